"""Grouped block-fp8 GEMM for many rows per expert on Hopper: as fp8_gemm_sm90_persistent.py, with
different weights for each tile of rows, and tiles taken from a queue (tile_queue.py).

Rows are first permuted to expert order and quantized, so that 64 of them are one bulk copy. They
are not padded: a tile starts with its block of rows (align.py), and its last 64 rows may partly
belong to the next expert; those are not stored. Only the existing rows of a tile are copied. Chunks
of 64 rows alternate between the two warpgroups, or each of three has one (192 rows a tile): two
with three chunks take as long as with four. A warpgroup without rows skips the stages.

The first GEMM stores gate and up concatenated, in sorted order and rounded to 16 bits, for the
kernel that multiplies and quantizes them: a tile of both would have 64 columns of each, half of a
scale's 128. The second GEMM stores rows in pair order. Results are stored through shared memory, in
whole lines.

Memory traffic of 8,192 (token, expert) pairs over 32 experts of 7168 x 2048, for 0.72 PFLOP: sorted
rows 176 MB, gate and up written and read 134, activation 34, results 117, weights 1,409 MB once and
then from the cache.
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

from rorqual.ops.activation import Activation, Quantized
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.gemm.fp8_gemm_sm90_loop import SHARED, place_of
from rorqual.ops.triton.moe.align import ExpertBlocks
from rorqual.ops.triton.moe.expert_rows import in_order, joined
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
from rorqual.ops.triton.rowwise.quantize import quantized
from rorqual.ops.triton.runtime.launch import dependent, multiprocessors, tile_counter
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    let_next_start,
    next_stage,
    thread_barrier,
    wait_for_inputs,
)

# by multiplying warpgroups: per thread of theirs, of the copying warp
REGISTERS = {2: (240, 24), 3: (160, 32)}


class PipelineBuffers(NamedTuple):
    """Buffers between the copying warp and the multiplying warpgroups: tiles of both operands,
    and barriers for full and for empty stages."""

    inputs: Any
    weights: Any
    full: Any
    empty: Any


class RowBlocks(NamedTuple):
    """Fields of align.ExpertBlocks: the rows of each expert."""

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
    queue,
    CHUNKS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    high = gl.load(rows.count)
    tiles = high * (ROWS // 128)
    tile = gl.program_id(0)
    stage = 0
    phase = 1
    while tile < tiles:
        m_tile, n_tile = place_of(tile, high, ROWS)
        first, end, expert, shift = block_at(rows, m_tile)
        w_row = expert * ROWS + n_tile * 128
        chunks = gl.minimum((end - first + 63) // 64, CHUNKS)
        for block in range(BLOCKS):
            mbarrier.wait(ring.empty.index(stage), phase)
            if block == 0:
                announce(queue, stage, n_tile, first, end, expert, shift, 1)
            for chunk in gl.static_range(CHUNKS):
                mbarrier.expect(
                    ring.full.index(stage), (64 * chunk + 192) * 128, pred=chunks == chunk + 1
                )
            for chunk in gl.static_range(CHUNKS):
                corner = [first + 64 * chunk, block * 128]
                part = ring.inputs.index(stage * CHUNKS + chunk)
                tma.async_copy_global_to_shared(
                    x_tma, corner, ring.full.index(stage), part, pred=chunk < chunks
                )
            tma.async_copy_global_to_shared(
                w_tma, [w_row, block * 128], ring.full.index(stage), ring.weights.index(stage)
            )
            stage, phase = next_stage(stage, phase, STAGES)
        tile = next_tile(queue, tiles)
    mbarrier.wait(ring.empty.index(stage), phase)
    announce_end(queue, stage, 1)
    mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def _sums(
    x_scale,
    weight_scale,
    ring,
    stage,
    phase,
    first,
    tokens,
    xs_row,
    xs_block,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    CHUNKS: gl.constexpr,
    WHO: gl.constexpr,
    TWO: gl.constexpr,
):
    """Sums of 64 tokens from `first` on, chunk WHO of the stages, and with TWO of those of chunk
    WHO + 2, all before `tokens`, and the tile's 128 weight rows, with scales from `weight_scale`
    on."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    token = first + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    token_scale = x_scale + token * xs_row
    zero = gl.full([64, 128], 0.0, gl.float32, ACC)
    low = zero
    high = zero
    done = zero
    # lets products reuse the registers of the previous result; otherwise the compiler runs out
    never = tokens < 0
    # Scales are loaded one unit ahead: loaded during a product they would arrive after it. Masked
    # instead of clamped, so that one address is enough.
    factor = gl.load(weight_scale)
    low_factor = gl.load(token_scale, mask=token < tokens, other=0.0)
    if TWO:
        high_factor = gl.load(token_scale + 128 * xs_row, mask=token + 128 < tokens, other=0.0)
    for block in range(BLOCKS):
        low_now = low_factor * factor
        if TWO:
            high_now = high_factor * factor
        coming = gl.minimum(block + 1, BLOCKS - 1)
        factor = gl.load(weight_scale + coming)
        low_factor = gl.load(token_scale + coming * xs_block, mask=token < tokens, other=0.0)
        if TWO:
            high_factor = gl.load(
                token_scale + (coming * xs_block + 128 * xs_row),
                mask=token + 128 < tokens,
                other=0.0,
            )
        mbarrier.wait(ring.full.index(stage), phase)
        xt = ring.inputs.index(stage * CHUNKS + WHO)
        wt = ring.weights.index(stage).permute((1, 0))
        part = warpgroup_mma(xt, wt, done, use_acc=never, is_async=True)
        if TWO:
            done = warpgroup_mma_wait(0, deps=[part])
            low = low + done * low_now[:, None]
            xt = ring.inputs.index(stage * CHUNKS + WHO + 2)
            part = warpgroup_mma(xt, wt, done, use_acc=never, is_async=True)
        done = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        if TWO:
            high = high + done * high_now[:, None]
        else:
            low = low + done * low_now[:, None]
        stage, phase = next_stage(stage, phase, STAGES)
    return low, high, stage, phase


@gluon.jit
def let_pass(full, empty, stage, phase, BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    """Skip the stages of a tile in which this warpgroup has no rows."""
    for _ in range(BLOCKS):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def targets_of(order, first, end, LINE: gl.constexpr, SCATTER: gl.constexpr):
    """Result rows of 64 rows from `first` on: the same rows or, with SCATTER, those in `order`; -1
    from `end` on."""
    row = first + gl.arange(0, 64, gl.SliceLayout(1, LINE))
    if SCATTER:
        return gl.load(order + row, mask=row < end, other=-1)
    else:
        return gl.where(row < end, row, -1)


@gluon.jit
def put_rows(
    y, out, acc, target, first_column, ROWS: gl.constexpr, LINE: gl.constexpr, WIDTH: gl.constexpr
):
    """Store 64 rows of WIDTH sums through the shared buffer `out`."""
    thread_barrier()  # all threads have read the previous contents
    out.store(acc.to(out.dtype))
    thread_barrier()
    column = first_column + gl.arange(0, WIDTH, gl.SliceLayout(0, LINE))
    gl.store(
        y + target.to(gl.int64)[:, None] * ROWS + column[None, :],
        out.load(LINE),
        mask=(target >= 0)[:, None],
    )


@gluon.jit
def _put_sums(
    y, out, acc, target, n_tile, ROWS: gl.constexpr, LINE: gl.constexpr, WIDTH: gl.constexpr
):
    """Store 64 rows of 128 sums through a buffer of WIDTH columns."""
    if WIDTH == 128:
        put_rows(y, out, acc, target, n_tile * 128, ROWS, LINE, 128)
    else:
        left, right = gl.split(acc.reshape([64, 2, 64]).permute((0, 2, 1)))
        put_rows(y, out, left, target, n_tile * 128, ROWS, LINE, 64)
        put_rows(y, out, right, target, n_tile * 128 + 64, ROWS, LINE, 64)


@gluon.jit
def _multiply_rows(
    x_scale,
    w_scale,
    y,
    out,
    ring,
    rows,
    queue,
    xs_row,
    xs_block,
    CHUNKS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    SCATTER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One of the warpgroups, which take chunks of 64 rows alternately."""
    WIDTH: gl.constexpr = out.shape[1]
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    wait_for_inputs(DEPENDENT)
    stage = 0
    phase = 0
    tile = announced_tile(queue, ring.full, stage, phase)
    while tile.n_tile >= 0:
        first = tile.first + WHO * 64
        end = tile.end
        if first < end:
            scales = w_scale + (tile.expert * (ROWS // 128) + tile.n_tile) * BLOCKS
            order = rows.order + tile.shift
            # loaded before the products, to overlap with them
            target = targets_of(order, first, end, LINE, SCATTER)
            if CHUNKS == 4 and first + 128 < end:
                next_target = targets_of(order, first + 128, end, LINE, SCATTER)
                low, upper, stage, phase = _sums(
                    x_scale, scales, ring, stage, phase, first, end, xs_row, xs_block,
                    BLOCKS, STAGES, CHUNKS, WHO, True,
                )  # fmt: skip
                _put_sums(y, out, low, target, tile.n_tile, ROWS, LINE, WIDTH)
                _put_sums(y, out, upper, next_target, tile.n_tile, ROWS, LINE, WIDTH)
            else:
                low, upper, stage, phase = _sums(
                    x_scale, scales, ring, stage, phase, first, end, xs_row, xs_block,
                    BLOCKS, STAGES, CHUNKS, WHO, False,
                )  # fmt: skip
                _put_sums(y, out, low, target, tile.n_tile, ROWS, LINE, WIDTH)
        else:
            stage, phase = let_pass(ring.full, ring.empty, stage, phase, BLOCKS, STAGES)
        tile = announced_tile(queue, ring.full, stage, phase)


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
    taken,
    xs_row,
    xs_block,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    SCATTER: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    COPIER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: any number of programs. ROWS: of each expert's weights. CHUNKS of 64
    rows are a tile: 2 or 4, or 3 of three warpgroups."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * CHUNKS, 64, 128], x_tma.layout)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], w_tma.layout)
    outs = gl.allocate_shared_memory(
        y.dtype.element_ty,
        [WARPGROUPS, 64, 128 if WARPGROUPS == 2 else 64],
        gl.NVMMASharedLayout(128, 16, rank=2),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    announced = gl.allocate_shared_memory(gl.int32, [STAGES * FIELDS, 1], announced_layout())
    ring = PipelineBuffers(inputs, weights, full, empty)
    rows = RowBlocks(order, blocks, count, limit)
    queue = TileQueue(taken, announced)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply_rows,
                    (
                        x_scale, w_scale, y, outs.index(0), ring, rows, queue, xs_row,
                        xs_block, CHUNKS, ROWS, BLOCKS, STAGES, 0, SCATTER, DEPENDENT,
                    ),
                ),
                (
                    _multiply_rows,
                    (
                        x_scale, w_scale, y, outs.index(1), ring, rows, queue, xs_row,
                        xs_block, CHUNKS, ROWS, BLOCKS, STAGES, 1, SCATTER, DEPENDENT,
                    ),
                ),
                (
                    _copy_rows,
                    (x_tma, w_tma, ring, rows, queue, CHUNKS, ROWS, BLOCKS, STAGES, DEPENDENT),
                ),
            ],
            [4, 1],
            [MULTIPLIER, COPIER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply_rows,
                    (
                        x_scale, w_scale, y, outs.index(0), ring, rows, queue, xs_row,
                        xs_block, CHUNKS, ROWS, BLOCKS, STAGES, 0, SCATTER, DEPENDENT,
                    ),
                ),
                (
                    _multiply_rows,
                    (
                        x_scale, w_scale, y, outs.index(1), ring, rows, queue, xs_row,
                        xs_block, CHUNKS, ROWS, BLOCKS, STAGES, 1, SCATTER, DEPENDENT,
                    ),
                ),
                (
                    _multiply_rows,
                    (
                        x_scale, w_scale, y, outs.index(2), ring, rows, queue, xs_row,
                        xs_block, CHUNKS, ROWS, BLOCKS, STAGES, 2, SCATTER, DEPENDENT,
                    ),
                ),
                (
                    _copy_rows,
                    (x_tma, w_tma, ring, rows, queue, CHUNKS, ROWS, BLOCKS, STAGES, DEPENDENT),
                ),
            ],
            [4, 4, 1],
            [MULTIPLIER, MULTIPLIER, COPIER],
        )  # fmt: skip


def product(
    x: Quantized,
    weight: Weight,
    blocks: ExpertBlocks,
    dtype: torch.dtype,
    stages: int,
    scatter: bool,
) -> Tensor:
    """Sorted rows x [pairs, columns] times their experts' weights [experts, rows, columns]: [pairs,
    rows] in sorted order or, with scatter, in pair order. dtype: 16 bits. blocks.rows: 128,
    192 or 256."""
    experts, rows, columns = weight.data.shape
    m = blocks.rows
    device = weight.data.device
    assert m in (128, 192, 256), m
    warpgroups = 3 if m == 192 else 2
    assert dtype.itemsize == 2, dtype
    assert rows % 128 == columns % 128 == 0, (rows, columns)
    used = (m + 128) * 128 * stages + (2 * 64 * 128 if warpgroups == 2 else 3 * 64 * 64) * 2
    assert used <= SHARED, (m, stages)
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
        tile_counter(device),
        *x.scale.stride(),
        rows,
        columns,
        m // 64,
        stages,
        scatter,
        warpgroups,
        *REGISTERS[warpgroups],
        num_warps=4,
        maxnreg=128 if warpgroups == 3 else 168,
        **dependent(device, after_long=scatter),
    )
    return y


def gate_up_product(
    x: Activation | Quantized,
    w: ExpertWeights,
    blocks: ExpertBlocks,
    top_k: int,
    dtype: torch.dtype,
    stages: int,
) -> Quantized:
    """silu(gate x) * (up x) of each pair in sorted order, [pairs, inner], for `product` with the
    down matrices; see grouped_gemm.py."""
    ue8m0 = w.gate_up.ue8m0
    # quantize once per token; the copies for its experts are then half as long
    rows = x if top_k == 1 and isinstance(x, Tensor) else quantized(x, ue8m0)
    sorted_rows = in_order(rows, blocks, top_k, ue8m0)
    both = product(sorted_rows, w.gate_up, blocks, dtype, stages, False)
    return joined(both, blocks, w.down.ue8m0)
