"""Groups of requests whose block tables begin with the same pages, found on the device in each
step, so that a captured step needs nothing from the host.

A request belongs to the group of those with which it shares most. So requests for a few documents
behind one system prompt form a group for each document, whose pages hold most of what is read, and
the system prompt is read once for each of these groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.attention.shared_prefix import MIN_TILES, SharedPrefixes
from rorqual.ops.triton.attention.split_kv import _chunk
from rorqual.ops.triton.runtime.launch import next_power

FEWEST_REQUESTS = 32  # below, a step's attention takes little
SHORTEST_PREFIX = 512  # tokens; a shorter one is read by each of its requests
MOST_PROGRAMS = 2  # a multiprocessor has registers for, with a tile of ROWS rows
ROWS = 64  # of a tile: query heads of a key/value head, times query tokens, times requests
REQUEST_COST = tl.constexpr(128)  # tokens read in the time in which a worker begins a request
COMPARED = 8192  # table entries that a program compares at a time


@triton.jit
def _complete(lens, QUERIES: tl.constexpr, PAGE: tl.constexpr):
    """Pages that were full before this step."""
    return tl.where(lens > QUERIES, (lens - QUERIES) // PAGE, 0).to(tl.int32)


@triton.jit(
    do_not_specialize=["requests", "table_row"],
    do_not_specialize_on_alignment=["tables", "kv_lens"],
)
def _depth_kernel(
    tables,
    kv_lens,
    depths,
    keys,
    requests,
    table_row,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    LEAST: tl.constexpr,
    REQUESTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (requests). depths [R]: the most pages that a request has in common with another, in
    units of UNIT; 0 where that is less than LEAST. keys [R]: the last of these pages."""
    one = tl.program_id(0)
    index = tl.arange(0, REQUESTS)
    inside = index < requests
    table = tables + tl.cast(one, tl.int64) * table_row
    complete = _complete(tl.load(kv_lens + index, mask=inside, other=0), QUERIES, PAGE)
    limit = tl.minimum(complete, _complete(tl.load(kv_lens + one), QUERIES, PAGE))
    alike = (index != one) & (limit > 0)
    pages = 0
    depth = 0
    while tl.sum(alike.to(tl.int32)) > 0:
        columns = pages + tl.arange(0, COLUMNS)
        here = alike[:, None] & (columns[None, :] < limit[:, None])
        ours = tl.load(table + columns, mask=columns < tl.max(limit), other=0)
        others = tl.load(
            tables + index.to(tl.int64)[:, None] * table_row + columns[None, :], mask=here, other=0
        )
        same = here & (others == ours[None, :]) & (ours != 0)[None, :]
        agree = tl.min(tl.where(same, COLUMNS, tl.arange(0, COLUMNS)[None, :]), 1)
        depth = tl.maximum(depth, pages + tl.max(tl.where(alike, agree, 0)))
        alike = alike & (agree == COLUMNS)
        pages += COLUMNS
    depth = depth // UNIT * UNIT
    depth = tl.where(depth >= LEAST, depth, 0)
    tl.store(depths + one, depth)
    tl.store(keys + one, tl.load(table + depth - 1, mask=depth > 0, other=0))


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
    depths,
    keys,
    own_lens,
    first_pages,
    group_of,
    place_of,
    group_lens,
    counts,
    members,
    requests,
    table_row,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    MEMBERS: tl.constexpr,
    REQUESTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (requests): the first of the requests with one depth and key makes sure that all pages
    up to there are the same (a page before may be a copy that one of them computed itself), and
    writes for all of them; a request alone writes for itself. Groups are named by their first
    request here; group_lens [R]: tokens of the prefix where a request begins a group, else 0."""
    one = tl.program_id(0)
    index = tl.arange(0, REQUESTS)
    inside = index < requests
    lens = tl.load(kv_lens + index, mask=inside, other=0)
    table = tables + tl.cast(one, tl.int64) * table_row
    limit = tl.load(depths + one)
    same = inside & (tl.load(depths + index, mask=inside, other=0) == limit)
    same &= tl.load(keys + index, mask=inside, other=0) == tl.load(keys + one)
    if limit == 0:
        same = index == one
    if tl.min(tl.where(same, index, REQUESTS)) == one:
        size = tl.sum(same.to(tl.int32))
        pages = 0
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
    own_lens,
    group_of,
    place_of,
    group_lens,
    numbers,
    starts,
    owners,
    parts,
    own_workers,
    requests,
    workers,
    BLOCK_N: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """One program: number the groups without gaps, lay their tiles in a row, share the workers out
    between prefixes and what follows, and tell each request where its partial results will be.
    numbers [R]: room for a group's number."""
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
    lens = tl.load(own_lens + index, mask=inside, other=0)
    own = tl.sum(tl.where(lens > 0, lens + REQUEST_COST, 0).to(tl.float32))  # 0: padding
    share = (total * BLOCK_N).to(tl.float32)
    share = workers * (share / tl.maximum(share + own, 1.0)) + 0.5
    for_prefixes = tl.minimum(tl.maximum(share.to(tl.int32), 1), workers - 1)
    for_prefixes = tl.minimum(for_prefixes, tl.cdiv(total, MIN_TILES))  # 0 without prefixes
    tl.store(own_workers, workers - for_prefixes)
    chunk = _chunk(total, tl.maximum(for_prefixes, 1), MIN_TILES)
    head = begin // chunk
    tl.store(parts + 3 * index, head + mine, mask=inside)
    splits = tl.where(shares, (stop - 1) // chunk - head + 1, 0)
    tl.store(parts + 3 * index + 1, splits, mask=inside)
    tl.store(parts + 3 * index + 2, tl.load(place_of + index, mask=inside, other=0), mask=inside)


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
    left out. Returns None where a tile has no room for the queries of two requests, or there are no
    two workers."""
    device = kv_lens.device
    requests = kv_lens.shape[0]
    each = heads[0] // heads[1] * queries
    members = ROWS // each
    if members < 2 or workers < 2:
        return None
    block_n = 16 if dtype == torch.float32 else 64
    if block_n % page and page % block_n:
        return None  # a tile would end inside a page
    unit = max(1, block_n // page)
    shortest = SHORTEST_PREFIX if shortest is None else shortest
    rows = max(16, next_power(members * each))
    groups_at_most = requests // 2 if members > 2 else 2 * requests // 3  # three may be two groups
    slots = workers + groups_at_most
    size = next_power(max(requests, 2))
    columns = max(1, min(16, COMPARED // size))

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
        own_workers=numbers(1),
        workers=workers,
        block_n=block_n,
    )
    group_of, place_of, group_lens, room = numbers(4, requests)
    depths, keys = numbers(2, requests)
    least = max(unit, -(-shortest // page))
    where = (tables, kv_lens, depths, keys)
    sizes = (requests, tables.stride(0))
    _depth_kernel[(requests,)](
        *where, *sizes, queries, page, unit, least, size, columns, num_warps=8
    )
    _find_kernel[(requests,)](
        *where,
        groups.own_lens,
        groups.first_pages,
        group_of,
        place_of,
        group_lens,
        groups.counts,
        groups.requests,
        *sizes,
        page,
        unit,
        members,
        size,
        columns,
        num_warps=8,
    )
    _number_kernel[(1,)](
        groups.own_lens,
        group_of,
        place_of,
        group_lens,
        room,
        groups.starts,
        groups.owners,
        groups.parts,
        groups.own_workers,
        requests,
        workers,
        block_n,
        size,
    )
    return groups
