"""Grouped 16-bit products of many rows an expert on Hopper, in Gluon: one warpgroup copies, three
multiply 64 rows each.

What bounds such products is not the tensor cores but the way from the L2 cache to them. A tile of
128 rows and 256 weight rows brings 2 x (128 + 256) bytes for 2 x 128 x 256 operations of each
column, 85 operations a byte; at the 6.4 TB/s that an H200's cache was seen to give, 545 TFLOP/s.
A tile of 192 x 256 does 110 a byte, the most whose sums fit the registers: 128 of 160 a thread of
three warpgroups. A warpgroup multiplies its 64 rows with 128 weight rows an instruction: the
assembler takes none of 256 where four warpgroups start with 128 registers a thread.

The first product reads tokens where they lie: threads copy 16 bytes each, announced a stage late,
when they have landed. The second's rows lie in the order of their experts, and 64 of them are one
bulk copy, as weights are. Rows are not padded: a tile begins where its block of rows does
(align.py), and its last 64 may be in part the next expert's; those are not stored. Of a tile only
what is there is copied, and a warpgroup that has no row lets the stages pass. Only the GPU knows
how many tiles there are.

The first product's tile holds 128 rows of gate and the same 128 of up: both halves of a sum are in
one thread, which makes silu(gate) * up of them in fp32. The second stores each row as its pick's
own. Results leave from registers, four threads 16 bytes of a row: shared memory has room for four
stages then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.moe.align import ExpertBlocks
from rorqual.ops.triton.runtime.launch import dependent, multiprocessors
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    let_next_start,
    next_stage,
    thread_barrier,
    wait_for_inputs,
)

M = 192  # rows a tile, 64 a warpgroup
N = 256  # weight rows a tile
K = 64  # columns a stage: 128 bytes
GROUP = 16  # tiles of rows that go through all weight rows together
STAGE_BYTES = (M + N) * K * 2
SHARED = 227 * 1024 - 1024
# of a thread that multiplies, of one that copies; four warpgroups start with 128 each
REGISTERS = (160, 32)


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
def _weight_rows(rows, m_tile, n_tile, ROWS: gl.constexpr, SILU: gl.constexpr):
    """(first of a tile's first 128 weight rows, of its second)"""
    row = gl.load(rows.blocks + m_tile) * ROWS
    if SILU:  # the same rows of gate and of up
        return row + n_tile * 128, row + n_tile * 128 + ROWS // 2
    else:
        return row + n_tile * 256, row + n_tile * 256 + 128


@gluon.jit
def _copy_weights(w_tma, ring, stage, first, second, column):
    full = ring.full.index(stage)
    part = ring.weights.index(stage)
    tma.async_copy_global_to_shared(w_tma, [first, column], full, part.slice(0, 128))
    tma.async_copy_global_to_shared(w_tma, [second, column], full, part.slice(128, 128))


@gluon.jit
def _copy_rows(
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
    """Tiles of rows that lie in order, and of weights."""
    wait_for_inputs(DEPENDENT)
    high = gl.load(rows.count)
    stage = 0
    phase = 1
    for turn in range(_turns(high * WIDE)):
        m_tile, n_tile = _tile_of(turn, high, WIDE, TOGETHER)
        first = gl.load(rows.blocks + rows.limit + m_tile)
        chunks = gl.minimum((gl.load(rows.blocks + 2 * rows.limit + m_tile) - first + 63) // 64, 3)
        w_row, w_next = _weight_rows(rows, m_tile, n_tile, ROWS, SILU)
        for block in range(BLOCKS):
            full = ring.full.index(stage)
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
            _copy_weights(w_tma, ring, stage, w_row, w_next, column)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _landed(ring, stage, OUTSTANDING: gl.constexpr):
    """Announces what threads copied to `stage`, once all but the last OUTSTANDING stages' copies
    are there: the tensor cores read what threads wrote behind a fence."""
    async_copy.wait_group(OUTSTANDING)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def _copy_tokens(
    x,
    x_row,
    w_tma,
    ring,
    rows,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    SILU: gl.constexpr,
    WIDE: gl.constexpr,
    TOGETHER: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Tiles of tokens, wherever they lie, and of weights."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    wait_for_inputs(DEPENDENT)
    high = gl.load(rows.count)
    columns = gl.arange(0, 64, gl.SliceLayout(0, COPY))
    stage = 0
    phase = 1
    late = -1  # the stage whose tokens were not announced yet
    for turn in range(_turns(high * WIDE)):
        m_tile, n_tile = _tile_of(turn, high, WIDE, TOGETHER)
        first = gl.load(rows.blocks + rows.limit + m_tile)
        end = gl.load(rows.blocks + 2 * rows.limit + m_tile)
        order = rows.order + gl.load(rows.blocks + 3 * rows.limit + m_tile)
        w_row, w_next = _weight_rows(rows, m_tile, n_tile, ROWS, SILU)
        starts = ()
        for chunk in gl.static_range(3):
            row = first + 64 * chunk + gl.arange(0, 64, gl.SliceLayout(1, COPY))
            pick = gl.load(order + row, mask=row < end, other=0)
            starts += (pick // TOP_K * x_row,)  # type: ignore[assignment]
        for block in range(BLOCKS):
            column = block * 64
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.expect(ring.full.index(stage), 256 * 128)
            _copy_weights(w_tma, ring, stage, w_row, w_next, column)
            for chunk in gl.static_range(3):
                if first + 64 * chunk < end:
                    places = x + (starts[chunk][:, None] + (columns + column)[None, :])
                    async_copy.async_copy_global_to_shared(
                        ring.inputs.index(stage * 3 + chunk),
                        places,
                        mask=((columns + column) < COLUMNS)[None, :],
                    )
            async_copy.commit_group()
            if late >= 0:
                _landed(ring, late, 1)
            late = stage
            stage, phase = next_stage(stage, phase, STAGES)
    if late >= 0:
        _landed(ring, late, 0)


@gluon.jit
def _let_pass(ring, stage, phase, BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    """The stages of a tile of which this warpgroup has no row."""
    for _ in range(BLOCKS):
        mbarrier.wait(ring.full.index(stage), phase)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _put(y, values, target, column, COLUMNS: gl.constexpr, ACC: gl.constexpr):
    """64 rows and 128 columns of a result."""
    columns = column + gl.arange(0, 128, gl.SliceLayout(0, ACC))
    gl.store(
        y + target.to(gl.int64)[:, None] * COLUMNS + columns[None, :],
        values.to(y.dtype.element_ty),
        mask=(target >= 0)[:, None] & (columns < COLUMNS)[None, :],
    )


@gluon.jit
def _multiply(
    y,
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
            row = first + gl.arange(0, 64, gl.SliceLayout(1, ACC))
            if SILU:
                target = gl.where(row < end, row, -1)
                made = low / (1.0 + gl.exp(-low)) * upper
                _put(y, made, target, n_tile * 128, ROWS // 2, ACC)
            else:
                order = rows.order + gl.load(block + 3 * rows.limit)
                target = gl.load(order + row, mask=row < end, other=-1)
                _put(y, low, target, n_tile * 256, ROWS, ACC)
                _put(y, upper, target, n_tile * 256 + 128, ROWS, ACC)
        else:
            stage, phase = _let_pass(ring, stage, phase, BLOCKS, STAGES)


@gluon.jit(do_not_specialize=["limit"])
def _grouped_sm90_kernel(
    x,
    x_row,
    w_tma,
    y,
    order,
    blocks,
    count,
    limit,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    TOGETHER: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    COPIER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: any number of programs. ROWS of each expert's weights. TOP_K above 0: x holds tokens
    with so many picks each, rows x_row apart, weights are gate's and then as many of up, and
    silu(gate) * up is stored in the order of the picks. 0: x describes rows in this order."""
    BLOCKS: gl.constexpr = (COLUMNS + 63) // 64
    WIDE: gl.constexpr = (ROWS + 255) // 256
    FIRST: gl.constexpr = TOP_K > 0
    kind: gl.constexpr = y.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    inputs = gl.allocate_shared_memory(kind, [STAGES * 3, 64, 64], LAYOUT)
    weights = gl.allocate_shared_memory(kind, [STAGES, 256, 64], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2 if FIRST else 1)
        mbarrier.init(empty.index(i), count=3)
    fence_async_shared()
    ring = PipelineBuffers(inputs, weights, full, empty)
    rows = RowBlocks(order, blocks, count, limit)
    if FIRST:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (y, ring, rows, ROWS, True, WIDE, TOGETHER, BLOCKS, STAGES, 0, DEPENDENT),
                ),
                (
                    _multiply,
                    (y, ring, rows, ROWS, True, WIDE, TOGETHER, BLOCKS, STAGES, 1, DEPENDENT),
                ),
                (
                    _multiply,
                    (y, ring, rows, ROWS, True, WIDE, TOGETHER, BLOCKS, STAGES, 2, DEPENDENT),
                ),
                (
                    _copy_tokens,
                    (
                        x, x_row, w_tma, ring, rows,
                        ROWS, COLUMNS, TOP_K, True, WIDE, TOGETHER, BLOCKS, STAGES, DEPENDENT,
                    ),
                ),
            ],
            [4, 4, 4],
            [MULTIPLIER, MULTIPLIER, COPIER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (y, ring, rows, ROWS, False, WIDE, TOGETHER, BLOCKS, STAGES, 0, DEPENDENT),
                ),
                (
                    _multiply,
                    (y, ring, rows, ROWS, False, WIDE, TOGETHER, BLOCKS, STAGES, 1, DEPENDENT),
                ),
                (
                    _multiply,
                    (y, ring, rows, ROWS, False, WIDE, TOGETHER, BLOCKS, STAGES, 2, DEPENDENT),
                ),
                (
                    _copy_rows,
                    (
                        x, w_tma, ring, rows,
                        ROWS, False, WIDE, TOGETHER, BLOCKS, STAGES, DEPENDENT,
                    ),
                ),
            ],
            [4, 4, 1],
            [MULTIPLIER, MULTIPLIER, COPIER],
        )  # fmt: skip


def _launch(
    x: Any, x_row: int, weight: Weight, y: Tensor, blocks: ExpertBlocks, top_k: int, stages: int
) -> None:
    experts, rows, columns = weight.data.shape
    device = weight.data.device
    assert blocks.rows == M, blocks.rows
    assert y.dtype == weight.data.dtype, (y.dtype, weight.data.dtype)
    assert y.dtype.itemsize == 2, y.dtype
    assert stages * STAGE_BYTES <= SHARED, stages
    layout = bulk_layout(16)
    tiles = blocks.limit * -(-rows // N)
    _grouped_sm90_kernel[min(tiles, multiprocessors(device)),](
        x,
        x_row,
        TensorDescriptor.from_tensor(weight.data.view(experts * rows, columns), [128, K], layout),
        y,
        blocks.order,
        blocks.blocks,
        blocks.count,
        blocks.limit,
        rows,
        columns,
        top_k,
        GROUP,
        stages,
        *REGISTERS,
        num_warps=4,
        maxnreg=128,
        **dependent(device),
    )


def gate_up(x: Tensor, weight: Weight, blocks: ExpertBlocks, top_k: int, stages: int) -> Tensor:
    """silu(gate x) * (up x) of each pick of x [T, columns], in the order of `blocks`, [picks, rows
    / 2]; weight [experts, rows, columns], gate's rows and then up's. blocks.rows: 192."""
    # 16 values: the compiler asks no less to know that 16 bytes are aligned
    aligned = x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    x = x if aligned else x.clone(memory_format=torch.contiguous_format)
    assert x.shape[0] * x.stride(0) < 2**31, "offsets are 32 bits"
    inner = weight.data.shape[1] // 2
    h = torch.empty(blocks.num_picks, inner, dtype=x.dtype, device=x.device)
    _launch(x, x.stride(0), weight, h, blocks, top_k, stages)
    return h


def down(h: Tensor, weight: Weight, blocks: ExpertBlocks, stages: int) -> Tensor:
    """Of rows h [picks, columns] in the order of `blocks`: [picks, rows] as the picks' own rows.
    Rows of picks that are not here stay unwritten."""
    y = torch.empty(h.shape[0], weight.data.shape[1], dtype=h.dtype, device=h.device)
    layout = bulk_layout(16)
    _launch(TensorDescriptor.from_tensor(h, [64, K], layout), 0, weight, y, blocks, 0, stages)
    return y


def products(x: Tensor, w: ExpertWeights, blocks: ExpertBlocks, top_k: int, stages: int) -> Tensor:
    """down (silu(gate x) * (up x)) of each pick in its own row, [picks, hidden]; see
    grouped_gemm.py."""
    return down(gate_up(x, w.gate_up, blocks, top_k, stages), w.down, blocks, stages)
