"""moe_align_block_size: sorts (token, expert) pairs into blocks of rows that share an expert, on
the device and without a host sync.

A pair is an index into the flattened topk ids [T, K]; identifiers here call it a pick. The order of
pairs within an expert's rows may differ between runs; no result depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.runtime.launch import (
    COUNTERS,
    dependent,
    next_power,
    wait_for_inputs,
    zeroed_counters,
)

# Up to so many pairs one kernel appends them, chunk by chunk, to a bucket per slot. 0: never.
BUCKET_PICKS = 4096
BUCKET_CHUNK = 128
ROUTER_COUNTERS = 64  # counters of a stream that the router (topk.py) uses, one per token
# else up to so many pairs one kernel sorts, with each program scanning all of them; above, three
# kernels over chunks
ONE_KERNEL_PICKS = 8192
SCAN = 2048
CHUNK = 256


@dataclass
class ExpertBlocks:
    """Pairs sorted by expert, in blocks of up to `rows` rows of one expert. A row is a position in
    the sorted order of all num_picks pairs; pairs of experts on other ranks leave unused rows at
    the end.

    blocks [4, limit] int32: each block's expert, its first row, the end of that expert's rows, and
    a shift: row r is pair order[r + shift]. order [...] int32. count [1] int32: number of blocks.
    places [num_picks] int32: each pair's row, -1 for experts on other ranks; None if pairs were
    sorted into buckets. If they were not, all shifts are 0."""

    order: Tensor
    blocks: Tensor
    count: Tensor
    rows: int
    num_picks: int
    places: Tensor | None = None

    @property
    def limit(self) -> int:
        return self.blocks.shape[1]


@triton.jit
def _histogram(ids, first, num_picks, SIZE: tl.constexpr, BINS: tl.constexpr):
    index = first + tl.arange(0, SIZE)
    slot = tl.load(ids + index, mask=index < num_picks, other=-1).to(tl.int32)
    return index, slot, tl.histogram(tl.maximum(slot, 0), BINS, mask=slot >= 0)


@triton.jit
def _store_block(block, limit, slot, start, end, shift, mask):
    tl.store(block, slot, mask=mask)
    tl.store(block + limit, start, mask=mask)
    tl.store(block + 2 * limit, end, mask=mask)
    tl.store(block + 3 * limit, shift, mask=mask)


@triton.jit
def append_to_buckets(slot, index, here, order, counts, num_picks):
    """Append the pairs `index` that are `here` to their slots' buckets, each of which has room for
    all pairs."""
    position = tl.atomic_add(counts + slot, 1, mask=here, sem="relaxed")
    tl.store(order + slot * num_picks + position, index, mask=here)


@triton.jit
def plan_if_last(
    programs, blocks, count, counts, num_picks, limit, ROWS: tl.constexpr, BINS: tl.constexpr
):
    """The last of `programs` to arrive knows how many pairs each slot has, plans the blocks, and
    resets `counts` [BINS + 1] to zero."""
    bins = tl.arange(0, BINS)
    tl.debug_barrier()  # all pairs are counted before this program is
    if tl.atomic_add(counts + BINS, 1, sem="acq_rel") == programs - 1:
        found = tl.load(counts + bins, cache_modifier=".cg")
        needed = (found + ROWS - 1) // ROWS
        # two sums in one integer: neither reaches 2^15
        before = tl.cumsum(needed * 65536 + found, 0) - (needed * 65536 + found)
        start = before % 65536
        block = before // 65536
        for number in range(tl.max(needed, 0)):
            _store_block(
                blocks + block + number,
                limit,
                bins,
                start + number * ROWS,
                start + found,
                bins * num_picks - start,
                number < needed,
            )
        tl.store(count, tl.sum(needed, 0))
        tl.debug_barrier()  # threads that hold the same count have all read it
        tl.store(counts + bins, 0)
        tl.store(counts + BINS, 0)


@triton.jit(do_not_specialize=["num_picks", "limit"])
def _bucket_kernel(
    ids,
    order,
    blocks,
    count,
    counts,
    num_picks,
    limit,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BINS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per chunk of pairs."""
    wait_for_inputs(DEPENDENT)
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    slot = tl.load(ids + index, mask=index < num_picks, other=-1).to(tl.int32)
    append_to_buckets(slot, index, slot >= 0, order, counts, num_picks)
    plan_if_last(tl.num_programs(0), blocks, count, counts, num_picks, limit, ROWS, BINS)


@triton.jit(do_not_specialize=["num_picks", "limit"])
def _sort_kernel(
    ids,
    order,
    places,
    blocks,
    count,
    num_picks,
    limit,
    slots,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BINS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per slot: counts all pairs, then writes the indices of its own in order."""
    wait_for_inputs(DEPENDENT)
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_picks, SIZE):
        _, _, found = _histogram(ids, first, num_picks, SIZE, BINS)
        counts += found
    needed = (counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(bins < mine, counts, 0))
    block = tl.sum(tl.where(bins < mine, needed, 0))
    rows = tl.sum(tl.where(bins == mine, counts, 0))
    for done in range(0, rows, ROWS):
        _store_block(
            blocks + block + done // ROWS, limit, mine, start + done, start + rows, 0, True
        )
    if mine == slots - 1:
        tl.store(count, tl.sum(needed))
    last = mine == slots - 1  # it also marks the pairs of experts on other ranks
    if (rows > 0) | last:
        for first in range(0, num_picks, SIZE):
            index = first + tl.arange(0, SIZE)
            slot = tl.load(ids + index, mask=index < num_picks, other=-1).to(tl.int32)
            here = slot == mine
            place = start + tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(order + place, index, mask=here)
            away = (slot < 0) & (index < num_picks) & last
            tl.store(places + index, tl.where(here, place, -1), mask=here | away)
            start += tl.sum(here.to(tl.int32))


@triton.jit(do_not_specialize=["num_picks"])
def _count_kernel(
    ids, totals, before, num_picks, SIZE: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """before [chunks, BINS]: how many pairs of each slot earlier chunks have."""
    wait_for_inputs(DEPENDENT)
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    _, _, found = _histogram(ids, chunk * SIZE, num_picks, SIZE, BINS)
    tl.store(before + chunk * BINS + bins, tl.atomic_add(totals + bins, found, sem="relaxed"))


@triton.jit(do_not_specialize=["limit"])
def _plan_kernel(
    totals,
    starts,
    blocks,
    count,
    limit,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BINS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """SIZE blocks per program; a block finds its slot by counting the slots whose blocks all
    precede it."""
    wait_for_inputs(DEPENDENT)
    bins = tl.arange(0, BINS)
    block = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    counts = tl.load(totals + bins)
    needed = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(needed, 0)
    starting = tl.cumsum(counts, 0) - counts
    slot = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), 1)
    mine = bins[None, :] == slot[:, None]
    start = tl.sum(tl.where(mine, starting[None, :], 0), 1)
    inside = block - tl.sum(tl.where(mine, (ends - needed)[None, :], 0), 1)
    valid = block < tl.sum(needed)
    _store_block(
        blocks + block,
        limit,
        slot,
        start + inside * ROWS,
        start + tl.sum(tl.where(mine, counts[None, :], 0), 1),
        0,
        valid,
    )
    if tl.program_id(0) == 0:
        tl.store(starts + bins, starting)
        tl.store(count, tl.sum(needed))


@triton.jit(do_not_specialize=["num_picks"])
def _scatter_kernel(
    ids,
    starts,
    before,
    order,
    places,
    num_picks,
    SIZE: tl.constexpr,
    BINS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    chunk = tl.program_id(0)
    within = tl.arange(0, SIZE)
    index = chunk * SIZE + within
    slot = tl.load(ids + index, mask=index < num_picks, other=-1).to(tl.int32)
    rank = tl.zeros((SIZE,), tl.int32)
    for first in range(0, SIZE, 32):  # how many earlier pairs of the chunk have the same slot
        nearby = first + tl.arange(0, 32)
        other = tl.load(
            ids + chunk * SIZE + nearby, mask=chunk * SIZE + nearby < num_picks, other=-1
        ).to(tl.int32)
        rank += tl.sum(
            ((other[None, :] == slot[:, None]) & (nearby[None, :] < within[:, None])).to(tl.int32),
            1,
        )
    base = tl.load(starts + slot, mask=slot >= 0, other=0) + tl.load(
        before + chunk * BINS + slot, mask=slot >= 0, other=0
    )
    tl.store(order + base + rank, index, mask=slot >= 0)
    tl.store(places + index, tl.where(slot >= 0, base + rank, -1), mask=index < num_picks)


def empty_blocks(
    num_picks: int, slots: int, rows: int, device: torch.device, buckets: bool
) -> ExpertBlocks:
    """Uninitialized ExpertBlocks for num_picks pairs among `slots` slots. buckets: `order` has room
    for all pairs in every slot, and there are no places."""
    limit = -(-((num_picks + min(num_picks, slots) * (rows - 1)) // rows) // 4) * 4
    order = slots * num_picks if buckets else -(-num_picks // 4) * 4
    places = 0 if buckets else num_picks
    # each part 16-byte aligned
    first = 4 + 4 * limit
    work = torch.empty(first + order + places, dtype=torch.int32, device=device)
    return ExpertBlocks(
        work[first : first + order],
        work[4:first].view(4, limit),
        work[:1],
        rows,
        num_picks,
        work[first + order :] if places else None,
    )


def takes_buckets(num_picks: int, slots: int) -> bool:
    return num_picks <= BUCKET_PICKS and ROUTER_COUNTERS + next_power(slots) < COUNTERS


def bucket_counts(device: torch.device, bins: int) -> Tensor:
    """[bins + 1] zeros, separate from the router's counters."""
    return zeroed_counters(device, ROUTER_COUNTERS + bins + 1)[ROUTER_COUNTERS:]


def moe_align_block_size(ids: Tensor, slots: int, rows: int) -> ExpertBlocks:
    """ids [T, K] int32 or int64: slots, negative: on another rank. Blocks have up to `rows` pairs
    of one slot."""
    num_picks = ids.numel()
    device = ids.device
    bins = next_power(slots)
    buckets = takes_buckets(num_picks, slots)
    out = empty_blocks(num_picks, slots, rows, device, buckets)
    if buckets:
        _bucket_kernel[triton.cdiv(num_picks, BUCKET_CHUNK),](
            ids,
            out.order,
            out.blocks,
            out.count,
            bucket_counts(device, bins),
            num_picks,
            out.limit,
            ROWS=rows,
            SIZE=BUCKET_CHUNK,
            BINS=bins,
            num_warps=4,
            **dependent(device),
        )
    elif num_picks <= ONE_KERNEL_PICKS:
        size = min(SCAN, max(128, next_power(num_picks)))
        _sort_kernel[slots,](
            ids,
            out.order,
            out.places,
            out.blocks,
            out.count,
            num_picks,
            out.limit,
            slots,
            ROWS=rows,
            SIZE=size,
            BINS=bins,
            num_warps=4,
            **dependent(device),
        )
    else:
        _sort_in_chunks(ids, out, bins)
    return out


def _sort_in_chunks(ids: Tensor, out: ExpertBlocks, bins: int) -> None:
    num_picks = ids.numel()
    device = ids.device
    chunks = triton.cdiv(num_picks, CHUNK)
    totals = torch.zeros(bins, dtype=torch.int32, device=device)
    starts = torch.empty_like(totals)
    before = torch.empty(chunks, bins, dtype=torch.int32, device=device)
    late = dependent(device)
    _count_kernel[chunks,](
        ids, totals, before, num_picks, SIZE=CHUNK, BINS=bins, num_warps=4, **late
    )
    _plan_kernel[triton.cdiv(out.limit, 32),](
        totals,
        starts,
        out.blocks,
        out.count,
        out.limit,
        ROWS=out.rows,
        SIZE=32,
        BINS=bins,
        num_warps=4,
        **late,
    )
    _scatter_kernel[chunks,](
        ids,
        starts,
        before,
        out.order,
        out.places,
        num_picks,
        SIZE=CHUNK,
        BINS=bins,
        num_warps=4,
        **late,
    )
