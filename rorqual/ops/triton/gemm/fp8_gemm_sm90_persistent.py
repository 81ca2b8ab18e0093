"""Block-fp8 GEMM for many tokens on Hopper, in Gluon: one warp copies, two load scales, two
warpgroups multiply.

Programs are persistent; tiles and multiplication are those of fp8_gemm_sm90_loop.py. Copies run up
to STAGES units ahead, also across tiles. The last of the weight tiles of 128 rows may have 64 or
fewer, and then takes little more than half the time; it is processed last, two token tiles by each
program that has a tile less than others. Smaller tiles are for fewer tokens, of which the larger
ones would not give all multiprocessors work. Scales are loaded for four units at once.

The bottleneck is shared memory, 128 bytes per cycle: a product of 64 x 128 x 32 reads 6 KB in its
64 cycles and a unit of 256 tokens writes 48 KB in 1024, together 144 bytes per cycle, so at most
0.89 of the tensor cores' rate; with 128 tokens 160 and 0.80, with products of 64 x 64 x 32 (as in
Triton's kernel with halves) 192 and 0.67, in tiles of 128 tokens and 64 rows 224 and 0.57, of 64
and 64 320 and 0.40.
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
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rorqual.ops.activation import Quantized
from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm.fp8_gemm_sm90_loop import (
    REGISTERS,
    assert_fits,
    leave,
    new_ring,
    share,
    sums,
    tile_of,
)
from rorqual.ops.triton.gemm.linear_plan import PersistentPlan
from rorqual.ops.triton.runtime.launch import dependent, multiprocessors
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    let_next_start,
    next_stage,
    thread_barrier,
    wait_for_inputs,
)


class Tiles(NamedTuple):
    """The order in which a program processes its tiles: `whole` ones, in `rounds` full rounds of
    all programs and what is left, then narrow ones, of which `first` come from the first `light`
    programs, which have no tile of the last round. high: token tiles; whole, all: tiles of this
    program."""

    high: Any
    rounds: Any
    light: Any
    whole: Any
    first: Any
    all: Any


@gluon.constexpr_function
def _is_narrow(rows, m, n):
    """Whether the last weight tile, of several, is narrow: only half of it is multiplied."""
    return m > 64 and n == 128 and rows > 128 and 0 < rows % 128 <= 64


@gluon.constexpr_function
def _whole(rows, m, n):
    """Weight tiles, without a narrow one."""
    return rows // n if _is_narrow(rows, m, n) else (rows + n - 1) // n


@gluon.jit
def _tiles(tokens, M: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr):
    high = (tokens + M - 1) // M
    whole, rounds = share(high, _whole(ROWS, M, N))
    light = 0
    first = 0
    rest = 0
    if _is_narrow(ROWS, M, N):
        worker = gl.program_id(0)
        workers = gl.num_programs(0)
        light = workers - high * _whole(ROWS, M, N) % workers
        both = (worker < high).to(gl.int32) + (worker + light < high).to(gl.int32)
        first = gl.where(worker < light, both, 0)
        others = gl.maximum(high - 2 * light, 0)
        rest = others // workers + (worker < others % workers).to(gl.int32)
    return Tiles(high, rounds, light, whole, first, whole + first + rest)


@gluon.jit
def _tile_at(turn, tiles, M: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr):
    """(token tile, weight tile) of a program's turn."""
    m_tile, n_tile = tile_of(turn, tiles.rounds, tiles.high, _whole(ROWS, M, N))
    if _is_narrow(ROWS, M, N):
        worker = gl.program_id(0)
        later = turn - tiles.whole
        further = 2 * tiles.light + worker + (later - tiles.first) * gl.num_programs(0)
        narrow = gl.where(later < tiles.first, worker + later * tiles.light, further)
        m_tile = gl.where(later < 0, m_tile, narrow)
        n_tile = gl.where(later < 0, n_tile, _whole(ROWS, M, N))
    return m_tile, n_tile


@gluon.jit
def _unit_at(
    unit, tiles, M: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr
):
    """(token tile, weight tile, block of columns) of a program's unit."""
    m_tile, n_tile = _tile_at(unit // BLOCKS, tiles, M, N, ROWS)
    return m_tile, n_tile, unit % BLOCKS


@gluon.jit
def _copy(
    x_tma,
    w_tma,
    ring,
    tokens,
    M: gl.constexpr,
    N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    tiles = _tiles(tokens, M, N, ROWS)
    units = tiles.all * BLOCKS
    # weights are copied before the wait for the previous kernel: no kernel of a step writes them
    for unit in range(gl.minimum(units, STAGES)):
        m_tile, n_tile, block = _unit_at(unit, tiles, M, N, ROWS, BLOCKS)
        mbarrier.expect(ring.full.index(unit), (M + N) * 128)
        tma.async_copy_global_to_shared(
            w_tma, [n_tile * N, block * 128], ring.full.index(unit), ring.weights.index(unit)
        )
    wait_for_inputs(DEPENDENT)
    stage = 0
    phase = 1
    for unit in range(units):
        m_tile, n_tile, block = _unit_at(unit, tiles, M, N, ROWS, BLOCKS)
        mbarrier.wait(ring.empty.index(stage), phase)
        more = unit >= STAGES
        mbarrier.expect(ring.full.index(stage), (M + N) * 128, pred=more)
        tma.async_copy_global_to_shared(
            x_tma, [m_tile * M, block * 128], ring.full.index(stage), ring.inputs.index(stage)
        )
        tma.async_copy_global_to_shared(
            w_tma,
            [n_tile * N, block * 128],
            ring.full.index(stage),
            ring.weights.index(stage),
            pred=more,
        )
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _factors_of(
    x_scale,
    w_scale,
    unit,
    tiles,
    tokens,
    xs_row,
    xs_block,
    M: gl.constexpr,
    N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """A unit's factors [M]: its tokens' scales times its weights' scale."""
    TOKENS: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    last = tiles.all * BLOCKS - 1
    m_tile, n_tile, block = _unit_at(gl.minimum(unit, last), tiles, M, N, ROWS, BLOCKS)
    token = m_tile * M + gl.arange(0, M, TOKENS)
    scale = gl.load(x_scale + block * xs_block + token * xs_row, mask=token < tokens, other=0.0)
    return scale * gl.load(w_scale + n_tile * N // 128 * BLOCKS + block)


@gluon.jit
def _scale(
    x_scale,
    w_scale,
    ring,
    tokens,
    xs_row,
    xs_block,
    M: gl.constexpr,
    N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    tiles = _tiles(tokens, M, N, ROWS)
    units = tiles.all * BLOCKS
    stage = 0
    free = 0
    phase = 0
    for unit in range(0, units, 4):
        a = _factors_of(x_scale, w_scale, unit, tiles, tokens, xs_row, xs_block, M, N, ROWS, BLOCKS)
        b = _factors_of(
            x_scale, w_scale, unit + 1, tiles, tokens, xs_row, xs_block, M, N, ROWS, BLOCKS
        )
        c = _factors_of(
            x_scale, w_scale, unit + 2, tiles, tokens, xs_row, xs_block, M, N, ROWS, BLOCKS
        )
        d = _factors_of(
            x_scale, w_scale, unit + 3, tiles, tokens, xs_row, xs_block, M, N, ROWS, BLOCKS
        )
        stage, free, phase = leave(ring, a, unit, unit < units, stage, free, phase, M, STAGES)
        stage, free, phase = leave(
            ring, b, unit + 1, unit + 1 < units, stage, free, phase, M, STAGES
        )
        stage, free, phase = leave(
            ring, c, unit + 2, unit + 2 < units, stage, free, phase, M, STAGES
        )
        stage, free, phase = leave(
            ring, d, unit + 3, unit + 3 < units, stage, free, phase, M, STAGES
        )


@gluon.jit
def _with_bias(acc, bias, row, ROWS: gl.constexpr, BIAS: gl.constexpr, ACC: gl.constexpr):
    if BIAS:
        row = row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
        acc = acc + gl.load(bias + row, mask=row < ROWS, other=0.0).to(gl.float32)[None, :]
    return acc


@gluon.jit
def _send(y_tma, out, acc, first, row):
    """Store with a bulk copy, which clips at the ends."""
    tma.store_wait(0)
    thread_barrier()  # the previous copy has read the buffer
    out.store(acc.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_tma, [first, row], out)


@gluon.jit
def _store(y, acc, first, row, tokens, ROWS: gl.constexpr, ACC: gl.constexpr):
    token = first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, ACC))
    row = row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
    there = (token < tokens)[:, None] & (row < ROWS)[None, :]
    gl.store(
        y + token.to(gl.int64)[:, None] * ROWS + row[None, :],
        acc.to(y.dtype.element_ty),
        mask=there,
    )


@gluon.jit
def _put_chunk(
    y,
    y_tma,
    out,
    bias,
    acc,
    first,
    row,
    tokens,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Store 64 tokens' sums over WIDTH weight rows from `row` on."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    acc = _with_bias(acc, bias, row, ROWS, BIAS, ACC)
    if WIDTH == 128:
        _send(y_tma, out, acc, first, row)
    else:
        _store(y, acc, first, row, tokens, ROWS, ACC)


@gluon.jit
def _tile(
    y,
    y_tma,
    out,
    bias,
    ring,
    unit,
    m_tile,
    n_tile,
    tokens,
    stage,
    phase,
    turn,
    M: gl.constexpr,
    N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
):
    """A warpgroup's part of a tile, which starts with the program's unit `unit`; WIDTH: weight rows
    of its products."""
    TWO: gl.constexpr = M == 256
    low, high, stage, phase, turn = sums(
        ring, unit, stage, phase, turn, 1, tokens, M, BLOCKS, STAGES, WHO, TWO, WIDTH
    )
    first = m_tile * M + (WHO * 64 if M > 64 else 0)
    row = n_tile * N + (0 if M > 64 else WHO * WIDTH)
    if first < tokens:  # without a branch here the compiler spills in the loop
        _put_chunk(y, y_tma, out, bias, low, first, row, tokens, ROWS, WIDTH, BIAS)
        if TWO:
            _put_chunk(y, y_tma, out, bias, high, first + 128, row, tokens, ROWS, WIDTH, BIAS)
    return stage, phase, turn


@gluon.jit
def _multiply(
    bias,
    y,
    y_tma,
    out,
    ring,
    tokens,
    M: gl.constexpr,
    N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One of the two warpgroups."""
    WIDTH: gl.constexpr = N if M > 64 else N // 2
    wait_for_inputs(DEPENDENT)
    tiles = _tiles(tokens, M, N, ROWS)
    stage = 0
    phase = 0
    turn = 1 - WHO
    for tile in range(tiles.all):
        m_tile, n_tile = _tile_at(tile, tiles, M, N, ROWS)
        if _is_narrow(ROWS, M, N) and n_tile == _whole(ROWS, M, N):
            stage, phase, turn = _tile(
                y, y_tma, out, bias, ring, tile * BLOCKS, m_tile, n_tile, tokens,
                stage, phase, turn, M, N, ROWS, BLOCKS, STAGES, WHO, 64, BIAS,
            )  # fmt: skip
        else:
            stage, phase, turn = _tile(
                y, y_tma, out, bias, ring, tile * BLOCKS, m_tile, n_tile, tokens,
                stage, phase, turn, M, N, ROWS, BLOCKS, STAGES, WHO, WIDTH, BIAS,
            )  # fmt: skip
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
    N: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    COPIER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: at most one program per tile of M tokens and N weight rows."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    outs = gl.allocate_shared_memory(y.dtype.element_ty, [2, 64, N], y_tma.layout)
    let_next_start(DEPENDENT)
    ring = new_ring(x_tma, w_tma, M, N, STAGES)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    bias, y, y_tma, outs.index(0), ring, tokens,
                    M, N, ROWS, BLOCKS, STAGES, 0, BIAS, DEPENDENT,
                ),
            ),
            (
                _multiply,
                (
                    bias, y, y_tma, outs.index(1), ring, tokens,
                    M, N, ROWS, BLOCKS, STAGES, 1, BIAS, DEPENDENT,
                ),
            ),
            (_copy, (x_tma, w_tma, ring, tokens, M, N, ROWS, BLOCKS, STAGES, DEPENDENT)),
            (
                _scale,
                (
                    x_scale, w_scale, ring, tokens, xs_row, xs_block,
                    M, N, ROWS, BLOCKS, STAGES, DEPENDENT,
                ),
            ),
        ],
        [4, 1, 2],
        [MULTIPLIER, COPIER, COPIER],
    )  # fmt: skip


def fits(weight: Weight, y: Tensor) -> bool:
    """Bulk copies of y need rows of a multiple of 16 bytes; its buffer has 16-bit values."""
    return y.element_size() == 2 and weight.data.shape[0] % 8 == 0


def launch(
    x: Quantized, weight: Weight, bias: Tensor | None, y: Tensor, plan: PersistentPlan
) -> None:
    """x [T, columns], weight [rows, columns] with one scale per 128x128 block, bias [rows], y [T,
    rows] contiguous."""
    m, n, stages = plan.m, plan.n, plan.stages
    (tokens, columns) = x.shape
    rows = weight.data.shape[0]
    device = y.device
    assert y.is_contiguous()
    assert_fits(m, n, stages)
    plain = bulk_layout(8)
    wide = bulk_layout(16)
    tiles = -(-tokens // m) * -(-rows // n)
    _tall_kernel[min(tiles, multiprocessors(device)),](
        TensorDescriptor.from_tensor(x.data, [m, 128], plain),
        x.scale,
        TensorDescriptor.from_tensor(weight.data, [n, 128], plain),
        weight.scale,
        bias,
        y,
        TensorDescriptor.from_tensor(y, [64, n], wide),
        tokens,
        *x.scale.stride(),
        rows,
        columns,
        m,
        n,
        stages,
        bias is not None,
        *REGISTERS,
        num_warps=4,
        maxnreg=168,
        **dependent(device),
    )
