"""Grouped block-fp8 products of many rows an expert on Hopper: fp8_gemm_sm90_persistent.py's, whose
tiles of rows each have weights of their own.

Rows are copied into the order of their experts and quantized on the way, so that 64 of them are one
bulk copy. They are not padded: a tile begins where its block of rows does (align.py), and its last
64 may be in part the next expert's; those are not stored. Of a tile only what is there is copied.
Chunks of 64 rows go to the two warpgroups in turn, and one that has none lets the stages pass. Only
the GPU knows how many tiles there are.

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
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rorqual.ops.activation import Activation, Quantized
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.gemm.fp8_gemm_sm90_persistent import REGISTERS, SHARED, share, sums, tile_of
from rorqual.ops.triton.moe.align import ExpertBlocks
from rorqual.ops.triton.rowwise.quantize import quantized, store_fp8
from rorqual.ops.triton.runtime.launch import dependent, multiprocessors, next_power
from rorqual.ops.triton.runtime.launch import wait_for_inputs as wait
from rorqual.ops.triton.runtime.sm90_pipeline import (
    let_next_start,
    next_stage,
    thread_barrier,
    wait_for_inputs,
)


@triton.jit
def _row(blocks, count, limit, ROWS: tl.constexpr):
    """(block of this program, its row, whether there is such a row)"""
    block = tl.program_id(0) // ROWS
    real = block < tl.load(count)
    row = tl.load(blocks + limit + block, mask=real, other=0) + tl.program_id(0) % ROWS
    return block, row.to(tl.int64), row < tl.load(blocks + 2 * limit + block, mask=real, other=0)


@triton.jit(do_not_specialize=["limit", "xs_block", "scale_block"])
def _order_kernel(
    x,
    x_scale,
    data,
    scale,
    order,
    blocks,
    count,
    limit,
    columns,
    x_row,
    xs_row,
    xs_block,
    scale_row,
    scale_block,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (rows of all blocks, pieces of a row). A row of x to its position in the order,
    quantized if it is not."""
    wait(DEPENDENT)
    column = tl.program_id(1) * SIZE
    block, row, real = _row(blocks, count, limit, ROWS)
    if real:
        token = (tl.load(order + tl.load(blocks + 3 * limit + block) + row) // TOP_K).to(tl.int64)
        offsets = column + tl.arange(0, SIZE)
        values = tl.load(x + token * x_row + offsets, mask=offsets < columns, other=0.0)
        if QUANTIZED:
            tl.store(data + row * columns + offsets, values, mask=offsets < columns)
            part = column // 128 + tl.arange(0, SIZE // 128)
            factors = tl.load(x_scale + token * xs_row + part * xs_block, mask=part * 128 < columns)
            tl.store(
                scale + row * scale_row + part * scale_block, factors, mask=part * 128 < columns
            )
        else:
            store_fp8(
                values.to(tl.float32),
                data,
                scale,
                row,
                column,
                columns,
                columns,
                scale_row,
                scale_block,
                SIZE,
            )


@triton.jit(do_not_specialize=["limit", "scale_block"])
def _join_kernel(
    both,
    data,
    scale,
    blocks,
    count,
    limit,
    columns,
    scale_row,
    scale_block,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid as that of _order_kernel. silu(gate) * up of a row that holds both side by side,
    quantized."""
    wait(DEPENDENT)
    column = tl.program_id(1) * SIZE
    _, row, real = _row(blocks, count, limit, ROWS)
    if real:
        offsets = column + tl.arange(0, SIZE)
        gate = tl.load(both + row * (2 * columns) + offsets, mask=offsets < columns, other=0.0).to(
            tl.float32
        )
        up = tl.load(
            both + row * (2 * columns) + columns + offsets, mask=offsets < columns, other=0.0
        ).to(tl.float32)
        store_fp8(
            gate / (1.0 + tl.exp(-gate)) * up,
            data,
            scale,
            row,
            column,
            columns,
            columns,
            scale_row,
            scale_block,
            SIZE,
        )


class PipelineBuffers(NamedTuple):
    """The buffers between the copying warp and the two warpgroups that multiply: tiles of both
    sides, and barriers that tell when a stage is full and when it is empty."""

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
        m_tile, n_tile = tile_of(turn, rounds, high, ROWS)
        first = gl.load(rows.blocks + rows.limit + m_tile)
        w_row = gl.load(rows.blocks + m_tile) * ROWS + n_tile * 128
        chunks = gl.minimum(
            (gl.load(rows.blocks + 2 * rows.limit + m_tile) - first + 63) // 64, M // 64
        )
        for block in range(BLOCKS):
            mbarrier.wait(ring.empty.index(stage), phase)
            for chunk in gl.static_range(M // 64):
                mbarrier.expect(
                    ring.full.index(stage), (64 * chunk + 192) * 128, pred=chunks == chunk + 1
                )
            for chunk in gl.static_range(M // 64):
                corner = [first + 64 * chunk, block * 128]
                part = ring.inputs.index(stage).slice(64 * chunk, 64)
                tma.async_copy_global_to_shared(
                    x_tma, corner, ring.full.index(stage), part, pred=chunk < chunks
                )
            tma.async_copy_global_to_shared(
                w_tma, [w_row, block * 128], ring.full.index(stage), ring.weights.index(stage)
            )
            stage, phase = next_stage(stage, phase, STAGES)


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
    x_scale,
    w_scale,
    y,
    out,
    ring,
    rows,
    xs_row,
    xs_block,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    SCATTER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One of the two warpgroups: chunks of 64 rows go to them by turns."""
    SKIP: gl.constexpr = WHO * 64
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    wait_for_inputs(DEPENDENT)
    high = gl.load(rows.count)
    turns, rounds = share(high, ROWS)
    stage = 0
    phase = 0
    for turn in range(turns):
        m_tile, n_tile = tile_of(turn, rounds, high, ROWS)
        block = rows.blocks + m_tile
        first = gl.load(block + rows.limit) + SKIP
        end = gl.load(block + 2 * rows.limit)
        if first < end:
            scales = w_scale + (gl.load(block) * (ROWS // 128) + n_tile) * BLOCKS
            order = rows.order + gl.load(block + 3 * rows.limit)
            # before the products, beside which it is on its way
            target = _targets(order, first, end, LINE, SCATTER)
            if M == 256 and first + 128 < end:
                next_target = _targets(order, first + 128, end, LINE, SCATTER)
                low, upper, stage, phase = sums(
                    x_scale, scales, ring.inputs, ring.weights, ring.full, ring.empty, stage, phase,
                    first, end, xs_row, xs_block, BLOCKS, STAGES, SKIP, True, 128, 128,
                )  # fmt: skip
                _put(y, out, low, target, n_tile, ROWS, LINE)
                _put(y, out, upper, next_target, n_tile, ROWS, LINE)
            else:
                low, upper, stage, phase = sums(
                    x_scale, scales, ring.inputs, ring.weights, ring.full, ring.empty, stage, phase,
                    first, end, xs_row, xs_block, BLOCKS, STAGES, SKIP, False, 128,
                )  # fmt: skip
                _put(y, out, low, target, n_tile, ROWS, LINE)
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
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, M, 128], x_tma.layout)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], w_tma.layout)
    outs = gl.allocate_shared_memory(
        y.dtype.element_ty, [2, 64, 128], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    ring = PipelineBuffers(inputs, weights, full, empty)
    rows = RowBlocks(order, blocks, count, limit)
    gl.warp_specialize(
        [
            (
                _multiply_rows,
                (
                    x_scale, w_scale, y, outs.index(0), ring, rows, xs_row, xs_block,
                    M, ROWS, BLOCKS, STAGES, 0, SCATTER, DEPENDENT,
                ),
            ),
            (
                _multiply_rows,
                (
                    x_scale, w_scale, y, outs.index(1), ring, rows, xs_row, xs_block,
                    M, ROWS, BLOCKS, STAGES, 1, SCATTER, DEPENDENT,
                ),
            ),
            (_copy_rows, (x_tma, w_tma, ring, rows, M, ROWS, BLOCKS, STAGES, DEPENDENT)),
        ],
        [4, 1],
        [MULTIPLIER, COPIER],
    )  # fmt: skip


def in_order(x: Tensor | Quantized, blocks: ExpertBlocks, top_k: int) -> Quantized:
    """Rows of x [T, columns] as `blocks` orders their picks, [picks, columns]; those behind the
    last pick stay unwritten."""
    data = x.data if isinstance(x, Quantized) else x
    columns = x.shape[1]
    device = blocks.order.device
    out = Quantized.empty(blocks.num_picks, columns, device)
    scale, strides = (x.scale, x.scale.stride()) if isinstance(x, Quantized) else (None, (0, 0))
    size = min(4096, max(128, next_power(columns)))
    _order_kernel[blocks.limit * blocks.rows, triton.cdiv(columns, size)](
        data,
        scale,
        out.data,
        out.scale,
        blocks.order,
        blocks.blocks,
        blocks.count,
        blocks.limit,
        columns,
        data.stride(0),
        *strides,
        *out.scale.stride(),
        top_k,
        blocks.rows,
        size,
        scale is not None,
        num_warps=8,
        **dependent(device),
    )
    return out


def joined(both: Tensor, blocks: ExpertBlocks) -> Quantized:
    """silu(gate) * up of rows [picks, 2 inner] in the order of `blocks`, [picks, inner]."""
    num_picks = both.shape[0]
    columns = both.shape[1] // 2
    out = Quantized.empty(num_picks, columns, both.device)
    size = min(2048, max(128, next_power(columns)))
    _join_kernel[blocks.limit * blocks.rows, triton.cdiv(columns, size)](
        both,
        out.data,
        out.scale,
        blocks.blocks,
        blocks.count,
        blocks.limit,
        columns,
        *out.scale.stride(),
        blocks.rows,
        size,
        num_warps=4,
        **dependent(both.device),
    )
    return out


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
    assert m in (128, 256), m
    assert dtype.itemsize == 2, dtype
    assert rows % 128 == columns % 128 == 0, (rows, columns)
    assert (m + 128) * 128 * stages + 4 * 64 * 128 <= SHARED, (m, stages)
    y = torch.empty(blocks.num_picks, rows, dtype=dtype, device=device)
    layout: Any = gl.NVMMASharedLayout(128, 8, rank=2)
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
    # once a token, where a copy for each of its picks is half as long then
    rows = x if top_k == 1 and isinstance(x, Tensor) else quantized(x)
    both = product(in_order(rows, blocks, top_k), w.gate_up, blocks, dtype, stages, False)
    return product(joined(both, blocks), w.down, blocks, dtype, stages, True)
