"""Block-fp8 GEMM for few tokens on Hopper, in Gluon (stream-K): weights stream through shared
memory, and all multiprocessors finish together.

The weights are split into units of N rows and 128 columns, ordered by row tile and then column, and
every program gets an equal run of units for any number of tiles and columns. Partial sums of a tile
that several programs share go to memory, and the last program adds them in column order: a sum
depends only on shape and configuration.

Weights are on the M side of the tensor cores (N rows per tile, 16 per warp), tokens on the N side
(M of them, at least 8). Bulk copies load STAGES units ahead; those of weights start before the
kernel waits for the one that computes x, since no kernel of a step writes weights. A program loads
the scales of all its units at once, before the first: a load per unit, even one unit ahead, waits
for all copies before it (390 ns per unit at 64 tokens). A unit's product overlaps with scaling and
adding the previous one: sequentially, with waits and a barrier, a unit of 64 rows and 64 tokens
took 340 ns, of which the tensor cores worked 65.

Cycles of a unit of 128 rows on one multiprocessor: 16 KB at 4.3 TB/s over 132 multiprocessors take
880; the products 4 per token; in parallel, scaling takes 1 per token, and waits and barriers about
130. More than M tokens are several blocks, whose programs read the same weights at about the same
time, so that all but one find them in L2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
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
from rorqual.ops.triton.gemm.linear_plan import StreamKPlan
from rorqual.ops.triton.runtime.launch import COUNTERS, dependent, multiprocessors, zeroed_counters
from rorqual.ops.triton.runtime.sm90_pipeline import (
    let_next_start,
    next_stage,
    thread_barrier,
    wait_for_inputs,
)

SHARED = 227 * 1024 - 1024  # bytes of a program's stages and scales; the rest is for barriers
SCALES = 32  # scales of each kind that a thread loads at once
# tokens times units of a program: larger matrices have more programs than run at once
MOST_SCALES = 16 * 1024


@gluon.jit
def _now(x, DEPENDENT: gl.constexpr):
    """x, opaque to the compiler: values computed from it are not hoisted and kept in registers."""
    if DEPENDENT:
        return gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        return x


@gluon.jit
def _first_unit(worker, workers, GROUPS: gl.constexpr, ALIGN: gl.constexpr):
    """The first unit of `worker`. Programs have whole groups of ALIGN units."""
    return GROUPS * worker // workers * ALIGN


@gluon.jit
def _worker_of(unit, workers, GROUPS: gl.constexpr, ALIGN: gl.constexpr):
    """The worker of a unit: the inverse of _first_unit."""
    return ((unit // ALIGN + 1) * workers - 1) // GROUPS


@gluon.jit
def _row_scales(w_scale, unit, end, N: gl.constexpr, BLOCKS: gl.constexpr):
    """The weight scale of each of these units; 0 from `end` on."""
    return gl.load(
        w_scale + unit // BLOCKS * N // 128 * BLOCKS + unit % BLOCKS, mask=unit < end, other=0.0
    )


@gluon.jit
def _await(x_here, w_here, stage, phase):
    mbarrier.wait(w_here.index(stage), phase)
    mbarrier.wait(x_here.index(stage), phase)


@gluon.jit
def _begin(inputs, weights, stage, spare, never):
    """The product of a stage, in flight. Only the registers of `spare` are used."""
    return warpgroup_mma(
        weights.index(stage),
        inputs.index(stage).permute((1, 0)),
        spare,
        use_acc=never,
        is_async=True,
    )


@gluon.jit
def _factor(factors, unit, ACC: gl.constexpr):
    return factors.index(unit).load(gl.SliceLayout(0, ACC))[None, :]


@gluon.jit
def _refill(
    x_tma, w_tma, inputs, weights, x_here, w_here, stage, unit, end, skip, BLOCKS: gl.constexpr
):
    """Refill the stage, which this warp has finished, with `unit`, if it exists."""
    thread_barrier()  # all other warps have finished, too
    N: gl.constexpr = weights.shape[1]
    more = unit < end
    column = unit % BLOCKS * 128
    mbarrier.expect(w_here.index(stage), N * 128, pred=more)
    mbarrier.expect(x_here.index(stage), inputs.shape[1] * 128, pred=more)
    tma.async_copy_global_to_shared(
        w_tma, [unit // BLOCKS * N, column], w_here.index(stage), weights.index(stage), pred=more
    )
    tma.async_copy_global_to_shared(
        x_tma, [skip, column], x_here.index(stage), inputs.index(stage), pred=more
    )


@gluon.jit
def _turn(
    product,
    spare,
    x_tma,
    w_tma,
    inputs,
    weights,
    x_here,
    w_here,
    stage,
    phase,
    unit,
    end,
    skip,
    never,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """Start the next unit's product, then wait for `product`, this unit's, and refill its stage."""
    coming, turned = next_stage(stage, phase, STAGES)
    _await(x_here, w_here, coming, turned)
    begun = _begin(inputs, weights, coming, spare, never)
    done = warpgroup_mma_wait(1, deps=[product])
    _refill(x_tma, w_tma, inputs, weights, x_here, w_here, stage, unit + STAGES, end, skip, BLOCKS)
    return begun, done, coming, turned


@gluon.jit
def _store(
    y,
    y_row,
    bias,
    acc,
    tile,
    first,
    tokens,
    N: gl.constexpr,
    ROWS: gl.constexpr,
    BIAS: gl.constexpr,
    ACC: gl.constexpr,
):
    """Store acc [N, M], the complete sums of a tile: of tokens from `first` on."""
    row = tile * N + gl.arange(0, N, gl.SliceLayout(1, ACC))
    token = gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
    if BIAS:
        acc = acc + gl.load(bias + row, mask=row < ROWS, other=0.0).to(gl.float32)[:, None]
    there = (row < ROWS)[:, None] & ((token >= first) & (token < tokens))[None, :]
    gl.store(y + (token * y_row)[None, :] + row[:, None], acc.to(y.dtype.element_ty), mask=there)


@gluon.jit
def _put_aside(partials, acc, slot, tokens, N: gl.constexpr, ACC: gl.constexpr):
    inside = gl.arange(0, N, gl.SliceLayout(1, ACC))
    token = gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
    place = partials + slot.to(gl.int64) * (acc.shape[1] * N)
    gl.store(place + token[None, :] * N + inside[:, None], acc, mask=(token < tokens)[None, :])


@gluon.jit
def _add_up(
    y,
    y_row,
    partials,
    bias,
    tile,
    first_token,
    tokens,
    workers,
    M: gl.constexpr,
    N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    GROUPS: gl.constexpr,
    ALIGN: gl.constexpr,
    BIAS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Sum the parts of a tile in column order, loading four at a time."""
    ACROSS: gl.constexpr = 16 if N == 64 else 32
    SUM: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    CHUNK: gl.constexpr = M if M * N <= 512 * WARPS else 512 * WARPS // N
    inside = gl.arange(0, N, gl.SliceLayout(0, SUM))
    row = tile * N + inside
    begin = tile * BLOCKS
    first = _worker_of(begin, workers, GROUPS, ALIGN)
    last = _worker_of(begin + BLOCKS - 1, workers, GROUPS, ALIGN)
    for chunk in gl.static_range(0, M, CHUNK):
        token = chunk + gl.arange(0, CHUNK, gl.SliceLayout(1, SUM))
        there = ((token >= first_token) & (token < tokens))[:, None] & (row < ROWS)[None, :]
        total = gl.full([CHUNK, N], 0.0, gl.float32, SUM)
        for part in range(first, last + 1, 4):
            for more in gl.static_range(4):
                worker = part + more
                slot = 2 * worker + (_first_unit(worker, workers, GROUPS, ALIGN) <= begin).to(
                    gl.int32
                )
                place = (
                    partials + slot.to(gl.int64) * (M * N) + (token * N)[:, None] + inside[None, :]
                )
                total = total + gl.load(
                    place, mask=there & (worker <= last), other=0.0, cache_modifier=".cg"
                )
        if BIAS:
            total = total + gl.load(bias + row, mask=row < ROWS, other=0.0).to(gl.float32)[None, :]
        gl.store(
            y + (token * y_row)[:, None] + row[None, :], total.to(y.dtype.element_ty), mask=there
        )


@gluon.jit(do_not_specialize=["tokens", "xs_block"])
def _stream_kernel(
    x_tma,
    x_scale,
    w_tma,
    w_scale,
    bias,
    y,
    partials,
    counters,
    tokens,
    xs_row,
    xs_block,
    y_row,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    ALIGN: gl.constexpr,
    CHUNKS: gl.constexpr,
    CHUNK: gl.constexpr,
    BIAS: gl.constexpr,
    WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: (programs of M tokens, at most one per group of ALIGN units, with at most CHUNKS CHUNK
    units each; blocks of M tokens). partials: two [M, N] slots per program, for the tile that it
    starts in the middle and the one that it ends in the middle. counters: completed units of each
    tile of each block, zero before and after."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    TILES: gl.constexpr = (ROWS + N - 1) // N
    GROUPS: gl.constexpr = TILES * (BLOCKS // ALIGN)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 32])
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, N, 128], w_tma.layout)
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, M, 128], x_tma.layout)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # factor of a unit's products, for each token
    factors = gl.allocate_shared_memory(gl.float32, [CHUNKS * CHUNK, M], FLAT)
    w_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(w_here.index(i), count=1)
        mbarrier.init(x_here.index(i), count=1)
    fence_async_shared()

    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    token_block = gl.program_id(1)
    # the last block begins M tokens before the end: copies of which three quarters are out of
    # bounds made products of 208 tokens take up to 1.5 times as long as of 256
    skip = gl.maximum(gl.minimum(token_block * M, tokens - M), 0)
    first_token = token_block * M - skip
    tokens = tokens - skip
    x_scale = x_scale + skip * xs_row
    y = y + skip.to(gl.int64) * y_row
    if ALIGN < BLOCKS:
        partials = partials + token_block.to(gl.int64) * (2 * workers * M * N)
        counters = counters + token_block * TILES
    unit = _first_unit(worker, workers, GROUPS, ALIGN)
    end = _first_unit(worker + 1, workers, GROUPS, ALIGN)
    first_unit = unit
    ahead = gl.minimum(end - unit, STAGES)
    for i in range(ahead):
        mbarrier.expect(w_here.index(i), N * 128)
        mbarrier.expect(x_here.index(i), M * 128)
        place = [(unit + i) // BLOCKS * N, (unit + i) % BLOCKS * 128]
        tma.async_copy_global_to_shared(w_tma, place, w_here.index(i), weights.index(i))
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    place = gl.arange(0, CHUNK * M, EACH)
    token = place % M
    asked = unit + place // M
    rows = _row_scales(w_scale, asked, end, N, BLOCKS)
    wait_for_inputs(DEPENDENT)
    for i in range(ahead):
        tma.async_copy_global_to_shared(
            x_tma, [skip, (unit + i) % BLOCKS * 128], x_here.index(i), inputs.index(i)
        )
    chunks = factors._reinterpret(gl.float32, [CHUNKS, CHUNK * M], FLAT)
    for chunk in gl.static_range(CHUNKS):
        if chunk:
            asked = asked + CHUNK
            rows = _row_scales(w_scale, asked, end, N, BLOCKS)
        there = (asked < end) & (token < tokens)
        scale = gl.load(x_scale + token * xs_row + asked % BLOCKS * xs_block, mask=there, other=0.0)
        chunks.index(chunk).store(scale * rows)

    thread_barrier()  # factors are written
    never = tokens < 0
    stage = 0
    phase = 0
    while unit < end:
        tile = unit // BLOCKS
        begin = tile * BLOCKS
        start = unit
        stop = gl.minimum(begin + BLOCKS, end)
        acc = gl.full([N, M], 0.0, gl.float32, ACC)
        # The registers of two products alternate, with the same names at the start and end of an
        # iteration: otherwise they would be copied, with a wait.
        spare = acc
        _await(x_here, w_here, stage, phase)
        part = _begin(inputs, weights, stage, acc, never)
        while unit + 2 < stop:
            other, done, stage, phase = _turn(
                part,
                spare,
                x_tma,
                w_tma,
                inputs,
                weights,
                x_here,
                w_here,
                stage,
                phase,
                unit,
                end,
                skip,
                never,
                STAGES,
                BLOCKS,
            )
            acc = acc + done * _factor(factors, unit - first_unit, ACC)
            unit = unit + 1  # not +=: tests run this on tensors, which that would change in place
            part, spare, stage, phase = _turn(
                other,
                done,
                x_tma,
                w_tma,
                inputs,
                weights,
                x_here,
                w_here,
                stage,
                phase,
                unit,
                end,
                skip,
                never,
                STAGES,
                BLOCKS,
            )
            acc = acc + spare * _factor(factors, unit - first_unit, ACC)
            unit = unit + 1
        if unit + 1 < stop:
            other, done, stage, phase = _turn(
                part,
                spare,
                x_tma,
                w_tma,
                inputs,
                weights,
                x_here,
                w_here,
                stage,
                phase,
                unit,
                end,
                skip,
                never,
                STAGES,
                BLOCKS,
            )
            acc = acc + done * _factor(factors, unit - first_unit, ACC)
            unit = unit + 1
            done = warpgroup_mma_wait(0, deps=[other])
        else:
            done = warpgroup_mma_wait(0, deps=[part])
        acc = acc + done * _factor(factors, unit - first_unit, ACC)
        _refill(
            x_tma, w_tma, inputs, weights, x_here, w_here, stage, unit + STAGES, end, skip, BLOCKS
        )
        unit = unit + 1
        stage, phase = next_stage(stage, phase, STAGES)
        units = stop - start
        held = _now(tokens, DEPENDENT)
        EVEN: gl.constexpr = 8 if ROWS % 8 == 0 else 1
        y_step = _now(y_row // EVEN, DEPENDENT) * EVEN  # known divisibility gives wide stores
        if units == BLOCKS:
            _store(y, y_step, bias, acc, tile, first_token, held, N, ROWS, BIAS, ACC)
        elif ALIGN < BLOCKS:
            slot = 2 * worker + (start == begin).to(gl.int32)
            _put_aside(partials, acc, slot, held, N, ACC)
            thread_barrier()  # all threads have stored their part before it is counted
            if gl.atomic_add(counters + tile, units, sem="acq_rel") + units == BLOCKS:
                _add_up(
                    y,
                    y_step,
                    partials,
                    bias,
                    tile,
                    first_token,
                    held,
                    workers,
                    M,
                    N,
                    ROWS,
                    BLOCKS,
                    GROUPS,
                    ALIGN,
                    BIAS,
                    WARPS,
                )
                gl.store(counters + tile, 0)


def programs(
    rows: int, columns: int, n: int, split: int, waves: int, processors: int, blocks: int = 1
) -> tuple[int, int]:
    """(programs per block of tokens, units of columns that stay together): whole tiles with a split
    of 1, else single units; at most `split` programs per tile on average and, over all `blocks`,
    `waves` per multiprocessor."""
    tiles = -(-rows // n)
    units = columns // 128
    align = units if split == 1 or tiles * blocks > COUNTERS else 1
    at_once = max(1, max(1, waves) * processors // blocks)
    return min(tiles * (units // align), at_once, tiles * split if align == 1 else tiles), align


def shared_bytes(m: int, n: int, stages: int, units: int) -> int:
    return (n + m) * 128 * stages + 4 * m * units


def chunks_of(units: int, workers: int, align: int, m: int, warps: int) -> tuple[int, int]:
    """(CHUNKS, CHUNK) for the scales of m tokens and of all units of a program, SCALES per thread
    at a time."""
    most = -(-units // align // workers) * align
    chunk = max(1, min(triton.next_power_of_2(most), SCALES * 32 * warps // m))
    return -(-most // chunk), chunk


def launch(x: Quantized, weight: Weight, bias: Tensor | None, y: Tensor, plan: StreamKPlan) -> None:
    """x [T, columns], weight [rows, columns] with one scale per 128x128 block, bias [rows], y [T,
    rows] contiguous. m: tokens per block (blocks share the weights through the cache). n: rows per
    tile, within one row of scales. split, waves: see `programs`."""
    m, n, warps = plan.m, plan.n, plan.warps
    (rows, columns) = weight.data.shape
    tokens = x.shape[0]
    device = y.device
    assert y.is_contiguous()
    blocks = -(-tokens // m)
    tiles = -(-rows // n)
    workers, align = programs(
        rows, columns, n, plan.split, plan.waves, multiprocessors(device), blocks
    )
    units = tiles * (columns // 128)
    workers = max(workers, -(-units * m // MOST_SCALES))
    chunks, chunk = chunks_of(units, workers, align, m, warps)
    # scales of long runs reduce the number of stages
    stages = min(plan.stages, (SHARED - shared_bytes(m, n, 0, chunks * chunk)) // ((n + m) * 128))
    assert stages > 1, "one is multiplied while another fills"
    shared = align * 128 < columns
    partials = (
        torch.empty(2 * workers * blocks, m, n, dtype=torch.float32, device=device)
        if shared
        else None
    )
    counters = zeroed_counters(device, tiles * blocks) if shared else None
    layout: Any = gl.NVMMASharedLayout(128, 8, rank=2)
    _stream_kernel[workers, blocks](
        TensorDescriptor.from_tensor(x.data, [m, 128], layout),
        x.scale,
        TensorDescriptor.from_tensor(weight.data, [n, 128], layout),
        weight.scale,
        bias,
        y,
        partials,
        counters,
        tokens,
        *x.scale.stride(),
        rows,
        rows,
        columns,
        m,
        n,
        stages,
        align,
        chunks,
        chunk,
        bias is not None,
        warps,
        num_warps=warps,
        **dependent(device),
    )
