"""Block-fp8 products of many tokens on Hopper, in Gluon: fp8_gemm_sm90_persistent.py's, whose
programs end together whatever the number of tiles is, and whose scales come through shared memory.

All tiles but those of the last round and the one before are whole rounds of programs. What is left
is cut into units, a tile's product over 128 columns, and every program takes an equal run of them
(stream-K), before its whole tiles. What a program holds of a tile that others share goes to memory,
and the last of them to finish adds the parts up in the order of columns: nobody waits for another
program, and a sum depends on shape and configuration alone. Each of the two warpgroups does so for
its own tokens.

Two warps fetch scales, four units of them at once, and leave their products where the warpgroups
that multiply find them: fetched by those, a unit ahead, they arrive behind the bulk copies of all
units after it, later than a unit of 128 tokens takes.
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

from rorqual.ops.activation import Quantized
from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm.fp8_gemm_sm90_persistent import (
    SHARED,
    N,
    corner_of,
    send,
    store,
    with_bias,
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

REGISTERS = (232, 40)  # of a thread that multiplies, of one that copies or fetches scales
KEPT_BYTES = 2048
FACTORS = gl.constexpr(
    KEPT_BYTES // 4
)  # what sums are multiplied by: so many are kept, of two units or of four


class Ring(NamedTuple):
    """Between the warps that fetch and the two warpgroups that multiply: stages of both sides'
    tiles, `factors` of the latest units, and barriers that tell when a stage and its factors are
    full and when the stage is empty. turns: which warpgroup may begin a product."""

    inputs: Any
    weights: Any
    factors: Any
    full: Any
    empty: Any
    turns: Any


class UnitRun(NamedTuple):
    """What a program does: `units` units from `first` on of `cut` tiles that are cut into units,
    which come behind `rounds` whole tiles a program; then its whole tiles."""

    first: Any
    units: Any
    cut: Any
    rounds: Any
    high: Any


@gluon.jit
def _first_unit(worker, workers, cut, BLOCKS: gl.constexpr):
    return cut * BLOCKS * worker // workers


@gluon.jit
def _worker_of(unit, workers, cut, BLOCKS: gl.constexpr):
    """Whose unit it is: the inverse of _first_unit."""
    return ((unit + 1) * workers - 1) // (cut * BLOCKS)


@gluon.jit
def run_of(tokens, M: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr, CUT: gl.constexpr):
    """A program's; without CUT the tiles of the last round stay whole and begin with the last
    program."""
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    high = (tokens + M - 1) // M
    tiles = high * ((ROWS + 127) // 128)
    rounds = tiles // workers
    if CUT:
        if rounds * workers < tiles:
            rounds = gl.maximum(rounds - 1, 0)
        cut = tiles - rounds * workers
        first = _first_unit(worker, workers, cut, BLOCKS)
        units = _first_unit(worker + 1, workers, cut, BLOCKS) - first
    else:
        cut = tiles - rounds * workers
        first = (workers - 1 - worker) * BLOCKS
        units = gl.where(first < cut * BLOCKS, BLOCKS, 0)
    return UnitRun(first, units, cut, rounds, high)


@gluon.jit
def unit_at(index, run, ROWS: gl.constexpr, BLOCKS: gl.constexpr):
    """(token tile, weight tile, block of columns) of a program's unit."""
    workers = gl.num_programs(0)
    inside = index - run.units
    unit = gl.where(
        inside < 0,
        run.rounds * workers * BLOCKS + run.first + index,
        (inside // BLOCKS * workers + gl.program_id(0)) * BLOCKS + inside % BLOCKS,
    )
    m_tile, n_tile = corner_of(unit // BLOCKS, run.high, ROWS)
    return m_tile, n_tile, unit % BLOCKS


@gluon.jit
def _copy(
    x_tma,
    w_tma,
    ring,
    tokens,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    run = run_of(tokens, M, ROWS, BLOCKS, CUT)
    total = run.units + run.rounds * BLOCKS
    # weights do not wait for the kernel before: none of a step writes them
    for index in range(gl.minimum(total, STAGES)):
        m_tile, n_tile, block = unit_at(index, run, ROWS, BLOCKS)
        mbarrier.expect(ring.full.index(index), (M + 128) * 128)
        tma.async_copy_global_to_shared(
            w_tma, [n_tile * 128, block * 128], ring.full.index(index), ring.weights.index(index)
        )
    wait_for_inputs(DEPENDENT)
    stage = 0
    phase = 1
    for index in range(total):
        m_tile, n_tile, block = unit_at(index, run, ROWS, BLOCKS)
        mbarrier.wait(ring.empty.index(stage), phase)
        more = index >= STAGES
        mbarrier.expect(ring.full.index(stage), (M + 128) * 128, pred=more)
        tma.async_copy_global_to_shared(
            x_tma, [m_tile * M, block * 128], ring.full.index(stage), ring.inputs.index(stage)
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
    index,
    run,
    total,
    tokens,
    xs_row,
    xs_block,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """[M] of a unit: its tokens' scales, times that of its weights."""
    TOKENS: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    m_tile, n_tile, block = unit_at(gl.minimum(index, total - 1), run, ROWS, BLOCKS)
    token = m_tile * M + gl.arange(0, M, TOKENS)
    scale = gl.load(x_scale + block * xs_block + token * xs_row, mask=token < tokens, other=0.0)
    return scale * gl.load(w_scale + n_tile * BLOCKS + block)


@gluon.jit
def _leave(ring, factors, index, total, stage, free, phase, M: gl.constexpr, STAGES: gl.constexpr):
    """A unit's factors in the place of those of the unit FACTORS // M before, once that unit is
    done with. free, phase: its stage and its phase."""
    KEPT: gl.constexpr = FACTORS // M
    if index < total:
        if index >= KEPT:
            mbarrier.wait(ring.empty.index(free), phase)
            free, phase = next_stage(free, phase, STAGES)
        ring.factors.index(index % KEPT).store(factors)
        thread_barrier()
        mbarrier.arrive(ring.full.index(stage), count=1)
        stage = stage + 1
        if stage == STAGES:
            stage = 0
    return stage, free, phase


@gluon.jit
def _scale(
    x_scale,
    w_scale,
    ring,
    tokens,
    xs_row,
    xs_block,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    run = run_of(tokens, M, ROWS, BLOCKS, CUT)
    total = run.units + run.rounds * BLOCKS
    stage = 0
    free = 0
    phase = 0
    for index in range(0, total, 4):
        a = _factors_of(
            x_scale, w_scale, index, run, total, tokens, xs_row, xs_block, M, ROWS, BLOCKS
        )
        b = _factors_of(
            x_scale, w_scale, index + 1, run, total, tokens, xs_row, xs_block, M, ROWS, BLOCKS
        )
        c = _factors_of(
            x_scale, w_scale, index + 2, run, total, tokens, xs_row, xs_block, M, ROWS, BLOCKS
        )
        d = _factors_of(
            x_scale, w_scale, index + 3, run, total, tokens, xs_row, xs_block, M, ROWS, BLOCKS
        )
        stage, free, phase = _leave(ring, a, index, total, stage, free, phase, M, STAGES)
        stage, free, phase = _leave(ring, b, index + 1, total, stage, free, phase, M, STAGES)
        stage, free, phase = _leave(ring, c, index + 2, total, stage, free, phase, M, STAGES)
        stage, free, phase = _leave(ring, d, index + 3, total, stage, free, phase, M, STAGES)


@gluon.jit
def _begin(ring, xt, wt, done, never, turn, WHO: gl.constexpr, TURNS: gl.constexpr):
    """A product under way, which takes the registers of `done`. TURNS: the two warpgroups begin
    theirs by turns, so that one's tensor cores' work covers the other's sums."""
    if TURNS:
        mbarrier.wait(ring.turns.index(WHO), turn)
    part = warpgroup_mma(xt, wt, done, use_acc=never, is_async=True)
    if TURNS:
        mbarrier.arrive(ring.turns.index(1 - WHO), count=1)
    return part, turn ^ 1


@gluon.jit
def _turn(
    ring,
    product,
    spare,
    unit,
    stage,
    phase,
    never,
    M: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """Begins the product of the next unit, then waits for `product`, that of this unit, and gives
    its stage away."""
    coming, turned = next_stage(stage, phase, STAGES)
    mbarrier.wait(ring.full.index(coming), turned)
    begun = _product(ring, coming, spare, never, M, WHO, WIDTH)
    factors = _factors(ring, unit, 0, M, WHO, WIDTH)
    done = warpgroup_mma_wait(1, deps=[product])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return begun, done, factors, coming, turned


@gluon.jit
def _product(ring, stage, spare, never, M: gl.constexpr, WHO: gl.constexpr, WIDTH: gl.constexpr):
    """Of a warpgroup's 64 tokens, under way. Of `spare` nothing but its registers is used."""
    return warpgroup_mma(
        ring.inputs.index(stage).slice(WHO * (M // 2), 64),
        ring.weights.index(stage).slice(0, WIDTH).permute((1, 0)),
        spare,
        use_acc=never,
        is_async=True,
    )


@gluon.jit
def _factors(
    ring, unit, CHUNK: gl.constexpr, M: gl.constexpr, WHO: gl.constexpr, WIDTH: gl.constexpr
):
    """[64, 1]: of the tokens of a warpgroup's chunk."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    chunks = ring.factors._reinterpret(gl.float32, [FACTORS // 64, 64], FLAT)
    chunk = unit % (FACTORS // M) * (M // 64) + WHO * (M // 128) + CHUNK
    return chunks.index(chunk).load(gl.SliceLayout(1, ACC))[:, None]


@gluon.jit
def _at_once(x):
    """x, computed before any product or wait behind this: put off, it would hold the registers that
    the next product takes."""
    return gl.inline_asm_elementwise("", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def overlapping_sums(
    ring,
    unit,
    units,
    stage,
    phase,
    tokens,
    M: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """As sums_of, of 64 tokens: the product of the next unit is under way while that of this one
    is scaled and added."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    never = tokens < 0
    stop = unit + units
    acc = gl.full([64, WIDTH], 0.0, gl.float32, ACC)
    # Two products' registers take turns, each under the same name where a turn of the loop begins
    # and ends: else it would be copied, and waited for.
    spare = acc
    mbarrier.wait(ring.full.index(stage), phase)
    part = _product(ring, stage, acc, never, M, WHO, WIDTH)
    while unit + 2 < stop:
        other, done, now, stage, phase = _turn(
            ring, part, spare, unit, stage, phase, never, M, STAGES, WHO, WIDTH
        )
        acc = _at_once(acc + done * now)
        unit = unit + 1  # not +=: tests run this on tensors, which that would change in place
        part, spare, now, stage, phase = _turn(
            ring, other, done, unit, stage, phase, never, M, STAGES, WHO, WIDTH
        )
        acc = _at_once(acc + spare * now)
        unit = unit + 1
    if unit + 1 < stop:
        other, done, now, stage, phase = _turn(
            ring, part, spare, unit, stage, phase, never, M, STAGES, WHO, WIDTH
        )
        acc = _at_once(acc + done * now)
        unit = unit + 1
        now = _factors(ring, unit, 0, M, WHO, WIDTH)
        done = warpgroup_mma_wait(0, deps=[other])
    else:
        now = _factors(ring, unit, 0, M, WHO, WIDTH)
        done = warpgroup_mma_wait(0, deps=[part])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    acc = _at_once(acc + done * now)
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def sums_of(
    ring,
    index,
    units,
    stage,
    phase,
    turn,
    tokens,
    M: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    WIDTH: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Of a warpgroup's 64 tokens or, with M of 256, twice 64, over WIDTH weight rows and `units`
    units from the program's unit `index` on."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    TWO: gl.constexpr = M == 256
    SKIP: gl.constexpr = WHO * (M // 2)
    zero = gl.full([64, WIDTH], 0.0, gl.float32, ACC)
    low = zero
    high = zero
    done = zero
    # so that products take the registers of the last one's result: the compiler finds no room
    # otherwise
    never = tokens < 0
    for unit in range(index, index + units):
        mbarrier.wait(ring.full.index(stage), phase)
        xt = ring.inputs.index(stage)
        wt = ring.weights.index(stage).slice(0, WIDTH).permute((1, 0))
        part, turn = _begin(ring, xt.slice(SKIP, 64), wt, done, never, turn, WHO, TURNS)
        low_now = _factors(ring, unit, 0, M, WHO, WIDTH)
        if TWO:
            high_now = _factors(ring, unit, 1, M, WHO, WIDTH)
            done = warpgroup_mma_wait(0, deps=[part])
            low = low + done * low_now
            part, turn = _begin(ring, xt.slice(SKIP + 64, 64), wt, done, never, turn, WHO, TURNS)
        done = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        if TWO:
            high = high + done * high_now
        else:
            low = low + done * low_now
        stage, phase = next_stage(stage, phase, STAGES)
    return low, high, stage, phase, turn


@gluon.jit
def _place_of(
    partials, slot, CHUNK: gl.constexpr, M: gl.constexpr, WIDTH: gl.constexpr, ACC: gl.constexpr
):
    """Of 64 tokens' sums in a slot, [M // 64, columns // 8, 64, 8]: 32 lanes write whole lines."""
    token = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    row = gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
    inside = (token * 8)[:, None] + (row // 8 * 512 + row % 8)[None, :]
    return partials + (slot * (M // 64) + CHUNK).to(gl.int64) * 8192 + inside


@gluon.jit
def _added_up(
    partials,
    tile,
    cut,
    CHUNK: gl.constexpr,
    M: gl.constexpr,
    BLOCKS: gl.constexpr,
    WIDTH: gl.constexpr,
    ACC: gl.constexpr,
):
    """The parts of a cut tile, in the order of their columns, two at a time on their way."""
    workers = gl.num_programs(0)
    begin = tile * BLOCKS
    last = _worker_of(begin + BLOCKS - 1, workers, cut, BLOCKS)
    total = gl.full([64, WIDTH], 0.0, gl.float32, ACC)
    for worker in range(_worker_of(begin, workers, cut, BLOCKS), last + 1, 2):
        slot = 2 * worker + (_first_unit(worker, workers, cut, BLOCKS) <= begin).to(gl.int32)
        place = _place_of(partials, slot, CHUNK, M, WIDTH, ACC)
        one = gl.load(place, cache_modifier=".cg")
        # any but the first begins inside the tile
        more = gl.minimum(last - worker, 1)
        next_slot = gl.where(more > 0, 2 * worker + 2, slot)
        next_place = _place_of(partials, next_slot, CHUNK, M, WIDTH, ACC)
        two = gl.load(next_place, cache_modifier=".cg")
        total = total + one
        total = gl.where(more > 0, total + two, total)
    return total


@gluon.jit
def _finish(
    low,
    high,
    y,
    y_tma,
    out,
    bias,
    partials,
    counters,
    run,
    index,
    units,
    m_tile,
    n_tile,
    tokens,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    WHO: gl.constexpr,
    WIDTH: gl.constexpr,
    CUT: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Stores a warpgroup's sums of a whole tile; of a part, leaves them to the last program to
    finish, which adds all parts up and stores these."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    FIRST: gl.constexpr = WHO * (M // 128)  # of the tile's chunks of 64 tokens
    TWO: gl.constexpr = M == 256
    first = m_tile * M + FIRST * 64
    complete = units == BLOCKS
    if CUT:  # noqa: SIM102 - else there is nothing to compile
        if units < BLOCKS:
            tile = (run.first + index) // BLOCKS
            is_head = (run.first + index) % BLOCKS == 0
            slot = 2 * gl.program_id(0) + is_head.to(gl.int32)
            gl.store(_place_of(partials, slot, FIRST, M, WIDTH, ACC), low)
            if TWO:
                gl.store(_place_of(partials, slot, FIRST + 1, M, WIDTH, ACC), high)
            thread_barrier()  # all is stored before one thread counts it in
            counter = counters + 2 * tile + WHO
            if gl.atomic_add(counter, units, sem="acq_rel") + units == BLOCKS:
                gl.store(counter, 0)
                low = _added_up(partials, tile, run.cut, FIRST, M, BLOCKS, WIDTH, ACC)
                if TWO:
                    high = _added_up(partials, tile, run.cut, FIRST + 1, M, BLOCKS, WIDTH, ACC)
                complete = units < BLOCKS
    if complete:
        low = with_bias(low, bias, n_tile, ROWS, BIAS, ACC)
        if WIDTH == 128:
            send(y_tma, out, low, first, n_tile)
        else:
            store(y, low, first, n_tile, tokens, ROWS, ACC)
        if TWO:
            high = with_bias(high, bias, n_tile, ROWS, BIAS, ACC)
            if WIDTH == 128:
                send(y_tma, out, high, first + 64, n_tile)
            else:
                store(y, high, first + 64, n_tile, tokens, ROWS, ACC)


@gluon.jit
def _work(
    y,
    y_tma,
    out,
    bias,
    partials,
    counters,
    ring,
    run,
    index,
    units,
    m_tile,
    n_tile,
    tokens,
    stage,
    phase,
    turn,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    WIDTH: gl.constexpr,
    CUT: gl.constexpr,
    TURNS: gl.constexpr,
    OVERLAP: gl.constexpr,
    BIAS: gl.constexpr,
):
    """A warpgroup's share of a tile, or of a part of one."""
    if OVERLAP and M == 128:
        low, stage, phase = overlapping_sums(
            ring, index, units, stage, phase, tokens, M, STAGES, WHO, WIDTH
        )
        high = low
    else:
        low, high, stage, phase, turn = sums_of(
            ring, index, units, stage, phase, turn, tokens, M, STAGES, WHO, WIDTH, TURNS
        )
    _finish(
        low, high, y, y_tma, out, bias, partials, counters, run, index, units, m_tile, n_tile,
        tokens, M, ROWS, BLOCKS, WHO, WIDTH, CUT, BIAS,
    )  # fmt: skip
    return stage, phase, turn


@gluon.jit
def _multiply(
    bias,
    y,
    y_tma,
    out,
    partials,
    counters,
    ring,
    tokens,
    M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    CUT: gl.constexpr,
    TURNS: gl.constexpr,
    OVERLAP: gl.constexpr,
    BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One of the two warpgroups."""
    wait_for_inputs(DEPENDENT)
    run = run_of(tokens, M, ROWS, BLOCKS, CUT)
    total = run.units + run.rounds * BLOCKS
    stage = 0
    phase = 0
    turn = 1 - WHO
    index = 0
    while index < total:
        m_tile, n_tile, block = unit_at(index, run, ROWS, BLOCKS)
        units = BLOCKS - block
        if index < run.units:
            units = gl.minimum(units, run.units - index)
        if ROWS % 128 > 0 and ROWS % 128 <= 64 and n_tile * 128 + 128 > ROWS:
            stage, phase, turn = _work(
                y, y_tma, out, bias, partials, counters, ring, run, index, units, m_tile, n_tile,
                tokens, stage, phase, turn, M, ROWS, BLOCKS, STAGES, WHO, 64, CUT, TURNS, OVERLAP,
                BIAS,
            )  # fmt: skip
        else:
            stage, phase, turn = _work(
                y, y_tma, out, bias, partials, counters, ring, run, index, units, m_tile, n_tile,
                tokens, stage, phase, turn, M, ROWS, BLOCKS, STAGES, WHO, 128, CUT, TURNS, OVERLAP,
                BIAS,
            )  # fmt: skip
        index = index + units  # not +=: tests run this on tensors
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "xs_block"])
def _balanced_kernel(
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
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
    TURNS: gl.constexpr,
    OVERLAP: gl.constexpr,
    BIAS: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    COPIER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: any number of programs up to one a tile or, with CUT, one a unit. M: 128 or 256 tokens
    a tile. partials: two slots [M, 128] a program, of a tile it begins inside and of one it ends
    inside; counters: units done of each cut tile by each warpgroup, zero before and after."""
    BLOCKS: gl.constexpr = COLUMNS // 128
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, M, 128], x_tma.layout)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], w_tma.layout)
    outs = gl.allocate_shared_memory(y.dtype.element_ty, [2, 64, 128], y_tma.layout)
    factors = gl.allocate_shared_memory(gl.float32, [FACTORS // M, M], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    ring = Ring(inputs, weights, factors, full, empty, turns)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    bias, y, y_tma, outs.index(0), partials, counters, ring, tokens,
                    M, ROWS, BLOCKS, STAGES, 0, CUT, TURNS, OVERLAP, BIAS, DEPENDENT,
                ),
            ),
            (
                _multiply,
                (
                    bias, y, y_tma, outs.index(1), partials, counters, ring, tokens,
                    M, ROWS, BLOCKS, STAGES, 1, CUT, TURNS, OVERLAP, BIAS, DEPENDENT,
                ),
            ),
            (_copy, (x_tma, w_tma, ring, tokens, M, ROWS, BLOCKS, STAGES, CUT, DEPENDENT)),
            (
                _scale,
                (
                    x_scale, w_scale, ring, tokens, xs_row, xs_block,
                    M, ROWS, BLOCKS, STAGES, CUT, DEPENDENT,
                ),
            ),
        ],
        [4, 1, 2],
        [MULTIPLIER, COPIER, COPIER],
    )  # fmt: skip


def programs(tiles: int, units: int, split: int, processors: int) -> tuple[int, bool]:
    """(programs, whether tiles are cut) of so many tiles of `units` blocks of columns: one a
    multiprocessor, at most `split` a tile on average."""
    workers = min(processors, tiles * min(split, units))
    return workers, split > 1 and tiles % workers > 0


def launch(
    x: Quantized, weight: Weight, bias: Tensor | None, y: Tensor, plan: PersistentPlan
) -> None:
    """As fp8_gemm_sm90_persistent.launch."""
    m, stages = plan.m, plan.stages
    (tokens, columns) = x.shape
    rows = weight.data.shape[0]
    device = y.device
    assert y.is_contiguous()
    assert m in (128, 256), m
    assert stages * m * 4 >= KEPT_BYTES, "no factors are kept for longer than their stage"
    assert (m + N) * 128 * stages + 4 * 64 * N + KEPT_BYTES <= SHARED, (m, stages)
    plain = bulk_layout(8)
    wide = bulk_layout(16)
    tiles = -(-tokens // m) * -(-rows // N)
    workers, cut = programs(tiles, columns // 128, plan.split, multiprocessors(device))
    partials = None
    counters = None
    if cut:
        partials = torch.empty(2 * workers, m, N, dtype=torch.float32, device=device)
        counters = zeroed_counters(device, 4 * workers)
    _balanced_kernel[workers,](
        TensorDescriptor.from_tensor(x.data, [m, 128], plain),
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
        stages,
        cut,
        plan.loop == "turns",
        plan.loop == "overlap",
        bias is not None,
        *REGISTERS,
        num_warps=4,
        maxnreg=168,
        **dependent(device),
    )
