"""From logits to token ids. A segment of its own after the forward pass, in three variants: greedy, plain, full.

A token is drawn by inverting the cumulative distribution at one uniform number, which depends on (seed, position) alone: the same
request gives the same tokens whatever else is in the batch. Cuts (top-k, top-p, min-p) only lower probabilities to zero in
vocabulary order, so a request without cuts is drawn alike in a batch with cuts. Tokens tied with the last one kept are kept too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from rorqual.engine.plan import TokenLogprobs
from rorqual.engine.rows import Rows
from rorqual.ops.counter import uniform
from rorqual.request import GREEDY_TEMPERATURE, SamplingParams

NEVER = float("-inf")


@dataclass
class Sampled:
    """token_ids [N]; the rest where log probabilities were asked for: of the token, its rank, and of the top ones."""

    token_ids: Tensor
    logprob: Tensor | None = None
    rank: Tensor | None = None
    top_ids: Tensor | None = None
    top: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.token_ids, self.logprob, self.rank, self.top_ids, self.top) if t is not None]


class Variant(Enum):
    """What a batch of rows needs, decided on the host. The first three are fixed sequences of device operations that a graph can hold."""

    GREEDY = "greedy"
    PLAIN = "plain"  # temperature and seed
    FILTERED = "filtered"  # top-k, top-p or min-p as well
    FULL = "full"  # edited logits or log probabilities: needs the host's word


def variant_of(params: Iterable[SamplingParams]) -> Variant:
    params = list(params)
    if any(p.edits_logits or p.logprobs is not None for p in params):
        return Variant.FULL
    return drawing_of(params)


def drawing_of(params: list[SamplingParams]) -> Variant:
    """How the tokens are drawn, whatever else the rows want."""
    if all(p.greedy for p in params):
        return Variant.GREEDY
    return Variant.FILTERED if any(p.filters for p in params) else Variant.PLAIN


def sample(logits: Tensor, slots: Tensor, host_slots: list[int], positions: Tensor, rows: Rows) -> Sampled:
    """logits [N, vocabulary] fp32 of the rows `slots`; `positions` [N] of the tokens to be drawn."""
    params, raw = rows.asked(host_slots), logits
    if any(p.edits_logits for p in params):
        logits = edit(logits, slots, host_slots, positions, rows)
    token_ids = choose(logits, drawing_of(params), slots, positions, rows)
    most = max((p.logprobs for p in params if p.logprobs is not None), default=None)
    if rows.counts is not None:
        rows.counts.index_put_((slots, token_ids), torch.ones_like(token_ids, dtype=torch.int32), accumulate=True)
    return Sampled(token_ids) if most is None else with_logprobs(raw, token_ids, most)


def choose(logits: Tensor, variant: Variant, slots: Tensor, positions: Tensor, rows: Rows) -> Tensor:
    """Token ids [N]. Rows with temperature 0 take the best logit in every variant."""
    best = logits.argmax(-1)
    if variant is Variant.GREEDY:
        return best
    temperature, top_p, min_p, top_k = rows.settings.index_select(0, slots).unbind(1)
    probs = (logits.double() / temperature.clamp(GREEDY_TEMPERATURE)[:, None]).softmax(-1)
    if variant is Variant.FILTERED:
        probs = cut(probs, top_k, top_p, min_p)
    cumulative = probs.cumsum(-1)
    goal = uniform(rows.seed.index_select(0, slots), positions)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, goal, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    return torch.where(temperature < GREEDY_TEMPERATURE, best, drawn)


def cut(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zero what top-k, then top-p over what top-k left, then min-p exclude. probs [N, vocabulary]; the others [N]."""
    ordered = probs.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, ordered.shape[1]).clamp(max=ordered.shape[1]).long() - 1
    by_k = ordered.gather(1, last[:, None])
    kept = ordered.masked_fill(ordered < by_k, 0)
    before = kept.cumsum(-1) - kept
    # The smallest set whose mass reaches top_p: a token stays while the mass before it is below the goal.
    inside = (before < top_p[:, None] * kept.sum(-1, keepdim=True)) & (kept > 0)
    by_p = ordered.masked_fill(~inside, float("inf")).amin(-1, keepdim=True)
    by_p = torch.where(top_p[:, None] < 1, by_p, by_k)
    threshold = torch.maximum(torch.maximum(by_k, by_p), min_p[:, None] * ordered[:, :1])
    return probs.masked_fill(probs < threshold, 0)


def edit(logits: Tensor, slots: Tensor, host_slots: list[int], positions: Tensor, rows: Rows) -> Tensor:
    """Penalties, bias and the minimum length, for the rows that ask for them. The full variant: it needs the host's word."""
    logits = logits.clone()
    for i, slot in enumerate(host_slots):
        row = rows.params[slot]
        if row is not None and row.params.edits_logits:
            assert rows.counts is not None
            assert rows.in_prompt is not None
            penalise(logits[i], rows.counts[slot], rows.in_prompt[slot], row.params)
            for token, bias in (row.params.logit_bias or {}).items():
                logits[i, token] += bias
            if row.stop_ids and row.params.min_tokens:
                banned = torch.tensor(sorted(row.stop_ids), device=logits.device)
                early = positions[i] - row.prompt_len < row.params.min_tokens
                logits[i, banned] = torch.where(early, NEVER, logits[i, banned])
    return logits


def penalise(logits: Tensor, counts: Tensor, in_prompt: Tensor, params: SamplingParams) -> None:
    """In place on one row. Repetition after arXiv 1909.05858 (prompt and output), frequency and presence on the output alone."""
    if params.repetition_penalty != 1.0:
        seen = in_prompt | (counts > 0)
        scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits.copy_(torch.where(seen, scaled, logits))
    logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def with_logprobs(raw: Tensor, token_ids: Tensor, most: int) -> Sampled:
    """Log probabilities under the unmodified distribution."""
    logprobs = raw.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    rank = (logprobs > chosen).sum(-1) + 1
    top, top_ids = logprobs.topk(min(most, raw.shape[1]), -1)
    return Sampled(token_ids, chosen.squeeze(1), rank, top_ids, top)


def row_logprobs(sampled: list[Tensor], row: int, params: SamplingParams) -> TokenLogprobs:
    """One row of the tensors of `Sampled`, on the host, cut to what its request asked for."""
    _, logprob, rank, top_ids, top = sampled
    count = params.logprobs or 0
    ids, values = top_ids[row, :count].tolist(), top[row, :count].tolist()
    return TokenLogprobs(float(logprob[row]), int(rank[row]), tuple(ids), tuple(values))
