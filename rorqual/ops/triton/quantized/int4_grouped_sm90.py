"""Grouped GEMMs of int4 weights and 16-bit tokens on Hopper, in Gluon: one warp copies weights and
four copy tokens, two warpgroups widen and multiply 64 weight rows each.

Weights are the left operand of the products, in registers, and a block's 8 to 128 tokens the right
one: so weights cross shared memory as 4-bit numbers, and a product of few tokens is narrow. A stage
has one chunk of int4_order.py, 128 columns, or two, of 128 weight rows and of the tokens. Copies
run as many stages ahead as fit, also across tiles, so that memory is never without requests: a tile
of Qwen3-30B's second GEMM has six chunks.

While one warpgroup widens numbers or multiplies a group's sums with its scales in fp32 (numbers
from -8 to 7 are exact in 16 bits), the tensor cores work for the other, or for those of the second
program of a multiprocessor. Scales are loaded one to three stages before they are used.

In the first GEMM a tile has 64 rows of gate and the 64 of up that belong to them, in the rows r and
r + 8 that a thread has of each 16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm.fp8_gemm_sm90_loop import SHARED, share
from rorqual.ops.triton.moe.align import ExpertBlocks
from rorqual.ops.triton.moe.grouped_gemm_sm90_fp8 import PipelineBuffers, RowBlocks
from rorqual.ops.triton.quantized import int4_order
from rorqual.ops.triton.quantized.int4_direct import CHUNK, GROUPS_TAKEN, high_numbers, low_numbers
from rorqual.ops.triton.runtime.launch import (
    INTERPRETED,
    dependent,
    is_hopper,
    multiprocessors,
)
from rorqual.ops.triton.runtime.sm90_pipeline import (
    let_next_start,
    next_stage,
    thread_barrier,
    wait_for_inputs,
)

ROWS_TAKEN = (8, 16, 32, 64, 128)  # of a block
# so that the loop over them stays one: unrolled, a product's registers are copied after its fence
LEAST_COLUMNS = 384
TILE = 128  # weight rows of a program, half of them of each warpgroup
FEW_ROWS = gl.constexpr(32)  # of a block, up to which a multiprocessor has two programs
# registers per thread, by programs of a multiprocessor: at the start, of the multiplying
# warpgroups, of the warps that copy tokens and of the one that copies weights
REGISTERS = {1: (128, 216, 56, 24), 2: (64, 104, 24, 24)}
MOST_STAGES = 16


@gluon.jit
def tile_at(turn, rounds, TILES: gl.constexpr):
    """(row block, weight tile) of a turn: all weight tiles of a block follow one another, so that
    programs at work at the same time have few experts. The last round, with fewer tiles than
    programs, starts with the last program."""
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    tile = turn * workers + gl.where(turn < rounds, worker, workers - 1 - worker)
    return tile // TILES, tile % TILES


@gluon.constexpr_function
def bytes_layout(gated):
    """Bytes [64 weight rows, 64] of a warpgroup: 16 of a row, of the rows a product gives a lane.
    In memory 32 rows of gate come before 32 of up."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [32 if gated else 8, 0]]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    warps = [[8, 0], [16, 0]] if gated else [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 64])


@gluon.constexpr_function
def sums_layout(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.constexpr_function
def line_layout(columns):
    """Tokens x columns, 16 bytes a lane."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def _copy_weights(
    w_tma,
    ring,
    rows,
    TILES: gl.constexpr,
    COLUMNS: gl.constexpr,
    GATED: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One warp: bulk copies of weights."""
    wait_for_inputs(DEPENDENT)
    turns, rounds = share(gl.load(rows.count), TILES * 128)
    stage = 0
    phase = 1
    for turn in range(turns):
        m_tile, n_tile = tile_at(turn, rounds, TILES)
        first = gl.load(rows.blocks + m_tile) * (TILES * 128) + n_tile * (64 if GATED else 128)
        for begin in range(0, COLUMNS // 2, STEP * 64):
            mbarrier.wait(ring.empty.index(stage), phase)
            full = ring.full.index(stage)
            mbarrier.expect(full, STEP * 128 * 64)
            for chunk in gl.static_range(STEP):
                for who in gl.static_range(2):
                    weights = ring.weights.index((stage * STEP + chunk) * 2 + who)
                    column = begin + chunk * 64
                    if GATED:
                        gate = first + 32 * who
                        tma.async_copy_global_to_shared(
                            w_tma, [gate, column], full, weights.slice(0, 32)
                        )
                        tma.async_copy_global_to_shared(
                            w_tma, [gate + TILES * 64, column], full, weights.slice(32, 32)
                        )
                    else:
                        tma.async_copy_global_to_shared(
                            w_tma, [first + 64 * who, column], full, weights
                        )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _copy_tokens(
    x,
    ring,
    rows,
    M: gl.constexpr,
    TILES: gl.constexpr,
    COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Four warps. A stage is announced LAG stages later, when its copies have arrived and these
    warps have made them visible to products: a fence of the multiplying warps would have to wait
    for their loads of scales."""
    LAG: gl.constexpr = 1 if STAGES < 4 else 2
    LINE: gl.constexpr = line_layout(64)
    row = gl.arange(0, M, gl.SliceLayout(1, LINE))
    column = gl.arange(0, 64, gl.SliceLayout(0, LINE))
    wait_for_inputs(DEPENDENT)
    turns, rounds = share(gl.load(rows.count), TILES * 128)
    stage = 0
    phase = 1
    begun = 0
    for turn in range(turns):
        m_tile, _ = tile_at(turn, rounds, TILES)
        block = rows.blocks + m_tile
        place = gl.load(block + rows.limit) + row
        there = place < gl.load(block + 2 * rows.limit)
        if GATED:
            order = rows.order + gl.load(block + 3 * rows.limit)
            place = gl.load(order + place, mask=there, other=0) // TOP_K
        source = x + place.to(gl.int64)[:, None] * COLUMNS + column[None, :]
        for begin in range(0, COLUMNS, STEP * 128):
            mbarrier.wait(ring.empty.index(stage), phase)
            for half in gl.static_range(2 * STEP):
                async_copy.async_copy_global_to_shared(
                    ring.inputs.index(stage * (2 * STEP) + half),
                    source + (begin + half * 64),
                    mask=there[:, None],
                )
            async_copy.commit_group()
            async_copy.wait_group(LAG)
            fence_async_shared()
            arrived = gl.where(stage < LAG, stage + (STAGES - LAG), stage - LAG)
            mbarrier.arrive(ring.full.index(arrived), count=1, pred=begun >= LAG)
            begun += 1
            stage, phase = next_stage(stage, phase, STAGES)
    async_copy.wait_group(0)
    fence_async_shared()
    for i in gl.static_range(LAG):
        left = LAG - i
        arrived = gl.where(stage < left, stage + (STAGES - left), stage - left)
        mbarrier.arrive(ring.full.index(arrived), count=1, pred=begun >= left)


@gluon.jit
def _numbers(packed, ACC: gl.constexpr, GATED: gl.constexpr, kind: gl.constexpr):
    """The low and the high halves of bytes [64, 64], as left operands."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    if GATED:
        packed = packed.reshape([2, 4, 8, 64]).permute((1, 0, 2, 3)).reshape([64, 64])
    spread = packed.reshape([64, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4))
    ordered = spread.reshape([64, 64])
    low = gl.convert_layout(low_numbers(ordered, kind), LEFT, assert_trivial=True)
    high = gl.convert_layout(high_numbers(ordered, kind), LEFT, assert_trivial=True)
    return low, high


@gluon.jit
def _scales(w_scale, group, LAST: gl.constexpr):
    """Bits of scales: as 16-bit numbers the compiler would join two in a register, and wait for
    both long before they are used."""
    return gl.load(w_scale + gl.minimum(group, LAST)).to(gl.uint32)


@gluon.jit
def _as_float(bits, kind: gl.constexpr):
    if kind == gl.bfloat16:
        return (bits << 16).to(gl.float32, bitcast=True)
    else:
        return bits.to(gl.uint16).to(kind, bitcast=True).to(gl.float32)


@gluon.jit
def _operands(
    ring, part, BYTES: gl.constexpr, ACC: gl.constexpr, WHO: gl.constexpr, GATED: gl.constexpr
):
    """Of a chunk's two products: both left operands, then both right ones."""
    packed = ring.weights.index(2 * part + WHO).load(BYTES)
    low, high = _numbers(packed, ACC, GATED, ring.inputs.dtype)
    below = ring.inputs.index(2 * part).permute((1, 0))
    above = ring.inputs.index(2 * part + 1).permute((1, 0))
    return low, high, below, above


@gluon.jit
def _started(
    ring, part, done, never, BYTES: gl.constexpr, ACC: gl.constexpr, WHO: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """The sums of a chunk, on their way: they overwrite `done`."""
    low, high, below, above = _operands(ring, part, BYTES, ACC, WHO, GATED)
    sums = warpgroup_mma(low, below, done, use_acc=never, is_async=True)
    return warpgroup_mma(high, above, sums, is_async=True)


@gluon.jit
def _sums_of_pairs(
    w_scale, scales, next_row, ring, stage, phase, done, other, never, M: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, WHO: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Two chunks a stage, groups of 128 columns, bf16: both chunks' scales are one load. scales:
    those of the first stage; returns those of the next tile, whose first row is next_row rows after
    this one's."""
    STEPS: gl.constexpr = CHUNKS // 2
    ACC: gl.constexpr = sums_layout(M)
    BYTES: gl.constexpr = bytes_layout(GATED)
    acc = gl.full([64, M], 0.0, gl.float32, ACC)
    for step in range(STEPS):
        coming = gl.load(w_scale + gl.where(step + 1 < STEPS, step + 1, next_row * STEPS))
        mbarrier.wait(ring.full.index(stage), phase)
        first = _started(ring, 2 * stage, done, never, BYTES, ACC, WHO, GATED)
        if M == 8:
            second = _started(ring, 2 * stage + 1, other, never, BYTES, ACC, WHO, GATED)
            done, other = warpgroup_mma_wait(0, deps=[first, second])
        else:  # the compiler has no registers for both
            done = warpgroup_mma_wait(0, deps=[first])
            second = _started(ring, 2 * stage + 1, other, never, BYTES, ACC, WHO, GATED)
            other = warpgroup_mma_wait(0, deps=[second])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        acc = acc + done * (scales << 16).to(gl.float32, bitcast=True)[:, None]
        acc = acc + other * (scales & -65536).to(gl.float32, bitcast=True)[:, None]
        scales = coming
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, scales, stage, phase, done, other


@gluon.jit
def _sums_one_by_one(
    w_scale, ring, stage, phase, done, other, never, M: gl.constexpr, CHUNKS: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, WHO: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One chunk a stage. Scales are loaded three stages before they are used."""
    ACC: gl.constexpr = sums_layout(M)
    BYTES: gl.constexpr = bytes_layout(GATED)
    kind: gl.constexpr = w_scale.dtype.element_ty
    PER: gl.constexpr = 128 // GROUP
    LAST: gl.constexpr = CHUNKS * PER - 1
    bits = w_scale.to(gl.pointer_type(gl.uint16), bitcast=True)
    acc = gl.full([64, M], 0.0, gl.float32, ACC)
    # of a stage's first group, and of those of the stages after it
    scale = _scales(bits, 0, LAST)
    scale_one = _scales(bits, PER, LAST)
    scale_two = _scales(bits, 2 * PER, LAST)
    if GROUP == 64:  # of its second group
        upper = _scales(bits, 1, LAST)
        upper_one = _scales(bits, 3, LAST)
        upper_two = _scales(bits, 5, LAST)
    for chunk in range(CHUNKS):
        mbarrier.wait(ring.full.index(stage), phase)
        if GROUP == 64:
            low, high, below, above = _operands(ring, stage, BYTES, ACC, WHO, GATED)
            first = warpgroup_mma(low, below, done, use_acc=never, is_async=True)
            second = warpgroup_mma(high, above, other, use_acc=never, is_async=True)
            done, other = warpgroup_mma_wait(0, deps=[first, second])
        else:
            sums = _started(ring, stage, done, never, BYTES, ACC, WHO, GATED)
            done = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        acc = acc + done * _as_float(scale, kind)[:, None]
        scale = scale_one
        scale_one = scale_two
        scale_two = _scales(bits, (chunk + 3) * PER, LAST)
        if GROUP == 64:
            acc = acc + other * _as_float(upper, kind)[:, None]
            upper = upper_one
            upper_one = upper_two
            upper_two = _scales(bits, (chunk + 3) * PER + 1, LAST)
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase, done, other


@gluon.jit
def _first_row(rows, turn, rounds, here, TILES: gl.constexpr, GATED: gl.constexpr):
    """The first weight row of a turn's tile."""
    m_tile, n_tile = tile_at(turn, rounds, TILES)
    expert = gl.load(rows.blocks + m_tile, mask=here, other=0)
    return expert * (TILES * 128) + n_tile * (64 if GATED else 128)


@gluon.jit
def _multiply_chunks(
    w_scale,
    y,
    out,
    ring,
    rows,
    M: gl.constexpr,
    TILES: gl.constexpr,
    CHUNKS: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """One of the two warpgroups: half of each tile's weight rows."""
    kind: gl.constexpr = y.dtype.element_ty
    ACC: gl.constexpr = sums_layout(M)
    WIDTH: gl.constexpr = 32 if GATED else 64  # columns of the result
    LINE: gl.constexpr = line_layout(WIDTH)
    PER: gl.constexpr = 128 // GROUP
    i = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    own = i // 8 % 2 * (TILES * 64) + WHO * 32 + i // 16 * 8 + i % 8 if GATED else WHO * 64 + i
    wait_for_inputs(DEPENDENT)
    count = gl.load(rows.count)
    turns, rounds = share(count, TILES * 128)
    # lets products reuse the registers of the previous result
    never = count < 0
    done = gl.full([64, M], 0.0, gl.float32, ACC)
    other = done
    stage = 0
    phase = 0
    # a tile's experts and first scales are loaded during the tile before
    row = _first_row(rows, 0, rounds, turns > 0, TILES, GATED)
    if STEP == 2:
        w_scale = w_scale.to(gl.pointer_type(gl.int32), bitcast=True)
        scales = gl.load(w_scale + (row + own).to(gl.int64) * (CHUNKS // 2))
    for tile in range(turns):
        m_tile, n_tile = tile_at(tile, rounds, TILES)
        block = rows.blocks + m_tile
        coming = _first_row(rows, gl.minimum(tile + 1, turns - 1), rounds, True, TILES, GATED)
        tile_scales = w_scale + (row + own).to(gl.int64) * (CHUNKS * PER // STEP)
        place = gl.load(block + rows.limit) + gl.arange(0, M, gl.SliceLayout(1, LINE))
        there = place < gl.load(block + 2 * rows.limit)
        if GATED:
            target = place
        else:
            order = rows.order + gl.load(block + 3 * rows.limit)
            target = gl.load(order + place, mask=there, other=0)
        if STEP == 2:
            acc, scales, stage, phase, done, other = _sums_of_pairs(
                tile_scales, scales, coming - row, ring, stage, phase, done, other, never, M,
                CHUNKS, STAGES, WHO, GATED,
            )  # fmt: skip
        else:
            acc, stage, phase, done, other = _sums_one_by_one(
                tile_scales, ring, stage, phase, done, other, never, M, CHUNKS, GROUP, STAGES,
                WHO, GATED,
            )  # fmt: skip
        row = coming
        if GATED:
            gate, up = gl.split(acc.reshape([4, 2, 8, M]).permute((0, 2, 3, 1)))
            result = (gate / (1.0 + gl.exp(-gate)) * up).reshape([32, M])
        else:
            result = acc
        thread_barrier()  # all threads have read the previous contents
        out.permute((1, 0)).store(result.to(kind))
        thread_barrier()
        column = n_tile * (2 * WIDTH) + WHO * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LINE))
        gl.store(
            y + target.to(gl.int64)[:, None] * (TILES * 2 * WIDTH) + column[None, :],
            out.load(LINE),
            mask=there[:, None],
        )


@gluon.jit(do_not_specialize=["limit"])
def _int4_grouped_kernel(
    x,
    w_tma,
    w_scale,
    y,
    order,
    blocks,
    count,
    limit,
    M: gl.constexpr,
    TILES: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    COPIER: gl.constexpr,
    LEAST: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid: any number of programs. M: rows of a block. TILES: of each expert's weight rows. GATED:
    y = silu(gate x) * (up x) in sorted order, for x in token order; else y = w x in pair order, for
    x in sorted order."""
    kind: gl.constexpr = y.dtype.element_ty
    WIDTH: gl.constexpr = 32 if GATED else 64
    PARTS: gl.constexpr = 2 * STEP * STAGES
    TOKENS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    inputs = gl.allocate_shared_memory(kind, [PARTS, M, 64], TOKENS)
    weights = gl.allocate_shared_memory(gl.uint8, [PARTS, 64, 64], w_tma.layout)
    RESULTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, WIDTH // 8, [1, 0])
    outs = gl.allocate_shared_memory(kind, [2, M, WIDTH], RESULTS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    ring = PipelineBuffers(inputs, weights, full, empty)
    rows = RowBlocks(order, blocks, count, limit)
    CHUNKS: gl.constexpr = COLUMNS // 128
    gl.warp_specialize(
        [
            (
                _multiply_chunks,
                (
                    w_scale, y, outs.index(0), ring, rows, M, TILES, CHUNKS, GROUP, GATED, STEP,
                    STAGES, 0, DEPENDENT,
                ),
            ),
            (
                _multiply_chunks,
                (
                    w_scale, y, outs.index(1), ring, rows, M, TILES, CHUNKS, GROUP, GATED, STEP,
                    STAGES, 1, DEPENDENT,
                ),
            ),
            (
                _copy_tokens,
                (x, ring, rows, M, TILES, COLUMNS, TOP_K, GATED, STEP, STAGES, DEPENDENT),
            ),
            (_copy_weights, (w_tma, ring, rows, TILES, COLUMNS, GATED, STEP, STAGES, DEPENDENT)),
        ],
        [4, 4, 1],
        [MULTIPLIER, COPIER, LEAST],
    )  # fmt: skip


def takes(weight: Weight) -> bool:
    """Weights [slots, rows, columns] as int4_order.py lays them out in chunks of 128 columns,
    without zero points, for tokens in 16 bits."""
    return (
        not INTERPRETED  # Triton's interpreter does not support Gluon
        and is_hopper(weight.data.device)
        and weight.turned
        and weight.activation == "wide"
        and weight.zero is None
        and weight.scale is not None
        and weight.block[0] == 1
        and int4_order.chunk_of(weight) == CHUNK
        and int4_order.group_of(weight) in GROUPS_TAKEN
        and weight.data.shape[1] % TILE == 0
        and weight.columns >= LEAST_COLUMNS
    )


def takes_experts(down: Weight) -> bool:
    """Both products of experts with this `down` [slots, hidden, inner]."""
    return takes(down) and down.data.shape[1] >= LEAST_COLUMNS


def programs_of(m: int) -> int:
    """Programs of a multiprocessor, for blocks of m rows."""
    return 2 if m <= FEW_ROWS.value else 1


def chunks_of(m: int, weight: Weight) -> int:
    """Chunks of a stage, for blocks of m rows: two save instructions between chunks, where few
    tokens leave the products little to do."""
    pairs = weight.columns // CHUNK % 2 == 0 and int4_order.group_of(weight) == CHUNK
    assert weight.scale is not None
    return 2 if m <= FEW_ROWS.value and pairs and weight.scale.dtype == torch.bfloat16 else 1


def stages_of(m: int, weight: Weight) -> int:
    """The most stages that fit into shared memory for blocks of m rows."""
    stage = chunks_of(m, weight) * (TILE * CHUNK // 2 + m * CHUNK * 2)
    results = 2 * 2 * 64 * m
    return min(MOST_STAGES, (SHARED // programs_of(m) - 1024 - results) // stage)


def _launch(
    x: Tensor,
    weight: Weight,
    y: Tensor,
    blocks: ExpertBlocks,
    top_k: int,
    gated: bool,
    most_stages: int,
) -> None:
    slots, rows, packed = weight.data.shape
    device = weight.data.device
    columns = 2 * packed
    m = blocks.rows
    assert m in ROWS_TAKEN, m
    assert x.is_contiguous()
    assert rows % TILE == columns % CHUNK == 0, (rows, columns)
    stages = min(most_stages, stages_of(m, weight))
    assert stages >= 2, (m, columns, stages)
    tiles = rows // TILE
    programs = programs_of(m)
    registers, *parts = REGISTERS[programs]
    layout = gl.NVMMASharedLayout(64, 8, rank=2)
    _int4_grouped_kernel[min(blocks.limit * tiles, programs * multiprocessors(device)),](
        x,
        TensorDescriptor.from_tensor(
            weight.data.view(slots * rows, packed), [32 if gated else 64, 64], layout
        ),
        weight.scale,
        y,
        blocks.order,
        blocks.blocks,
        blocks.count,
        blocks.limit,
        m,
        tiles,
        columns,
        int4_order.group_of(weight),
        top_k,
        gated,
        chunks_of(m, weight),
        stages,
        *parts,
        num_warps=4,
        maxnreg=registers,
        **dependent(device, after_long=not gated),
    )


def gate_up_product(
    x: Tensor, weight: Weight, blocks: ExpertBlocks, top_k: int, most_stages: int = MOST_STAGES
) -> Tensor:
    """silu(gate x) * (up x) of each pair, in sorted order: [pairs, inner]. x [T, hidden] of 16
    bits."""
    inner = weight.data.shape[1] // 2
    h = torch.empty(blocks.num_picks, inner, dtype=x.dtype, device=x.device)
    _launch(x.contiguous(), weight, h, blocks, top_k, True, most_stages)
    return h


def down_product(
    h: Tensor, weight: Weight, blocks: ExpertBlocks, most_stages: int = MOST_STAGES
) -> Tensor:
    """down h of each pair, in pair order: [pairs, hidden]. h [pairs, inner] in sorted order. Rows
    of experts on other ranks are uninitialized."""
    y = torch.empty(blocks.num_picks, weight.data.shape[1], dtype=h.dtype, device=h.device)
    _launch(h, weight, y, blocks, 1, False, most_stages)
    return y
