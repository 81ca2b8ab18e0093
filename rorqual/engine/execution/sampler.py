"""From logits to token ids. A segment of its own after the forward pass, in three variants: greedy,
plain, full.

A token is drawn by inverting the cumulative distribution at one uniform number, which depends on
(seed, position) alone: the same request gives the same tokens whatever else is in the batch. Cuts
(top-k, top-p, min-p) only lower probabilities to zero in vocabulary order, so a request without
cuts is drawn alike in a batch with cuts. Tokens tied with the last one kept are kept too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.scheduling.scheduler_output import NewRequest, SamplingVariant, TokenLogprobs
from rorqual.ops.reference import Distribution
from rorqual.request import SamplingParams

NEVER = float("-inf")
# Streams of random numbers: the token itself, whether its draft is accepted, the draft, and
# simulated acceptance.
TOKEN, ACCEPT, DRAFT, SIMULATE = range(4)


def sample(
    logits: Tensor, variant: SamplingVariant, slots: Tensor, positions: Tensor, rows: RequestState
) -> Tensor:
    """Token ids [M] for logits [M, vocabulary] fp32 of the rows `slots` [M]; `positions` [M] of
    the tokens to be drawn."""
    if variant is SamplingVariant.GREEDY:
        return rows.ops.argmax(logits)
    return sample_from(distribution(logits, variant, slots, rows), slots, positions, rows)


def distribution(
    logits: Tensor, variant: SamplingVariant, slots: Tensor, rows: RequestState
) -> Distribution:
    """After temperature and cuts."""
    return rows.ops.distribution(
        logits, rows.settings.index_select(0, slots), variant is SamplingVariant.FILTERED
    )


def sample_from(
    given: Distribution, slots: Tensor, positions: Tensor, rows: RequestState
) -> Tensor:
    """One token a row. Rows with temperature 0 take the best logit."""
    return rows.ops.sample_from(
        given, rows.ops.uniform(rows.seed.index_select(0, slots), positions, TOKEN)
    )


# ---- what needs the host's word


@dataclass
class LogitRow:
    """One row of logits as the host knows it: whose it is, and the drafts [j] that stand between
    its request's newest token and it."""

    slot: int
    ahead: Tensor | None = None


def apply_logits_processors(
    logits: Tensor, places: list[LogitRow], positions: Tensor, rows: RequestState
) -> Tensor:
    """Penalties, bias and the minimum length, for the rows that ask for them."""
    logits = logits.clone()
    for i, place in enumerate(places):
        row = rows.params[place.slot]
        if row is not None and row.params.edits_logits:
            _edit_row(logits[i], row, place, positions[i], rows)
    return logits


def _edit_row(
    logits: Tensor, row: NewRequest, place: LogitRow, position: Tensor, rows: RequestState
) -> None:
    assert rows.counts is not None
    assert rows.in_prompt is not None
    counts = rows.counts[place.slot]
    if place.ahead is not None and place.ahead.numel():
        counts = counts.index_add(0, place.ahead, torch.ones_like(place.ahead, dtype=counts.dtype))
    penalize(logits, counts, rows.in_prompt[place.slot], row.params)
    for token, bias in (row.params.logit_bias or {}).items():
        logits[token] += bias
    if row.stop_ids and row.params.min_tokens:
        banned = torch.tensor(sorted(row.stop_ids), device=logits.device)
        early = position - row.prompt_len < row.params.min_tokens
        logits[banned] = torch.where(early, NEVER, logits[banned])


def penalize(logits: Tensor, counts: Tensor, in_prompt: Tensor, params: SamplingParams) -> None:
    """In place on one row. Repetition after arXiv 1909.05858 (prompt and output), frequency and
    presence on the output alone."""
    if params.repetition_penalty != 1.0:
        seen = in_prompt | (counts > 0)
        scaled = torch.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
        logits.copy_(torch.where(seen, scaled, logits))
    logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def apply_bitmask(logits: Tensor, mask: Tensor) -> Tensor:
    """Keep the tokens whose bit is set in mask [M, words] int32: bit i % 32 of word i // 32."""
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, NEVER)


@dataclass
class Logprobs:
    """Of M drawn tokens under the unmodified distribution: logprob and rank [M], the best ids
    and their values [M, most]."""

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.logprob, self.rank, self.top_ids, self.top]

    @staticmethod
    def of(raw: Tensor, token_ids: Tensor, most: int) -> Logprobs:
        logprobs = raw.log_softmax(-1)
        chosen = logprobs.gather(1, token_ids[:, None])
        rank = (logprobs > chosen).sum(-1) + 1
        top, top_ids = logprobs.topk(min(most, raw.shape[1]), -1)
        return Logprobs(chosen.squeeze(1), rank, top_ids, top)

    def row(self, row: int, count: int) -> TokenLogprobs:
        """One row, on the host, with `count` of the best."""
        ids = self.top_ids[row, :count].tolist()
        values = self.top[row, :count].tolist()
        return TokenLogprobs(
            float(self.logprob[row]), int(self.rank[row]), tuple(ids), tuple(values)
        )
