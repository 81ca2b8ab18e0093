"""Rows to the ranks that hold their experts, and their sums back, over buffers that every GPU of a
host can read and write.

Four kernels make one exchange: `dispatch` sends, `recv_dispatch` waits for what others sent,
`send_combine` sends partial sums home, `combine` waits for them and adds. A row goes once to each
rank that holds any of its experts; the capacity of a block of rows is that of the step's longest
rank, which the host knows, so nothing is counted on the host and everything fits into a graph. Each
rank's buffer (p2p_flags.py):

| part    | bytes                          | content                                               |
| ------- | ------------------------------ | ----------------------------------------------------- |
| flags   | 2 * 4 * world                  | flags[way, peer]: how many blocks of its kernels that |
|         |                                | peer has completed; 0 there, 1 back                   |
| data    | world * rows * columns * item  | hidden states [world, capacity, columns]: block r     |
|         |                                | came from rank r; e4m3 if quantized                   |
| scales  | 4 * world * rows * columns/128 | of e4m3 rows [world, capacity, ceil(columns/128)]     |
| ids     | 4 * world * rows * top_k       | int32, experts as this rank numbers its own; -1: not  |
|         |                                | here, or no row came                                  |
| weights | 4 * world * rows * top_k       | fp32                                                  |
| sums    | world * rows * columns * item  | partial sums [world, capacity, columns]: block r came |
|         |                                | back from rank r                                      |

All ids of a block are written at each call, those without a row as -1, so what arrived is used
where it lies and no count is sent.

Writes go out and nothing is read over the links: a write is on its way while the next one is made,
a read waits for a round trip. Pulling sums would also need a copy of them in memory that others
can read; `send_combine` is that copy, made where it is wanted.

Flags count blocks of kernels and are never reset (a replayed graph goes on where it stopped);
`totals` [2], this rank's own, says how far every flag must have come. Only the kernel in front of a
waiting one moves it, so no two blocks disagree about it.

Why nobody overwrites what another rank still reads, with no barrier but these flags, if all ranks
make the same calls in the same order on one stream each, and a buffer's next `dispatch` comes after
its last `combine`:

- data, scales, ids, weights of rank B are written by A's next `dispatch`, which follows A's
  `combine`, which waited for B's `send_combine`, which follows all that B's experts read, and
  itself read `ids` for the last time.
- sums of A are written by B's next `send_combine`, which follows B's `recv_dispatch`, which waited
  for A's next `dispatch`, which follows A's `combine`, their reader. For this every rank waits in
  `combine`, also one that has no rows.
- a flag that is ahead does no harm, since a waiting kernel asks for the least; it cannot stand for
  a call whose data has not come, since its counts of one call all precede those of the next.

Two exchanges under way at once take two buffers. `recv_dispatch` and `combine` wait for `dispatch`
and `send_combine` of other GPUs alone, which wait for nothing: no kernel needs all its blocks on a
GPU at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rorqual.ops.reference import ACTIVATION_BLOCK, FP8
from rorqual.ops.triton.comm.p2p_flags import at, await_flags
from rorqual.ops.triton.rowwise.quantize import to_fp8
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs

TOKENS_AT_ONCE = 32  # whose picks a program reads at once


@dataclass(frozen=True)
class Areas:
    """Where the parts of a buffer begin, in bytes; `size` of all. `rows`: the largest capacity;
    itemsize of hidden states."""

    world: int
    rows: int
    columns: int
    top_k: int
    itemsize: int

    @property
    def starts(self) -> tuple[int, ...]:
        """(flags, data, scales, ids, weights, sums, end), each on a multiple of 256."""
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
            rows * row,
        ):
            found.append(found[-1] + -(-length // 256) * 256)
        return tuple(found)

    @property
    def size(self) -> int:
        return self.starts[-1]


@dataclass(frozen=True)
class ExpertPlacement:
    """Which experts the ranks of the axis hold: rank r those of part (r * stride + first) //
    share, `each` slots a part.

    The axis may be some of the ranks of a stage (`stride` apart, from `first`), and `share`
    neighbours hold columns of the same experts."""

    each: int
    share: int = 1
    stride: int = 1
    first: int = 0


@dataclass(frozen=True, eq=False)
class DispatchBuffer:
    """One exchange at a time. `start`: of this buffer in the memory behind `table`; `totals` [2]
    int32, zero at first as the flags are; `rows` [areas.rows, world] int32: where each token's
    partial sums come back, -1 where none does."""

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
    """[tokens, peers] int32: 1 where a token has picked a slot of the peer's part."""
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
    """By peer: how many tokens before `block` go there, whether token `block` does, and how many
    of all."""
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


@triton.jit(do_not_specialize=["tokens", "capacity"])
def _dispatch_kernel(
    table,
    totals,
    x,
    slots,
    weights,
    rows,
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
    EACH: tl.constexpr,
    SHARE: tl.constexpr,
    TOP_K: tl.constexpr,
    PICKS: tl.constexpr,
    SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    CHUNK: tl.constexpr,
    QUANT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Block i sends token i, if there is one, and marks row i of each peer's block as empty
    where fewer tokens go there."""
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(0)
    peer = tl.arange(0, PEERS)
    pick = tl.arange(0, PICKS)
    offsets = tl.arange(0, SIZE)
    real = peer < WORLD
    mine = pick < TOP_K
    inside = offsets < columns
    # on its way meanwhile
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

    scale_blocks = 0
    scale_columns = 0
    scales = values
    if QUANT:
        scale_blocks = tl.arange(0, SIZE // 128)
        scale_columns = (columns + 127) // 128
        values, scales = to_fp8(values.to(tl.float32), SIZE // 128, True)
        values = tl.reshape(values, (SIZE,))
    for step in tl.static_range(WORLD):
        to = (rank + block + step) % WORLD  # ranks and blocks begin with different peers
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
    tl.debug_barrier()  # every thread's stores come before the flags
    flags = (bases + flags_at).to(tl.pointer_type(tl.int32)) + rank
    tl.atomic_add(flags, tl.full([PEERS], 1, tl.int32), mask=real, sem="release", scope="sys")
    if block == 0:
        tl.store(totals, tl.load(totals) + capacity)


@triton.jit
def _arrival_kernel(
    table, totals, rank, flags_at, WORLD: tl.constexpr, PEERS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One block. Later kernels are let in only when all is there: they may keep lines of memory
    that change while this one waits."""
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
    ids_at,
    sums_at,
    TOP_K: tl.constexpr,
    PICKS: tl.constexpr,
    SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Block i sends one row of y back to where it came from, if it is one; neighbouring blocks
    send to different ranks."""
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(0)
    to = (rank + block) % WORLD
    index = block // WORLD
    row = (to * capacity + index).to(tl.int64)
    pick = tl.arange(0, PICKS)
    offsets = tl.arange(0, SIZE)
    here = tl.load(
        at(table, rank, ids_at, tl.int32) + row * TOP_K + pick, mask=pick < TOP_K, other=-1
    )
    if tl.max(here) >= 0:
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
    """out[i] = the sum of what came back for token i, in fp32 and in the order of ranks. There
    is a block also if there is no token."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    peer = tl.arange(0, PEERS)
    offsets = tl.arange(0, SIZE)
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
                mask=(offsets < columns) & (row >= 0),
                other=0.0,
                cache_modifier=".cg",
            )
            total += part.to(tl.float32)
        tl.store(out + token * columns + offsets, total.to(kind), mask=offsets < columns)


def dispatch(
    buffer: DispatchBuffer,
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    capacity: int,
    placement: ExpertPlacement,
    fp8: bool = False,
) -> None:
    """Send x [T, columns] with its picks, slots [T, K] int32 or int64 and weights [T, K] fp32; T
    at most `capacity`, which is the same on all ranks, at least 1 and at most the buffer's. fp8:
    as quantize_activation rounds it."""
    areas = buffer.areas
    (tokens, columns) = x.shape
    assert tokens <= capacity <= areas.rows, (tokens, capacity, areas)
    assert (columns, slots.shape[1]) == (areas.columns, areas.top_k), (x.shape, slots.shape, areas)
    assert x.stride(1) == 1
    assert x.element_size() == areas.itemsize
    size = max(128, next_power(columns))
    starts = buffer.starts[:5]
    _dispatch_kernel[capacity,](
        buffer.table,
        buffer.totals,
        x,
        slots.contiguous(),
        weights.contiguous(),
        buffer.rows,
        tokens,
        capacity,
        columns,
        x.stride(0),
        buffer.rank,
        placement.stride,
        placement.first,
        *starts,
        placement.each,
        placement.share,
        areas.top_k,
        next_power(areas.top_k),
        size,
        areas.world,
        next_power(areas.world),
        TOKENS_AT_ONCE,
        fp8,
        num_warps=_warps(size),
        **dependent(x.device),
    )


def recv_dispatch(buffer: DispatchBuffer) -> None:
    """What all ranks have sent is there for the kernels behind this one."""
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
    """(rows [world * capacity, columns] alone or with their scales, ids, weights [world *
    capacity, K]): views of `memory`, all that is this rank's behind `table`, as bytes."""
    areas = buffer.areas
    count = areas.world * capacity
    (_, data, scales, ids, weights, _) = buffer.starts

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
    """Send the partial sums y [world * capacity, columns] home; rows that stand for no token
    stay."""
    areas = buffer.areas
    (flags, _, _, ids, _, sums) = buffer.starts
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
        ids,
        sums,
        areas.top_k,
        next_power(areas.top_k),
        size,
        areas.world,
        num_warps=_warps(size),
        **dependent(y.device),
    )


def combine(buffer: DispatchBuffer, like: Tensor) -> Tensor:
    """The sums of this rank's tokens, [T, columns]: shape and dtype of `like`, their hidden
    states as they were dispatched."""
    areas = buffer.areas
    (tokens, columns) = like.shape
    out = torch.empty(tokens, columns, dtype=like.dtype, device=like.device)
    size = next_power(columns)
    _combine_kernel[max(1, tokens),](
        buffer.table,
        buffer.totals,
        buffer.rows,
        out,
        tokens,
        columns,
        buffer.rank,
        buffer.starts[0],
        buffer.starts[5],
        size,
        areas.world,
        next_power(areas.world),
        num_warps=_warps(size),
        **dependent(out.device),
    )
    return out


def _warps(size: int) -> int:
    return min(8, max(1, size // 512))
