"""Dispatch of rows to the ranks of their experts, and combine, over buffers that every GPU of a
host can read and write.

One exchange has four kernels: `dispatch` sends rows, `recv_dispatch` waits for the others' rows,
`send_combine` returns partial sums, `combine` waits for them and adds. A row is sent once to each
rank that holds any of its experts. The capacity of a block of rows is the row count of the step's
longest rank, which the host knows, so there are no counts and everything can be captured. Each
rank's buffer (p2p_flags.py):

| part    | bytes                          | content                                               |
| ------- | ------------------------------ | ----------------------------------------------------- |
| flags   | 2 * 4 * world                  | flags[direction, peer]: completed blocks of that      |
|         |                                | peer's kernels; 0: dispatch, 1: combine               |
| data    | world * rows * columns * item  | hidden states [world, capacity, columns]: block r is  |
|         |                                | from rank r; e4m3 if quantized                        |
| scales  | 4 * world * rows * columns/128 | of e4m3 rows [world, capacity, ceil(columns/128)]     |
| ids     | 4 * world * rows * top_k       | int32, local expert ids; -1: on another rank, or      |
|         |                                | unused row                                            |
| weights | 4 * world * rows * top_k       | fp32                                                  |
| used    | 4 * world * rows               | int32 [world, rows]: 1 if that row of rank r's block  |
|         |                                | is used, 0 if not                                     |
| sums    | world * rows * columns * item  | partial sums [world, capacity, columns]: block r is   |
|         |                                | from rank r                                           |

All ids of a block are written at each call, -1 for unused rows, so received rows are used in place
and no count is sent.

Data is only pushed, never pulled over the links: writes are pipelined, a read waits for a round
trip. Pulling sums would also need them in memory that others can read; `send_combine` writes them
to where they are needed.

Flags count blocks of kernels and are never reset (a replayed graph continues where it stopped).
`totals` [2], local to this rank, is the value that every flag must reach. Only the kernel before a
waiting one changes it, so all blocks see the same value.

No data is overwritten while another rank reads it, without any barrier but these flags, if all
ranks make the same calls in the same order on one stream each, and a buffer's next `dispatch`
follows its last `combine`:

- data, scales, ids, weights of rank B are written by A's next `dispatch`, which follows A's
  `combine`, which waited for blocks of B's `send_combine`, which follows all reads of B's experts.
- A waited only for those blocks of B's `send_combine` that return A's rows. Others may still run.
  They must not read what A's next `dispatch` writes: not `ids`, where A's block begins elsewhere
  if the next capacity is another one. They read `used`, where each rank's part has one place.
- sums of A are written by B's next `send_combine`, which follows B's `recv_dispatch`, which waited
  for A's next `dispatch`, which follows A's `combine`, their reader. For this every rank must wait
  in `combine`, even without rows.
- a flag may be ahead, since a waiting kernel needs at least a value. It cannot cover a call whose
  data is missing, since a peer's counts of one call all precede those of the next.

Two exchanges in flight need two buffers. `recv_dispatch` and `combine` wait only for `dispatch` and
`send_combine` of other GPUs, which wait for nothing: no kernel needs all its blocks to be resident
at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import ACTIVATION_BLOCK, FP8
from rorqual.ops.triton.comm.p2p_flags import at, await_flags
from rorqual.ops.triton.rowwise.quantize import to_fp8
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs
from rorqual.ops.triton.runtime.padding import padding, real_rows

TOKENS_AT_ONCE = 32  # tokens whose expert ids a program reads at once


@dataclass(frozen=True)
class Areas:
    """Offsets of the parts of a buffer, in bytes, and its `size`. `rows`: the largest capacity.
    itemsize: of hidden states."""

    world: int
    rows: int
    columns: int
    top_k: int
    itemsize: int

    @property
    def starts(self) -> tuple[int, ...]:
        """(flags, data, scales, ids, weights, used, sums, end), multiples of 256."""
        rows = self.world * self.rows
        row = self.columns * self.itemsize
        scales = 4 * -(-self.columns // ACTIVATION_BLOCK)
        topk = 4 * self.top_k
        found = [0]
        for length in (
            8 * self.world,
            rows * row,
            rows * scales,
            rows * topk,
            rows * topk,
            rows * 4,
            rows * row,
        ):
            found.append(found[-1] + -(-length // 256) * 256)
        return tuple(found)

    @property
    def size(self) -> int:
        return self.starts[-1]


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of the axis's ranks: rank r has part (r * stride + first) // share, of `each`
    slots.

    The axis may be every `stride`-th rank of a stage, from `first` on, and `share` consecutive
    ranks have columns of the same experts."""

    each: int
    share: int = 1
    stride: int = 1
    first: int = 0


@dataclass(frozen=True, eq=False)
class DispatchBuffer:
    """For one exchange at a time. `start`: offset of this buffer in each rank's memory. `totals`
    [2] int32, initially zero, as the flags. `rows` [areas.rows, world] int32: row of each token's
    partial sum from each rank; -1: none."""

    table: Tensor
    start: int
    areas: Areas
    rank: int
    totals: Tensor
    rows: Tensor

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(self.start + start for start in self.areas.starts[:-1])


@triton.jit
def _wants(
    slots, token, tokens, part, TOP_K: tl.constexpr, PICKS: tl.constexpr, EACH: tl.constexpr
):
    """[tokens, peers] int32: 1 if a token is routed to a slot of the peer's part."""
    pick = tl.arange(0, PICKS)
    real = (token < tokens)[:, None] & (pick < TOP_K)[None, :]
    slot = tl.load(slots + token[:, None] * TOP_K + pick[None, :], mask=real, other=0).to(tl.int32)
    holder = tl.where(real, slot // EACH, -1)
    return tl.max((holder[:, :, None] == part[None, None, :]).to(tl.int32), 1)


@triton.jit
def _rows_by_peer(
    slots,
    block,
    tokens,
    part,
    TOP_K: tl.constexpr,
    PICKS: tl.constexpr,
    EACH: tl.constexpr,
    PEERS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """By peer: how many tokens before `block` are sent there, whether token `block` is, and how
    many of all."""
    none = tl.full([PEERS], 0, tl.int32)
    before = none
    goes = none
    count = none
    for start in range(0, tokens, CHUNK):
        token = start + tl.arange(0, CHUNK)
        wants = _wants(slots, token, tokens, part, TOP_K, PICKS, EACH)
        count += tl.sum(wants, 0)
        before += tl.sum(tl.where((token < block)[:, None], wants, 0), 0)
        goes += tl.sum(tl.where((token == block)[:, None], wants, 0), 0)
    return before, goes, count


@triton.jit(do_not_specialize=["tokens", "capacity", "each_rows", "first_row"])
def _dispatch_kernel(
    table,
    totals,
    x,
    slots,
    weights,
    rows,
    requests,
    each_rows,
    first_row,
    tokens,
    capacity,
    columns,
    x_row,
    rank,
    stride,
    first,
    flags_at,
    data_at,
    scales_at,
    ids_at,
    weights_at,
    used_at,
    limit,
    EACH: tl.constexpr,
    SHARE: tl.constexpr,
    TOP_K: tl.constexpr,
    PICKS: tl.constexpr,
    SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    CHUNK: tl.constexpr,
    QUANT: tl.constexpr,
    UE8M0: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Block i sends token i, if it exists and is not padding, and marks row i of its block at each
    peer as used, or as unused if fewer tokens are sent there. limit: the largest capacity."""
    tokens = real_rows(tokens, requests, each_rows, first_row)  # no kernel writes `requests`
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(0)
    peer = tl.arange(0, PEERS)
    pick = tl.arange(0, PICKS)
    offsets = tl.arange(0, SIZE)
    real = peer < WORLD
    mine = pick < TOP_K
    inside = offsets < columns
    # loaded early, to overlap
    values = tl.load(
        x + block.to(tl.int64) * x_row + offsets, mask=inside & (block < tokens), other=0.0
    )
    part = tl.where(real, (peer * stride + first) // SHARE, -2)
    before, goes, count = _rows_by_peer(
        slots, block, tokens, part, TOP_K, PICKS, EACH, PEERS, CHUNK
    )
    tl.store(
        rows + block * WORLD + peer, tl.where(goes > 0, peer * capacity + before, -1), mask=real
    )

    bases = tl.load(table + peer, mask=real, other=0)
    slot = tl.load(slots + block * TOP_K + pick, mask=mine & (block < tokens), other=0).to(tl.int32)
    weight = tl.load(weights + block * TOP_K + pick, mask=mine & (block < tokens), other=0.0)
    local = slot[None, :] - (part * EACH)[:, None]
    local = tl.where((local >= 0) & (local < EACH), local, -1)
    topk_offsets = ((rank * capacity + before) * TOP_K)[:, None] + pick[None, :]
    sent = (goes > 0)[:, None] & mine[None, :]
    tl.store(
        (bases + ids_at).to(tl.pointer_type(tl.int32))[:, None] + topk_offsets, local, mask=sent
    )
    shown = tl.broadcast_to(weight[None, :], (PEERS, PICKS))
    tl.store(
        (bases + weights_at).to(tl.pointer_type(tl.float32))[:, None] + topk_offsets,
        shown,
        mask=sent,
    )
    empty = (bases + ids_at).to(tl.pointer_type(tl.int32)) + (rank * capacity + block) * TOP_K
    absent = tl.full([PEERS, PICKS], -1, tl.int32)
    tl.store(
        empty[:, None] + pick[None, :],
        absent,
        mask=(real & (count <= block))[:, None] & mine[None, :],
    )
    marks = (bases + used_at).to(tl.pointer_type(tl.int32)) + rank * limit + block
    tl.store(marks, (block < count).to(tl.int32), mask=real)

    scale_blocks = 0
    scale_columns = 0
    scales = values
    if QUANT:
        scale_blocks = tl.arange(0, SIZE // 128)
        scale_columns = (columns + 127) // 128
        values, scales = to_fp8(values.to(tl.float32), SIZE // 128, UE8M0, True)
        values = tl.reshape(values, (SIZE,))
    for step in tl.static_range(WORLD):
        to = (rank + block + step) % WORLD  # ranks and blocks start with different peers
        slot_there = tl.sum(tl.where(peer == to, tl.where(goes > 0, before, -1), 0)).to(tl.int64)
        if slot_there >= 0:
            base = tl.load(table + to)
            row = rank * capacity + slot_there
            data = (base + data_at).to(tl.pointer_type(values.dtype))
            data = tl.multiple_of(data, 16) + row * columns
            tl.store(data + offsets, values, mask=inside)
            if QUANT:
                factors = (base + scales_at).to(tl.pointer_type(tl.float32)) + row * scale_columns
                tl.store(factors + scale_blocks, scales, mask=scale_blocks < scale_columns)
    tl.debug_barrier()  # all threads' stores come before the flags
    flags = (bases + flags_at).to(tl.pointer_type(tl.int32)) + rank
    tl.atomic_add(flags, tl.full([PEERS], 1, tl.int32), mask=real, sem="release", scope="sys")
    if block == 0:
        tl.store(totals, tl.load(totals) + capacity)


@triton.jit
def _arrival_kernel(
    table, totals, rank, flags_at, WORLD: tl.constexpr, PEERS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One block. Later kernels may start only after everything has arrived: otherwise they might
    cache memory that changes while this one waits."""
    if DEPENDENT:
        gdc_wait()
    peer = tl.arange(0, PEERS)
    await_flags(
        table, at(table, rank, flags_at, tl.int32), peer, peer < WORLD, tl.load(totals), WORLD
    )
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["capacity"])
def _give_back_kernel(
    table,
    totals,
    y,
    capacity,
    columns,
    rank,
    flags_at,
    used_at,
    sums_at,
    limit,
    SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Block i returns one row of y, if it is used, to the rank that sent it; consecutive blocks
    send to different ranks."""
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(0)
    to = (rank + block) % WORLD
    index = block // WORLD
    row = (to * capacity + index).to(tl.int64)
    offsets = tl.arange(0, SIZE)
    if tl.load(at(table, rank, used_at, tl.int32) + to * limit + index) > 0:
        kind: tl.constexpr = y.dtype.element_ty
        values = tl.load(y + row * columns + offsets, mask=offsets < columns)
        target = at(table, to, sums_at, kind) + (rank * capacity + index).to(tl.int64) * columns
        tl.store(target + offsets, values, mask=offsets < columns)
    tl.debug_barrier()
    flags = (tl.load(table + to) + flags_at).to(tl.pointer_type(tl.int32))
    tl.atomic_add(flags + WORLD + rank, 1, sem="release", scope="sys")
    if block == 0:
        tl.store(totals + 1, tl.load(totals + 1) + capacity)


@triton.jit(do_not_specialize=["tokens"])
def _combine_kernel(
    table,
    totals,
    rows,
    base,
    out,
    tokens,
    columns,
    rank,
    flags_at,
    sums_at,
    SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[i] = the sum of token i's partial sums, in fp32 and in rank order, rounded, and base[i].
    There is at least one block, even without tokens."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    peer = tl.arange(0, PEERS)
    offsets = tl.arange(0, SIZE)
    inside = (offsets < columns) & (token < tokens)
    more = tl.zeros([SIZE], tl.float32)
    if base is not None:
        more = tl.load(base + token * columns + offsets, mask=inside, other=0.0).to(tl.float32)
    await_flags(
        table,
        at(table, rank, flags_at, tl.int32) + WORLD,
        peer,
        peer < WORLD,
        tl.load(totals + 1),
        WORLD,
    )
    if token < tokens:
        kind: tl.constexpr = out.dtype.element_ty
        sums = at(table, rank, sums_at, kind)
        total = tl.zeros([SIZE], tl.float32)
        for source in tl.static_range(WORLD):
            row = tl.load(rows + token * WORLD + source).to(tl.int64)
            part = tl.load(
                sums + row * columns + offsets,
                mask=inside & (row >= 0),
                other=0.0,
                cache_modifier=".cg",
            )
            total += part.to(tl.float32)
        if base is not None:
            total = total.to(kind).to(tl.float32) + more
        tl.store(out + token * columns + offsets, total.to(kind), mask=inside)


def dispatch(
    buffer: DispatchBuffer,
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    capacity: int,
    placement: ExpertPlacement,
    fp8: bool = False,
    padded: PaddedRows | None = None,
    ue8m0: bool = False,
) -> None:
    """Send x [T, columns] with slots [T, K] int32 or int64 and weights [T, K] fp32; T at most
    `capacity`, which is the same on all ranks, at least 1 and at most the buffer's. fp8: quantize
    as quantize_activation, with ue8m0 by powers of two. padded: some of the last rows are padding,
    which is not sent, so no rank reads experts for it; its sums are 0."""
    areas = buffer.areas
    (tokens, columns) = x.shape
    assert tokens <= capacity <= areas.rows, (tokens, capacity, areas)
    assert (columns, slots.shape[1]) == (areas.columns, areas.top_k), (x.shape, slots.shape, areas)
    assert x.stride(1) == 1
    assert x.element_size() == areas.itemsize
    size = max(128, next_power(columns))
    starts = buffer.starts[:6]
    _dispatch_kernel[capacity,](
        buffer.table,
        buffer.totals,
        x,
        slots.contiguous(),
        weights.contiguous(),
        buffer.rows,
        *padding(padded),
        tokens,
        capacity,
        columns,
        x.stride(0),
        buffer.rank,
        placement.stride,
        placement.first,
        *starts,
        areas.rows,
        placement.each,
        placement.share,
        areas.top_k,
        next_power(areas.top_k),
        size,
        areas.world,
        next_power(areas.world),
        TOKENS_AT_ONCE,
        fp8,
        ue8m0,
        num_warps=_warps(size),
        **dependent(x.device),
    )


def recv_dispatch(buffer: DispatchBuffer) -> None:
    """Wait, on the stream, until all ranks' rows have arrived."""
    world = buffer.areas.world
    _arrival_kernel[1,](
        buffer.table,
        buffer.totals,
        buffer.rank,
        buffer.starts[0],
        world,
        next_power(world),
        num_warps=1,
        **dependent(buffer.table.device),
    )


def arrived(
    buffer: DispatchBuffer, memory: Tensor, capacity: int, dtype: torch.dtype, fp8: bool = False
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """((rows [world * capacity, columns],) or (e4m3 rows, scales), ids and weights [world *
    capacity, K]): views of `memory`, this rank's memory in bytes."""
    areas = buffer.areas
    count = areas.world * capacity
    (_, data, scales, ids, weights, *_) = buffer.starts

    def part(start: int, columns: int, kind: torch.dtype) -> Tensor:
        return (
            memory[start : start + count * columns * kind.itemsize].view(kind).view(count, columns)
        )

    topk = part(ids, areas.top_k, torch.int32), part(weights, areas.top_k, torch.float32)
    if not fp8:
        return (part(data, areas.columns, dtype),), *topk
    blocks = -(-areas.columns // ACTIVATION_BLOCK)
    return (part(data, areas.columns, FP8), part(scales, blocks, torch.float32)), *topk


def send_combine(buffer: DispatchBuffer, y: Tensor, capacity: int) -> None:
    """Return the partial sums y [world * capacity, columns] to the ranks that sent the rows; unused
    rows are not sent."""
    areas = buffer.areas
    (flags, *_, used, sums) = buffer.starts
    assert y.shape == (areas.world * capacity, areas.columns), (y.shape, capacity, areas)
    assert y.element_size() == areas.itemsize
    assert y.is_contiguous()
    size = next_power(areas.columns)
    _give_back_kernel[areas.world * capacity,](
        buffer.table,
        buffer.totals,
        y,
        capacity,
        areas.columns,
        buffer.rank,
        flags,
        used,
        sums,
        areas.rows,
        size,
        areas.world,
        num_warps=_warps(size),
        **dependent(y.device),
    )


def combine(buffer: DispatchBuffer, like: Tensor, base: Tensor | None = None) -> Tensor:
    """The sums of this rank's tokens, [T, columns], with the shape and dtype of `like`, the
    dispatched hidden states. base: added to the rounded sums."""
    areas = buffer.areas
    (tokens, columns) = like.shape
    assert base is None or (base.shape == like.shape and base.is_contiguous())
    out = torch.empty(tokens, columns, dtype=like.dtype, device=like.device)
    size = next_power(columns)
    _combine_kernel[max(1, tokens),](
        buffer.table,
        buffer.totals,
        buffer.rows,
        base,
        out,
        tokens,
        columns,
        buffer.rank,
        buffer.starts[0],
        buffer.starts[-1],
        size,
        areas.world,
        next_power(areas.world),
        num_warps=_warps(size),
        **dependent(out.device),
    )
    return out


def _warps(size: int) -> int:
    return min(8, max(1, size // 512))
