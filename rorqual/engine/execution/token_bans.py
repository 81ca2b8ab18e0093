"""Banned tokens of a request: always, or after certain other tokens (bad words)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rorqual.engine.scheduling.scheduler_output import NewRequest
from rorqual.platforms.base import Platform
from rorqual.request import MAX_BAD_WORD_TOKENS, SamplingParams

NEVER = float("-inf")
REMEMBERED = MAX_BAD_WORD_TOKENS - 1  # latest output tokens that decide what may follow


@dataclass
class TokenBans:
    """Of one request. forbidden [vocabulary]: always banned; None for no token. last [B]: banned
    where the output ends with before [B, W], in which -1 matches any token or none."""

    forbidden: Tensor | None = None
    last: Tensor | None = None
    before: Tensor | None = None

    @staticmethod
    def of(params: SamplingParams, vocab: int, platform: Platform) -> TokenBans:
        found = TokenBans()
        if params.allowed_token_ids is not None:
            forbidden = np.ones(vocab, np.bool_)  # torch would wake threads for so many
            forbidden[np.array(params.allowed_token_ids, np.int64)] = False
            found.forbidden = platform.to_device(torch.from_numpy(forbidden))
        words = params.bad_word_ids
        if words:
            width = max(map(len, words)) - 1
            before = [[-1] * (width + 1 - len(word)) + list(word[:-1]) for word in words]
            found.last = platform.to_device(torch.tensor([word[-1] for word in words]))
            found.before = platform.to_device(torch.tensor(before, dtype=torch.int64))
        return found

    def apply(self, logits: Tensor, output: Tensor) -> None:
        """In place on one row of logits; output [at least W]: the output before it, -1 before its
        start."""
        if self.forbidden is not None:
            logits.masked_fill_(self.forbidden, NEVER)
        if self.last is None or self.before is None:
            return
        before = self.before
        tail = output[output.shape[0] - before.shape[1] :]
        meant = ((before < 0) | (before == tail)).all(1)
        # added up: several words may end with the same token
        logits.index_add_(0, self.last, torch.where(meant, NEVER, 0.0).to(logits.dtype))


class RecentTokens:
    """tokens [slots, REMEMBERED]: each request's latest output tokens, -1 before its first."""

    def __init__(self, slots: int, platform: Platform):
        self.platform = platform
        shape = (slots, REMEMBERED)
        self.tokens = torch.full(shape, -1, dtype=torch.int64, device=platform.device)
        self.places = torch.arange(REMEMBERED, device=platform.device)

    def set_up(self, row: NewRequest) -> None:
        output = list(row.tokens[row.prompt_len :])[-REMEMBERED:]
        padded = [-1] * (REMEMBERED - len(output)) + output
        self.tokens[row.slot] = self.platform.to_device(torch.tensor(padded, dtype=torch.int64))

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Append tokens [N, width] of the rows `slots` [N]: new ones, then -1."""
        both = torch.cat((self.tokens[slots], tokens), 1)
        new = (tokens >= 0).sum(1, keepdim=True)
        self.tokens[slots] = both.gather(1, new + self.places)
