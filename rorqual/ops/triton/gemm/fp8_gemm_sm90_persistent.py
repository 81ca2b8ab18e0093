"""Block-fp8 products of many tokens on Hopper, in Gluon: one warp copies, two warpgroups multiply,
and neither waits for the other two.

A program is persistent and takes tiles of M tokens and 128 weight rows. Each warpgroup has half of
the tokens, 64 at a time: while one promotes its partial sums to fp32, the tensor cores work for the
other. Copies run up to STAGES blocks of 128 columns ahead, over the ends of tiles too. The last
column of tiles may have 64 weight rows and then takes half the time; it comes last, to those who
had least.

Shared memory, 128 bytes a cycle, is what bounds it: a product of 64 x 128 x 32 reads 6 KB in its 64
cycles and a block of 256 tokens brings 48 KB in 1024, together 144 bytes a cycle, so 0.89 of the
tensor cores' rate at most; with 128 tokens 160 and 0.80, with products of 64 x 64 x 32 (as in
Triton's kernel in halves) 192 and 0.67.
"""

from __future__ import annotations

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
from rorqual.ops.triton.gemm.linear_plan import PersistentPlan
from rorqual.ops.triton.runtime.launch import dependent, multiprocessors
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    let_next_start,
    next_stage,
    thread_barrier,
    wait_for_inputs,
)

N = 128  # weight rows a tile
SHARED = 227 * 1024 - 1024  # bytes of stages and of the output on its way out
REGISTERS = (240, 24)  # of a thread that multiplies, of one that copies


@gluon.jit
def share(high, ROWS: gl.constexpr):
    """(tiles of this program, whole rounds of all programs) where tokens make `high` tiles."""
    tiles = high * ((ROWS + 127) // 128)
    workers = gl.num_programs(0)
    return tiles // workers + (workers - 1 - gl.program_id(0) < tiles % workers).to(
        gl.int32
    ), tiles // workers


@gluon.jit
def tile_of(turn, rounds, high, ROWS: gl.constexpr):
    """(token tile, weight tile) of a turn. The last round, of fewer tiles than programs, begins
    with the last program."""
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    tile = turn * workers + gl.where(turn < rounds, worker, workers - 1 - worker)
    return corner_of(tile, high, ROWS)


@gluon.jit
def corner_of(tile, high, ROWS: gl.constexpr):
    """(token tile, weight tile): 16 token tiles go through all weight tiles together, so that both
    stay in the cache."""
    PER_GROUP: gl.constexpr = 16 * ((ROWS + 127) // 128)
    group = tile // PER_GROUP
    inside = tile % PER_GROUP
    height = gl.minimum(high - group * 16, 16)
    return group * 16 + inside % height, inside // height


@gluon.jit
def _copy(
    x_tma,
    w_tma,
    inputs,
    weights,
    full,
    empty,
    tokens,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    high = (tokens + M - 1) // M
    turns, rounds = share(high, ROWS)
    stage = 0
    phase = 1
    for turn in range(turns):
        m_tile, n_tile = tile_of(turn, rounds, high, ROWS)
        for block in range(BLOCKS):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (M + 128) * 128)
            tma.async_copy_global_to_shared(
                x_tma, [m_tile * M, block * 128], full.index(stage), inputs.index(stage)
            )
            tma.async_copy_global_to_shared(
                w_tma, [n_tile * 128, block * 128], full.index(stage), weights.index(stage)
            )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def sums(
    x_scale,
    weight_scale,
    inputs,
    weights,
    full,
    empty,
    stage,
    phase,
    first,
    tokens,
    xs_row,
    xs_block,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    SKIP: gl.constexpr,
    TWO: gl.constexpr,
    WIDTH: gl.constexpr,
    NEXT: gl.constexpr = 64,
):
    """Sums of 64 tokens from `first` on and, with TWO, of 64 more NEXT behind them, all before
    `tokens`, which begin at row SKIP of the stages, over WIDTH weight rows with the scales from
    `weight_scale` on."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    token = first + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    token_scale = x_scale + token * xs_row
    zero = gl.full([64, WIDTH], 0.0, gl.float32, ACC)
    low = zero
    high = zero
    done = zero
    # so that products take the registers of the last one's result: the compiler finds no room
    # otherwise
    never = tokens < 0
    # Scales come a unit ahead: under way beside a product they would arrive after it. Masked, not
    # kept inside: then one address serves all.
    factor = gl.load(weight_scale)
    low_factor = gl.load(token_scale, mask=token < tokens, other=0.0)
    if TWO:
        high_factor = gl.load(token_scale + NEXT * xs_row, mask=token + NEXT < tokens, other=0.0)
    for block in range(BLOCKS):
        low_now = low_factor * factor
        if TWO:
            high_now = high_factor * factor
        coming = gl.minimum(block + 1, BLOCKS - 1)
        factor = gl.load(weight_scale + coming)
        low_factor = gl.load(token_scale + coming * xs_block, mask=token < tokens, other=0.0)
        if TWO:
            high_factor = gl.load(
                token_scale + (coming * xs_block + NEXT * xs_row),
                mask=token + NEXT < tokens,
                other=0.0,
            )
        mbarrier.wait(full.index(stage), phase)
        xt = inputs.index(stage)
        wt = weights.index(stage).slice(0, WIDTH).permute((1, 0))
        part = warpgroup_mma(xt.slice(SKIP, 64), wt, done, use_acc=never, is_async=True)
        if TWO:
            done = warpgroup_mma_wait(0, deps=[part])
            low = low + done * low_now[:, None]
            part = warpgroup_mma(xt.slice(SKIP + NEXT, 64), wt, done, use_acc=never, is_async=True)
        done = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage), count=1)
        if TWO:
            high = high + done * high_now[:, None]
        else:
            low = low + done * low_now[:, None]
        stage, phase = next_stage(stage, phase, STAGES)
    return low, high, stage, phase


@gluon.jit
def with_bias(acc, bias, row_tile, ROWS: gl.constexpr, BIAS: gl.constexpr, ACC: gl.constexpr):
    if BIAS:
        row = row_tile * 128 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
        acc = acc + gl.load(bias + row, mask=row < ROWS, other=0.0).to(gl.float32)[None, :]
    return acc


@gluon.jit
def send(y_tma, out, acc, first, n_tile):
    """By a bulk copy, which leaves out what lies past the ends."""
    tma.store_wait(0)
    thread_barrier()  # the copy before this one has read its place
    out.store(acc.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_tma, [first, n_tile * 128], out)


@gluon.jit
def store(y, acc, first, n_tile, tokens, ROWS: gl.constexpr, ACC: gl.constexpr):
    token = first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, ACC))
    row = n_tile * 128 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
    there = (token < tokens)[:, None] & (row < ROWS)[None, :]
    gl.store(
        y + token.to(gl.int64)[:, None] * ROWS + row[None, :],
        acc.to(y.dtype.element_ty),
        mask=there,
    )


@gluon.jit
def _multiply(
    x_scale,
    w_scale,
    bias,
    y,
    y_tma,
    out,
    inputs,
    weights,
    full,
    empty,
    tokens,
    xs_row,
    xs_block,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One of the two warpgroups."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    TWO: gl.constexpr = M == 256
    SKIP: gl.constexpr = WHO * (M // 2)
    wait_for_inputs(DEPENDENT)
    high = (tokens + M - 1) // M
    turns, rounds = share(high, ROWS)
    stage = 0
    phase = 0
    for turn in range(turns):
        m_tile, n_tile = tile_of(turn, rounds, high, ROWS)
        first = m_tile * M + SKIP
        scales = w_scale + n_tile * BLOCKS
        if ROWS % 128 > 0 and ROWS % 128 <= 64 and n_tile * 128 + 128 > ROWS:
            narrow, narrow_high, stage, phase = sums(
                x_scale,
                scales,
                inputs,
                weights,
                full,
                empty,
                stage,
                phase,
                first,
                tokens,
                xs_row,
                xs_block,
                BLOCKS,
                STAGES,
                SKIP,
                TWO,
                64,
            )
            store(
                y,
                with_bias(narrow, bias, n_tile, ROWS, BIAS, NARROW),
                first,
                n_tile,
                tokens,
                ROWS,
                NARROW,
            )
            if TWO:
                store(
                    y,
                    with_bias(narrow_high, bias, n_tile, ROWS, BIAS, NARROW),
                    first + 64,
                    n_tile,
                    tokens,
                    ROWS,
                    NARROW,
                )
        else:
            low, upper, stage, phase = sums(
                x_scale,
                scales,
                inputs,
                weights,
                full,
                empty,
                stage,
                phase,
                first,
                tokens,
                xs_row,
                xs_block,
                BLOCKS,
                STAGES,
                SKIP,
                TWO,
                128,
            )
            send(y_tma, out, with_bias(low, bias, n_tile, ROWS, BIAS, ACC), first, n_tile)
            if TWO:
                send(
                    y_tma, out, with_bias(upper, bias, n_tile, ROWS, BIAS, ACC), first + 64, n_tile
                )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "xs_block"])
def _tall_kernel(
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
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    COPIER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: at most one program a tile. M: 128 or 256 tokens a tile."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, M, 128], x_tma.layout)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], w_tma.layout)
    outs = gl.allocate_shared_memory(y.dtype.element_ty, [2, 64, 128], y_tma.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_scale,
                    w_scale,
                    bias,
                    y,
                    y_tma,
                    outs.index(0),
                    inputs,
                    weights,
                    full,
                    empty,
                    tokens,
                    xs_row,
                    xs_block,
                    M,
                    ROWS,
                    BLOCKS,
                    STAGES,
                    0,
                    BIAS,
                    DEPENDENT,
                ),
            ),
            (
                _multiply,
                (
                    x_scale,
                    w_scale,
                    bias,
                    y,
                    y_tma,
                    outs.index(1),
                    inputs,
                    weights,
                    full,
                    empty,
                    tokens,
                    xs_row,
                    xs_block,
                    M,
                    ROWS,
                    BLOCKS,
                    STAGES,
                    1,
                    BIAS,
                    DEPENDENT,
                ),
            ),
            (
                _copy,
                (
                    x_tma,
                    w_tma,
                    inputs,
                    weights,
                    full,
                    empty,
                    tokens,
                    M,
                    ROWS,
                    BLOCKS,
                    STAGES,
                    DEPENDENT,
                ),
            ),
        ],
        [4, 1],
        [MULTIPLIER, COPIER],
    )


def fits(weight: Weight, y: Tensor) -> bool:
    """Bulk copies of y need rows of whole 16 bytes; its stage holds 16 bits a value."""
    return y.element_size() == 2 and weight.data.shape[0] % 8 == 0


def launch(
    x: Quantized, weight: Weight, bias: Tensor | None, y: Tensor, plan: PersistentPlan
) -> None:
    """x [T, columns], weight [rows, columns] with one scale a 128x128 block, bias [rows], y [T,
    rows] contiguous. m: 128 or 256."""
    m, stages = plan.m, plan.stages
    (tokens, columns) = x.shape
    rows = weight.data.shape[0]
    device = y.device
    assert y.is_contiguous()
    assert m in (128, 256), m
    assert (m + N) * 128 * stages + 4 * 64 * N <= SHARED, (m, stages)
    plain = bulk_layout(8)
    wide = bulk_layout(16)
    tiles = -(-tokens // m) * -(-rows // N)
    _tall_kernel[min(tiles, multiprocessors(device)),](
        TensorDescriptor.from_tensor(x.data, [m, 128], plain),
        x.scale,
        TensorDescriptor.from_tensor(weight.data, [N, 128], plain),
        weight.scale,
        bias,
        y,
        TensorDescriptor.from_tensor(y, [64, N], wide),
        tokens,
        *x.scale.stride(),
        rows,
        columns,
        m,
        stages,
        bias is not None,
        *REGISTERS,
        num_warps=4,
        maxnreg=168,
        **dependent(device),
    )
