"""Decode attention that reads a shared prefix once for several requests (arXiv 2402.05099,
2402.15220).

Requests whose block tables begin with the same pages form groups (prefix_groups.py). Some workers
of the decode kernel attend to the groups' common pages, with the queries of all of a group's
requests as the rows of one tile, the others to what follows in each request; they are shared out by
the tokens of both, and `combine_shared` merges the results. A separate kernel for the first part
took 1 % of a step in which nothing is shared; workers with a part of both, one after the other,
waited twice for their schedule and first tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.attention.mla_decode import (
    _row,
    _slots,
    _softmax_step,
    _store_part,
    _whole,
    widened,
)
from rorqual.ops.triton.attention.split_kv import SplitPlan, _chunk, rows_at_once
from rorqual.ops.triton.runtime.launch import dependent, wait_for_inputs
from rorqual.ops.triton.runtime.prefetch import fetch_rows_ahead

MIN_TILES = tl.constexpr(4)  # of a program


@dataclass(frozen=True)
class SharedPrefixes:
    """The groups of one step, for all its layers. R requests; groups are numbered in the order of
    their first requests, and one holds at most `members` requests: more that share a prefix form
    several.

    own_lens [R] int64: cached entries after the prefix. first_pages [R] int32: pages of the prefix.
    parts [R, 3] int32: the first of a request's partial results for its prefix, their number (0
    without one), and the request's place in its group. starts [R + 1] int32: first tile of each
    group, then the total. owners, counts [R] int32: a group's first request, whose block table is
    read, and its number of requests. requests [R, members] int32: those of the group that begins
    with a request. partial [slots, key/value heads, rows, width] fp32, lse [slots, key/value heads,
    rows] fp32: results of a worker for a group (normalized) and their log2-sum-exp2; rows are
    (place, query token, head). own_workers [1] int32: workers of what follows prefixes, the first
    ones; the others have the prefixes.
    """

    own_lens: Tensor
    first_pages: Tensor
    parts: Tensor
    starts: Tensor
    owners: Tensor
    counts: Tensor
    requests: Tensor
    partial: Tensor
    lse: Tensor
    own_workers: Tensor
    workers: int
    block_n: int

    @property
    def members(self) -> int:
        return self.requests.shape[1]

    @property
    def rows(self) -> int:
        return self.lse.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Arguments of the decode kernel, in its order."""
        return (
            *(self.first_pages, self.parts, self.starts, self.owners, self.counts),
            *(self.requests, self.partial, self.lse, self.own_workers),
        )


@triton.jit
def prefix_share(starts, owners, requests, worker, workers, REQUESTS: tl.constexpr):
    """(first tile, the one after the last, group of the first tile, its first request) of a worker
    for prefixes, `worker` of `workers`; no tile if it is negative. Read before the wait for the
    kernel before, as all of the schedule."""
    all_tiles = tl.load(starts + requests, cache_modifier=".cg")
    chunk = _chunk(all_tiles, tl.maximum(workers, 1), MIN_TILES)
    position = tl.where(worker < 0, all_tiles, worker * chunk)
    index = tl.arange(0, REQUESTS)
    ends = tl.load(
        starts + 1 + index, mask=index < requests, other=2147483647, cache_modifier=".cg"
    )
    group = tl.sum((ends <= position).to(tl.int32))
    owner = tl.load(owners + group, mask=position < all_tiles, other=0, cache_modifier=".cg")
    return position, tl.minimum(position + chunk, all_tiles), group, owner


@triton.jit
def fetch_prefix_ahead(
    k_head,
    v_head,
    tables,
    starts,
    kv_row,
    table_row,
    position,
    last,
    group,
    owner,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Prefetch a worker's first two tiles, before the wait for the kernel before: pages of prefixes
    were complete before the step."""
    if position < last:
        table = tables + owner.to(tl.int64) * table_row
        begin = tl.load(starts + group, cache_modifier=".cg")
        stop = tl.load(starts + group + 1, cache_modifier=".cg")
        token = (position - begin) * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
        token = tl.minimum(token, (stop - begin) * BLOCK_N - 1)
        page = tl.load(table + token // PAGE).to(tl.int64)
        rows = (page * PAGE + token % PAGE) * kv_row
        each: tl.constexpr = SIZE * k_head.dtype.element_ty.primitive_bitwidth // 8
        fetch_rows_ahead(k_head + rows, each, DEPENDENT)
        fetch_rows_ahead(v_head + rows, each, DEPENDENT)


@triton.jit
def attend_prefixes(
    q,
    k_head,
    v_head,
    scale_head,
    tables,
    starts,
    owners,
    counts,
    members,
    partial,
    lse,
    factor,
    q_token,
    q_head,
    kv_row,
    scale_row,
    table_row,
    key_head,
    worker,
    position,
    last,
    group,
    owner,
    SHARE: tl.constexpr,
    QUERIES: tl.constexpr,
    MEMBERS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One worker's share (`prefix_share`) of one key/value head; worker: its number among those of
    prefixes. Worker w stores its result for group g in slot w + g: of the pairs that occur, one
    ends where the next begins, so no two have the same sum. k_head, v_head [WIDTH], scale_head:
    columns of this head in the first row of the cache."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    if position < last:
        rows = tl.arange(0, BLOCK_H)
        member = rows // (QUERIES * SHARE)
        query = rows // SHARE % QUERIES
        head = key_head * SHARE + rows % SHARE
        columns = tl.arange(0, WIDTH)
        offsets = tl.arange(0, BLOCK_N)
        inside = (columns < SIZE)[None, :]
        while position < last:
            begin = tl.load(starts + group)
            stop = tl.minimum(tl.load(starts + group + 1), last)
            row_ok = (rows < MEMBERS * QUERIES * SHARE) & (member < tl.load(counts + owner))
            request = tl.load(members + owner * MEMBERS + member, mask=row_ok, other=0)
            q_rows = q + (request.to(tl.int64) * QUERIES + query) * q_token + head * q_head
            queries = tl.load(
                q_rows[:, None] + columns[None, :], mask=row_ok[:, None] & inside, other=0.0
            )
            table = tables + owner.to(tl.int64) * table_row
            acc = tl.zeros((BLOCK_H, WIDTH), tl.float32)
            peak = tl.full((BLOCK_H,), -1e30, tl.float32)
            total = tl.zeros((BLOCK_H,), tl.float32)
            for j in tl.range(position - begin, stop - begin, num_stages=STAGES):
                if PAGE % BLOCK_N == 0:
                    slots = _row(table, j * BLOCK_N, PAGE) + offsets
                else:
                    slots = _slots(table, j * BLOCK_N + offsets, (j + 1) * BLOCK_N, PAGE)
                k = _whole(k_head[None, :] + slots[:, None] * kv_row, inside, SIZE == WIDTH)
                v = _whole(v_head[None, :] + slots[:, None] * kv_row, inside, SIZE == WIDTH)
                scores = tl.dot(queries, widened(k, DTYPE).T, input_precision=PRECISION)
                if SCALED:
                    scale_rows = scale_head + slots * scale_row
                    scores *= tl.load(scale_rows)[None, :]
                weights, shrink, peak, total = _softmax_step(scores, factor, peak, total)
                if SCALED:
                    weights *= tl.load(scale_rows + 1)[None, :]
                acc *= shrink[:, None]
                acc = tl.dot(weights.to(DTYPE), widened(v, DTYPE), acc, input_precision=PRECISION)
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            place = (worker + group).to(tl.int64) * tl.num_programs(0) + key_head
            _store_part(
                partial, lse, place * BLOCK_H + rows, columns, acc, peak, total, row_ok, WIDTH
            )
            position = stop
            group += 1
            owner = tl.load(owners + group, mask=position < last, other=0)


@triton.jit
def _merged(acc, peak, total, partial, lse, where, ok, WIDTH: tl.constexpr):
    """The state of the online softmax of rows [BLOCK_R] after partial results `where` [BLOCK_R,
    STEP] of which `ok` exist: (weighted sum [BLOCK_R, WIDTH], peak, total)."""
    columns = tl.arange(0, WIDTH)
    score = tl.load(lse + where, mask=ok, other=float("-inf"), cache_modifier=".cg")
    values = tl.load(
        partial + where[:, :, None] * WIDTH + columns[None, None, :],
        mask=ok[:, :, None],
        other=0.0,
        cache_modifier=".cg",
    )
    new_peak = tl.maximum(peak, tl.max(score, 1))
    weight = tl.exp2(score - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], 1)
    return acc, new_peak, total * shrink + tl.sum(weight, 1)


@triton.jit(do_not_specialize=["requests", "workers", "min_tiles"])
def _combine_kernel(
    partial,
    lse,
    starts,
    prefix_partial,
    prefix_lse,
    parts,
    own_workers,
    out,
    out_token,
    out_head,
    requests,
    workers,
    min_tiles,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    PREFIX_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """As split_kv's, and the partial results for a request's prefix. What follows one is a partial
    result also where one worker computed it all: that of slot 2 workers + request."""
    ROWS: tl.constexpr = QUERIES * HEADS
    SHARE: tl.constexpr = HEADS // KEY_HEADS
    request = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    # before the wait, as in decode attention: the schedule is there (`split_kv.stored`)
    begin = tl.load(starts + request, cache_modifier=".cg")
    end = tl.load(starts + request + 1, cache_modifier=".cg")
    all_tiles = tl.load(starts + requests, cache_modifier=".cg")
    chunk = _chunk(all_tiles, tl.load(own_workers, cache_modifier=".cg"), min_tiles)
    slot = tl.load(parts + 3 * request, cache_modifier=".cg")
    prefixed = tl.load(parts + 3 * request + 1, cache_modifier=".cg")
    place = tl.load(parts + 3 * request + 2, cache_modifier=".cg")
    wait_for_inputs(DEPENDENT)  # even without work
    head_worker = begin // chunk
    count = tl.where(end > begin, (end - 1) // chunk - head_worker + 1, 0)
    if (count == 1) & (prefixed == 0):
        return
    columns = tl.arange(0, WIDTH)
    row_ok = rows < ROWS
    query = rows // HEADS
    head = rows % HEADS
    acc = tl.zeros((BLOCK_R, WIDTH), tl.float32)
    peak = tl.full((BLOCK_R,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for i in range(0, count, STEP):
        split = i + tl.arange(0, STEP)
        held = 2 * (head_worker + split) + (split == 0).to(tl.int32)
        held = tl.where(count == 1, 2 * workers + request, held)
        where = held.to(tl.int64)[None, :] * ROWS + rows[:, None]
        ok = row_ok[:, None] & (split < count)[None, :]
        acc, peak, total = _merged(acc, peak, total, partial, lse, where, ok, WIDTH)
    row = (place * QUERIES + query) * SHARE + head % SHARE
    for i in range(0, prefixed, STEP):
        split = i + tl.arange(0, STEP)
        held = (slot + split).to(tl.int64)[None, :] * KEY_HEADS + (head // SHARE)[:, None]
        where = held * PREFIX_ROWS + row[:, None]
        ok = row_ok[:, None] & (split < prefixed)[None, :]
        acc, peak, total = _merged(acc, peak, total, prefix_partial, prefix_lse, where, ok, WIDTH)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    token = request.to(tl.int64) * QUERIES + query
    target = out + token[:, None] * out_token + head[:, None] * out_head + columns[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & (columns < SIZE)[None, :])


def combine_shared(plan: SplitPlan, groups: SharedPrefixes, out: Tensor) -> None:
    """Finish `out` [T, H, size] in place, as split_kv.combine, and with what was found in the
    prefixes. plan: of groups.own_lens, with a slot for each request."""
    requests = groups.own_lens.shape[0]
    rows = plan.partial.shape[1]
    block_r, step = rows_at_once(requests * rows)
    _combine_kernel[(requests, triton.cdiv(rows, block_r))](
        plan.partial,
        plan.lse,
        plan.starts,
        groups.partial,
        groups.lse,
        groups.parts,
        groups.own_workers,
        out,
        out.stride(0),
        out.stride(1),
        requests,
        plan.workers,
        plan.min_tiles,
        out.shape[1],
        groups.lse.shape[1],
        out.shape[0] // requests,
        groups.rows,
        out.shape[2],
        plan.partial.shape[2],
        block_r,
        step,
        num_warps=4,
        **dependent(out.device),
    )
