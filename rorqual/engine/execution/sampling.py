"""Sampling tokens from logits, in fixed sequences of device operations that a graph can capture.

A token is sampled by inverting the cumulative distribution at one uniform number, which depends on
(seed, position) alone: the same request gives the same tokens whatever else is in the batch.
Filters (top-k, top-p, min-p) only set probabilities to zero and keep the vocabulary order, so a
request without filters is sampled alike in a batch with some. Tokens tied with the last one kept
are kept too.
"""

from __future__ import annotations

from torch import Tensor

from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.scheduling.scheduler_output import SamplingVariant
from rorqual.ops.reference import Distribution

# Streams of random numbers: the token itself, whether its draft is accepted, the draft, and
# simulated acceptance.
TOKEN, ACCEPT, DRAFT, SIMULATE = range(4)


def sample(
    logits: Tensor, variant: SamplingVariant, slots: Tensor, positions: Tensor, rows: RequestState
) -> Tensor:
    """Token ids [M] for logits [M, vocabulary] fp32 of the rows `slots` [M]; `positions` [M] of the
    tokens to sample."""
    if variant is SamplingVariant.GREEDY:
        return rows.ops.argmax(logits)
    return sample_from(distribution(logits, variant, slots, rows), slots, positions, rows)


def distribution(
    logits: Tensor, variant: SamplingVariant, slots: Tensor, rows: RequestState
) -> Distribution:
    """After temperature and filters."""
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
