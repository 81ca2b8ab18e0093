"""Grouped GEMMs of 16-bit weights for many rows per expert on Hopper, in Gluon: four warps copy,
two warpgroups multiply 64 rows x 256 weight rows each.

Tiles are as in grouped_gemm_sm90_fp8.py, of blocks of up to 128 rows of one expert; a warpgroup
without rows skips their stages. Copies run up to STAGES units of 64 columns ahead, also
across tiles, so that neither the first copies of a tile nor its results leave the tensor cores
without work for long; of the second GEMM's short tiles (12 units of Qwen3-30B) both would be a
quarter.

In the first GEMM a tile has 128 rows of gate and the 128 of up that belong to them, one product of
256: two of 128 would read x twice, and shared memory has 128 bytes per cycle (a product of 64 x 256
x 16 reads 10 KB in its 128 cycles, a unit writes 48 KB in 1,024: together 125). What limits an H200
before that is the L2 cache, which these 48 KB come from (docs/performance.md). The first GEMM's
rows of x are gathered by token with 16-byte copies; the second GEMM's follow one another in memory
and are bulk copies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm.fp8_gemm_sm90_loop import SHARED
from rorqual.ops.triton.moe.align import ExpertBlocks
from rorqual.ops.triton.moe.grouped_gemm_sm90_fp8 import (
    PipelineBuffers,
    RowBlocks,
    let_pass,
    put_rows,
    targets_of,
)
from rorqual.ops.triton.moe.tile_queue import (
    FIELDS,
    TileQueue,
    announce,
    announce_end,
    announced_layout,
    announced_tile,
    block_at,
    next_tile,
)
from rorqual.ops.triton.runtime.launch import dependent, multiprocessors, tile_counter
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    let_next_start,
    next_stage,
    wait_for_inputs,
)

M = 128  # rows of a block
UNIT = 64  # columns of a stage
COPY_THREADS = gl.constexpr(128)
REGISTERS = (232, 40)  # per thread of the multiplying warpgroups, of the copying warps


@gluon.jit
def _tokens_of(order, place, end, TOP_K: gl.constexpr, COLUMNS: gl.constexpr):
    """Which sorted rows `place` are before `end`, and where their tokens' rows of x begin."""
    there = place < end
    return there, gl.load(order + place, mask=there, other=0) // TOP_K * COLUMNS


@gluon.jit
def _copy_units(
    x,
    x_tma,
    w_tma,
    ring,
    rows,
    queue,
    TILES: gl.constexpr,
    COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, LINE))
    column = gl.arange(0, 64, gl.SliceLayout(0, LINE))
    wait_for_inputs(DEPENDENT)
    tiles = gl.load(rows.count) * TILES
    tile = gl.program_id(0)
    stage = 0
    phase = 1
    while tile < tiles:
        # all weight tiles of a block follow one another, so that programs at work at the same time
        # have few experts
        n_tile = tile % TILES
        first, end, expert, shift = block_at(rows, tile // TILES)
        two = first + 64 < end
        if GATED:
            order = rows.order + shift
            in_0, at_0 = _tokens_of(order, first + row, end, TOP_K, COLUMNS)
            in_1, at_1 = _tokens_of(order, first + 64 + row, end, TOP_K, COLUMNS)
            lower = expert * (TILES * 256) + n_tile * 128
            upper = lower + TILES * 128
        else:
            lower = expert * (TILES * 256) + n_tile * 256
            upper = lower + 128
        for unit in range(COLUMNS // 64):
            mbarrier.wait(ring.empty.index(stage), phase)
            if unit == 0:
                announce(queue, stage, n_tile, first, end, expert, shift, 4)
            full = ring.full.index(stage)
            weights = ring.weights.index(stage)
            inputs = ring.inputs.index(2 * stage)
            more_inputs = ring.inputs.index(2 * stage + 1)
            if GATED:
                mbarrier.expect(full, 256 * 64 * 2)
            else:
                mbarrier.expect(full, (256 + 64) * 64 * 2, pred=not two)
                mbarrier.expect(full, (256 + 128) * 64 * 2, pred=two)
            tma.async_copy_global_to_shared(w_tma, [lower, unit * 64], full, weights.slice(0, 128))
            tma.async_copy_global_to_shared(
                w_tma, [upper, unit * 64], full, weights.slice(128, 128)
            )
            if GATED:
                source = x + unit * 64 + column[None, :]
                async_copy.async_copy_global_to_shared(
                    inputs, source + at_0[:, None], mask=in_0[:, None]
                )
                if two:
                    async_copy.async_copy_global_to_shared(
                        more_inputs, source + at_1[:, None], mask=in_1[:, None]
                    )
                async_copy.mbarrier_arrive(full, increment_count=False)
            else:
                tma.async_copy_global_to_shared(x_tma, [first, unit * 64], full, inputs)
                tma.async_copy_global_to_shared(
                    x_tma, [first + 64, unit * 64], full, more_inputs, pred=two
                )
            stage, phase = next_stage(stage, phase, STAGES)
        tile = next_tile(queue, tiles)
    mbarrier.wait(ring.empty.index(stage), phase)
    announce_end(queue, stage, 4)
    ARRIVALS: gl.constexpr = 1 + (COPY_THREADS if GATED else 0)
    mbarrier.arrive(ring.full.index(stage), count=ARRIVALS)


@gluon.jit
def _stage_before(stage, STAGES: gl.constexpr):
    """Computed, not carried from one unit to the next: Triton takes a variable that a loop sets to
    the value it had before the loop for a constant."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _split_columns(acc):
    """The first and the last 128 columns of 256."""
    return gl.split(acc.reshape([64, 2, 128]).permute((0, 2, 1)))


@gluon.jit
def _multiply_units(
    y,
    out,
    ring,
    rows,
    queue,
    TILES: gl.constexpr,
    UNITS: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One of the two warpgroups: the first or the last 64 rows of each block."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    wait_for_inputs(DEPENDENT)
    stage = 0
    phase = 0
    tile = announced_tile(queue, ring.full, stage, phase)
    while tile.n_tile >= 0:
        n_tile = tile.n_tile
        first = tile.first + WHO * 64
        if first < tile.end:
            # loaded before the products, to overlap with them
            target = targets_of(rows.order + tile.shift, first, tile.end, LINE, not GATED)
            acc = gl.full([64, 256], 0.0, gl.float32, ACC)
            for unit in range(UNITS):
                mbarrier.wait(ring.full.index(stage), phase)
                if GATED:
                    fence_async_shared()  # x was not copied by a bulk copy
                xt = ring.inputs.index(2 * stage + WHO)
                wt = ring.weights.index(stage).permute((1, 0))
                acc = warpgroup_mma(xt, wt, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                before = _stage_before(stage, STAGES)
                mbarrier.arrive(ring.empty.index(before), count=1, pred=unit > 0)
                stage, phase = next_stage(stage, phase, STAGES)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(ring.empty.index(_stage_before(stage, STAGES)), count=1)
            first_half, second_half = _split_columns(acc)
            if GATED:
                result = first_half / (1.0 + gl.exp(-first_half)) * second_half
                put_rows(y, out, result, target, n_tile * 128, TILES * 128, LINE, 128)
            else:
                column = n_tile * 256
                put_rows(y, out, first_half, target, column, TILES * 256, LINE, 128)
                put_rows(y, out, second_half, target, column + 128, TILES * 256, LINE, 128)
        else:
            stage, phase = let_pass(ring.full, ring.empty, stage, phase, UNITS, STAGES)
        tile = announced_tile(queue, ring.full, stage, phase)


@gluon.jit(do_not_specialize=["limit"])
def _grouped_kernel_bf16(
    x,
    x_tma,
    w_tma,
    y,
    order,
    blocks,
    count,
    limit,
    taken,
    TILES: gl.constexpr,
    COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    COPIER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: any number of programs. TILES: of each expert's weight rows. GATED: y = silu(gate x) *
    (up x) in sorted order, for x in token order; else y = w x in pair order, for x in sorted
    order."""
    kind: gl.constexpr = y.dtype.element_ty
    LINES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    inputs = gl.allocate_shared_memory(kind, [2 * STAGES, 64, 64], LINES)
    weights = gl.allocate_shared_memory(kind, [STAGES, 256, 64], w_tma.layout)
    outs = gl.allocate_shared_memory(kind, [2, 64, 128], LINES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    announced = gl.allocate_shared_memory(gl.int32, [STAGES * FIELDS, 1], announced_layout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + (COPY_THREADS if GATED else 0))
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    ring = PipelineBuffers(inputs, weights, full, empty)
    rows = RowBlocks(order, blocks, count, limit)
    queue = TileQueue(taken, announced)
    UNITS: gl.constexpr = COLUMNS // 64
    gl.warp_specialize(
        [
            (
                _multiply_units,
                (y, outs.index(0), ring, rows, queue, TILES, UNITS, GATED, STAGES, 0, DEPENDENT),
            ),
            (
                _multiply_units,
                (y, outs.index(1), ring, rows, queue, TILES, UNITS, GATED, STAGES, 1, DEPENDENT),
            ),
            (
                _copy_units,
                (
                    x, x_tma, w_tma, ring, rows, queue, TILES, COLUMNS, TOP_K, GATED, STAGES,
                    DEPENDENT,
                ),
            ),
        ],
        [4, 4],
        [MULTIPLIER, COPIER],
    )  # fmt: skip


def fits(down: Weight, dtype: torch.dtype) -> bool:
    """Whether experts with these weights, not quantized, consist of whole tiles, in 16 bits like
    the activations, which are of `dtype`."""
    _, hidden, inner = down.data.shape
    return (
        dtype.itemsize == 2 and down.data.dtype == dtype and hidden % 256 == 0 and inner % 128 == 0
    )


def _launch(
    x: Tensor,
    weight: Weight,
    y: Tensor,
    blocks: ExpertBlocks,
    top_k: int,
    gated: bool,
    stages: int,
) -> None:
    experts, rows, columns = weight.data.shape
    device = weight.data.device
    assert blocks.rows == M, blocks.rows
    assert x.is_contiguous()
    assert not gated or x.numel() < 2**31, x.shape
    assert rows % 256 == columns % UNIT == 0, (rows, columns)
    assert (M + 256) * UNIT * 2 * stages + 4 * 64 * 128 <= SHARED, stages
    tiles = rows // 256
    layout = bulk_layout(16)
    flat = weight.data.view(experts * rows, columns)
    _grouped_kernel_bf16[min(blocks.limit * tiles, multiprocessors(device)),](
        x,
        None if gated else TensorDescriptor.from_tensor(x, [64, UNIT], layout),
        TensorDescriptor.from_tensor(flat, [128, UNIT], layout),
        y,
        blocks.order,
        blocks.blocks,
        blocks.count,
        blocks.limit,
        tile_counter(device),
        tiles,
        columns,
        top_k,
        gated,
        stages,
        *REGISTERS,
        num_warps=4,
        maxnreg=168,
        **dependent(device, after_long=not gated),
    )


def gate_up_product(
    x: Tensor, weight: Weight, blocks: ExpertBlocks, top_k: int, stages: int
) -> Tensor:
    """silu(gate x) * (up x) of each pair, in sorted order: [pairs, inner]. x [T, hidden] of the
    weights' dtype, which has 16 bits."""
    inner = weight.data.shape[1] // 2
    h = torch.empty(blocks.num_picks, inner, dtype=x.dtype, device=x.device)
    _launch(x, weight, h, blocks, top_k, True, stages)
    return h


def down_product(h: Tensor, weight: Weight, blocks: ExpertBlocks, stages: int) -> Tensor:
    """down h of each pair, in pair order: [pairs, hidden]. h [pairs, inner] in sorted order. Rows
    of experts on other ranks are uninitialized."""
    y = torch.empty(blocks.num_picks, weight.data.shape[1], dtype=h.dtype, device=h.device)
    _launch(h, weight, y, blocks, 1, False, stages)
    return y
