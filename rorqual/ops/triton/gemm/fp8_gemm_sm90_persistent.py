"""Block-fp8 GEMM for many tokens on Hopper, in Gluon: one warp copies, two load scales, two
warpgroups multiply, or three (tiles of 192 tokens: two would take as long as for 256).

Programs are persistent; tiles and multiplication are those of fp8_gemm_sm90_loop.py. Copies run up
to STAGES units ahead, also across tiles. The last column of tiles may have 64 weight rows and then
takes three quarters of the time; it is processed last, by the programs with the least work. Scales
are loaded for four units at once.

The last chunk of 64 tokens begins 64 before the end: copies of which three quarters are out of
bounds made products of 160 tokens take up to 1.4 times as long as of 256.

Few tiles would leave multiprocessors without work: then SPLIT programs share the columns of a tile,
and half as many those of a narrow tile. All but the last to finish put their sums aside in fp32; it
waits for them, which are about to be there, and adds all in the order of the columns.

The bottleneck is shared memory, 128 bytes per cycle: a product of 64 x 128 x 32 reads 6 KB in its
64 cycles and a unit of 256 tokens writes 48 KB in 1024, together 144 bytes per cycle, so at most
0.89 of the tensor cores' rate; with 192 tokens 149 and 0.86, with 128 160 and 0.80, with products
of 64 x 64 x 32 (narrow tiles, and Triton's kernel with halves) 192 and 0.67.
"""

from __future__ import annotations

import torch
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
    N,
    assert_fits,
    leave,
    new_ring,
    padded,
    share,
    sums,
    tile_of,
    warpgroups,
)
from rorqual.ops.triton.gemm.linear_plan import PersistentPlan
from rorqual.ops.triton.runtime.launch import dependent, multiprocessors, zeroed_counters
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    let_next_start,
    next_stage,
    thread_barrier,
    wait_for_inputs,
)


@gluon.jit
def _parts_of(narrow, SPLIT: gl.constexpr):
    """Programs that share a tile."""
    return gl.where(narrow, max(1, SPLIT // 2), SPLIT)


@gluon.jit
def _part(high, ROWS: gl.constexpr, SPLIT: gl.constexpr):
    """(tile, token tile, weight tile, part, whether the tile is narrow) of this program, which has
    a part of one tile. Narrow tiles come last. At most 16 token tiles."""
    NARROW: gl.constexpr = ROWS % 128 > 0 and ROWS % 128 <= 64
    worker = gl.program_id(0)
    whole = high * (ROWS // 128 if NARROW else (ROWS + 127) // 128)
    narrow = worker >= whole * SPLIT
    parts = _parts_of(narrow, SPLIT)
    worker = worker - gl.where(narrow, whole * SPLIT, 0)
    tile = worker // parts + gl.where(narrow, whole, 0)
    return tile, tile % high, tile // high, worker % parts, narrow


@gluon.jit
def _share(high, ROWS: gl.constexpr, BLOCKS: gl.constexpr, SPLIT: gl.constexpr):
    """(units of this program, full rounds of all programs)"""
    if SPLIT > 1:
        _, _, _, _, narrow = _part(high, ROWS, SPLIT)
        return BLOCKS // _parts_of(narrow, SPLIT), high
    else:
        tiles, rounds = share(high, ROWS)
        return tiles * BLOCKS, rounds


@gluon.jit
def _unit_at(unit, rounds, high, ROWS: gl.constexpr, BLOCKS: gl.constexpr, SPLIT: gl.constexpr):
    """(token tile, weight tile, block of columns) of a program's unit."""
    if SPLIT > 1:
        _, m_tile, n_tile, part, narrow = _part(high, ROWS, SPLIT)
        return m_tile, n_tile, part * (BLOCKS // _parts_of(narrow, SPLIT)) + unit
    else:
        m_tile, n_tile = tile_of(unit // BLOCKS, rounds, high, ROWS)
        return m_tile, n_tile, unit % BLOCKS


@gluon.jit
def _start_of(first, tokens):
    """Where the chunk of 64 tokens from `first` on is read: the last one earlier, to be whole."""
    return gl.maximum(gl.minimum(first, tokens - 64), 0)


@gluon.jit
def _copy(
    x_tma,
    w_tma,
    ring,
    tokens,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    high = (tokens + M - 1) // M
    units, rounds = _share(high, ROWS, BLOCKS, SPLIT)
    # weights are copied before the wait for the previous kernel: no kernel of a step writes them
    for unit in range(gl.minimum(units, STAGES)):
        m_tile, n_tile, block = _unit_at(unit, rounds, high, ROWS, BLOCKS, SPLIT)
        mbarrier.expect(ring.full.index(unit), (M + 128) * 128)
        tma.async_copy_global_to_shared(
            w_tma, [n_tile * 128, block * 128], ring.full.index(unit), ring.weights.index(unit)
        )
    wait_for_inputs(DEPENDENT)
    stage = 0
    phase = 1
    for unit in range(units):
        m_tile, n_tile, block = _unit_at(unit, rounds, high, ROWS, BLOCKS, SPLIT)
        mbarrier.wait(ring.empty.index(stage), phase)
        more = unit >= STAGES
        mbarrier.expect(ring.full.index(stage), (M + 128) * 128, pred=more)
        for chunk in gl.static_range(M // 64):
            tma.async_copy_global_to_shared(
                x_tma,
                [_start_of(m_tile * M + 64 * chunk, tokens), block * 128],
                ring.full.index(stage),
                ring.inputs.index(stage * (M // 64) + chunk),
            )
        tma.async_copy_global_to_shared(
            w_tma,
            [n_tile * 128, block * 128],
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
    units,
    rounds,
    high,
    tokens,
    xs_row,
    xs_block,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """A unit's factors [padded(M)]: its tokens' scales times its weights' scale."""
    TOKENS: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    m_tile, n_tile, block = _unit_at(gl.minimum(unit, units - 1), rounds, high, ROWS, BLOCKS, SPLIT)
    place = gl.arange(0, padded(M), TOKENS)
    token = _start_of(m_tile * M + place // 64 * 64, tokens) + place % 64
    scale = gl.load(x_scale + block * xs_block + token * xs_row, mask=token < tokens, other=0.0)
    return scale * gl.load(w_scale + n_tile * BLOCKS + block)


@gluon.jit
def _scale(
    given,
    xs_row,
    xs_block,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    x_scale, w_scale, ring, tokens = given
    wait_for_inputs(DEPENDENT)
    high = (tokens + M - 1) // M
    units, rounds = _share(high, ROWS, BLOCKS, SPLIT)
    stage = 0
    free = 0
    phase = 0
    for unit in range(0, units, 4):
        a = _factors_of(
            x_scale, w_scale, unit, units, rounds, high, tokens, xs_row, xs_block, M, ROWS,
            BLOCKS, SPLIT,
        )  # fmt: skip
        b = _factors_of(
            x_scale, w_scale, unit + 1, units, rounds, high, tokens, xs_row, xs_block, M, ROWS,
            BLOCKS, SPLIT,
        )  # fmt: skip
        c = _factors_of(
            x_scale, w_scale, unit + 2, units, rounds, high, tokens, xs_row, xs_block, M, ROWS,
            BLOCKS, SPLIT,
        )  # fmt: skip
        d = _factors_of(
            x_scale, w_scale, unit + 3, units, rounds, high, tokens, xs_row, xs_block, M, ROWS,
            BLOCKS, SPLIT,
        )  # fmt: skip
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
def _with_bias(acc, bias, row_tile, ROWS: gl.constexpr, BIAS: gl.constexpr, ACC: gl.constexpr):
    if BIAS:
        row = row_tile * 128 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
        acc = acc + gl.load(bias + row, mask=row < ROWS, other=0.0).to(gl.float32)[None, :]
    return acc


@gluon.jit
def _store(y, acc, start, first, n_tile, tokens, ROWS: gl.constexpr, ACC: gl.constexpr):
    """Store rows from `first` on of those from `start` on."""
    token = start + gl.arange(0, acc.shape[0], gl.SliceLayout(1, ACC))
    row = n_tile * 128 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
    there = ((token >= first) & (token < tokens))[:, None] & (row < ROWS)[None, :]
    gl.store(
        y + token.to(gl.int64)[:, None] * ROWS + row[None, :],
        acc.to(y.dtype.element_ty),
        mask=there,
    )


@gluon.jit
def _send(y, y_tma, out, acc, start, first, n_tile, tokens, ROWS: gl.constexpr):
    """Store rows from `first` on of those from `start` on: with a bulk copy, which clips at the
    ends, if that is all of them."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    tma.store_wait(0)
    thread_barrier()  # the previous copy has read the buffer
    out.store(acc.to(out.dtype))
    if start < first:
        thread_barrier()  # all have written
        _store(y, out.load(LINES), start, first, n_tile, tokens, ROWS, LINES)
    else:
        fence_async_shared()
        tma.async_copy_shared_to_global(y_tma, [first, n_tile * 128], out)


@gluon.jit
def _add_up(
    partials,
    counters,
    acc,
    tile,
    part,
    SPLIT: gl.constexpr,
    PARTS: gl.constexpr,
    WHO: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """(The sums of all parts of a chunk, whether this is the last of its programs, which alone has
    them)."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    token = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    row = gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
    chunk = tile * 2 + WHO
    places = partials + (chunk * (SPLIT * 64 * 128) + token * WIDTH)[:, None] + row[None, :]
    begun = counters + 2 * chunk
    written = begun + 1
    last = gl.atomic_add(begun, 1, sem="relaxed") == PARTS - 1
    total = acc
    if last:
        while gl.atomic_add(written, 0, sem="acquire") < PARTS - 1:
            pass
        total = gl.full([64, WIDTH], 0.0, gl.float32, ACC)
        for other in range(part):
            total = total + gl.load(places + other * (64 * 128), cache_modifier=".cg")
        total = total + acc
        for other in range(part + 1, PARTS):
            total = total + gl.load(places + other * (64 * 128), cache_modifier=".cg")
        gl.store(begun, 0)
        gl.store(written, 0)
    else:
        gl.store(places + part * (64 * 128), acc)
        thread_barrier()  # all threads have stored before it is counted
        gl.atomic_add(written, 1, sem="release")
    return total, last


@gluon.jit
def _put_chunk(
    y,
    y_tma,
    out,
    bias,
    acc,
    first,
    n_tile,
    tokens,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Store 64 tokens' sums over WIDTH weight rows."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    acc = _with_bias(acc, bias, n_tile, ROWS, BIAS, ACC)
    start = _start_of(first, tokens)
    if WIDTH == 128:
        _send(y, y_tma, out, acc, start, first, n_tile, tokens, ROWS)
    else:
        _store(y, acc, start, first, n_tile, tokens, ROWS, ACC)


@gluon.jit
def _tile(
    y,
    y_tma,
    out,
    bias,
    partials,
    counters,
    ring,
    unit,
    tile,
    part,
    m_tile,
    n_tile,
    tokens,
    stage,
    phase,
    turn,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
):
    """A warpgroup's part of a tile or of the program's part of it, which starts with the program's
    unit `unit`."""
    PARTS: gl.constexpr = SPLIT if WIDTH == 128 else max(1, SPLIT // 2)
    TWO: gl.constexpr = M == 256
    low, high, stage, phase, turn = sums(
        ring, unit, stage, phase, turn, 1, tokens, M, BLOCKS // PARTS, STAGES, WHO, TWO, WIDTH
    )
    first = m_tile * M + WHO * 64
    last = first < tokens
    if PARTS > 1:  # noqa: SIM102 (known when compiled)
        if last:
            low, last = _add_up(partials, counters, low, tile, part, SPLIT, PARTS, WHO, WIDTH)
    if last:  # without a branch here the compiler spills in the loop
        _put_chunk(y, y_tma, out, bias, low, first, n_tile, tokens, ROWS, WIDTH, BIAS)
        if TWO:
            _put_chunk(y, y_tma, out, bias, high, first + 128, n_tile, tokens, ROWS, WIDTH, BIAS)
    return stage, phase, turn


@gluon.jit
def _multiply(
    given,
    out,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One of the warpgroups."""
    bias, y, y_tma, partials, counters, ring, tokens = given
    wait_for_inputs(DEPENDENT)
    high = (tokens + M - 1) // M
    stage = 0
    phase = 0
    turn = 1 if WHO == 0 else 0
    tile = 0
    part = 0
    if SPLIT > 1:
        tile, m_tile, n_tile, part, _ = _part(high, ROWS, SPLIT)
        tiles = 1
        rounds = 1
    else:
        tiles, rounds = share(high, ROWS)
    for done in range(tiles):
        if SPLIT == 1:
            m_tile, n_tile = tile_of(done, rounds, high, ROWS)
        if ROWS % 128 > 0 and ROWS % 128 <= 64 and n_tile * 128 + 128 > ROWS:
            stage, phase, turn = _tile(
                y, y_tma, out, bias, partials, counters, ring, done * BLOCKS, tile, part, m_tile,
                n_tile, tokens, stage, phase, turn, M, ROWS, BLOCKS, SPLIT, STAGES, WHO, 64, BIAS,
            )  # fmt: skip
        else:
            stage, phase, turn = _tile(
                y, y_tma, out, bias, partials, counters, ring, done * BLOCKS, tile, part, m_tile,
                n_tile, tokens, stage, phase, turn, M, ROWS, BLOCKS, SPLIT, STAGES, WHO, 128, BIAS,
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
    partials,
    counters,
    tokens,
    xs_row,
    xs_block,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    M: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    COPIER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: at most one program per tile, or if SPLIT > 1 one per part of a tile. M: 128, 192 or
    256 tokens per tile. partials: [tiles, 2, SPLIT, 64, 128] fp32. counters: of each tile's two
    chunks of 64 tokens, how many parts are finished and how many of them are written, zero before
    and after."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    WARPGROUPS: gl.constexpr = warpgroups(M)
    outs = gl.allocate_shared_memory(y.dtype.element_ty, [WARPGROUPS, 64, 128], y_tma.layout)
    let_next_start(DEPENDENT)
    ring = new_ring(x_tma, w_tma, M, STAGES)
    first = outs.index(0)
    second = outs.index(1)
    given = (bias, y, y_tma, partials, counters, ring, tokens)
    scales = (x_scale, w_scale, ring, tokens)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (given, first, M, ROWS, BLOCKS, SPLIT, STAGES, 0, BIAS, DEPENDENT)),
                (_multiply, (given, second, M, ROWS, BLOCKS, SPLIT, STAGES, 1, BIAS, DEPENDENT)),
                (_copy, (x_tma, w_tma, ring, tokens, M, ROWS, BLOCKS, SPLIT, STAGES, DEPENDENT)),
                (_scale, (scales, xs_row, xs_block, M, ROWS, BLOCKS, SPLIT, STAGES, DEPENDENT)),
            ],
            [4, 1, 2],
            [MULTIPLIER, COPIER, COPIER],
        )
    else:
        third = outs.index(2)
        gl.warp_specialize(
            [
                (_multiply, (given, first, M, ROWS, BLOCKS, SPLIT, STAGES, 0, BIAS, DEPENDENT)),
                (_multiply, (given, second, M, ROWS, BLOCKS, SPLIT, STAGES, 1, BIAS, DEPENDENT)),
                (_multiply, (given, third, M, ROWS, BLOCKS, SPLIT, STAGES, 2, BIAS, DEPENDENT)),
                (_copy, (x_tma, w_tma, ring, tokens, M, ROWS, BLOCKS, SPLIT, STAGES, DEPENDENT)),
                (_scale, (scales, xs_row, xs_block, M, ROWS, BLOCKS, SPLIT, STAGES, DEPENDENT)),
            ],
            [4, 4, 1, 2],
            [MULTIPLIER, MULTIPLIER, COPIER, COPIER],
        )


def fits(weight: Weight, y: Tensor) -> bool:
    """Bulk copies of y need rows of a multiple of 16 bytes; its buffer has 16-bit values."""
    return y.element_size() == 2 and weight.data.shape[0] % 8 == 0


def launch(
    x: Quantized, weight: Weight, bias: Tensor | None, y: Tensor, plan: PersistentPlan
) -> None:
    """x [T, columns], weight [rows, columns] with one scale per 128x128 block, bias [rows], y [T,
    rows] contiguous. m: 128, 192 or 256."""
    m, stages = plan.m, plan.stages
    multiplier, copier, average = REGISTERS[warpgroups(m)]
    (tokens, columns) = x.shape
    rows = weight.data.shape[0]
    device = y.device
    assert y.is_contiguous()
    assert_fits(m, stages)
    plain = bulk_layout(8)
    wide = bulk_layout(16)
    high = -(-tokens // m)
    tiles = high * -(-rows // N)
    programs = min(tiles, multiprocessors(device))
    partials = counters = None
    split, shared = plan.parts(rows, columns, high, multiprocessors(device))
    if split > 1:
        programs = shared
        partials = torch.empty(tiles, 2, split, 64, N, dtype=torch.float32, device=device)
        counters = zeroed_counters(device, 4 * tiles)
    _tall_kernel[programs,](
        TensorDescriptor.from_tensor(x.data, [64, 128], plain),
        x.scale,
        TensorDescriptor.from_tensor(weight.data, [N, 128], plain),
        weight.scale,
        bias,
        y,
        TensorDescriptor.from_tensor(y, [64, N], wide),
        partials,
        counters,
        tokens,
        *x.scale.stride(),
        rows,
        columns,
        m,
        split,
        stages,
        bias is not None,
        multiplier,
        copier,
        num_warps=4,
        maxnreg=average,
        **dependent(device),
    )
