"""Device rows: per-request state that the device advances by itself, indexed by the request's
slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rorqual.engine.execution.grammar import Grammars, Matcher
from rorqual.engine.execution.token_bans import RecentTokens, TokenBans
from rorqual.engine.scheduling.scheduler_output import NewRequest, SchedulerOutput
from rorqual.errors import CapacityError, RequestError
from rorqual.ops.interface import Ops
from rorqual.ops.select import ops_for
from rorqual.platforms.base import Platform
from rorqual.request import SamplingParams


class RequestState:
    """last_token, length (cached entries) [slots]; tables [slots, pages]; sampling settings
    [slots].

    `length` is also the position of the newest token, the first that a decode step computes. drafts
    [slots, most_drafts] follow it; `num_drafts` of them are valid, at most `limit` are wanted (0
    for a request that opts out). `coupled` rows, seeded ones, sample drafts and tokens with the
    same random numbers. Penalty counts [slots, vocabulary], draft probabilities [slots,
    most_drafts, vocabulary], recent tokens and the token history [slots, tokens] are allocated on
    first use; `bans` has the rows with token bans. One row more than `slots` pads steps: its table
    is all null pages and its length stays 0. A table's unused end is null too, and takes writes
    past a request's pages. `ops` samples for these rows.
    """

    def __init__(
        self,
        slots: int,
        max_pages: int,
        vocab: int,
        platform: Platform,
        most_drafts: int = 0,
        ops: Ops | None = None,
    ):
        self.platform = platform
        self.vocab = vocab
        self.most_drafts = most_drafts
        self.ops = ops or ops_for(platform.name)
        self.padding = slots
        refused = CapacityError(
            f"no memory for the state of max_num_seqs={slots} requests of up to {max_pages} cache "
            "pages"
        )
        # a host gives out more memory than it has, and then kills a process that writes to it
        row = 8 * (max_pages + most_drafts + 10)
        if platform.name == "cpu" and slots * row > platform.available_memory():
            raise refused
        try:
            self._allocate(slots + 1, max_pages)
        except (RuntimeError, MemoryError) as error:
            raise refused from error
        self.draws = True  # False on all pipeline stages but the last
        self.grammars: Grammars | None = None
        self.matchers: dict[int, Matcher] = {}
        self.counts: Tensor | None = None
        self.in_prompt: Tensor | None = None
        self.draft_probs: Tensor | None = None
        self.history: Tensor | None = None
        self.bans: dict[int, TokenBans] = {}
        self.recent: RecentTokens | None = None

    def _allocate(self, slots: int, max_pages: int) -> None:
        device = self.platform.device
        self.last_token = torch.zeros(slots, dtype=torch.int64, device=device)
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)
        self.tables = torch.zeros(slots, max_pages, dtype=torch.int64, device=device)
        # temperature, top_p, min_p, top_k
        self.settings = torch.zeros(slots, 4, dtype=torch.float64, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drafts = torch.zeros(slots, self.most_drafts, dtype=torch.int64, device=device)
        self.num_drafts = torch.zeros(slots, dtype=torch.int64, device=device)
        self.limit = torch.zeros(slots, dtype=torch.int64, device=device)
        self.coupled = torch.zeros(slots, dtype=torch.bool, device=device)
        self.params: list[NewRequest | None] = [None] * slots

    def sampling_params(self, slots: Sequence[int]) -> list[SamplingParams]:
        """The sampling parameters of these slots, in order."""
        return [row.params for slot in slots if (row := self.params[slot]) is not None]

    def state(self, slots: Tensor) -> Tensor:
        """The state of these rows that a step changes, [N, 3 + most_drafts], for the pipeline
        stages that do not sample."""
        columns = torch.stack(
            (self.last_token[slots], self.length[slots], self.num_drafts[slots]), 1
        )
        return torch.cat((columns, self.drafts[slots]), 1)

    def take(self, slots: Tensor, state: Tensor) -> None:
        self.last_token[slots], self.length[slots], self.num_drafts[slots] = state[:, :3].unbind(1)
        self.drafts[slots] = state[:, 3:]

    def keep_probs(self) -> Tensor:
        """[slots, most_drafts, vocabulary] fp32: what each draft was drawn from."""
        if self.draft_probs is None:
            shape = (len(self.params), self.most_drafts, self.vocab)
            self.draft_probs = torch.zeros(shape, dtype=torch.float32, device=self.platform.device)
        return self.draft_probs

    def keep_history(self, tokens: int) -> None:
        """Allocate the token history of every request by position, which the ngram drafter
        reads."""
        self.history = torch.zeros(
            len(self.params), tokens, dtype=torch.int64, device=self.platform.device
        )

    def apply(self, output: SchedulerOutput) -> None:
        """Set up new rows and write new pages into block tables, before the step that uses them."""
        if output.new_requests:
            self._write(output.new_requests)
        for row in output.new_requests:
            self._set_up(row)
        if output.pages:
            slots, indices, pages = self.platform.to_device(torch.tensor(output.pages).T)
            self.tables[slots, indices] = pages

    def _write(self, rows: Sequence[NewRequest]) -> None:
        """Write the columns that all rows have, for all new rows at once, from one copy: before the
        step's first kernel, launches are the cost."""
        to_device = self.platform.to_device
        asked = [row.params for row in rows]
        width = max(len(row.pages) for row in rows)
        known = np.zeros((8 + width, len(rows)), np.int64)
        known[0] = [row.slot for row in rows]
        known[1] = [row.seed for row in rows]
        known[2] = [self.most_drafts if params.speculate else 0 for params in asked]
        known[3] = [params.seed is not None or params.greedy for params in asked]
        settings = known[4:8].view(np.float64)
        for column, (row, params) in enumerate(zip(rows, asked, strict=True)):
            settings[:, column] = params.temperature, params.top_p, params.min_p, params.top_k
            known[8 : 8 + len(row.pages), column] = row.pages
        moved = to_device(torch.from_numpy(known))
        slots = moved[0]
        self.tables.index_fill_(0, slots, 0)
        self.tables[:, :width].index_copy_(0, slots, moved[8:].T)
        self.settings.index_copy_(0, slots, moved[4:8].view(torch.float64).T)
        self.seed.index_copy_(0, slots, moved[1])
        if self.most_drafts:
            self.num_drafts.index_fill_(0, slots, 0)
            self.limit.index_copy_(0, slots, moved[2])
            self.coupled[slots] = moved[3].bool()

    def _set_up(self, row: NewRequest) -> None:
        """Write the state that only few rows have."""
        params = row.params
        slot = row.slot
        self.params[slot] = row
        if row.length:
            # assigned, a number would be copied, for which the host would wait
            self.last_token[slot].fill_(row.last_token)
            self.length[slot].fill_(row.length)
        if self.history is not None:
            self.history[slot, : len(row.tokens)] = self._on_device(row.tokens)
        self.matchers.pop(slot, None)
        if params.structured is not None and self.draws:
            self._match(row)
        if params.edits_logits:
            self._count(row)
        self.bans.pop(slot, None)
        if params.bans and self.draws:
            self.bans[slot] = TokenBans.of(params, self.vocab, self.platform)
            if self.recent is None:
                self.recent = RecentTokens(len(self.params), self.platform)
            self.recent.set_up(row)

    def _match(self, row: NewRequest) -> None:
        """Make the request's matcher; a preempted request already has output to replay."""
        assert row.params.structured is not None
        if self.grammars is None:
            raise RequestError(
                "structured output needs a tokenizer and the package xgrammar; this engine "
                "was built without"
            )
        matcher = self.matchers[row.slot] = self.grammars.matcher(row.params.structured)
        for token in row.tokens[row.prompt_len :]:
            moved = matcher.accept(token)
            assert moved, "the grammar allowed this token when it was drawn"

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        """Count the output tokens [M] of the rows `slots` [M]; -1 is none."""
        if self.counts is not None:
            self.counts.index_put_(
                (slots, tokens.clamp(min=0)), (tokens >= 0).int(), accumulate=True
            )

    def _count(self, row: NewRequest) -> None:
        """Prompt tokens, and counts of output tokens, which a preempted request already has."""
        if self.counts is None or self.in_prompt is None:
            shape = (len(self.params), self.vocab)
            device = self.platform.device
            self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        tokens = self._on_device(row.tokens)
        self.in_prompt[row.slot] = False
        self.in_prompt[row.slot, tokens[: row.prompt_len]] = True
        self.counts[row.slot] = torch.bincount(tokens[row.prompt_len :], minlength=self.vocab)

    def _on_device(self, tokens: Sequence[int]) -> Tensor:
        return self.platform.to_device(torch.from_numpy(np.array(tokens, np.int64)))
