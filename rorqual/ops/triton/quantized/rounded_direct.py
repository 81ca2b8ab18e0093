"""GEMM of int8, e4m3 or int4 weights and one token that is rounded to 8 bits, in Gluon: the kernel
rounds the token itself, and weights are loaded from global memory directly to tensor core
registers.

A kernel that rounds one token takes as long as it takes to start it. Here each program reads all
columns of its token, rounds them as rows.py does, and puts them into shared memory, while its
weights are on their way. With two tokens and more this costs more than it saves.

Weights, warps and parts of the columns are as in int4_direct.py: lane 4 r + q of a warp loads 16
adjacent bytes of 64 of a row, which are the left operands of mma. Repacked int4 weights
(int4_order.py) are in the order of the operands of m16n8k32. Other weights are not: the token's
columns are permuted alike instead, within 64 columns. The token counts as all eight of the
product's.

sm_90 has no mma.sync of e4m3: its assembler makes 16-bit products of one, and converts both
operands each time. So a token that is rounded to e4m3 is kept in fp16, which holds every such
number, and the product is m16n8k16.

e4m3 weights may have one scale per 128x128 block. Then the token has one per 128 columns, two
chunks, whose products are multiplied by both.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rorqual.ops.reference import Weight
from rorqual.ops.triton.quantized import int4_order, operands
from rorqual.ops.triton.quantized.int4_direct import (
    CHUNK,
    GROUPS_TAKEN,
    HALF,
    MOST_CHUNKS,
    PARTS_TAKEN,
    DirectTile,
    along,
    ask,
    ask_first,
    ask_scales,
    bytes_layout,
    first_of,
    in_pairs,
    launched_with,
    load_choice,
    out_layout,
    pair_layout,
    piece_with,
    pieces_of,
    sums_layout,
    with_parts,
)
from rorqual.ops.triton.quantized.int4_order import (
    FP8_HIGH,
    FP8_LOW,
    FP8_UNIT,
    INT8_HIGH,
    INT8_LOW,
    INT8_UNIT,
)
from rorqual.ops.triton.runtime.launch import INTERPRETED, takes_fp8
from rorqual.ops.triton.runtime.sm90_pipeline import (
    let_next_start,
    thread_barrier,
    wait_for_inputs,
)

ACTIVATIONS_TAKEN = ("int8_token", "fp8_token")
# columns of the token: with 7168 the general kernels' steps are faster, but for int4 weights and a
# token in int8
MOST_COLUMNS = 4096
MOST_OF_INT4_INT8 = 8192  # they are in registers until the token's scale is known


@gluon.constexpr_function
def columns_of(GROUP):
    """Of a chunk, 64 bytes a row: GROUP is 0 for 8-bit weights."""
    return 128 if GROUP else 64


@gluon.constexpr_function
def token_layout(warps, parts):
    """Parts x 1 x columns, as a token is read and rounded."""
    return gl.BlockedLayout([1, 1, 4], [1, 1, 32], [parts, 1, warps], [2, 1, 0])


@gluon.constexpr_function
def rounded_layout():
    return gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])


@gluon.jit
def _low_numbers(packed, kind: gl.constexpr):
    """int4_order.low_half as int8, or as e4m3 numbers in 16 bits."""
    if kind == gl.int8:
        return gl.inline_asm_elementwise(
            INT8_LOW, "=r,r", [packed], dtype=gl.int8, is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            FP8_LOW, "=r,r", [packed], dtype=gl.float8e4nv, is_pure=True, pack=4
        ).to(kind)


@gluon.jit
def _high_numbers(packed, kind: gl.constexpr):
    """int4_order.high_half as int8, or as e4m3 numbers in 16 bits."""
    if kind == gl.int8:
        return gl.inline_asm_elementwise(
            INT8_HIGH, "=r,r", [packed], dtype=gl.int8, is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            FP8_HIGH, "=r,r", [packed], dtype=gl.float8e4nv, is_pure=True, pack=4
        ).to(kind)


# ---- the token


@gluon.jit
def _column_of(place):
    """The column of 64 whose weights are in the place of m16n8k32's column `place`: a lane's 16
    adjacent bytes are four pieces of its operands."""
    thread = place // 4 % 4
    half = place // 16 % 2
    step = place // 32 % 2
    return place // 64 * 64 + thread * 16 + step * 8 + half * 4 + place % 4


@gluon.jit
def _read(x, FIRST: gl.constexpr, WIDTH: gl.constexpr, FOURS: gl.constexpr, COPY: gl.constexpr):
    """WIDTH columns from FIRST on of each part, [parts, 1, WIDTH] fp32, with FOURS in the order of
    _column_of. NaN becomes 0, as in rows.py."""
    place = FIRST + gl.arange(0, WIDTH, along(COPY, 2))
    column = _column_of(place) if FOURS else place
    values = gl.load(x + column[None, None, :]).to(gl.float32)
    return gl.where(values == values, values, 0.0)


@gluon.jit
def _as_pairs(numbers, PACKED: gl.constexpr):
    """[parts, 1, columns] as fp16, each column in the place of m16n8k16 that its weights have: a
    thread's 16 adjacent bytes of 64 columns, or four of each 16 of PACKED int4 weights, are pairs
    of its operands."""
    OWN: gl.constexpr = 4 if PACKED else 16
    PARTS: gl.constexpr = numbers.shape[0]
    WIDTH: gl.constexpr = numbers.shape[2]
    shape: gl.constexpr = [PARTS, WIDTH // (4 * OWN), 4, OWN // 4, 2, 2]
    places = gl.permute(gl.reshape(numbers.to(gl.float16), shape), [0, 1, 3, 4, 2, 5])
    return gl.reshape(places, [PARTS, 1, WIDTH])


@gluon.jit
def _rounded(values, scale, kind: gl.constexpr):
    """As rows._round_kernel."""
    divisor = scale + gl.zeros_like(values)
    # 0 / x would leave the fast path of the division
    steps = gl.div_rn(gl.where(values == 0, divisor, values), divisor)
    steps = gl.where(values == 0, 0.0, steps)
    if kind == gl.int8:
        nearest = (steps + 12582912.0) - 12582912.0
        return gl.minimum(gl.maximum(nearest, -127.0), 127.0).to(gl.int8)
    else:
        return steps.to(kind)


@gluon.jit
def _round_token(
    x, INT8: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """(The token at x in shared memory, rounded: pieces [PARTS, 1, columns]; its scale)."""
    COPY: gl.constexpr = token_layout(WARPS, PARTS)
    PIECES: gl.constexpr = pieces_of(CHUNKS)
    WIDE: gl.constexpr = columns_of(GROUP)
    own = x + gl.arange(0, PARTS, along(COPY, 0))[:, None, None] * (CHUNKS * WIDE)
    values = ()
    for i in gl.static_range(len(PIECES)):
        read = _read(own, first_of(CHUNKS, i) * WIDE, PIECES[i] * WIDE, INT8 and GROUP == 0, COPY)
        values += (read,)  # type: ignore[assignment]
    peak = gl.to_tensor(1e-4)
    for i in gl.static_range(len(PIECES)):
        most = gl.max(gl.max(gl.abs(values[i]), 2), 0)
        peak = gl.maximum(peak, gl.max(most, 0))
    scale = gl.div_rn(peak, 127.0 if INT8 else 448.0)
    found = ()
    for i in gl.static_range(len(PIECES)):
        numbers = _rounded(values[i], scale, gl.int8 if INT8 else gl.float8e4nv)
        kept = numbers if INT8 else _as_pairs(numbers, GROUP > 0)
        piece = gl.allocate_shared_memory(kept.dtype, kept.shape, rounded_layout())
        piece.store(kept)
        found += (piece,)  # type: ignore[assignment]
    return found, scale


@gluon.jit
def _scale_of(peak, UE8M0: gl.constexpr):
    """As in rowwise/quantize.py, correctly rounded."""
    if UE8M0:
        exponent = (peak.to(gl.int32, bitcast=True) + 0x1FFFFF) >> 23
        return ((exponent - 8) << 23).to(gl.float32, bitcast=True)
    else:
        return gl.div_rn(peak, 448.0)


@gluon.jit
def _round_piece(
    x, FIRST: gl.constexpr, WIDTH: gl.constexpr, UE8M0: gl.constexpr, COPY: gl.constexpr
):
    """WIDTH columns from FIRST on of each part, rounded with a scale per 128, in shared memory
    [parts, 1, WIDTH], and the scales [parts, 1, groups]. NaN stays, as in rowwise/quantize.py."""
    column = FIRST + gl.arange(0, WIDTH, along(COPY, 2))
    values = gl.load(x + column[None, None, :]).to(gl.float32)
    PARTS: gl.constexpr = values.shape[0]
    groups = gl.reshape(values, [PARTS, 1, WIDTH // 128, 128])
    scale = _scale_of(gl.maximum(gl.max(gl.abs(groups), 3), 1e-4), UE8M0)
    numbers = gl.reshape(
        _rounded(groups, scale[:, :, :, None], gl.float8e4nv), [PARTS, 1, WIDTH]
    )  # fmt: skip
    piece = gl.allocate_shared_memory(gl.float16, [PARTS, 1, WIDTH], rounded_layout())
    piece.store(_as_pairs(numbers, False))
    scales = gl.allocate_shared_memory(gl.float32, [PARTS, 1, WIDTH // 128], rounded_layout())
    scales.store(scale)
    return piece, scales


@gluon.jit
def _round_groups(
    x, CHUNKS: gl.constexpr, UE8M0: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr
):
    """As _round_token with a scale per 128 columns, two chunks: (pieces, pieces of the scales)."""
    COPY: gl.constexpr = token_layout(WARPS, PARTS)
    PIECES: gl.constexpr = pieces_of(CHUNKS)
    own = x + gl.arange(0, PARTS, along(COPY, 0))[:, None, None] * (CHUNKS * HALF)
    found = ()
    scales = ()
    for i in gl.static_range(len(PIECES)):
        piece, factors = _round_piece(
            own, first_of(CHUNKS, i) * HALF, PIECES[i] * HALF, UE8M0, COPY
        )  # fmt: skip
        found += (piece,)  # type: ignore[assignment]
        scales += (factors,)  # type: ignore[assignment]
    return found, scales


# ---- products


@gluon.jit
def _in_fours(numbers):
    """in_pairs for mma.m16n8k32, whose operands are four bytes."""
    PARTS: gl.constexpr = numbers.shape[0]
    N: gl.constexpr = numbers.shape[1]
    fours = gl.permute(gl.reshape(numbers, [PARTS, N, 4, 2, 2, 4]), [0, 1, 3, 4, 2, 5])
    return gl.reshape(fours, [PARTS, N, HALF])


@gluon.jit
def _product(numbers, piece, FIRST: gl.constexpr, SUMS: gl.constexpr):
    """Of 64 columns of weights, in the order of their bytes, and of the token: [parts, rows, 8], in
    int32 or fp32."""
    kind: gl.constexpr = piece.dtype
    TOTAL: gl.constexpr = gl.int32 if kind == gl.int8 else gl.float32
    EACH: gl.constexpr = 4 if kind == gl.int8 else 2
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, EACH)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, EACH)
    right = piece.slice(FIRST, HALF, 2).permute((0, 2, 1)).load(RIGHT)
    right = right.broadcast_to([numbers.shape[0], HALF, 8])
    left = _in_fours(numbers) if kind == gl.int8 else in_pairs(numbers.to(kind))
    none = gl.full([numbers.shape[0], numbers.shape[1], 8], 0, TOTAL, SUMS)
    return mma_v2(gl.convert_layout(left, LEFT, assert_trivial=True), right, none)


@gluon.jit
def _add_chunk(
    acc, packed, scales, token, CHUNK_AT: gl.constexpr, CHUNKS: gl.constexpr,
    GROUP: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """acc + the products of a chunk."""
    PIECE: gl.constexpr = piece_with(CHUNKS, CHUNK_AT)
    FIRST: gl.constexpr = (CHUNK_AT - first_of(CHUNKS, PIECE)) * columns_of(GROUP)
    piece = token[PIECE]
    kind: gl.constexpr = piece.dtype
    if GROUP == 0:
        return acc + _product(packed, piece, FIRST, SUMS)
    else:
        UNIT: gl.constexpr = INT8_UNIT if kind == gl.int8 else FP8_UNIT
        low = _product(_low_numbers(packed, kind), piece, FIRST, SUMS)
        high = _product(_high_numbers(packed, kind), piece, FIRST + HALF, SUMS)
        if GROUP == HALF:
            acc += low.to(gl.float32) * (scales[2 * CHUNK_AT].to(gl.float32) * UNIT)[:, :, None]
            scale = scales[2 * CHUNK_AT + 1].to(gl.float32) * UNIT
            return acc + high.to(gl.float32) * scale[:, :, None]
        else:
            scale = scales[CHUNK_AT].to(gl.float32) * UNIT
            return acc + (low + high).to(gl.float32) * scale[:, :, None]


@gluon.jit
def _add_group(
    acc, first, second, scales, token, token_scales, GROUP_AT: gl.constexpr,
    CHUNKS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """acc + the products of two chunks, whose columns share the token's and each row's scale."""
    PIECE: gl.constexpr = piece_with(CHUNKS, 2 * GROUP_AT)
    GROUP_IN: gl.constexpr = GROUP_AT - first_of(CHUNKS, PIECE) // 2
    below = _product(first, token[PIECE], GROUP_IN * 128, SUMS)
    above = _product(second, token[PIECE], GROUP_IN * 128 + HALF, SUMS)
    scale = token_scales[PIECE].slice(GROUP_IN, 1, 2).load(SUMS)
    return acc + (below + above) * (scales[GROUP_AT][:, :, None] * scale)


@gluon.jit
def _row_of(place, first, column, EACH: gl.constexpr, LIMIT: gl.constexpr):
    """The weight row of a place in a tile: EACH from `column` on of a matrix with LIMIT rows that
    begins with row `first`, then the same ones of the next matrix."""
    return first + place // EACH * LIMIT + gl.minimum(column + place % EACH, LIMIT - 1)


@gluon.jit
def _sums(
    x, w, w_scale, first, column, EACH: gl.constexpr, LIMIT: gl.constexpr, INT8: gl.constexpr,
    COLUMNS: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr,
    DEPTH: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr, UE8M0: gl.constexpr,
    WAITS: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """[16 WARPS TILES, 8] fp32, each column the same: w's rows (_row_of) times the token at x.
    first: int64. BLOCKS: one scale per 128x128 of w. WAITS: for the previous kernel, once the
    weights are on their way: no kernel of a step writes them."""
    BYTES: gl.constexpr = bytes_layout(WARPS, PARTS, TILES)
    SUMS: gl.constexpr = sums_layout(WARPS, PARTS)
    CHUNKS: gl.constexpr = COLUMNS // columns_of(GROUP) // PARTS
    SHARE: gl.constexpr = CHUNKS * HALF  # bytes of a part
    N: gl.constexpr = 16 * WARPS * TILES
    row = _row_of(gl.arange(0, N, along(BYTES, 1)), first, column, EACH, LIMIT)
    part = gl.arange(0, PARTS, along(BYTES, 0))[:, None, None] * SHARE
    w_tile = w + row[None, :, None] * (SHARE * PARTS) + part
    w_tile += gl.arange(0, HALF, along(BYTES, 2))[None, None, :]
    given = ask_first(w_tile, CHUNKS, DEPTH)
    scales = ()
    if GROUP > 0 or BLOCKS:
        GROUPS: gl.constexpr = COLUMNS // (128 if BLOCKS else GROUP) // PARTS  # of a part
        row = _row_of(gl.arange(0, N, along(SUMS, 1)), first, column, EACH, LIMIT)
        if BLOCKS:
            row = row // 128
        at = row[None, :] * (GROUPS * PARTS) + gl.arange(0, PARTS, along(SUMS, 0))[:, None] * GROUPS
        scales = ask_scales(w_scale + at, GROUPS, WARPS, PARTS, TILES, SUMS)
    wait_for_inputs(WAITS)
    WHOLE: gl.constexpr = GROUP == 0 and INT8
    acc = gl.full([PARTS, N, 8], 0, gl.int32 if WHOLE else gl.float32, SUMS)
    if BLOCKS:
        token, token_scales = _round_groups(x, CHUNKS, UE8M0, WARPS, PARTS)
        thread_barrier()  # the whole token is in shared memory
        for group in gl.static_range(CHUNKS // 2):
            acc = _add_group(
                acc, given[2 * group], given[2 * group + 1], scales, token, token_scales, group,
                CHUNKS, SUMS,
            )  # fmt: skip
            for chunk in gl.static_range(2):
                if 2 * group + chunk + DEPTH < CHUNKS:
                    given += (ask(w_tile, 2 * group + chunk + DEPTH),)
        return gl.convert_layout(gl.sum(acc, 0), OUT)
    else:
        token, scale = _round_token(x, INT8, CHUNKS, GROUP, WARPS, PARTS)
        thread_barrier()
        for chunk in gl.static_range(CHUNKS):
            acc = _add_chunk(acc, given[chunk], scales, token, chunk, CHUNKS, GROUP, SUMS)
            if chunk + DEPTH < CHUNKS:
                given += (ask(w_tile, chunk + DEPTH),)
        total = gl.convert_layout(gl.sum(acc, 0).to(gl.float32), OUT)
        if GROUP == 0:
            row = _row_of(gl.arange(0, N, gl.SliceLayout(1, OUT)), first, column, EACH, LIMIT)
            total = total * gl.load(w_scale + row).to(gl.float32)[:, None]
        return total * scale


@gluon.jit
def _rounded_linear_kernel(
    x, w, w_scale, bias, y,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, INT8: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr, TILES: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
    BLOCKS: gl.constexpr, UE8M0: gl.constexpr, BIAS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """y = W x: 16 WARPS TILES rows a program."""
    OUT: gl.constexpr = out_layout(WARPS * PARTS)
    let_next_start(DEPENDENT)
    N: gl.constexpr = 16 * WARPS * TILES
    column = gl.program_id(0) * N
    acc = _sums(
        x, w, w_scale, gl.to_tensor(0).to(gl.int64), column, N, ROWS, INT8, COLUMNS, WARPS, PARTS,
        TILES, DEPTH, GROUP, BLOCKS, UE8M0, DEPENDENT, OUT,
    )  # fmt: skip
    row = column + gl.arange(0, N, gl.SliceLayout(1, OUT))
    if BIAS:
        acc += gl.load(bias + row, mask=row < ROWS, other=0.0).to(gl.float32)[:, None]
    stored = (row < ROWS)[:, None] & (gl.arange(0, 8, gl.SliceLayout(0, OUT)) == 0)[None, :]
    gl.store(y + row[:, None] + gl.zeros([1, 8], gl.int32, OUT), acc.to(y.dtype.element_ty), stored)


@gluon.jit
def _rounded_gate_up_kernel(
    x, w, w_scale, h, ids, x_row,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, TOP_K: gl.constexpr, INT8: gl.constexpr,
    WARPS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr, DEPTH: gl.constexpr,
    GROUP: gl.constexpr, BLOCKS: gl.constexpr, UE8M0: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """h[pair] = silu(gate x) * (up x), 8 WARPS TILES columns a program. Of a tile's weight rows the
    first half are gates and the other half their ups."""
    PAIR: gl.constexpr = pair_layout(WARPS * PARTS)
    OUT: gl.constexpr = out_layout(WARPS * PARTS)
    N: gl.constexpr = 8 * WARPS * TILES
    tiles: gl.constexpr = (INNER + N - 1) // N
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    pair = gl.program_id(0) // tiles
    column = gl.program_id(0) % tiles * N
    expert = gl.load(ids + pair).to(gl.int64)
    if expert >= 0:
        acc = _sums(
            x + (pair // TOP_K).to(gl.int64) * x_row, w, w_scale, expert * (2 * INNER), column, N,
            INNER, INT8, HIDDEN, WARPS, PARTS, TILES, DEPTH, GROUP, BLOCKS, UE8M0, False, OUT,
        )  # fmt: skip
        pairs = gl.permute(gl.reshape(acc, [2, N, 8]), [1, 2, 0])
        gate, up = gl.split(gl.convert_layout(pairs, PAIR))
        y = gate / (1.0 + gl.exp(-gate)) * up
        FOUND: gl.constexpr = gl.SliceLayout(2, PAIR)
        at = column + gl.arange(0, N, gl.SliceLayout(1, FOUND))
        stored = (at < INNER)[:, None] & (gl.arange(0, 8, gl.SliceLayout(0, FOUND)) == 0)[None, :]
        target = h + pair.to(gl.int64) * INNER + at[:, None] + gl.zeros([1, 8], gl.int32, FOUND)
        gl.store(target, y.to(h.dtype.element_ty), mask=stored)


@gluon.jit
def _rounded_down_kernel(
    h, w, w_scale, y, ids,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, INT8: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr, TILES: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
    BLOCKS: gl.constexpr, UE8M0: gl.constexpr, EARLY: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """y[pair] = down[expert] h[pair], 16 WARPS TILES columns a program. EARLY: after the kernel
    above, which let this one start once it had waited for the ids."""
    OUT: gl.constexpr = out_layout(WARPS * PARTS)
    N: gl.constexpr = 16 * WARPS * TILES
    tiles: gl.constexpr = (HIDDEN + N - 1) // N
    let_next_start(DEPENDENT)
    if not EARLY:
        wait_for_inputs(DEPENDENT)
    pair = gl.program_id(0) // tiles
    column = gl.program_id(0) % tiles * N
    expert = load_choice(ids + pair, EARLY).to(gl.int64)
    if expert >= 0:
        acc = _sums(
            h + pair.to(gl.int64) * INNER, w, w_scale, expert * HIDDEN, column, N, HIDDEN, INT8,
            INNER, WARPS, PARTS, TILES, DEPTH, GROUP, BLOCKS, UE8M0, DEPENDENT, OUT,
        )  # fmt: skip
        at = column + gl.arange(0, N, gl.SliceLayout(1, OUT))
        stored = (at < HIDDEN)[:, None] & (gl.arange(0, 8, gl.SliceLayout(0, OUT)) == 0)[None, :]
        target = y + pair.to(gl.int64) * HIDDEN + at[:, None] + gl.zeros([1, 8], gl.int32, OUT)
        gl.store(target, acc.to(y.dtype.element_ty), mask=stored)
    wait_for_inputs(DEPENDENT)  # so kernels that wait for this one also wait for the first GEMM


# ---- which weights


def takes(weight: Weight) -> bool:
    """Weights that operands.supported takes, with one scale a token; int8 and e4m3 with one a row,
    int4 in chunks of 128 columns. And e4m3 with one per 128x128 block."""
    if INTERPRETED:  # the interpreter does not support Gluon
        return False
    if weight.fp8_blocks:
        runs = takes_fp8(weight.data.device) and weight.data.is_contiguous()
        return runs and takes_blocks_of(weight.columns)
    if not operands.supported(weight):
        return False
    if weight.activation not in ACTIVATIONS_TAKEN or weight.zero is not None:
        return False
    group = operands.group_of(weight)
    if weight.is_int4:
        whole = int4_order.chunk_of(weight) == CHUNK and group in GROUPS_TAKEN
    else:
        whole = group == 0 and weight.block[0] == 1
    return whole and any(fits(weight, weight.columns, parts) for parts in PARTS_TAKEN)


def takes_blocks_of(columns: int) -> bool:
    """Whether e4m3 weights with a scale per 128x128 block and so many columns are taken."""
    return not INTERPRETED and any(_fits_blocks(columns, parts) for parts in PARTS_TAKEN)


def fits(weight: Weight, columns: int, parts: int) -> bool:
    """Whether a warp's share of so many columns is whole chunks, and not too many."""
    if weight.fp8_blocks:
        return _fits_blocks(columns, parts)
    long = weight.is_int4 and weight.activation == "int8_token"
    most = MOST_OF_INT4_INT8 if long else MOST_COLUMNS
    chunks, rest = divmod(columns, CHUNK if weight.is_int4 else HALF.value)
    whole = not rest and chunks % parts == 0
    return whole and chunks // parts <= MOST_CHUNKS and columns <= most


def _fits_blocks(columns: int, parts: int) -> bool:
    """Chunks come in pairs, which share a scale."""
    pairs, rest = divmod(columns, CHUNK)
    whole = not rest and pairs % parts == 0
    return whole and 2 * pairs // parts <= MOST_CHUNKS and columns <= MOST_COLUMNS


def _constants(weight: Weight, tile: DirectTile) -> dict[str, Any]:
    return {
        "INT8": weight.activation.startswith("int8"),
        "GROUP": operands.group_of(weight) if weight.is_int4 else 0,
        "BLOCKS": weight.fp8_blocks,
        "UE8M0": weight.ue8m0,
        **launched_with(tile, weight.data.device),
    }


# ---- launches


def _fitted(tile: DirectTile, weight: Weight) -> DirectTile:
    return with_parts(tile, lambda parts: fits(weight, weight.columns, parts))


def linear(x: Tensor, weight: Weight, bias: Tensor | None, y: Tensor, tile: DirectTile) -> None:
    """y [1, rows] = x [1, columns] W^T + bias, x in any float dtype, not rounded."""
    assert y.shape[0] == 1
    assert x.stride(1) == 1
    tile = _fitted(tile, weight)
    rows = y.shape[1]
    _rounded_linear_kernel[triton.cdiv(rows, tile.rows),](
        x, weight.data, weight.scale, bias, y, rows, weight.columns, BIAS=bias is not None,
        **_constants(weight, tile),
    )  # fmt: skip


def gate_up(
    x: Tensor, weight: Weight, h: Tensor, ids: Tensor, tile: DirectTile, top_k: int
) -> None:
    """h[pair] = silu(gate x) * (up x). x [T, hidden], not rounded, weight [slots, 2 inner, hidden],
    h [pairs, inner], ids [pairs] the experts of pairs, -1: none here."""
    assert x.stride(1) == 1
    tile = _fitted(tile, weight)
    inner = h.shape[1]
    _rounded_gate_up_kernel[ids.numel() * triton.cdiv(2 * inner, tile.rows),](
        x, weight.data, weight.scale, h, ids, x.stride(0), weight.columns, inner, top_k,
        **_constants(weight, tile),
    )  # fmt: skip


def down(h: Tensor, weight: Weight, y: Tensor, ids: Tensor, tile: DirectTile, early: bool) -> None:
    """y[pair] = down h[pair]. h [pairs, inner], not rounded, weight [slots, hidden, inner], y
    [pairs, hidden]. early: the kernel before is `gate_up`, so ids are there before it ends."""
    assert h.is_contiguous()
    tile = _fitted(tile, weight)
    hidden = y.shape[1]
    _rounded_down_kernel[ids.numel() * triton.cdiv(hidden, tile.rows),](
        h, weight.data, weight.scale, y, ids, hidden, weight.columns, EARLY=early,
        **_constants(weight, tile),
    )  # fmt: skip
