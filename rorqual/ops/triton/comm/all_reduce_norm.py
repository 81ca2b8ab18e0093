"""All-reduce, residual addition and RMSNorm in one kernel, over buffers that every GPU of a host
can read and write.

Each rank has a buffer of the same shape, addressed by `table` (p2p_flags.py):

| part  | bytes                         | content                                                  |
| ----- | ----------------------------- | -------------------------------------------------------- |
| flags | 4 * rows * world              | flags[row, peer]: that peer's progress with that row     |
| data  | 2 * rows * columns * itemsize | this rank's partial sums, alternately in either half     |
| sums  | 2 * rows * columns * itemsize | sums of rows that other ranks reduced (two-shot)         |

One block per row; blocks of different rows are independent. A row's epoch, in this rank's own
memory, grows by 2 per call, so flags are never reset and a replayed graph continues where it
stopped. Halves alternate: a rank may be one call ahead of a peer that still reads, but not two,
since it waits for that peer in between. Sums are in rank order, so all ranks get the same bits.

One-shot: every rank reads every row of all ranks. Two-shot: rank row % world reduces a row and
writes the sum to all ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.comm.p2p_flags import at, await_flags
from rorqual.ops.triton.rowwise.norm import normed
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs


def buffer_bytes(rows: int, columns: int, world: int, itemsize: int) -> int:
    return _data_start(rows, world) + 4 * rows * columns * itemsize


def _data_start(rows: int, world: int) -> int:
    return -(-4 * rows * world // 256) * 256


@triton.jit
def meet_ranks(table, row, epoch, rank, WORLD: tl.constexpr, PEERS: tl.constexpr):
    """Barrier over the ranks: signal that this one reached `epoch` with `row`, and wait for all.
    Their earlier stores are then visible."""
    tl.debug_barrier()  # all threads' stores come before the flag
    peer = tl.arange(0, PEERS)
    real = peer < WORLD
    theirs = tl.load(table + peer, mask=real, other=0).to(tl.pointer_type(tl.int32))
    epochs = tl.full([PEERS], 0, tl.int32) + epoch
    tl.atomic_xchg(theirs + row * WORLD + rank, epochs, mask=real, sem="release", scope="sys")
    await_flags(
        table,
        tl.load(table + rank).to(tl.pointer_type(tl.int32)) + row * WORLD,
        peer,
        real,
        epoch,
        WORLD,
    )


@triton.jit
def _all_reduce_norm_kernel(
    table,
    epochs,
    x,
    residual,
    weight,
    out,
    total,
    columns,
    x_row,
    r_row,
    eps,
    rank,
    start,
    half,
    SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, SIZE)
    inside = offsets < columns
    kind = x.dtype.element_ty
    epoch = tl.load(epochs + row)
    # start of this row in data; in sums it is two halves further
    row_start = ((epoch >> 1) & 1) * half + row * columns
    values = tl.load(x + row * x_row + offsets, mask=inside, other=0.0)
    mine = at(table, rank, start, kind)
    tl.store(mine + row_start + offsets, values, mask=inside)
    added = tl.full([SIZE], 0.0, tl.float32)
    if TWO_SHOT:
        meet_ranks(table, row, epoch + 1, rank, WORLD, PEERS)
        if row % WORLD == rank:
            for peer in tl.static_range(WORLD):
                theirs = at(table, peer, start, kind) + row_start
                added += tl.load(theirs + offsets, mask=inside, other=0.0, cache_modifier=".cg").to(
                    tl.float32
                )
            for peer in tl.static_range(WORLD):
                theirs = at(table, peer, start, kind) + row_start + 2 * half
                tl.store(theirs + offsets, added.to(kind), mask=inside)
        meet_ranks(table, row, epoch + 2, rank, WORLD, PEERS)
        added = tl.load(
            mine + row_start + 2 * half + offsets, mask=inside, other=0.0, cache_modifier=".cg"
        ).to(tl.float32)
    else:
        meet_ranks(table, row, epoch + 2, rank, WORLD, PEERS)
        for peer in tl.static_range(WORLD):
            theirs = at(table, peer, start, kind) + row_start
            added += tl.load(theirs + offsets, mask=inside, other=0.0, cache_modifier=".cg").to(
                tl.float32
            )
    other = tl.load(residual + row * r_row + offsets, mask=inside, other=0.0)
    values = (added.to(kind).to(tl.float32) + other.to(tl.float32)).to(kind)
    tl.store(total + row * columns + offsets, values, mask=inside)
    factor = tl.load(weight + offsets, mask=inside, other=0.0)
    tl.store(
        out + row * columns + offsets,
        normed(values.to(tl.float32), factor, columns, eps, kind),
        mask=inside,
    )
    tl.store(epochs + row, epoch + 2)


def all_reduce_norm(
    table: Tensor,
    epochs: Tensor,
    rank: int,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    two_shot: bool,
) -> tuple[Tensor, Tensor]:
    """(norm(sum of x over ranks + residual), that sum + residual), both [T, columns] on every
    rank. table [world + 1] int64; epochs [rows] int32, zero before the first call, as the
    buffers are; T at most rows. All ranks call with the same T and `two_shot`."""
    tokens, columns = x.shape
    assert tokens <= epochs.shape[0], (tokens, epochs.shape)
    assert x.stride(1) == residual.stride(1) == 1
    rows = epochs.shape[0]
    world = table.shape[0] - 1
    out = torch.empty_like(x)
    total = torch.empty_like(x)
    size = max(16, next_power(columns))
    if tokens:
        _all_reduce_norm_kernel[tokens,](
            table,
            epochs,
            x,
            residual,
            weight,
            out,
            total,
            columns,
            x.stride(0),
            residual.stride(0),
            eps,
            rank,
            _data_start(rows, world),
            rows * columns,
            size,
            world,
            next_power(world),
            two_shot,
            num_warps=min(16, max(1, size // 512)),
            **dependent(x.device),
        )
    return out, total
