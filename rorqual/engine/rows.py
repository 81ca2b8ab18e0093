"""Device rows: per-request state that the device advances by itself, indexed by the request's slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rorqual.engine.plan import NewRow, Plan
from rorqual.platforms.base import Platform
from rorqual.request import SamplingParams


class Rows:
    """last_token, length (cached entries) [slots]; tables [slots, pages]; sampling settings [slots].

    `length` is also the position of the token that a decode step computes. Penalty counts [slots, vocabulary] are made on first use.
    One row more than `slots` stands in where a step is padded: its table is all null pages and its length stays 0.
    """

    def __init__(self, slots: int, max_pages: int, vocab: int, platform: Platform):
        device = platform.device
        self.platform, self.vocab = platform, vocab
        self.padding = slots
        slots += 1
        self.last_token = torch.zeros(slots, dtype=torch.int64, device=device)
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)
        self.tables = torch.zeros(slots, max_pages, dtype=torch.int64, device=device)
        # temperature, top_p, min_p, top_k
        self.settings = torch.zeros(slots, 4, dtype=torch.float64, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)
        self.params: list[NewRow | None] = [None] * slots
        self.counts: Tensor | None = None
        self.in_prompt: Tensor | None = None

    def asked(self, slots: Sequence[int]) -> list[SamplingParams]:
        """The sampling parameters of these slots, in order."""
        return [row.params for slot in slots if (row := self.params[slot]) is not None]

    def apply(self, plan: Plan) -> None:
        """Set up new rows and write new pages into block tables, before the step that needs them."""
        for row in plan.new_rows:
            self._set_up(row)
        if plan.pages:
            slots, indices, pages = self.platform.to_device(torch.tensor(plan.pages).T)
            self.tables[slots, indices] = pages

    def _set_up(self, row: NewRow) -> None:
        params, slot = row.params, row.slot
        self.params[slot] = row
        self.tables[slot, : len(row.pages)] = self.platform.to_device(torch.tensor(row.pages))
        settings = (params.temperature, params.top_p, params.min_p, params.top_k)
        self.settings[slot] = self.platform.to_device(torch.tensor(settings, dtype=torch.float64))
        self.seed[slot] = row.seed
        if params.edits_logits:
            self._count(row)

    def _count(self, row: NewRow) -> None:
        """Tokens of the prompt, and counts of those already put out (a request that was preempted has some)."""
        if self.counts is None or self.in_prompt is None:
            shape, device = (len(self.params), self.vocab), self.platform.device
            self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        tokens = self.platform.to_device(torch.tensor(row.tokens, dtype=torch.int64))
        self.in_prompt[row.slot] = False
        self.in_prompt[row.slot, tokens[: row.prompt_len]] = True
        self.counts[row.slot] = torch.bincount(tokens[row.prompt_len :], minlength=self.vocab)
