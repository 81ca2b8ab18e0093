"""Sampling: rorqual.ops.reference.distribution, sample_from, sample_residual and write_probs.

The vocabulary is split into chunks of CHUNK tokens, one program each, so that even few rows fill a
GPU. The chunks' sums give peak, mass and the chunk of the sampled token; only that chunk is read
again.

Filters (top-k, top-p, min-p) need a threshold, which is found without sorting. First a lower bound:
for top-k the k-th largest of the maxima of disjoint sets of tokens; for top-p a value below which
all tokens together may be excluded. Tokens above the bound, usually a few hundred, are stored as
candidates, and one program per row finds the threshold among them by bisection over the logits' bit
patterns, jumping from value to value. A chunk with more than HELD candidates is read from the
logits again. Results do not depend on the order of programs.

Weights are fp32 (base-2 exponentials of differences, the factor in two parts), their sums fp64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.reference import Distribution
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs
from rorqual.request import GREEDY_TEMPERATURE

CHUNK = 4096
HELD = 1024  # most candidates that are stored per chunk
SEARCHED = 2048  # candidates that the search compares at once
SETS = 256  # disjoint sets of tokens whose maxima bound top-k
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _weights(x, peak, temperature):
    """2^((x - peak) log2(e) / temperature) in fp32, zero for -inf; temperature a scalar in fp64."""
    factor = LOG2E / tl.maximum(temperature, GREEDY)
    high = factor.to(tl.float32)
    low = (factor - high.to(tl.float64)).to(tl.float32)
    # products of infinities would be NaN
    below = tl.maximum(x - tl.where(peak > NEVER, peak, 0.0), -1e30)
    return tl.exp2(below * high + below * low)


@triton.jit
def _chunk(logits, row, chunk, row_stride, vocab, CHUNK: tl.constexpr):
    """(tokens, their logits in fp32), -inf past the vocabulary."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    return token, tl.load(
        logits + row.to(tl.int64) * row_stride + token, mask=token < vocab, other=NEVER
    ).to(tl.float32)


@triton.jit
def _key(x):
    """A finite or infinite fp32 scalar as an integer with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value(key):
    """The fp32 number of a key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["chunks"])
def _chunk_kernel(
    logits,
    settings,
    peaks,
    sums,
    firsts,
    sets,
    row_stride,
    vocab,
    chunks,
    CUTS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, chunk): its largest logit, the first token with it, the sum of weights relative
    to it, and the maxima of PARTS subsets."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    token, x = _chunk(logits, row, chunk, row_stride, vocab, CHUNK)
    peak = tl.max(x, 0)
    weights = _weights(x, peak, tl.load(settings + row * 4))
    index = row * chunks + chunk
    tl.store(peaks + index, peak)
    tl.store(sums + index, tl.sum(weights.to(tl.float64), 0))
    tl.store(firsts + index, tl.minimum(tl.min(tl.where(x == peak, token, vocab), 0), vocab - 1))
    if CUTS:
        best = tl.max(tl.reshape(x, (PARTS, CHUNK // PARTS)), 1)
        tl.store(sets + index.to(tl.int64) * PARTS + tl.arange(0, PARTS), best)


@triton.jit
def _rounded_up(x):
    """Round the fp64 scalar x up to fp32."""
    near = x.to(tl.float32)
    return tl.where(near.to(tl.float64) < x, _value(_key(near) + 1), near)


@triton.jit
def _kth_best(sets, row, chunks, k, PARTS: tl.constexpr, SETS: tl.constexpr):
    """The k-th largest of the sets' maxima; -inf if there are fewer than k."""
    index = tl.arange(0, SETS)
    some = tl.arange(0, 16)
    count = chunks * PARTS
    sets += row.to(tl.int64) * count
    best = tl.load(sets + index, mask=index < count, other=NEVER)
    as_good = tl.zeros((SETS,), tl.int32)
    for start in range(0, tl.minimum(count, SETS), 16):
        others = tl.load(
            sets + start + some, mask=start + some < tl.minimum(count, SETS), other=NEVER
        )
        as_good += tl.sum((others[None, :] >= best[:, None]).to(tl.int32), 1)
    return tl.max(tl.where(as_good >= k, best, NEVER), 0)


@triton.jit
def _limits(settings, row, peak, vocab):
    """(temperature, top_p, least logit by min-p, top_k); disabled filters are 1, -inf and 0."""
    temperature = tl.load(settings + row * 4)
    top_p = tl.load(settings + row * 4 + 1)
    min_p = tl.load(settings + row * 4 + 2)
    top_k = tl.load(settings + row * 4 + 3)
    warm = tl.maximum(temperature, GREEDY)
    by_min = tl.where(
        min_p > 0,
        _rounded_up(peak.to(tl.float64) + warm * tl.log(tl.maximum(min_p, 1e-300))),
        NEVER,
    )
    return temperature, top_p, by_min, tl.where(top_k < vocab, top_k, 0.0)


@triton.jit(do_not_specialize=["chunks"])
def _summary_kernel(
    settings,
    peaks,
    sums,
    firsts,
    sets,
    summary,
    parts,
    best,
    bounds,
    vocab,
    chunks,
    CUTS: tl.constexpr,
    PARTS: tl.constexpr,
    SETS: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row: its summary without filters, the masses of its chunks, its best token, and the lower
    bound of the threshold (inf: no filters). CHUNKS is `chunks` rounded up."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    index = tl.arange(0, CHUNKS)
    present = index < chunks
    found = tl.load(peaks + row * chunks + index, mask=present, other=NEVER)
    peak = tl.max(found, 0)
    temperature, top_p, by_min, top_k = _limits(settings, row, peak, vocab)
    warm = tl.maximum(temperature, GREEDY)
    behind = tl.maximum((found - tl.where(peak > NEVER, peak, 0.0)).to(tl.float64), -1e30)
    masses = tl.load(sums + row * chunks + index, mask=present, other=0.0) * tl.exp2(
        behind * (LOG2E / warm)
    )
    mass = tl.sum(masses, 0)
    first = tl.load(firsts + row * chunks + index, mask=present, other=0)
    tl.store(
        best + row, tl.min(tl.where(present & (found == peak), first, vocab - 1), 0).to(tl.int64)
    )
    tl.store(parts + row * chunks + index, masses, mask=present)
    tl.store(summary + row * 4, temperature)
    tl.store(summary + row * 4 + 1, peak.to(tl.float64))
    tl.store(summary + row * 4 + 2, float("-inf"))
    tl.store(summary + row * 4 + 3, mass)
    if CUTS:
        bound = by_min
        if top_k > 0:
            by_k = _kth_best(sets, row, chunks, top_k, PARTS, SETS)
            # top-p counts all tokens that top-k keeps
            bound = tl.where(top_p < 1, by_k, tl.maximum(by_k, by_min))
        elif top_p < 1:
            small = peak.to(tl.float64) + warm * tl.log(0.5 * (1 - top_p) * mass / vocab)
            bound = tl.maximum(_value(_key(small.to(tl.float32)) - 1), by_min)
        nothing = (top_k == 0) & (top_p >= 1) & (by_min == NEVER)
        tl.store(bounds + row, tl.where(nothing, float("inf"), tl.maximum(bound, -3.4028234e38)))


@triton.jit(do_not_specialize=["chunks"])
def _gather_kernel(
    logits,
    peaks,
    bounds,
    held,
    counts,
    row_stride,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, chunk): how many logits reach the row's bound, and the first HELD of them."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    index = row * chunks + chunk
    bound = tl.load(bounds + row)
    count = 0
    if tl.load(peaks + index) >= bound:
        _, x = _chunk(logits, row, chunk, row_stride, vocab, CHUNK)
        reaches = (x >= bound).to(tl.int32)
        order = tl.cumsum(reaches, 0) - 1
        tl.store(held + index.to(tl.int64) * HELD + order, x, mask=(reaches > 0) & (order < HELD))
        count = tl.sum(reaches, 0)
    tl.store(counts + index, count)


class Candidates(NamedTuple):
    """The logits of a row that reach its bound, and where they are read from. most: largest number
    of candidates in a chunk."""

    logits: Any
    held: Any
    counts: Any
    row: Any
    peak: Any
    most: Any
    temperature: Any
    row_stride: Any
    vocab: Any
    chunks: Any


@triton.jit
def _candidates_from(
    c,
    start,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
):
    """Candidates start .. start + WIDTH of each chunk, [CHUNKS, WIDTH], padded with -inf."""
    chunk = tl.arange(0, CHUNKS)
    index = start + tl.arange(0, WIDTH)
    count = tl.load(c.counts + c.row * c.chunks + chunk, mask=chunk < c.chunks, other=0)
    held_here = (index[None, :] < count[:, None]) & (count <= HELD)[:, None]
    offsets = (c.row.to(tl.int64) * c.chunks + chunk)[:, None] * HELD + index[None, :]
    x = tl.load(c.held + offsets, mask=held_here, other=NEVER)
    token = chunk[:, None] * CHUNK + index[None, :]
    unheld = (count > HELD)[:, None] & (token < c.vocab) & (index < CHUNK)[None, :]
    y = tl.load(c.logits + c.row.to(tl.int64) * c.row_stride + token, mask=unheld, other=NEVER).to(
        tl.float32
    )
    return tl.maximum(x, y)


@triton.jit
def _threshold(
    c,
    low,
    goal,
    WEIGHED: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
):
    """The largest candidate for which the candidates at least as large sum to `goal`, by weight or
    by number; `low` if there is none above it."""
    # the answer is at least lower, and below upper
    lower = _key(low)
    upper = _key(c.peak) + 1
    while upper - lower > 1:
        at = lower + (upper - lower) // 2
        middle = _value(at)
        amount = tl.zeros((CHUNKS, WIDTH), tl.float64)
        above = tl.full((CHUNKS, WIDTH), float("inf"), tl.float32)
        below = tl.full((CHUNKS, WIDTH), NEVER, tl.float32)
        for start in range(0, c.most, WIDTH):
            x = _candidates_from(c, start, CHUNKS, WIDTH, CHUNK, HELD)
            reaches = x >= middle
            worth = _weights(x, c.peak, c.temperature) if WEIGHED else 1.0
            amount += tl.where(reaches, worth, 0.0)
            above = tl.minimum(above, tl.where(reaches, x, float("inf")))
            below = tl.maximum(below, tl.where(reaches, NEVER, x))
        if tl.sum(tl.sum(amount, 1), 0) >= goal:  # so does the least of them
            lower = tl.maximum(_key(tl.min(tl.min(above, 1), 0)), at)
        else:
            upper = tl.minimum(tl.maximum(_key(tl.max(tl.max(below, 1), 0)), lower) + 1, at)
    return _value(lower)


@triton.jit
def _kept_masses(
    c,
    floor,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
):
    """[CHUNKS] fp64: weights of the candidates that reach `floor`."""
    masses = tl.zeros((CHUNKS,), tl.float64)
    for start in range(0, c.most, WIDTH):
        x = _candidates_from(c, start, CHUNKS, WIDTH, CHUNK, HELD)
        masses += tl.sum(
            tl.where(x >= floor, _weights(x, c.peak, c.temperature), 0.0).to(tl.float64), 1
        )
    return masses


@triton.jit(do_not_specialize=["chunks"])
def _cut_kernel(
    logits,
    settings,
    held,
    counts,
    bounds,
    summary,
    parts,
    row_stride,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One filtered row: floor and mass of its summary, and the masses of its chunks."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    bound = tl.load(bounds + row)
    if bound < float("inf"):
        peak = tl.load(summary + row * 4 + 1).to(tl.float32)
        temperature, top_p, floor, top_k = _limits(settings, row, peak, vocab)
        longest = tl.max(tl.load(counts + row * chunks + chunk, mask=chunk < chunks, other=0), 0)
        most = tl.where(longest > HELD, CHUNK, longest)
        c = Candidates(
            logits, held, counts, row, peak, most, temperature,
            row_stride, vocab, chunks,
        )  # fmt: skip
        low = bound
        all_kept = tl.load(summary + row * 4 + 3)
        if top_k > 0:
            low = _threshold(c, bound, top_k, False, CHUNKS, WIDTH, CHUNK, HELD)
            all_kept = tl.sum(_kept_masses(c, low, CHUNKS, WIDTH, CHUNK, HELD), 0)
            floor = tl.maximum(floor, low)
        if top_p < 1:
            goal = top_p * all_kept
            by_p = _threshold(c, low, goal, True, CHUNKS, WIDTH, CHUNK, HELD)
            floor = tl.maximum(floor, by_p)
        masses = _kept_masses(c, floor, CHUNKS, WIDTH, CHUNK, HELD)
        tl.store(summary + row * 4 + 2, floor.to(tl.float64))
        tl.store(summary + row * 4 + 3, tl.sum(masses, 0))
        tl.store(parts + row * chunks + chunk, masses, mask=chunk < chunks)


@triton.jit
def _chunk_probs(logits, summary, row, chunk, row_stride, vocab, CHUNK: tl.constexpr):
    """(tokens, weights in fp32, mass) of one chunk."""
    temperature = tl.load(summary + row * 4)
    peak = tl.load(summary + row * 4 + 1).to(tl.float32)
    floor = tl.load(summary + row * 4 + 2).to(tl.float32)
    mass = tl.load(summary + row * 4 + 3)
    token, x = _chunk(logits, row, chunk, row_stride, vocab, CHUNK)
    return token, tl.where(x >= floor, _weights(x, peak, temperature), 0.0), mass


@triton.jit
def _rest(token, weights, mass, refused, q, q_row, vocab, CERTAIN: tl.constexpr):
    """max(p - q, 0) in fp64: the residual after a rejected draft."""
    p = weights.to(tl.float64) / mass
    if CERTAIN:
        rest = tl.where(token == refused, 0.0, p)
    else:
        rest = tl.maximum(
            p - tl.load(q + q_row * vocab + token, mask=token < vocab, other=0.0), 0.0
        )
    return rest


@triton.jit(do_not_specialize=["chunks"])
def _rest_kernel(
    logits,
    summary,
    rows,
    refused,
    q,
    q_rows,
    parts,
    row_stride,
    vocab,
    chunks,
    CERTAIN: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (draw, chunk): the chunk's residual mass."""
    wait_for_inputs(DEPENDENT)
    at = tl.program_id(0)
    chunk = tl.program_id(1)
    row = tl.load(rows + at)
    left = tl.full((), 0.0, tl.float64)
    if row >= 0:
        token, weights, mass = _chunk_probs(logits, summary, row, chunk, row_stride, vocab, CHUNK)
        q_row = 0 if CERTAIN else tl.load(q_rows + at)
        left = tl.sum(
            _rest(token, weights, mass, tl.load(refused + at), q, q_row, vocab, CERTAIN), 0
        )
    tl.store(parts + at * chunks + chunk, left)


@triton.jit(do_not_specialize=["chunks"])
def _draw_kernel(
    logits,
    summary,
    parts,
    best,
    numbers,
    rows,
    refused,
    q,
    q_rows,
    out,
    row_stride,
    vocab,
    chunks,
    REST: tl.constexpr,
    CERTAIN: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One draw: the chunk in which the number falls, then the token. REST: from what refused
    drafts leave, else from the row."""
    wait_for_inputs(DEPENDENT)
    at = tl.program_id(0)
    index = tl.arange(0, CHUNKS)
    # a draw that is not requested has no residual mass
    row = tl.maximum(tl.load(rows + at), 0) if REST else at.to(tl.int64)
    masses = tl.load(parts + at * chunks + index, mask=index < chunks, other=0.0)
    passed = tl.cumsum(masses, 0)
    total = tl.sum(masses, 0)
    goal = tl.load(numbers + at) * total
    # rounded sums may all stay below the goal: then take the last chunk, or token, with any mass
    hit = tl.min(tl.where((passed > goal) & (masses > 0), index, CHUNKS), 0)
    chunk = tl.where(hit < CHUNKS, hit, tl.maximum(tl.max(tl.where(masses > 0, index, -1), 0), 0))
    goal -= tl.sum(tl.where(index < chunk, masses, 0.0), 0)
    token, weights, mass = _chunk_probs(logits, summary, row, chunk, row_stride, vocab, CHUNK)
    share = weights.to(tl.float64)
    if REST:
        q_row = 0 if CERTAIN else tl.load(q_rows + at)
        share = _rest(token, weights, mass, tl.load(refused + at), q, q_row, vocab, CERTAIN)
    hit = tl.min(tl.where((tl.cumsum(share, 0) > goal) & (share > 0), token, vocab), 0)
    drawn = tl.where(hit < vocab, hit, tl.max(tl.where(share > 0, token, 0), 0)).to(tl.int64)
    if REST:
        tl.store(out + at, tl.where(total > 0, drawn, -1))
    else:
        tl.store(
            out + at, tl.where(tl.load(summary + row * 4) < GREEDY, tl.load(best + row), drawn)
        )


@triton.jit
def _probs_kernel(
    logits, summary, plane, rows, row_stride, vocab, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    token, weights, mass = _chunk_probs(logits, summary, row, chunk, row_stride, vocab, CHUNK)
    tl.store(
        plane + tl.load(rows + row) * vocab + token,
        weights / mass.to(tl.float32),
        mask=token < vocab,
    )


def distribution(logits: Tensor, settings: Tensor, filters: bool) -> Distribution:
    """rorqual.ops.reference.distribution. logits [M, V] in any float format, contiguous rows; two
    kernels, with filters four.

    Its scratch is [M, chunks] fp64: the masses of each row's chunks.
    """
    (rows, vocab) = logits.shape
    device = logits.device
    late = dependent(logits.device)
    assert logits.stride(1) == 1
    settings = settings.contiguous()
    chunks = triton.cdiv(vocab, CHUNK)
    chunk = _chunk_size(vocab)
    width = next_power(chunks)
    subsets = max(1, SETS // width)
    new = lambda kind, *shape: torch.empty(*shape, dtype=kind, device=device)  # noqa: E731
    out = Distribution(
        logits,
        new(torch.float64, rows, 4),
        new(torch.int64, rows),
        new(torch.float64, rows, chunks),
    )
    if not rows:
        return out
    peaks = new(torch.float32, rows, chunks)
    sums = new(torch.float64, rows, chunks)
    firsts = new(torch.int32, rows, chunks)
    sets = new(torch.float32, rows, chunks, subsets) if filters else peaks
    bounds = new(torch.float32, rows)
    sizes = logits.stride(0), vocab, chunks
    found = peaks, sums, firsts, sets
    _chunk_kernel[rows, chunks](
        logits, settings, *found, *sizes, filters, subsets, chunk, num_warps=8, **late
    )
    _summary_kernel[rows,](
        settings,
        *found,
        out.summary,
        out.scratch,
        out.best,
        bounds,
        vocab,
        chunks,
        filters,
        subsets,
        SETS,
        width,
        num_warps=4,
        **late,
    )
    if filters:
        _cut(out, settings, peaks, bounds)
    return out


def _cut(given: Distribution, settings: Tensor, peaks: Tensor, bounds: Tensor) -> None:
    """Update floor and masses of filtered rows in `given`. peaks [M, chunks] and bounds [M] fp32
    are from _summary_kernel and the kernel before it."""
    logits = given.logits
    rows, chunks = peaks.shape
    vocab = logits.shape[1]
    chunk = _chunk_size(vocab)
    width = next_power(chunks)
    late = dependent(logits.device)
    held = torch.empty(rows, chunks, HELD, dtype=torch.float32, device=logits.device)
    counts = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    sizes = logits.stride(0), vocab, chunks
    _gather_kernel[rows, chunks](
        logits, peaks, bounds, held, counts, *sizes, chunk, HELD, num_warps=8, **late
    )
    _cut_kernel[rows,](
        logits,
        settings,
        held,
        counts,
        bounds,
        given.summary,
        given.scratch,
        *sizes,
        width,
        max(1, SEARCHED // width),
        chunk,
        HELD,
        num_warps=8,
        **late,
    )


def _chunk_size(vocab: int) -> int:
    return min(CHUNK, max(next_power(vocab), SETS))


def sample_from(given: Distribution, numbers: Tensor) -> Tensor:
    """rorqual.ops.reference.sample_from."""
    (rows, vocab) = given.logits.shape
    parts = given.scratch
    out = torch.empty_like(given.best)
    chunks = parts.shape[1]
    if rows:
        _draw_kernel[rows,](
            given.logits,
            given.summary,
            parts,
            given.best,
            numbers.contiguous(),
            None,
            None,
            None,
            None,
            out,
            given.logits.stride(0),
            vocab,
            chunks,
            False,
            False,
            next_power(chunks),
            _chunk_size(vocab),
            num_warps=8,
            **dependent(out.device),
        )
    return out


def sample_residual(
    given: Distribution,
    rows: Tensor,
    numbers: Tensor,
    refused: Tensor,
    q: Tensor | None = None,
    q_rows: Tensor | None = None,
) -> Tensor:
    """rorqual.ops.reference.sample_residual; q contiguous."""
    vocab = given.logits.shape[1]
    count = rows.shape[0]
    parts = torch.empty(count, given.scratch.shape[1], dtype=torch.float64, device=rows.device)
    out = torch.empty_like(rows)
    chunks = parts.shape[1]
    certain = q is None
    assert q is None or q.is_contiguous()
    if not count:
        return out
    late = dependent(rows.device)
    sizes = (given.logits.stride(0), vocab, chunks)
    rows = rows.contiguous()
    numbers = numbers.contiguous()
    refused = refused.contiguous()
    _rest_kernel[count, chunks](
        given.logits,
        given.summary,
        rows,
        refused,
        q,
        q_rows,
        parts,
        *sizes,
        certain,
        _chunk_size(vocab),
        num_warps=8,
        **late,
    )
    _draw_kernel[count,](
        given.logits,
        given.summary,
        parts,
        given.best,
        numbers,
        rows,
        refused,
        q,
        q_rows,
        out,
        *sizes,
        True,
        certain,
        next_power(chunks),
        _chunk_size(vocab),
        num_warps=8,
        **late,
    )
    return out


def write_probs(given: Distribution, plane: Tensor, rows: Tensor) -> None:
    """rorqual.ops.reference.write_probs; plane contiguous."""
    count, vocab = given.logits.shape
    assert plane.is_contiguous()
    if count:
        _probs_kernel[count, given.scratch.shape[1]](
            given.logits,
            given.summary,
            plane,
            rows,
            given.logits.stride(0),
            vocab,
            _chunk_size(vocab),
            num_warps=8,
            **dependent(plane.device),
        )
