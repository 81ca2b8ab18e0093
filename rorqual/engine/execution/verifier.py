"""Speculative decoding, the first half: verify the drafts of the previous step. The second half
makes new ones (drafters.py).

Every decoding request has num_speculative_tokens + 1 rows: its newest token and
num_speculative_tokens drafts. The model's own token after each row either confirms the next draft
or replaces it, and drafts after a replaced one are dropped. A draft may be missing (a request that
opts out, or one that drafted fewer before): it counts as rejected. Everything here is a fixed
sequence of device operations, so that a graph can capture it.

Greedy and seeded requests are *coupled*: draft and token are sampled with the same random number,
and a draft is accepted when it is the token the model would have sampled anyway. Their output
therefore equals that without speculation, token by token. Others use rejection sampling (arXiv
2211.17192, theorem 1): a draft d of probability q(d) is accepted with min(1, p(d) / q(d)), else the
token is drawn from max(p - q, 0), which leaves the distribution p unchanged and accepts more often.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.execution.sampling import (
    ACCEPT,
    SIMULATE,
    TOKEN,
    distribution,
    sample,
    sample_from,
)
from rorqual.engine.scheduling.scheduler_output import SamplingVariant
from rorqual.ops.reference import Distribution


@dataclass
class Verification:
    """tokens [R, num_speculative_tokens + 1]: accepted drafts, the model's own token, then -1.
    num_accepted, drafted [R]: drafts accepted, and made."""

    tokens: Tensor
    num_accepted: Tensor
    drafted: Tensor


class Verifier:
    """`rates`: probability that the draft at each position is accepted, decided at random instead
    of by comparison (simulated acceptance)."""

    def __init__(self, rows: RequestState, most: int, rates: tuple[float, ...] = ()):
        device = rows.platform.device
        self.rows = rows
        self.places = torch.arange(most + 1, device=device)
        self.rates = torch.tensor(rates, dtype=torch.float64, device=device) if rates else None

    def verify(
        self,
        logits: Tensor,
        variant: SamplingVariant,
        slots: Tensor,
        positions: Tensor,
        num_speculative_tokens: int,
    ) -> Verification:
        """logits [R * (num_speculative_tokens + 1), vocabulary], request after request; slots [R];
        positions [R * (num_speculative_tokens + 1)] of the tokens to sample."""
        rows = self.rows
        width = num_speculative_tokens + 1
        if not num_speculative_tokens:
            tokens = sample(logits, variant, slots, positions, rows)
            none = torch.zeros_like(slots)
            return Verification(tokens[:, None], none, none)
        given = taken = None
        if variant is SamplingVariant.GREEDY:
            tokens = rows.ops.argmax(logits).view(-1, width)
        else:
            each = slots.repeat_interleave(width)
            given = distribution(logits, variant, each, rows)
            tokens = sample_from(given, each, positions, rows).view(-1, width)
        if self.rates is not None:
            taken = self._accept_at_random(
                slots, positions.view(-1, width)[:, :num_speculative_tokens]
            )
        elif given is not None:
            taken = self._accepted(
                given,
                tokens,
                rows.drafts.index_select(0, slots)[:, :num_speculative_tokens],
                slots,
                positions,
            )
        stand, num_accepted, drafted = rows.ops.verify_drafts(
            tokens, rows.drafts, rows.num_drafts, slots, taken
        )
        if given is not None and self.rates is None:
            stand = self._replaced(given, tokens, stand, slots, positions, num_accepted, drafted)
        return Verification(stand, num_accepted, drafted)

    def _accepted(
        self, given: Distribution, tokens: Tensor, drafts: Tensor, slots: Tensor, positions: Tensor
    ) -> Tensor:
        """Accepted [R, num_speculative_tokens]: by comparison for coupled rows, with probability
        p(d) / q(d) for the others."""
        rows = self.rows
        (count, n) = drafts.shape
        p = given.probability(drafts)
        kept = rows.draft_probs
        q = p.new_ones(()) if kept is None else kept[slots[:, None], self.places[:n], drafts]
        lot = self._numbers(slots, positions.view(count, n + 1)[:, :n], ACCEPT) * q < p
        return torch.where(
            rows.coupled.index_select(0, slots)[:, None], tokens[:, :n] == drafts, lot
        )

    def _numbers(self, slots: Tensor, positions: Tensor, stream: int) -> Tensor:
        """Random numbers [R, ...] for positions [R, ...]."""
        seeds = self.rows.seed.index_select(0, slots)
        return self.rows.ops.uniform(
            seeds.view(-1, *[1] * (positions.dim() - 1)).expand_as(positions), positions, stream
        )

    def _replaced(
        self,
        given: Distribution,
        tokens: Tensor,
        stand: Tensor,
        slots: Tensor,
        positions: Tensor,
        num_accepted: Tensor,
        drafted: Tensor,
    ) -> Tensor:
        """`stand` with the token after the accepted drafts resampled from max(p - q, 0) where a
        draft was rejected."""
        rows = self.rows
        n = tokens.shape[1] - 1
        place = num_accepted.clamp(max=n - 1)
        refused = rows.drafts[slots, place]
        # the row after the accepted drafts
        after = torch.arange(0, positions.shape[0], n + 1, device=slots.device) + num_accepted
        numbers = self._numbers(slots, positions.index_select(0, after), TOKEN)
        q = None if rows.draft_probs is None else rows.draft_probs.flatten(0, 1)
        # nothing was rejected: the model's own token stands
        own = rows.coupled.index_select(0, slots) | (num_accepted >= drafted)
        other = rows.ops.sample_residual(
            given,
            torch.where(own, -1, after),
            numbers,
            refused,
            q,
            slots * rows.most_drafts + place,
        )
        # Likewise where max(p - q, 0) is all zero, p and q being equal but for rounding: only
        # rounding can have caused the rejection.
        last = torch.where(other < 0, tokens.gather(1, num_accepted[:, None]).squeeze(1), other)
        return stand.scatter(1, num_accepted[:, None], last[:, None])

    def _accept_at_random(self, slots: Tensor, positions: Tensor) -> Tensor:
        assert self.rates is not None
        return self._numbers(slots, positions, SIMULATE) < self.rates[: positions.shape[1]]
