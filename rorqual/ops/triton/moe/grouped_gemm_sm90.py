"""Grouped 16-bit products of many rows an expert on Hopper, in Gluon: one warp copies, three
warpgroups multiply 64 rows each.

What bounds such products is not the tensor cores but the way from the L2 cache to them. A tile of
128 rows and 256 weight rows brings 2 x (128 + 256) bytes for 2 x 128 x 256 operations of each
column, 85 operations a byte; at the 6.4 TB/s that an H200's cache was seen to give, 545 TFLOP/s.
A tile of 192 x 256 does 110 a byte, the most whose sums fit the registers: 128 of 160 a thread of
three warpgroups. A warpgroup multiplies its 64 rows with 128 weight rows an instruction: the
assembler takes none of 256 where four warpgroups start with 128 registers a thread.

Rows come in the order of their experts (expert_rows.py), so that 64 of them are one bulk copy. They
are not padded: a tile begins where its block of rows does (align.py), and its last 64 may be in
part the next expert's; those are not stored. Of a tile only what is there is copied, and a
warpgroup that has no row lets the stages pass. Only the GPU knows how many tiles there are.

The first product's tile holds 128 rows of gate and the same 128 of up: both halves of a sum are in
one thread, which makes silu(gate) * up of them in fp32. The second stores each row as its pick's
own. Results leave through shared memory, from which threads take whole lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.moe.align import ExpertBlocks
from rorqual.ops.triton.moe.expert_rows import in_order_wide
from rorqual.ops.triton.runtime.launch import dependent, multiprocessors
from rorqual.ops.triton.runtime.sm90_pipeline import let_next_start, next_stage, wait_for_inputs

M = 192  # rows a tile, 64 a warpgroup
N = 256  # weight rows a tile
K = 64  # columns a stage: 128 bytes
GROUP = 16  # tiles of rows that go through all weight rows together
STAGE_BYTES = (M + N) * K * 2
OUT_BYTES = 3 * 64 * 128 * 2
SHARED = 227 * 1024 - 1024
# of a thread that multiplies, of one that copies; four warpgroups start with 128 each
REGISTERS = (160, 24)


class PipelineBuffers(NamedTuple):
    """Between the copying warp and the warpgroups that multiply: tiles of both sides, and barriers
    that tell when a stage is full and when it is empty."""

    inputs: Any
    weights: Any
    full: Any
    empty: Any


class RowBlocks(NamedTuple):
    """Which rows go to which expert: fields of align.ExpertBlocks."""

    order: Any
    blocks: Any
    count: Any
    limit: Any


@gluon.jit
def _turns(tiles):
    """Of this program, of so many tiles in all."""
    workers = gl.num_programs(0)
    return (tiles - gl.program_id(0) + workers - 1) // workers


@gluon.jit
def _tile_of(turn, high, WIDE: gl.constexpr, TOGETHER: gl.constexpr):
    """(tile of rows, tile of weight rows) of a turn, of `high` times WIDE: TOGETHER tiles of rows
    go through all weight rows together, so that both stay in the cache."""
    tile = turn * gl.num_programs(0) + gl.program_id(0)
    group = tile // (TOGETHER * WIDE)
    inside = tile % (TOGETHER * WIDE)
    height = gl.minimum(high - group * TOGETHER, TOGETHER)
    return group * TOGETHER + inside % height, inside // height


@gluon.jit
def _copy(
    x_tma,
    w_tma,
    ring,
    rows,
    ROWS: gl.constexpr,
    SILU: gl.constexpr,
    WIDE: gl.constexpr,
    TOGETHER: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    high = gl.load(rows.count)
    stage = 0
    phase = 1
    for turn in range(_turns(high * WIDE)):
        m_tile, n_tile = _tile_of(turn, high, WIDE, TOGETHER)
        first = gl.load(rows.blocks + rows.limit + m_tile)
        chunks = gl.minimum((gl.load(rows.blocks + 2 * rows.limit + m_tile) - first + 63) // 64, 3)
        w_row = gl.load(rows.blocks + m_tile) * ROWS
        if SILU:  # the same rows of gate and of up
            w_row = w_row + n_tile * 128
            w_next = w_row + ROWS // 2
        else:
            w_row = w_row + n_tile * 256
            w_next = w_row + 128
        for block in range(BLOCKS):
            full = ring.full.index(stage)
            w_part = ring.weights.index(stage)
            column = block * 64
            mbarrier.wait(ring.empty.index(stage), phase)
            for chunk in gl.static_range(3):
                mbarrier.expect(full, (64 * chunk + 320) * 128, pred=chunks == chunk + 1)
            for chunk in gl.static_range(3):
                tma.async_copy_global_to_shared(
                    x_tma,
                    [first + 64 * chunk, column],
                    full,
                    ring.inputs.index(stage * 3 + chunk),
                    pred=chunk < chunks,
                )
            tma.async_copy_global_to_shared(w_tma, [w_row, column], full, w_part.slice(0, 128))
            tma.async_copy_global_to_shared(w_tma, [w_next, column], full, w_part.slice(128, 128))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _let_pass(ring, stage, phase, BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    """The stages of a tile of which this warpgroup has no row."""
    for _ in range(BLOCKS):
        mbarrier.wait(ring.full.index(stage), phase)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _put(y, out, values, target, column, COLUMNS: gl.constexpr, LINE: gl.constexpr):
    """64 rows and 128 columns of a result, by way of `out`."""
    gl.thread_barrier()  # all have read what was there
    out.store(values.to(out.dtype))
    gl.thread_barrier()
    columns = column + gl.arange(0, 128, gl.SliceLayout(0, LINE))
    gl.store(
        y + target.to(gl.int64)[:, None] * COLUMNS + columns[None, :],
        out.load(LINE),
        mask=(target >= 0)[:, None] & (columns < COLUMNS)[None, :],
    )


@gluon.jit
def _multiply(
    y,
    out,
    ring,
    rows,
    ROWS: gl.constexpr,
    SILU: gl.constexpr,
    WIDE: gl.constexpr,
    TOGETHER: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One of the three warpgroups: 64 rows of each tile."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    wait_for_inputs(DEPENDENT)
    high = gl.load(rows.count)
    zero = gl.full([64, 128], 0.0, gl.float32, ACC)
    stage = 0
    phase = 0
    for turn in range(_turns(high * WIDE)):
        m_tile, n_tile = _tile_of(turn, high, WIDE, TOGETHER)
        block = rows.blocks + m_tile
        first = gl.load(block + rows.limit) + WHO * 64
        end = gl.load(block + 2 * rows.limit)
        if first < end:
            low = zero
            upper = zero
            for index in range(BLOCKS):
                mbarrier.wait(ring.full.index(stage), phase)
                x = ring.inputs.index(stage * 3 + WHO)
                w = ring.weights.index(stage)
                left = warpgroup_mma(
                    x, w.slice(0, 128).permute((1, 0)), low, use_acc=index > 0, is_async=True
                )
                right = warpgroup_mma(
                    x, w.slice(128, 128).permute((1, 0)), upper, use_acc=index > 0, is_async=True
                )
                low, upper = warpgroup_mma_wait(0, deps=[left, right])
                mbarrier.arrive(ring.empty.index(stage), count=1)
                stage, phase = next_stage(stage, phase, STAGES)
            row = first + gl.arange(0, 64, gl.SliceLayout(1, LINE))
            if SILU:
                target = gl.where(row < end, row, -1)
                made = low / (1.0 + gl.exp(-low)) * upper
                _put(y, out, made, target, n_tile * 128, ROWS // 2, LINE)
            else:
                order = rows.order + gl.load(block + 3 * rows.limit)
                target = gl.load(order + row, mask=row < end, other=-1)
                _put(y, out, low, target, n_tile * 256, ROWS, LINE)
                _put(y, out, upper, target, n_tile * 256 + 128, ROWS, LINE)
        else:
            stage, phase = _let_pass(ring, stage, phase, BLOCKS, STAGES)


@gluon.jit(do_not_specialize=["limit"])
def _grouped_sm90_kernel(
    x_tma,
    w_tma,
    y,
    order,
    blocks,
    count,
    limit,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    SILU: gl.constexpr,
    TOGETHER: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    COPIER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: any number of programs. ROWS of each expert's weights; SILU: they are gate's and then
    as many of up, and silu(gate) * up is stored in the order of the rows."""
    BLOCKS: gl.constexpr = (COLUMNS + 63) // 64
    WIDE: gl.constexpr = (ROWS + 255) // 256
    kind: gl.constexpr = y.dtype.element_ty
    inputs = gl.allocate_shared_memory(kind, [STAGES * 3, 64, 64], x_tma.layout)
    weights = gl.allocate_shared_memory(kind, [STAGES, 256, 64], w_tma.layout)
    outs = gl.allocate_shared_memory(kind, [3, 64, 128], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    fence_async_shared()
    ring = PipelineBuffers(inputs, weights, full, empty)
    rows = RowBlocks(order, blocks, count, limit)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    y, outs.index(0), ring, rows,
                    ROWS, SILU, WIDE, TOGETHER, BLOCKS, STAGES, 0, DEPENDENT,
                ),
            ),
            (
                _multiply,
                (
                    y, outs.index(1), ring, rows,
                    ROWS, SILU, WIDE, TOGETHER, BLOCKS, STAGES, 1, DEPENDENT,
                ),
            ),
            (
                _multiply,
                (
                    y, outs.index(2), ring, rows,
                    ROWS, SILU, WIDE, TOGETHER, BLOCKS, STAGES, 2, DEPENDENT,
                ),
            ),
            (
                _copy,
                (
                    x_tma, w_tma, ring, rows,
                    ROWS, SILU, WIDE, TOGETHER, BLOCKS, STAGES, DEPENDENT,
                ),
            ),
        ],
        [4, 4, 1],
        [MULTIPLIER, MULTIPLIER, COPIER],
    )  # fmt: skip


def product(x: Tensor, weight: Weight, blocks: ExpertBlocks, silu: bool, stages: int) -> Tensor:
    """Rows x [picks, columns] in the order of `blocks` with their experts' weights [experts, rows,
    columns]. silu: silu(gate) * up in the same order, [picks, rows / 2]; else [picks, rows] as the
    picks' own rows. blocks.rows: 192. Rows of picks that are not here stay unwritten."""
    experts, rows, columns = weight.data.shape
    device = weight.data.device
    assert blocks.rows == M, blocks.rows
    assert x.dtype == weight.data.dtype, (x.dtype, weight.data.dtype)
    assert x.dtype.itemsize == 2, x.dtype
    assert stages * STAGE_BYTES + OUT_BYTES <= SHARED, stages
    y = torch.empty(blocks.num_picks, rows // 2 if silu else rows, dtype=x.dtype, device=device)
    layout: Any = gl.NVMMASharedLayout(128, 16, rank=2)
    flat = weight.data.view(experts * rows, columns)
    tiles = blocks.limit * -(-rows // N)
    _grouped_sm90_kernel[min(tiles, multiprocessors(device)),](
        TensorDescriptor.from_tensor(x, [64, K], layout),
        TensorDescriptor.from_tensor(flat, [128, K], layout),
        y,
        blocks.order,
        blocks.blocks,
        blocks.count,
        blocks.limit,
        rows,
        columns,
        silu,
        GROUP,
        stages,
        *REGISTERS,
        num_warps=4,
        maxnreg=128,
        **dependent(device),
    )
    return y


def products(x: Tensor, w: ExpertWeights, blocks: ExpertBlocks, top_k: int, stages: int) -> Tensor:
    """down (silu(gate x) * (up x)) of each pick in its own row, [picks, hidden]; see
    grouped_gemm.py."""
    h = product(in_order_wide(x, blocks, top_k), w.gate_up, blocks, True, stages)
    return product(h, w.down, blocks, False, stages)
