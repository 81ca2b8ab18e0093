"""Main loop of the persistent block-fp8 kernel on Hopper (fp8_gemm_sm90_persistent.py): the order
of tiles (also used by moe/grouped_gemm_sm90_fp8.py), the stages between the copying warps and the
two or three multiplying warpgroups, and the multiplication.

A program processes tiles of M tokens and 128 weight rows, one unit of 128 columns at a time. Chunks
of 64 tokens alternate between the warpgroups, which start their products in turn: while one
promotes its partial sums to fp32, the tensor cores work for another.

The factors of sums (a token's scale times the weights' scale) are written to shared memory by two
dedicated warps. Fetched by the warpgroups one unit ahead, scales would arrive after the bulk copies
of all later units, which takes longer than a unit of 128 tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rorqual.ops.triton.runtime.sm90_pipeline import next_stage, thread_barrier

N = 128  # weight rows per tile
SHARED = 227 * 1024 - 1024  # bytes of stages and of the output buffer
# by multiplying warpgroups: per thread of theirs, of copying and scale warps, and of all on average
REGISTERS = {2: (232, 40, 168), 3: (160, 32, 128)}
KEPT_BYTES = 2048
# number of factors in shared memory: of two units or of four
FACTORS = gl.constexpr(KEPT_BYTES // 4)


@gluon.constexpr_function
def warpgroups(m):
    """Multiplying warpgroups of tiles of m tokens: two with three chunks would take as long as with
    four."""
    return 3 if m == 192 else 2


def assert_fits(m: int, stages: int) -> None:
    """Shared memory in bytes for tiles of m tokens with this many stages, and 64 x 128 16-bit
    results per warpgroup."""
    assert m in (128, 192, 256), m
    assert stages * m * 4 >= KEPT_BYTES, "no factors are kept for longer than their stage"
    results = warpgroups(m) * 64 * N * 2
    assert (m + N) * 128 * stages + results + KEPT_BYTES <= SHARED, (m, stages)


@gluon.constexpr_function
def padded(m):
    """Factors of a unit of m tokens: a power of two."""
    return 128 if m == 128 else 256


class Ring(NamedTuple):
    """Buffers between the copying warps and the multiplying warpgroups: stages with tiles of
    both operands, `factors` of the latest units, and barriers for full stages, full factors and
    empty stages. turns: barriers for which warpgroup may start a product."""

    inputs: Any
    weights: Any
    factors: Any
    full: Any
    empty: Any
    turns: Any


@gluon.jit
def new_ring(x_tma, w_tma, M: gl.constexpr, STAGES: gl.constexpr):
    """Allocate in shared memory and initialize the barriers."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CHUNKS: gl.constexpr = M // 64
    WARPGROUPS: gl.constexpr = warpgroups(M)
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * CHUNKS, 64, 128], x_tma.layout)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], w_tma.layout)
    factors = gl.allocate_shared_memory(gl.float32, [FACTORS // padded(M), padded(M)], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    return Ring(inputs, weights, factors, full, empty, turns)


@gluon.jit
def share(high, ROWS: gl.constexpr):
    """(tiles of this program, full rounds of all programs), for `high` token tiles."""
    tiles = high * ((ROWS + 127) // 128)
    workers = gl.num_programs(0)
    return tiles // workers + (workers - 1 - gl.program_id(0) < tiles % workers).to(
        gl.int32
    ), tiles // workers


@gluon.jit
def place_of(tile, high, ROWS: gl.constexpr):
    """(token tile, weight tile) of tile number `tile`. 16 token tiles iterate over all weight tiles
    together, so that both stay in the cache."""
    PER_GROUP: gl.constexpr = 16 * ((ROWS + 127) // 128)
    group = tile // PER_GROUP
    inside = tile % PER_GROUP
    height = gl.minimum(high - group * 16, 16)
    return group * 16 + inside % height, inside // height


@gluon.jit
def tile_of(turn, rounds, high, ROWS: gl.constexpr):
    """(token tile, weight tile) of a turn. The last round, with fewer tiles than programs, starts
    with the last program."""
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    tile = turn * workers + gl.where(turn < rounds, worker, workers - 1 - worker)
    return place_of(tile, high, ROWS)


@gluon.jit
def leave(ring, factors, unit, there, stage, free, phase, M: gl.constexpr, STAGES: gl.constexpr):
    """Write a unit's factors, [padded(M)], over those of the unit FACTORS // padded(M) earlier,
    once that unit is done; a no-op if not `there`. free, phase: that unit's stage barrier and its
    phase."""
    KEPT: gl.constexpr = FACTORS // padded(M)
    if there:
        if unit >= KEPT:
            mbarrier.wait(ring.empty.index(free), phase)
            free, phase = next_stage(free, phase, STAGES)
        ring.factors.index(unit % KEPT).store(factors)
        thread_barrier()
        mbarrier.arrive(ring.full.index(stage), count=1)
        stage = stage + 1
        if stage == STAGES:
            stage = 0
    return stage, free, phase


@gluon.jit
def _begin(ring, xt, wt, done, never, turn, by_turns, WHO: gl.constexpr, M: gl.constexpr):
    """A product in flight, which uses the registers of `done`."""
    mbarrier.wait(ring.turns.index(WHO), turn, pred=by_turns > 0)
    part = warpgroup_mma(xt, wt, done, use_acc=never, is_async=True)
    mbarrier.arrive(ring.turns.index((WHO + 1) % warpgroups(M)), count=1, pred=by_turns > 0)
    return part, turn ^ by_turns


@gluon.jit
def _chunk_factors(ring, unit, CHUNK: gl.constexpr, M: gl.constexpr, WIDTH: gl.constexpr):
    """[64, 1]: factors of the tokens of one chunk of a unit."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    chunks = ring.factors._reinterpret(gl.float32, [FACTORS // 64, 64], FLAT)
    chunk = unit % (FACTORS // padded(M)) * (padded(M) // 64) + CHUNK
    return chunks.index(chunk).load(gl.SliceLayout(1, ACC))[:, None]


@gluon.jit
def sums(
    ring,
    first,
    stage,
    phase,
    turn,
    by_turns,
    tokens,
    M: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    TWO: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """Sums of a tile's chunk WHO of 64 tokens and, with TWO, of chunk WHO + 2, over WIDTH weight
    rows and the program's BLOCKS units from `first` on. by_turns: 1 if the others have
    equally many products, else 0. tokens: any non-negative number unknown to the compiler."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    zero = gl.full([64, WIDTH], 0.0, gl.float32, ACC)
    low = zero
    high = zero
    done = zero
    # lets products reuse the registers of the previous result; otherwise the compiler runs out
    never = tokens < 0
    for unit in range(first, first + BLOCKS):
        mbarrier.wait(ring.full.index(stage), phase)
        xt = ring.inputs.index(stage * (M // 64) + WHO)
        wt = ring.weights.index(stage).slice(0, WIDTH).permute((1, 0))
        part, turn = _begin(ring, xt, wt, done, never, turn, by_turns, WHO, M)
        low_now = _chunk_factors(ring, unit, WHO, M, WIDTH)
        if TWO:
            high_now = _chunk_factors(ring, unit, WHO + 2, M, WIDTH)
            done = warpgroup_mma_wait(0, deps=[part])
            low = low + done * low_now
            xt = ring.inputs.index(stage * (M // 64) + WHO + 2)
            part, turn = _begin(ring, xt, wt, done, never, turn, by_turns, WHO, M)
        done = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        if TWO:
            high = high + done * high_now
        else:
            low = low + done * low_now
        stage, phase = next_stage(stage, phase, STAGES)
    return low, high, stage, phase, turn
