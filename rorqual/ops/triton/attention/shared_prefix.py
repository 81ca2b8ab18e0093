"""Decode attention that reads a shared prefix once for several requests (arXiv 2402.05099,
2402.15220).

Requests whose block tables begin with the same pages form groups, found on the device in each step,
so a captured step needs nothing from the host. Each worker of the decode kernel first attends to
its part of the groups' common pages, with the queries of all of a group's requests as the rows of
one tile, then to its part of what follows in each request, and `combine_shared` merges both. A
separate kernel for the first part took 1 % of a step in which nothing is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
from rorqual.ops.triton.attention.split_kv import SplitPlan, _chunk
from rorqual.ops.triton.runtime.launch import (
    dependent,
    next_power,
    wait_for_inputs,
)

FEWEST_REQUESTS = 32  # below, a step's attention takes little, and an idle kernel a layer shows
SHORTEST_PREFIX = 512  # tokens; a shorter one is read by each of its requests
MOST_PROGRAMS = 2  # a multiprocessor has registers for, with a tile of ROWS rows
ROWS = 64  # of a tile: query heads of a key/value head, times query tokens, times requests
COMPARED = 8192  # table entries that a program compares at a time
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
    (place, query token, head).
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
            *(self.requests, self.partial, self.lse),
        )


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(
    do_not_specialize=["requests", "table_row"],
    do_not_specialize_on_alignment=["tables", "kv_lens"],
)
def _find_kernel(
    tables,
    kv_lens,
    own_lens,
    first_pages,
    group_of,
    place_of,
    group_lens,
    counts,
    members,
    requests,
    table_row,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    LEAST: tl.constexpr,
    MEMBERS: tl.constexpr,
    REQUESTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (requests): the first of the requests with one first page compares their tables and
    writes for all of them; a request alone writes for itself. Only pages that were complete before
    this step count, in units of UNIT, LEAST at least. Groups are named by their first request here;
    group_lens [R]: tokens of the prefix where a request begins a group, else 0."""
    one = tl.program_id(0)
    index = tl.arange(0, REQUESTS)
    inside = index < requests
    heads = tl.load(tables + index.to(tl.int64) * table_row, mask=inside, other=0)
    lens = tl.load(kv_lens + index, mask=inside, other=0)
    table = tables + tl.cast(one, tl.int64) * table_row
    head = tl.load(table)
    complete = tl.where(lens > QUERIES, (lens - QUERIES) // PAGE, 0).to(tl.int32)
    same = inside & (heads == head) & (head != 0) & (complete >= LEAST)
    if tl.sum((same & (index == one)).to(tl.int32)) == 0:
        same = index == one
    if tl.min(tl.where(same, index, REQUESTS)) == one:
        size = tl.sum(same.to(tl.int32))
        limit = tl.min(tl.where(same, complete, 2147483647))
        pages = tl.where(size > 1, 0, limit)
        going = size > 1
        while going:
            columns = pages + tl.arange(0, COLUMNS)
            ahead = columns < limit
            ours = tl.load(table + columns, mask=ahead, other=0)
            others = tl.load(
                tables + index.to(tl.int64)[:, None] * table_row + columns[None, :],
                mask=same[:, None] & ahead[None, :],
                other=0,
            )
            differ = tl.max((same[:, None] & (others != ours[None, :])).to(tl.int32), 0)
            ends = (differ > 0) | (columns >= limit)
            agree = tl.min(tl.where(ends, tl.arange(0, COLUMNS), COLUMNS))
            pages += agree
            going = agree == COLUMNS
        pages = pages // UNIT * UNIT
        pages = tl.where((size > 1) & (pages >= LEAST), pages, 0)
        groups = tl.cdiv(size, MEMBERS)
        most = tl.cdiv(size, groups)  # of a group: nearly equal ones
        rank = tl.cumsum(same.to(tl.int32), 0) - 1
        place = rank % most
        begins = same & (place == 0)
        group = tl.associative_scan(tl.where(begins, index, 0), 0, _larger)
        tl.store(own_lens + index, lens - pages * PAGE, mask=same)
        tl.store(first_pages + index, pages, mask=same)
        tl.store(group_of + index, tl.where(pages > 0, group, -1), mask=same)
        tl.store(place_of + index, place, mask=same)
        tl.store(group_lens + index, tl.where(begins, pages * PAGE, 0), mask=same)
        tl.store(counts + index, tl.minimum(most, size - rank), mask=same)
        tl.store(members + group * MEMBERS + place, index, mask=same)


@triton.jit(do_not_specialize=["requests", "workers"])
def _number_kernel(
    group_of,
    place_of,
    group_lens,
    numbers,
    starts,
    owners,
    parts,
    requests,
    workers,
    BLOCK_N: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """One program: number the groups without gaps, lay their tiles in a row, and tell each request
    where its partial results will be. numbers [R]: room for a group's number."""
    index = tl.arange(0, REQUESTS)
    inside = index < requests
    tiles = tl.load(group_lens + index, mask=inside, other=0) // BLOCK_N
    begins = tiles > 0
    number = tl.cumsum(begins.to(tl.int32), 0) - 1
    end = tl.cumsum(tiles, 0)
    total = tl.sum(tiles)
    count = tl.sum(begins.to(tl.int32))
    tl.store(starts, 0)
    tl.store(starts + 1 + number, end, mask=begins)
    tl.store(starts + 1 + index, total, mask=inside & (index >= count))
    tl.store(owners + number, index, mask=begins)
    tl.store(numbers + index, number, mask=inside)
    tl.debug_barrier()  # other threads' stores, read below
    group = tl.load(group_of + index, mask=inside, other=-1)
    shares = group >= 0
    mine = tl.load(numbers + group, mask=shares, other=0)
    begin = tl.load(starts + mine, mask=shares, other=0)
    stop = tl.load(starts + mine + 1, mask=shares, other=1)
    chunk = tl.maximum(_chunk(total, workers, MIN_TILES), 1)
    head = begin // chunk
    tl.store(parts + 3 * index, head + mine, mask=inside)
    splits = tl.where(shares, (stop - 1) // chunk - head + 1, 0)
    tl.store(parts + 3 * index + 1, splits, mask=inside)
    tl.store(parts + 3 * index + 2, tl.load(place_of + index, mask=inside, other=0), mask=inside)


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
    requests,
    key_head,
    worker,
    workers,
    SHARE: tl.constexpr,
    QUERIES: tl.constexpr,
    MEMBERS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REQUESTS: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One worker's tiles of one key/value head. Worker w stores its result for group g in slot
    w + g: of the pairs that occur, one ends where the next begins, so no two have the same sum.
    k_head, v_head [WIDTH], scale_head: columns of this head in the first row of the cache."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    all_tiles = tl.load(starts + requests)
    chunk = _chunk(all_tiles, workers, MIN_TILES)
    position = worker * chunk
    last = tl.minimum(position + chunk, all_tiles)
    if position < last:
        rows = tl.arange(0, BLOCK_H)
        member = rows // (QUERIES * SHARE)
        query = rows // SHARE % QUERIES
        head = key_head * SHARE + rows % SHARE
        columns = tl.arange(0, WIDTH)
        offsets = tl.arange(0, BLOCK_N)
        inside = (columns < SIZE)[None, :]
        index = tl.arange(0, REQUESTS)
        ends = tl.load(starts + 1 + index, mask=index < requests, other=2147483647)
        group = tl.sum((ends <= position).to(tl.int32))
        while position < last:
            begin = tl.load(starts + group)
            stop = tl.minimum(tl.load(starts + group + 1), last)
            owner = tl.load(owners + group)
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
            for j in tl.range(position - begin, stop - begin, num_stages=3):
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
    wait_for_inputs(DEPENDENT)
    request = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = tl.load(starts + request)
    end = tl.load(starts + request + 1)
    chunk = _chunk(tl.load(starts + requests), workers, min_tiles)
    slot = tl.load(parts + 3 * request)
    prefixed = tl.load(parts + 3 * request + 1)
    place = tl.load(parts + 3 * request + 2)
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


def find(
    tables: Tensor,
    kv_lens: Tensor,
    queries: int,
    page: int,
    heads: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    workers: int,
    shortest: int | None = None,
) -> SharedPrefixes | None:
    """The groups of one step. tables [R, columns] int64 and kv_lens [R] int64 on the device, as
    gqa_decode takes them; heads: of queries and of keys; width: columns of a partial result, a
    power of two; workers: gqa_decode.gqa_workers; shortest: tokens of a prefix, SHORTEST_PREFIX if
    left out. Returns None where a tile has no room for the queries of two requests."""
    device = kv_lens.device
    requests = kv_lens.shape[0]
    each = heads[0] // heads[1] * queries
    members = ROWS // each
    if members < 2:
        return None
    block_n = 16 if dtype == torch.float32 else 64
    if block_n % page and page % block_n:
        return None  # a tile would end inside a page
    unit = max(1, block_n // page)
    shortest = SHORTEST_PREFIX if shortest is None else shortest
    rows = max(16, next_power(members * each))
    slots = workers + requests

    def numbers(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=kind, device=device)

    groups = SharedPrefixes(
        own_lens=torch.empty_like(kv_lens),
        first_pages=numbers(requests),
        parts=numbers(requests, 3),
        starts=numbers(requests + 1),
        owners=numbers(requests),
        counts=numbers(requests),
        requests=numbers(requests, members),
        partial=numbers(slots, heads[1], rows, width, kind=torch.float32),
        lse=numbers(slots, heads[1], rows, kind=torch.float32),
        workers=workers,
        block_n=block_n,
    )
    group_of, place_of, group_lens, room = numbers(4, requests)
    size = next_power(max(requests, 2))
    _find_kernel[(requests,)](
        tables,
        kv_lens,
        groups.own_lens,
        groups.first_pages,
        group_of,
        place_of,
        group_lens,
        groups.counts,
        groups.requests,
        requests,
        tables.stride(0),
        queries,
        page,
        unit,
        max(unit, -(-shortest // page)),
        members,
        size,
        max(1, min(16, COMPARED // size)),
        num_warps=8,
    )
    _number_kernel[(1,)](
        group_of,
        place_of,
        group_lens,
        room,
        groups.starts,
        groups.owners,
        groups.parts,
        requests,
        workers,
        block_n,
        size,
    )
    return groups


def combine_shared(plan: SplitPlan, groups: SharedPrefixes, out: Tensor) -> None:
    """Finish `out` [T, H, size] in place, as split_kv.combine, and with what was found in the
    prefixes. plan: of groups.own_lens, with a slot for each request."""
    requests = groups.own_lens.shape[0]
    rows = plan.partial.shape[1]
    few = requests * rows < 4096
    block_r, step = (1, 16) if few else (8, 2)
    _combine_kernel[(requests, triton.cdiv(rows, block_r))](
        plan.partial,
        plan.lse,
        plan.starts,
        groups.partial,
        groups.lse,
        groups.parts,
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
