"""Grouped block-fp8 products of many rows an expert on Hopper: tiles, stages and loop are those of
gemm/fp8_gemm_sm90_loop.py, but tiles of rows each have weights of their own.

Rows are copied into the order of their experts and quantized on the way, so that 64 of them are one
bulk copy. They are not padded: a tile begins where its block of rows does (align.py), and its last
64 may be in part the next expert's; those are not stored. Of a tile only what is there is copied.
Chunks of 64 rows go to the two warpgroups in turn. Where both have as many, their products begin by
turns; one that has none lets the stages pass. Only the GPU knows how many tiles there are, and
whose weights they need: nothing is copied before the kernels that sort are done.

The first product leaves gate and up side by side, in sorted order and rounded to 16 bits, for the
kernel that joins and quantizes them: a tile of both would hold 64 columns of either, half of what
one scale stands for. The second stores each row as its pick's own. Sums leave through shared
memory, from which threads take whole lines.

Bytes of 8,192 picks of 32 experts 7168 x 2048 beside the products' 0.72 PFLOP: rows in order 176
MB, gate and up out and in 134, joined 34, results 117, weights 1,409 MB once and from the cache
again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rorqual.ops.activation import Activation, NormOutput, Quantized, hidden_of
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.gemm.fp8_gemm_sm90_loop import (
    REGISTERS,
    assert_fits,
    leave,
    new_ring,
    share,
    sums,
    tile_of,
)
from rorqual.ops.triton.moe.align import ExpertBlocks
from rorqual.ops.triton.moe.expert_rows import in_order, joined
from rorqual.ops.triton.rowwise.quantize import quantized
from rorqual.ops.triton.runtime.launch import dependent, multiprocessors
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    let_next_start,
    next_stage,
    thread_barrier,
    wait_for_inputs,
)


class RowBlocks(NamedTuple):
    """Which rows go to which expert: fields of align.ExpertBlocks."""

    order: Any
    blocks: Any
    count: Any
    limit: Any


class ExpertTile(NamedTuple):
    """Rows from `first` on, but none from `end` on, of an expert, over a tile of its weights. Row r
    is pick order[r + shift]."""

    first: Any
    end: Any
    shift: Any
    expert: Any
    n_tile: Any


@gluon.jit
def _tile_at(rows, turn, rounds, high, ROWS: gl.constexpr):
    """A program's."""
    m_tile, n_tile = tile_of(turn, rounds, high, ROWS)
    block = rows.blocks + m_tile
    first = gl.load(block + rows.limit)
    end = gl.load(block + 2 * rows.limit)
    return ExpertTile(first, end, gl.load(block + 3 * rows.limit), gl.load(block), n_tile)


@gluon.jit
def _chunks(tile, M: gl.constexpr):
    """How many chunks of 64 rows a tile has."""
    return gl.minimum((tile.end - tile.first + 63) // 64, M // 64)


@gluon.jit
def _copy_rows(
    x_tma,
    w_tma,
    ring,
    rows,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    high = gl.load(rows.count)
    turns, rounds = share(high, ROWS)
    stage = 0
    phase = 1
    for turn in range(turns):
        tile = _tile_at(rows, turn, rounds, high, ROWS)
        w_row = tile.expert * ROWS + tile.n_tile * 128
        chunks = _chunks(tile, M)
        for block in range(BLOCKS):
            mbarrier.wait(ring.empty.index(stage), phase)
            for chunk in gl.static_range(M // 64):
                mbarrier.expect(
                    ring.full.index(stage), (64 * chunk + 192) * 128, pred=chunks == chunk + 1
                )
            for chunk in gl.static_range(M // 64):
                corner = [tile.first + 64 * chunk, block * 128]
                part = ring.inputs.index(stage).slice(64 * chunk, 64)
                tma.async_copy_global_to_shared(
                    x_tma, corner, ring.full.index(stage), part, pred=chunk < chunks
                )
            tma.async_copy_global_to_shared(
                w_tma, [w_row, block * 128], ring.full.index(stage), ring.weights.index(stage)
            )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _factors_of(
    x_scale,
    w_scale,
    scales,
    block,
    first,
    end,
    xs_row,
    xs_block,
    M: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """([M], one) of a unit: its rows' scales, and that of its weights."""
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    row = gl.arange(0, M, ROW)
    column = gl.minimum(block, BLOCKS - 1)
    corner = x_scale + (column * xs_block + first * xs_row)
    scale = gl.load(corner + row * xs_row, mask=row < end - first, other=0.0)
    return scale, gl.load(w_scale + scales + column)


@gluon.jit
def _scale_rows(
    x_scale,
    w_scale,
    ring,
    rows,
    xs_row,
    xs_block,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Scales of two units are on their way while those of the two before are left, over the ends of
    tiles too: where a tile's rows are is read a tile ahead. They are multiplied once they are to be
    left: what waits for one load waits for all before it."""
    wait_for_inputs(DEPENDENT)
    high = gl.load(rows.count)
    turns, rounds = share(high, ROWS)
    stage = 0
    free = 0
    phase = 0
    if turns > 0:
        tile = _tile_at(rows, 0, rounds, high, ROWS)
        first = tile.first
        end = tile.end
        scales = (tile.expert * (ROWS // 128) + tile.n_tile) * BLOCKS
        a, aw = _factors_of(x_scale, w_scale, scales, 0, first, end, xs_row, xs_block, M, BLOCKS)
        b, bw = _factors_of(x_scale, w_scale, scales, 1, first, end, xs_row, xs_block, M, BLOCKS)
        for turn in range(turns):
            tile = _tile_at(rows, gl.minimum(turn + 1, turns - 1), rounds, high, ROWS)
            for block in range(0, BLOCKS, 4):
                unit = turn * BLOCKS + block
                c, cw = _factors_of(
                    x_scale, w_scale, scales, block + 2, first, end, xs_row, xs_block, M, BLOCKS
                )
                d, dw = _factors_of(
                    x_scale, w_scale, scales, block + 3, first, end, xs_row, xs_block, M, BLOCKS
                )
                stage, free, phase = leave(ring, a * aw, unit, True, stage, free, phase, M, STAGES)
                stage, free, phase = leave(
                    ring, b * bw, unit + 1, block + 1 < BLOCKS, stage, free, phase, M, STAGES
                )
                ahead = block + 4
                if ahead >= BLOCKS:
                    ahead = 0
                    first = tile.first
                    end = tile.end
                    scales = (tile.expert * (ROWS // 128) + tile.n_tile) * BLOCKS
                a, aw = _factors_of(
                    x_scale, w_scale, scales, ahead, first, end, xs_row, xs_block, M, BLOCKS
                )
                b, bw = _factors_of(
                    x_scale, w_scale, scales, ahead + 1, first, end, xs_row, xs_block, M, BLOCKS
                )
                stage, free, phase = leave(
                    ring, c * cw, unit + 2, block + 2 < BLOCKS, stage, free, phase, M, STAGES
                )
                stage, free, phase = leave(
                    ring, d * dw, unit + 3, block + 3 < BLOCKS, stage, free, phase, M, STAGES
                )


@gluon.jit
def _let_pass(full, empty, stage, phase, BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    """The stages of a tile of which this warpgroup has no row."""
    for _ in range(BLOCKS):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _targets(order, first, end, LINE: gl.constexpr, SCATTER: gl.constexpr):
    """The rows of the result to which 64 rows from `first` on go: the same or, with SCATTER, those
    that `order` says; -1 from `end` on."""
    row = first + gl.arange(0, 64, gl.SliceLayout(1, LINE))
    if SCATTER:
        return gl.load(order + row, mask=row < end, other=-1)
    else:
        return gl.where(row < end, row, -1)


@gluon.jit
def _put(y, out, acc, target, n_tile, ROWS: gl.constexpr, LINE: gl.constexpr):
    """64 rows of sums, by way of `out`."""
    thread_barrier()  # all have read what was there
    out.store(acc.to(out.dtype))
    thread_barrier()
    column = n_tile * 128 + gl.arange(0, 128, gl.SliceLayout(0, LINE))
    gl.store(
        y + target.to(gl.int64)[:, None] * ROWS + column[None, :],
        out.load(LINE),
        mask=(target >= 0)[:, None],
    )


@gluon.jit
def _multiply_rows(
    y,
    out,
    ring,
    rows,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    SCATTER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One of the two warpgroups: chunks of 64 rows go to them by turns."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    wait_for_inputs(DEPENDENT)
    high = gl.load(rows.count)
    turns, rounds = share(high, ROWS)
    stage = 0
    phase = 0
    mine = 1 - WHO
    for turn in range(turns):
        tile = _tile_at(rows, turn, rounds, high, ROWS)
        first = tile.first + WHO * 64
        end = tile.end
        unit = turn * BLOCKS
        # of an odd number of chunks one warpgroup has one more
        by_turns = 1 - _chunks(tile, M) % 2
        if first < end:
            order = rows.order + tile.shift
            target = _targets(order, first, end, LINE, SCATTER)
            if M == 256 and first + 128 < end:
                next_target = _targets(order, first + 128, end, LINE, SCATTER)
                low, upper, stage, phase, mine = sums(
                    ring, unit, stage, phase, mine, by_turns, end, M, BLOCKS, STAGES, WHO, True, 128
                )
                if end >= 0:  # always, but without a branch here the compiler spills in the loop
                    _put(y, out, low, target, tile.n_tile, ROWS, LINE)
                    _put(y, out, upper, next_target, tile.n_tile, ROWS, LINE)
            else:
                low, upper, stage, phase, mine = sums(
                    ring, unit, stage, phase, mine, by_turns, end, M, BLOCKS, STAGES, WHO, False,
                    128,
                )  # fmt: skip
                if end >= 0:  # likewise
                    _put(y, out, low, target, tile.n_tile, ROWS, LINE)
        else:
            stage, phase = _let_pass(ring.full, ring.empty, stage, phase, BLOCKS, STAGES)


@gluon.jit(do_not_specialize=["limit", "xs_block"])
def _grouped_kernel(
    x_tma,
    x_scale,
    w_tma,
    w_scale,
    y,
    order,
    blocks,
    count,
    limit,
    xs_row,
    xs_block,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    M: gl.constexpr,
    STAGES: gl.constexpr,
    SCATTER: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    COPIER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: any number of programs. ROWS of each expert's weights; M: 128 or 256 rows a tile."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    outs = gl.allocate_shared_memory(
        y.dtype.element_ty, [2, 64, 128], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    let_next_start(DEPENDENT)
    ring = new_ring(x_tma, w_tma, M, STAGES)
    rows = RowBlocks(order, blocks, count, limit)
    gl.warp_specialize(
        [
            (
                _multiply_rows,
                (
                    y, outs.index(0), ring, rows,
                    M, ROWS, BLOCKS, STAGES, 0, SCATTER, DEPENDENT,
                ),
            ),
            (
                _multiply_rows,
                (
                    y, outs.index(1), ring, rows,
                    M, ROWS, BLOCKS, STAGES, 1, SCATTER, DEPENDENT,
                ),
            ),
            (_copy_rows, (x_tma, w_tma, ring, rows, M, ROWS, BLOCKS, STAGES, DEPENDENT)),
            (
                _scale_rows,
                (
                    x_scale, w_scale, ring, rows, xs_row, xs_block,
                    M, ROWS, BLOCKS, STAGES, DEPENDENT,
                ),
            ),
        ],
        [4, 1, 2],
        [MULTIPLIER, COPIER, COPIER],
    )  # fmt: skip


def product(
    x: Quantized,
    weight: Weight,
    blocks: ExpertBlocks,
    dtype: torch.dtype,
    stages: int,
    scatter: bool,
) -> Tensor:
    """Rows x [picks, columns] in the order of `blocks` with their experts' weights [experts,
    rows, columns], [picks, rows] in the same order or, with scatter, as the picks' own rows;
    dtype of 16 bits. blocks.rows: 128 or 256."""
    experts, rows, columns = weight.data.shape
    m = blocks.rows
    device = weight.data.device
    assert dtype.itemsize == 2, dtype
    assert rows % 128 == columns % 128 == 0, (rows, columns)
    assert_fits(m, stages)
    y = torch.empty(blocks.num_picks, rows, dtype=dtype, device=device)
    layout = bulk_layout(8)
    flat = weight.data.view(experts * rows, columns)
    _grouped_kernel[min(blocks.limit * (rows // 128), multiprocessors(device)),](
        TensorDescriptor.from_tensor(x.data, [64, 128], layout),
        x.scale,
        TensorDescriptor.from_tensor(flat, [128, 128], layout),
        weight.scale,
        y,
        blocks.order,
        blocks.blocks,
        blocks.count,
        blocks.limit,
        *x.scale.stride(),
        rows,
        columns,
        m,
        stages,
        scatter,
        *REGISTERS,
        num_warps=4,
        maxnreg=168,
        **dependent(device),
    )
    return y


def products(
    x: Activation | Quantized,
    w: ExpertWeights,
    blocks: ExpertBlocks,
    top_k: int,
    dtype: torch.dtype,
    stages: int,
) -> Tensor:
    """down (silu(gate x) * (up x)) of each pick in its own row, [picks, hidden]; see
    grouped_gemm.py."""
    # on the way into the order, unless each of a token's picks would do it again
    once = top_k == 1 or blocks.places is not None
    rows = hidden_of(x) if once and not isinstance(x, Quantized | NormOutput) else quantized(x)
    both = product(in_order(rows, blocks, top_k), w.gate_up, blocks, dtype, stages, False)
    return product(joined(both, blocks), w.down, blocks, dtype, stages, True)
