"""The loop of the persistent block-fp8 kernel on Hopper (fp8_gemm_sm90_persistent.py): the order of
tiles, which that of the experts has as well (moe/grouped_gemm_sm90_fp8.py), the stages between the
warps that fetch and the two warpgroups that multiply, and how these multiply.

A program takes tiles of M tokens and 128 weight rows, a unit of 128 columns at a time. Chunks of 64
tokens go to the two warpgroups in turn, and these begin their products by turns: while one promotes
its partial sums to fp32, the tensor cores work for the other.

What sums are multiplied by, a token's scale times the weights', is left in shared memory by two
warps that do nothing else: fetched by the warpgroups, a unit ahead, scales arrive behind the bulk
copies of all units after it, later than a unit of 128 tokens takes.
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

N = 128  # weight rows a tile
SHARED = 227 * 1024 - 1024  # bytes of stages and of the output on its way out
REGISTERS = (232, 40)  # of a thread that multiplies, of one that copies or fetches scales
KEPT_BYTES = 2048
# what sums are multiplied by: so many are kept, of two units or of four
FACTORS = gl.constexpr(KEPT_BYTES // 4)


def assert_fits(m: int, stages: int) -> None:
    """Tiles of m tokens with so many stages, and 64 x 128 results of 16 bits a warpgroup."""
    assert m in (128, 256), m
    assert stages * m * 4 >= KEPT_BYTES, "no factors are kept for longer than their stage"
    assert (m + N) * 128 * stages + 4 * 64 * N + KEPT_BYTES <= SHARED, (m, stages)


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


@gluon.jit
def new_ring(x_tma, w_tma, M: gl.constexpr, STAGES: gl.constexpr):
    """In shared memory, barriers ready."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, M, 128], x_tma.layout)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], w_tma.layout)
    factors = gl.allocate_shared_memory(gl.float32, [FACTORS // M, M], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    return Ring(inputs, weights, factors, full, empty, turns)


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
    """(token tile, weight tile) of a turn: 16 token tiles go through all weight tiles together,
    so that both stay in the cache. The last round, of fewer tiles than programs, begins with the
    last program."""
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    tile = turn * workers + gl.where(turn < rounds, worker, workers - 1 - worker)
    PER_GROUP: gl.constexpr = 16 * ((ROWS + 127) // 128)
    group = tile // PER_GROUP
    inside = tile % PER_GROUP
    height = gl.minimum(high - group * 16, 16)
    return group * 16 + inside % height, inside // height


@gluon.jit
def leave(ring, factors, unit, there, stage, free, phase, M: gl.constexpr, STAGES: gl.constexpr):
    """A unit's factors, [M], in the place of those of the unit FACTORS // M before, once that unit
    is done with; nothing if it is not `there`. free, phase: its stage and its phase."""
    KEPT: gl.constexpr = FACTORS // M
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
def _begin(ring, xt, wt, done, never, turn, by_turns, WHO: gl.constexpr):
    """A product in flight, which uses the registers of `done`."""
    mbarrier.wait(ring.turns.index(WHO), turn, pred=by_turns > 0)
    part = warpgroup_mma(xt, wt, done, use_acc=never, is_async=True)
    mbarrier.arrive(ring.turns.index(1 - WHO), count=1, pred=by_turns > 0)
    return part, turn ^ by_turns


@gluon.jit
def _chunk_factors(ring, unit, CHUNK: gl.constexpr, M: gl.constexpr, WIDTH: gl.constexpr):
    """[64, 1]: of the tokens of one chunk of a unit."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    chunks = ring.factors._reinterpret(gl.float32, [FACTORS // 64, 64], FLAT)
    chunk = unit % (FACTORS // M) * (M // 64) + CHUNK
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
    """Of a tile's chunk WHO of 64 tokens and, with TWO, of chunk WHO + 2, over WIDTH weight rows
    and the program's BLOCKS units from `first` on. by_turns: 1 where the other warpgroup has as
    many products, else 0. tokens: any number of them that the compiler cannot know."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    zero = gl.full([64, WIDTH], 0.0, gl.float32, ACC)
    low = zero
    high = zero
    done = zero
    # so that products take the registers of the last one's result: the compiler finds no room
    # otherwise
    never = tokens < 0
    for unit in range(first, first + BLOCKS):
        mbarrier.wait(ring.full.index(stage), phase)
        xt = ring.inputs.index(stage)
        wt = ring.weights.index(stage).slice(0, WIDTH).permute((1, 0))
        part, turn = _begin(ring, xt.slice(WHO * 64, 64), wt, done, never, turn, by_turns, WHO)
        low_now = _chunk_factors(ring, unit, WHO, M, WIDTH)
        if TWO:
            high_now = _chunk_factors(ring, unit, WHO + 2, M, WIDTH)
            done = warpgroup_mma_wait(0, deps=[part])
            low = low + done * low_now
            part, turn = _begin(
                ring, xt.slice(WHO * 64 + 128, 64), wt, done, never, turn, by_turns, WHO
            )
        done = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        if TWO:
            high = high + done * high_now
        else:
            low = low + done * low_now
        stage, phase = next_stage(stage, phase, STAGES)
    return low, high, stage, phase, turn
