"""Block-fp8 GEMM of few tiles on Hopper, in Gluon (sliced-K), for up to some hundred tokens: the
warpgroups of a program share the columns of one tile.

With few tiles every program has one: 64 weight rows on the M side of the tensor cores, M tokens on
the N side. A warpgroup waits for a product, scales it and starts the next one, and the tensor cores
would idle in between; so each of SLICES warpgroups takes every SLICES-th block of 128 columns, and
they add their sums in shared memory at the end. A row's sum depends on the shape and on SLICES
alone. One warp copies, up to STAGES blocks ahead; two write the factors of all blocks (a token's
scale times the weights' scale) to shared memory.

The bottleneck is shared memory, 128 bytes per cycle: a block of 64 rows and 128 tokens is 24 KB,
written once and read once, 384 cycles; its products take 256.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from rorqual.ops.activation import Quantized
from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm.linear_plan import SlicedPlan
from rorqual.ops.triton.runtime.launch import dependent, multiprocessors
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    let_next_start,
    next_stage,
    thread_barrier,
    wait_for_inputs,
)

N = gl.constexpr(64)  # weight rows per tile
CHUNK = gl.constexpr(8)  # blocks of columns whose factors are fetched together
SHARED = 227 * 1024 - 1024  # bytes of a program's buffers; the rest is for barriers
# registers of a thread of (the multiplying warpgroups, the other warps, all at the start)
REGISTERS = {2: (232, 40, 168), 3: (152, 56, 128)}


class SlicedBuffers(NamedTuple):
    """In shared memory: stages with tiles of both operands, and their barriers; `factors` of all
    blocks of columns, and barriers of CHUNK blocks each; sums `held` for the slice before, and
    barriers of all slices but the last; and the results."""

    inputs: Any
    weights: Any
    full: Any
    empty: Any
    factors: Any
    known: Any
    held: Any
    handed: Any
    out: Any


@gluon.jit
def _tile(tokens, M: gl.constexpr):
    """(first token, where its M tokens are read, first weight row) of this program. Tiles of the
    same weights are neighbors. The last M tokens are read from M before the end, to be whole."""
    high = (tokens + M - 1) // M
    first = gl.program_id(0) % high * M
    return first, gl.maximum(gl.minimum(first, tokens - M), 0), gl.program_id(0) // high * N


@gluon.jit
def _copy(
    x_tma,
    w_tma,
    buffers,
    tokens,
    M: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    _, start, row = _tile(tokens, M)
    # weights are copied before the wait for the previous kernel: no kernel of a step writes them
    for block in gl.static_range(min(STAGES, BLOCKS)):
        mbarrier.expect(buffers.full.index(block), (M + N) * 128)
        tma.async_copy_global_to_shared(
            w_tma, [row, block * 128], buffers.full.index(block), buffers.weights.index(block)
        )
    wait_for_inputs(DEPENDENT)
    stage = 0
    phase = 1
    for block in range(BLOCKS):
        mbarrier.wait(buffers.empty.index(stage), phase)
        more = block >= STAGES
        mbarrier.expect(buffers.full.index(stage), (M + N) * 128, pred=more)
        tma.async_copy_global_to_shared(
            x_tma, [start, block * 128], buffers.full.index(stage), buffers.inputs.index(stage)
        )
        tma.async_copy_global_to_shared(
            w_tma,
            [row, block * 128],
            buffers.full.index(stage),
            buffers.weights.index(stage),
            pred=more,
        )
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _scale(
    given,
    xs_row,
    xs_block,
    M: gl.constexpr,
    BLOCKS: gl.constexpr,
    CHUNKS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_scale, w_scale, buffers, tokens = given
    chunks = buffers.factors._reinterpret(gl.float32, [CHUNKS, CHUNK * M], FLAT)
    _, start, row = _tile(tokens, M)
    place = gl.arange(0, CHUNK * M, EACH)
    token = start + place % M
    x_scale = x_scale + token * xs_row
    w_scale = w_scale + row // 128 * BLOCKS
    wait_for_inputs(DEPENDENT)
    for chunk in range(CHUNKS):
        block = chunk * CHUNK + place // M
        there = block < BLOCKS
        scale = gl.load(x_scale + block * xs_block, mask=there & (token < tokens), other=0.0)
        chunks.index(chunk).store(scale * gl.load(w_scale + block, mask=there, other=0.0))
        thread_barrier()  # all threads have written
        mbarrier.arrive(buffers.known.index(chunk), count=1)


@gluon.jit
def _finish(
    y,
    y_tma,
    bias,
    out,
    acc,
    tokens,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BIAS: gl.constexpr,
    ACC: gl.constexpr,
):
    """Store a tile's sums, [N, M]: those of tokens from the tile's first on. With a bulk copy,
    which clips at the ends, if that is all of them."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    first, start, n = _tile(tokens, M)
    if BIAS:
        inside = n + gl.arange(0, N, gl.SliceLayout(1, ACC))
        acc = acc + gl.load(bias + inside, mask=inside < ROWS, other=0.0).to(gl.float32)[:, None]
    out.permute((1, 0)).store(acc.to(out.dtype))
    if start < first:
        thread_barrier()  # all threads have written
        token = start + gl.arange(0, M, gl.SliceLayout(1, LINES))
        row = n + gl.arange(0, N, gl.SliceLayout(0, LINES))
        gl.store(
            y + token.to(gl.int64)[:, None] * ROWS + row[None, :],
            out.load(LINES),
            mask=((token >= first) & (token < tokens))[:, None] & (row < ROWS)[None, :],
        )
    else:
        fence_async_shared()
        tma.async_copy_shared_to_global(y_tma, [first, n], out)
        tma.store_wait(0)


@gluon.jit
def _multiply(
    given,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    SLICES: gl.constexpr,
    STAGES: gl.constexpr,
    SLICE: gl.constexpr,
    BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """A warpgroup: blocks SLICE, SLICE + SLICES, ... of the columns. The last slice hands its sums
    to the one before, which adds its own, and so on to the first."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 32])
    bias, y, y_tma, buffers, tokens = given
    wait_for_inputs(DEPENDENT)
    acc = gl.full([N, M], 0.0, gl.float32, ACC)
    done = acc
    # lets products reuse the registers of the previous result; otherwise the compiler runs out
    never = tokens < 0
    stage = SLICE
    phase = 0
    for block in range(SLICE, BLOCKS, SLICES):
        mbarrier.wait(buffers.full.index(stage), phase)
        part = warpgroup_mma(
            buffers.weights.index(stage),
            buffers.inputs.index(stage).permute((1, 0)),
            done,
            use_acc=never,
            is_async=True,
        )
        mbarrier.wait(buffers.known.index(block // CHUNK), 0)
        done = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(buffers.empty.index(stage), count=1)
        acc = acc + done * buffers.factors.index(block).load(gl.SliceLayout(0, ACC))[None, :]
        stage = stage + SLICES
        if stage >= STAGES:
            stage = stage - STAGES
            phase = phase ^ 1
    if SLICE < SLICES - 1:
        mbarrier.wait(buffers.handed.index(SLICE), 0)
        acc = acc + buffers.held.load(ACC)
    if SLICE > 0:
        buffers.held.store(acc)
        thread_barrier()  # all threads have written
        mbarrier.arrive(buffers.handed.index(SLICE - 1), count=1)
    else:
        _finish(y, y_tma, bias, buffers.out, acc, tokens, M, ROWS, BIAS, ACC)


@gluon.jit(do_not_specialize=["tokens", "xs_block"])
def _sliced_kernel(
    x_tma,
    x_scale,
    w_tma,
    w_scale,
    bias,
    y,
    y_tma,
    tokens,
    xs_row,
    xs_block,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    M: gl.constexpr,
    SLICES: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    HELPER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: one program per tile of M tokens and N weight rows.

    STAGES is a multiple of SLICES: a stage has one slice. A slice that waited for another's stage
    could be ahead of it, and take the phase before the one it waits for, which is long over, for
    that one.
    """
    BLOCKS: gl.constexpr = COLUMNS // 128
    CHUNKS: gl.constexpr = (BLOCKS + CHUNK - 1) // CHUNK
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SUMS: gl.constexpr = gl.NVMMASharedLayout(min(128, 4 * M), 32, rank=2)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, N, 128], w_tma.layout)
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, M, 128], x_tma.layout)
    held = gl.allocate_shared_memory(gl.float32, [N, M], SUMS)
    out = gl.allocate_shared_memory(y.dtype.element_ty, [M, N], y_tma.layout)
    factors = gl.allocate_shared_memory(gl.float32, [CHUNKS * CHUNK, M], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    known = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [SLICES, 1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(CHUNKS):
        mbarrier.init(known.index(i), count=1)
    for i in gl.static_range(SLICES):
        mbarrier.init(handed.index(i), count=1)
    fence_async_shared()
    buffers = SlicedBuffers(inputs, weights, full, empty, factors, known, held, handed, out)
    given = (bias, y, y_tma, buffers, tokens)
    scales = (x_scale, w_scale, buffers, tokens)
    if SLICES == 2:
        gl.warp_specialize(
            [
                (_multiply, (given, M, ROWS, BLOCKS, SLICES, STAGES, 0, BIAS, DEPENDENT)),
                (_multiply, (given, M, ROWS, BLOCKS, SLICES, STAGES, 1, BIAS, DEPENDENT)),
                (_copy, (x_tma, w_tma, buffers, tokens, M, BLOCKS, STAGES, DEPENDENT)),
                (_scale, (scales, xs_row, xs_block, M, BLOCKS, CHUNKS, DEPENDENT)),
            ],
            [4, 1, 2],
            [MULTIPLIER, HELPER, HELPER],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (given, M, ROWS, BLOCKS, SLICES, STAGES, 0, BIAS, DEPENDENT)),
                (_multiply, (given, M, ROWS, BLOCKS, SLICES, STAGES, 1, BIAS, DEPENDENT)),
                (_multiply, (given, M, ROWS, BLOCKS, SLICES, STAGES, 2, BIAS, DEPENDENT)),
                (_copy, (x_tma, w_tma, buffers, tokens, M, BLOCKS, STAGES, DEPENDENT)),
                (_scale, (scales, xs_row, xs_block, M, BLOCKS, CHUNKS, DEPENDENT)),
            ],
            [4, 4, 1, 2],
            [MULTIPLIER, MULTIPLIER, HELPER, HELPER],
        )


def stages_of(plan: SlicedPlan, columns: int) -> int:
    """At most `plan.stages`, as many for each slice: less where many columns have many factors."""
    factors = -(-columns // (128 * CHUNK.value)) * CHUNK.value * plan.m * 4
    room = SHARED - factors - N.value * plan.m * (4 + 2)
    return min(plan.stages, room // ((N.value + plan.m) * 128)) // plan.slices * plan.slices


def programs(plan: SlicedPlan, tokens: int, rows: int) -> int:
    return -(-tokens // plan.m) * -(-rows // N.value)


def fits(plan: SlicedPlan, weight: Weight, y: Tensor) -> bool:
    """Bulk copies of y need rows of a multiple of 16 bytes; its buffer has 16-bit values. Each
    slice has two stages and a block of columns; all programs run at once."""
    rows, columns = weight.data.shape
    return (
        y.element_size() == 2
        and rows % 8 == 0
        and plan.slices <= min(columns // 128, stages_of(plan, columns) // 2)
        and programs(plan, y.shape[0], rows) <= multiprocessors(y.device)
    )


def launch(x: Quantized, weight: Weight, bias: Tensor | None, y: Tensor, plan: SlicedPlan) -> None:
    """x [T, columns], weight [rows, columns] with one scale per 128x128 block, bias [rows], y [T,
    rows] contiguous."""
    m, slices = plan.m, plan.slices
    (tokens, columns) = x.shape
    rows = weight.data.shape[0]
    assert y.is_contiguous()
    multiplier, helper, most = REGISTERS[slices]
    plain = bulk_layout(8)
    _sliced_kernel[programs(plan, tokens, rows),](
        TensorDescriptor.from_tensor(x.data, [m, 128], plain),
        x.scale,
        TensorDescriptor.from_tensor(weight.data, [N.value, 128], plain),
        weight.scale,
        bias,
        y,
        TensorDescriptor.from_tensor(y, [m, N.value], bulk_layout(16)),
        tokens,
        *x.scale.stride(),
        rows,
        columns,
        m,
        slices,
        stages_of(plan, columns),
        bias is not None,
        multiplier,
        helper,
        num_warps=4,
        maxnreg=most,
        **dependent(y.device),
    )
