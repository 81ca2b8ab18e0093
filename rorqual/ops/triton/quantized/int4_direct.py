"""GEMM of int4 weights and a few 16-bit tokens, in Gluon: weights are loaded from global memory
directly to tensor core registers.

A weight is used once, so staging it in shared memory would be wasted traffic. A warp has 16 weight
rows and one of PARTS equal parts of the columns; lane 4 r + q reads its 16 adjacent bytes
(int4_order.py) of a chunk of 128 columns, of rows r and r + 8, and unpacks them to its part of the
left operand of mma.m16n8k16. DEPTH chunks are loaded ahead. All columns of the M tokens are in
shared memory: every warp reads its part. A tile of 128 columns and 16 rows takes about 120
instructions for 8 tokens; the form with wgmma (operands.py) takes 204. The chunks of a warp are
unrolled: in a loop, each byte would have its own register.

Weights are loaded before the kernel waits for the one that computes the tokens, if the experts do
not depend on it: no kernel of a step writes weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from rorqual.ops.reference import Weight
from rorqual.ops.triton.quantized import int4_order
from rorqual.ops.triton.quantized.int4_order import BF16_HIGH, BF16_LOW, FP16_HIGH, FP16_LOW
from rorqual.ops.triton.runtime.launch import (
    COUNTERS,
    INTERPRETED,
    dependent,
    is_hopper,
    zeroed_counters,
)
from rorqual.ops.triton.runtime.sm90_pipeline import (
    let_next_start,
    thread_barrier,
    wait_for_inputs,
)

CHUNK = 128  # columns
HALF = gl.constexpr(64)
GROUPS_TAKEN = (64, 128)  # columns that share a scale
MOST_CHUNKS = 24  # of a warp: they are unrolled
PARTS_TAKEN = (1, 2, 4, 8)
FEWEST_TOKENS = 8  # of a tile
SHARED = 200 * 1024  # bytes of a tile's tokens
PORTABLE_SHARED = 88 * 1024  # before sm_90


# (order, blocks or None, count or None, limit) of moe/align.ExpertBlocks or of unsorted pairs
Places = tuple[Tensor, Tensor | None, Tensor | None, int]


@dataclass(frozen=True)
class DirectTile:
    """warps: each with `tiles` times 16 weight rows. parts: of the columns, each with this many
    warps. depth: chunks loaded ahead. registers: most per thread; 0: the compiler's choice."""

    warps: int
    parts: int
    depth: int
    registers: int = 0
    tiles: int = 1

    @property
    def rows(self) -> int:
        """Of weights in a program's tile."""
        return 16 * self.warps * self.tiles


@gluon.constexpr_function
def bytes_layout(warps, parts, tiles):
    """Bytes [parts, 16 rows a warp and tile, 64]: 16 in a row, of the rows mma gives a lane."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 8, 0]]
    registers += [[0, 16 * warps << i, 0] for i in range(tiles.bit_length() - 1)]
    lanes = [[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    rows = [[0, 16 << i, 0] for i in range(warps.bit_length() - 1)]
    shares = [[1 << i, 0, 0] for i in range(parts.bit_length() - 1)]
    shape = [parts, 16 * warps * tiles, 64]
    return gl.DistributedLinearLayout(registers, lanes, rows + shares, [], shape)


@gluon.constexpr_function
def scales_layout(count, warps, parts, tiles):
    """Scales [parts, 16 rows a warp and tile, count]: all of the rows that mma gives a lane."""
    registers = [[0, 0, 1 << i] for i in range(count.bit_length() - 1)] + [[0, 8, 0]]
    registers += [[0, 16 * warps << i, 0] for i in range(tiles.bit_length() - 1)]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    rows = [[0, 16 << i, 0] for i in range(warps.bit_length() - 1)]
    shares = [[1 << i, 0, 0] for i in range(parts.bit_length() - 1)]
    shape = [parts, 16 * warps * tiles, count]
    return gl.DistributedLinearLayout(registers, lanes, rows + shares, [], shape)


@gluon.constexpr_function
def halvings(count):
    return count.bit_length() - 1


@gluon.constexpr_function
def sums_layout(warps, parts):
    return gl.NVMMADistributedLayout([2, 0], [parts, warps, 1], [1, 16, 8])


@gluon.constexpr_function
def copy_layout(warps, parts):
    """Parts x tokens x columns: 16 bytes a lane, 256 of a row for half a warp."""
    return gl.BlockedLayout([1, 1, 8], [1, 2, 16], [parts, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def out_layout(warps):
    """Weight rows x tokens, as results are stored: rows are neighbours in memory."""
    return gl.BlockedLayout([2, 1], [8, 4], [warps, 1], [0, 1])


@gluon.constexpr_function
def pair_layout(warps):
    """As out_layout, and both halves of a pair in one thread."""
    return gl.BlockedLayout([2, 1, 2], [8, 4, 1], [warps, 1, 1], [2, 0, 1])


@gluon.constexpr_function
def tokens_layout():
    return gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])


@gluon.constexpr_function
def pieces_of(chunks):
    """Numbers of chunks that are powers of two, as shapes have to be, and together `chunks`."""
    return [1 << bit for bit in reversed(range(chunks.bit_length())) if chunks >> bit & 1]


@gluon.constexpr_function
def first_of(chunks, piece):
    """The first chunk of a piece."""
    return sum(pieces_of(chunks)[:piece])


@gluon.constexpr_function
def piece_with(chunks, chunk):
    """Which piece has the chunk."""
    piece = 0
    while first_of(chunks, piece + 1) <= chunk:
        piece += 1
    return piece


@gluon.constexpr_function
def along(layout, axis):
    """Of a tensor of three dimensions: the layout of one of them."""
    outer, inner = {0: (2, 1), 1: (2, 0), 2: (1, 0)}[axis]
    return gl.SliceLayout(inner, gl.SliceLayout(outer, layout))


@gluon.jit
def low_numbers(packed, kind: gl.constexpr):
    """int4_order.low_half in 16 bits."""
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise(
            BF16_LOW, "=&r,=&r,r", [packed], dtype=gl.bfloat16, is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            FP16_LOW, "=&r,=&r,r", [packed], dtype=gl.float16, is_pure=True, pack=4
        )


@gluon.jit
def high_numbers(packed, kind: gl.constexpr):
    """int4_order.high_half in 16 bits."""
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise(
            BF16_HIGH, "=&r,=&r,r", [packed], dtype=gl.bfloat16, is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            FP16_HIGH, "=&r,=&r,r", [packed], dtype=gl.float16, is_pure=True, pack=4
        )


@gluon.jit
def ask(w_tile, chunk):
    """Load the bytes of a chunk."""
    return gl.load(w_tile + chunk * HALF, cache_modifier=".cg")


@gluon.jit
def ask_first(w_tile, CHUNKS: gl.constexpr, DEPTH: gl.constexpr):
    given = ()
    for chunk in gl.static_range(min(DEPTH, CHUNKS)):
        given += (ask(w_tile, chunk),)  # type: ignore[assignment]
    return given


@gluon.jit
def in_pairs(chunk):
    """The 64 bytes or numbers of each row in the order of the columns of mma.m16n8k16, whose
    operands are pairs. Nothing changes its thread."""
    PARTS: gl.constexpr = chunk.shape[0]
    N: gl.constexpr = chunk.shape[1]
    pairs = gl.permute(gl.reshape(chunk, [PARTS, N, 4, 4, 2, 2]), [0, 1, 3, 4, 2, 5])
    return gl.reshape(pairs, [PARTS, N, HALF])


@gluon.jit
def in_halves(table):
    """[parts, rows, count] as two of half the columns."""
    HALVED: gl.constexpr = table.shape[2] // 2
    pairs = gl.reshape(table, [table.shape[0], table.shape[1], 2, HALVED])
    return gl.split(gl.permute(pairs, [0, 1, 3, 2]))


@gluon.jit
def one_by_one(table, COUNT: gl.constexpr, SUMS: gl.constexpr):
    """[parts, rows, COUNT] as COUNT tensors [parts, rows]."""
    found = (table,)
    for _ in gl.static_range(halvings(COUNT)):
        halved = ()
        for i in gl.static_range(len(found)):
            halved += in_halves(found[i])
        found = halved  # type: ignore[assignment]
    rows = ()
    for i in gl.static_range(COUNT):
        row = gl.reshape(found[i], [table.shape[0], table.shape[1]])
        row = gl.convert_layout(row, gl.SliceLayout(2, SUMS), assert_trivial=True)
        rows += (row,)  # type: ignore[assignment]
    return rows


@gluon.jit
def ask_scales(
    w_scale, GROUPS: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """The scales of all a warp's groups, in few wide loads: [parts, rows] of each."""
    PIECES: gl.constexpr = pieces_of(GROUPS)
    scales = ()
    for i in gl.static_range(len(PIECES)):
        scales += piece_of_scales(
            w_scale, first_of(GROUPS, i), PIECES[i], WARPS, PARTS, TILES, SUMS
        )  # fmt: skip
    return scales


@gluon.jit
def piece_of_scales(
    w_scale, FIRST: gl.constexpr, COUNT: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
    TILES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    PLACES: gl.constexpr = scales_layout(COUNT, WARPS, PARTS, TILES)
    at = gl.convert_layout(w_scale, gl.SliceLayout(2, PLACES), assert_trivial=True)
    group = FIRST + gl.arange(0, COUNT, along(PLACES, 2))
    return one_by_one(gl.load(at[:, :, None] + group[None, None, :]), COUNT, SUMS)


@gluon.jit
def add_chunk(
    acc, packed, scales, tokens, CHUNK_AT: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """acc + the products of a chunk. tokens: pieces as copy_tokens makes them."""
    PIECE: gl.constexpr = piece_with(CHUNKS, CHUNK_AT)
    piece = tokens[PIECE]
    kind: gl.constexpr = piece.dtype
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    ordered = in_pairs(packed)
    low = gl.convert_layout(low_numbers(ordered, kind), LEFT, assert_trivial=True)
    high = gl.convert_layout(high_numbers(ordered, kind), LEFT, assert_trivial=True)
    LOW: gl.constexpr = (CHUNK_AT - first_of(CHUNKS, PIECE)) * 128
    HIGH: gl.constexpr = LOW + HALF
    first = piece.slice(LOW, HALF, 2).permute((0, 2, 1)).load(RIGHT)
    second = piece.slice(HIGH, HALF, 2).permute((0, 2, 1)).load(RIGHT)
    none = gl.full(acc.shape, 0.0, gl.float32, SUMS)
    # two independent chains of products: a single one would wait for its own results
    below = mma_v2(low, first, none)
    above = mma_v2(high, second, none)
    if GROUP == HALF:
        acc += below * scales[2 * CHUNK_AT].to(gl.float32)[:, :, None]
        return acc + above * scales[2 * CHUNK_AT + 1].to(gl.float32)[:, :, None]
    else:
        return acc + (below + above) * scales[CHUNK_AT].to(gl.float32)[:, :, None]


@gluon.jit
def copy_piece(
    rows, valid, FIRST: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, PARTS: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = rows.dtype.element_ty
    piece = gl.allocate_shared_memory(kind, [PARTS, M, WIDTH], tokens_layout())
    column = FIRST + gl.arange(0, WIDTH, along(COPY, 2))[None, None, :]
    async_copy.async_copy_global_to_shared(piece, rows + column, mask=valid[None, :, None])
    return piece


@gluon.jit
def copy_tokens(
    x, token, x_row, valid, M: gl.constexpr, CHUNKS: gl.constexpr, PARTS: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """Rows `token` [M] of x, on their way to shared memory: pieces [PARTS, M, columns]. Rows that
    are not valid become zeros."""
    PIECES: gl.constexpr = pieces_of(CHUNKS)
    part = gl.arange(0, PARTS, along(COPY, 0))[:, None, None] * (CHUNKS * 128)
    rows = x + token.to(gl.int64)[None, :, None] * x_row + part
    found = ()
    for i in gl.static_range(len(PIECES)):
        piece = copy_piece(
            rows, valid, first_of(CHUNKS, i) * 128, PIECES[i] * 128, M, PARTS, COPY
        )  # fmt: skip
        found += (piece,)  # type: ignore[assignment]
    async_copy.commit_group()
    return found


@gluon.jit
def finished(
    given, scales, tokens, w_tile, M: gl.constexpr, CHUNKS: gl.constexpr, DEPTH: gl.constexpr,
    GROUP: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """[16 WARPS TILES weight rows, M tokens] fp32. given: the first DEPTH chunks, on their way."""
    SUMS: gl.constexpr = sums_layout(WARPS, PARTS)
    acc = gl.full([PARTS, 16 * WARPS * TILES, M], 0.0, gl.float32, SUMS)
    async_copy.wait_group(0)
    thread_barrier()
    for chunk in gl.static_range(CHUNKS):
        acc = add_chunk(acc, given[chunk], scales, tokens, chunk, CHUNKS, GROUP, SUMS)
        if chunk + DEPTH < CHUNKS:
            given += (ask(w_tile, chunk + DEPTH),)
    return gl.sum(acc, 0)


@gluon.jit
def load_choice(place, EARLY: gl.constexpr):
    """What the router's kernels wrote. EARLY: before the wait for the previous kernel. They have
    ended by then, but only the wait empties the multiprocessor's L1, which may still have what was
    in this memory before; so the value comes from L2."""
    if EARLY:
        return gl.load(place, cache_modifier=".cg")
    else:
        return gl.load(place)


@gluon.jit
def block_of(blocks, order, limit, index, SORTED: gl.constexpr, EARLY: gl.constexpr):
    """(expert, first row, end of its rows, shift) of a row block, as experts._block. Read before it
    is known whether there is such a block."""
    if SORTED:
        expert = load_choice(blocks + index, EARLY)
        start = load_choice(blocks + limit + index, EARLY)
        end = load_choice(blocks + 2 * limit + index, EARLY)
        shift = load_choice(blocks + 3 * limit + index, EARLY)
        return expert, start, end, shift
    else:
        expert = load_choice(order + index, EARLY).to(gl.int32)
        return expert, index, index + (expert >= 0).to(gl.int32), 0


@gluon.jit
def is_there(index, expert, count, limit, SORTED: gl.constexpr, EARLY: gl.constexpr):
    """Whether a block is one of the sorted ones, or an unsorted pair that has an expert."""
    if SORTED:
        return index < load_choice(count, EARLY)
    else:
        return (index < limit) & (expert >= 0)


@gluon.jit
def weights_of(
    w, w_scale, row, COLUMNS: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr,
    BYTES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Where the first chunk's bytes and scales of each part lie, of rows `row`."""
    SHARE: gl.constexpr = COLUMNS // PARTS
    byte = gl.arange(0, 64, along(BYTES, 2))[None, None, :]
    part = gl.arange(0, PARTS, along(BYTES, 0))[:, None, None]
    w_tile = w + row[None, :, None] * (COLUMNS // 2) + part * (SHARE // 2) + byte
    at = gl.convert_layout(row, along(SUMS, 1))
    share = gl.arange(0, PARTS, along(SUMS, 0))
    scales = w_scale + at[None, :] * (COLUMNS // GROUP) + share[:, None] * (SHARE // GROUP)
    return w_tile, scales


@gluon.jit(do_not_specialize=["limit"])
def _int4_gate_up_kernel(
    x, w, w_scale, h, order, blocks, count, limit, x_row,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, TOP_K: gl.constexpr, M: gl.constexpr,
    WARPS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr, DEPTH: gl.constexpr,
    GROUP: gl.constexpr, SORTED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """h[row] = silu(gate x) * (up x): 8 WARPS TILES columns of h for one row block. Of a tile's
    weight rows the first half are gates and the other half their ups."""
    COPY: gl.constexpr = copy_layout(WARPS, PARTS)
    BYTES: gl.constexpr = bytes_layout(WARPS, PARTS, TILES)
    SUMS: gl.constexpr = sums_layout(WARPS, PARTS)
    PAIR: gl.constexpr = pair_layout(WARPS * PARTS)
    OUT: gl.constexpr = gl.SliceLayout(2, PAIR)
    CHUNKS: gl.constexpr = HIDDEN // 128 // PARTS
    N: gl.constexpr = 8 * WARPS * TILES
    tiles: gl.constexpr = (INNER + N - 1) // N
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    index = gl.program_id(0) // tiles
    column = gl.program_id(0) % tiles * N
    expert, start, end, shift = block_of(blocks, order, limit, index, SORTED, False)
    if is_there(index, expert, count, limit, SORTED, False):
        part = gl.arange(0, 2 * N, along(BYTES, 1))
        inner = part // N * INNER + gl.minimum(column + part % N, INNER - 1)
        row = expert.to(gl.int64) * (2 * INNER) + inner
        w_tile, scales = weights_of(w, w_scale, row, HIDDEN, PARTS, GROUP, BYTES, SUMS)
        given = ask_first(w_tile, CHUNKS, DEPTH)
        scales = ask_scales(scales, CHUNKS * 128 // GROUP, WARPS, PARTS, TILES, SUMS)
        rows = start + gl.arange(0, M, along(COPY, 1))
        valid = rows < end
        picks = gl.load(order + shift + rows, mask=valid, other=0) if SORTED else rows
        tokens = copy_tokens(x, picks // TOP_K, x_row, valid, M, CHUNKS, PARTS, COPY)
        acc = finished(
            given, scales, tokens, w_tile, M, CHUNKS, DEPTH, GROUP, WARPS, PARTS, TILES
        )  # fmt: skip
        pairs = gl.permute(gl.reshape(acc, [2, N, M]), [1, 2, 0])
        gate, up = gl.split(gl.convert_layout(pairs, PAIR))
        y = gate / (1.0 + gl.exp(-gate)) * up
        out_column = column + gl.arange(0, N, gl.SliceLayout(1, OUT))
        out_row = start + gl.arange(0, M, gl.SliceLayout(0, OUT))
        target = h + out_row.to(gl.int64)[None, :] * INNER + out_column[:, None]
        stored = (out_row < end)[None, :] & (out_column < INNER)[:, None]
        gl.store(target, y.to(h.dtype.element_ty), mask=stored)


@gluon.jit(do_not_specialize=["limit"])
def _int4_down_kernel(
    h, w, w_scale, y, order, blocks, count, limit, h_row,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr, TILES: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
    SORTED: gl.constexpr, EARLY: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """y[pair] = down[expert] h[row], 16 WARPS TILES columns per program."""
    COPY: gl.constexpr = copy_layout(WARPS, PARTS)
    BYTES: gl.constexpr = bytes_layout(WARPS, PARTS, TILES)
    SUMS: gl.constexpr = sums_layout(WARPS, PARTS)
    OUT: gl.constexpr = out_layout(WARPS * PARTS)
    CHUNKS: gl.constexpr = INNER // 128 // PARTS
    N: gl.constexpr = 16 * WARPS * TILES
    tiles: gl.constexpr = (HIDDEN + N - 1) // N
    let_next_start(DEPENDENT)
    # experts were chosen before the first product, which let this one start once it had waited
    if not EARLY:
        wait_for_inputs(DEPENDENT)
    index = gl.program_id(0) // tiles
    column = gl.program_id(0) % tiles * N
    expert, start, end, shift = block_of(blocks, order, limit, index, SORTED, EARLY)
    if is_there(index, expert, count, limit, SORTED, EARLY):
        part = gl.minimum(column + gl.arange(0, N, along(BYTES, 1)), HIDDEN - 1)
        row = expert.to(gl.int64) * HIDDEN + part
        w_tile, scales = weights_of(w, w_scale, row, INNER, PARTS, GROUP, BYTES, SUMS)
        given = ask_first(w_tile, CHUNKS, DEPTH)
        scales = ask_scales(scales, CHUNKS * 128 // GROUP, WARPS, PARTS, TILES, SUMS)
        rows = start + gl.arange(0, M, along(COPY, 1))
        out_row = start + gl.arange(0, M, gl.SliceLayout(0, OUT))
        there = out_row < end
        pick = out_row
        if SORTED:
            place = order + shift + out_row
            pick = gl.load(place, mask=there, other=0, cache_modifier=".cg" if EARLY else "")
        wait_for_inputs(DEPENDENT)
        tokens = copy_tokens(h, rows, h_row, rows < end, M, CHUNKS, PARTS, COPY)
        acc = finished(
            given, scales, tokens, w_tile, M, CHUNKS, DEPTH, GROUP, WARPS, PARTS, TILES
        )  # fmt: skip
        found = gl.convert_layout(acc, OUT).to(y.dtype.element_ty)
        out_column = column + gl.arange(0, N, gl.SliceLayout(1, OUT))
        target = y + pick.to(gl.int64)[None, :] * HIDDEN + out_column[:, None]
        gl.store(target, found, mask=there[None, :] & (out_column < HIDDEN)[:, None])
    wait_for_inputs(DEPENDENT)  # so kernels that wait for this one also wait for the first GEMM


@gluon.jit
def _store_rows(y, row, token, values, bias, stored, ROWS: gl.constexpr, BIAS: gl.constexpr):
    if BIAS:
        more = gl.load(bias + row, mask=row < ROWS, other=0.0)
        values += more.to(gl.float32)[:, None]
    target = y + token.to(gl.int64)[None, :] * ROWS + row[:, None]
    gl.store(target, values.to(y.dtype.element_ty), mask=stored)


@gluon.jit(do_not_specialize=["tokens"])
def _int4_linear_kernel(
    x, w, w_scale, bias, y, partials, counters, tokens, x_row,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr, TILES: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
    SPLIT: gl.constexpr, BIAS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """y = x W^T: program (tile of 16 WARPS TILES rows, M tokens, share of the columns). Of SPLIT
    shares the last one to finish adds all up, in their order."""
    COPY: gl.constexpr = copy_layout(WARPS, PARTS)
    BYTES: gl.constexpr = bytes_layout(WARPS, PARTS, TILES)
    SUMS: gl.constexpr = sums_layout(WARPS, PARTS)
    OUT: gl.constexpr = out_layout(WARPS * PARTS)
    CHUNKS: gl.constexpr = COLUMNS // 128 // SPLIT // PARTS
    N: gl.constexpr = 16 * WARPS * TILES
    tile = gl.program_id(0)
    share = gl.program_id(1)
    m_tiles = (tokens + M - 1) // M
    first_row = tile // m_tiles * N
    first_token = tile % m_tiles * M
    let_next_start(DEPENDENT)
    inside = gl.minimum(first_row + gl.arange(0, N, along(BYTES, 1)), ROWS - 1).to(gl.int64)
    SHARE: gl.constexpr = COLUMNS // SPLIT
    w_tile, scales = weights_of(
        w + share * (SHARE // 2), w_scale + share * (SHARE // GROUP), inside * SPLIT, SHARE, PARTS,
        GROUP, BYTES, SUMS,
    )  # fmt: skip
    given = ask_first(w_tile, CHUNKS, DEPTH)
    scales = ask_scales(scales, CHUNKS * 128 // GROUP, WARPS, PARTS, TILES, SUMS)
    token = first_token + gl.arange(0, M, along(COPY, 1))
    source = gl.minimum(token, tokens - 1)
    wait_for_inputs(DEPENDENT)
    inputs = copy_tokens(
        x + share * SHARE, source, x_row, token < tokens, M, CHUNKS, PARTS, COPY
    )  # fmt: skip
    acc = finished(given, scales, inputs, w_tile, M, CHUNKS, DEPTH, GROUP, WARPS, PARTS, TILES)
    acc = gl.convert_layout(acc, OUT)
    row = first_row + gl.arange(0, N, gl.SliceLayout(1, OUT))
    out_token = first_token + gl.arange(0, M, gl.SliceLayout(0, OUT))
    stored = (out_token < tokens)[None, :] & (row < ROWS)[:, None]
    if SPLIT == 1:
        _store_rows(y, row, out_token, acc, bias, stored, ROWS, BIAS)
    else:
        held = partials + out_token.to(gl.int64)[None, :] * ROWS + row[:, None]
        size = tokens.to(gl.int64) * ROWS
        gl.store(held + share * size, acc, mask=stored, cache_modifier=".cg")
        thread_barrier()  # every thread's part is stored before one of them counts them in
        if gl.atomic_add(counters + tile, 1, sem="acq_rel") + 1 == SPLIT:
            acc = gl.full([N, M], 0.0, gl.float32, OUT)
            for part in gl.static_range(SPLIT):
                there = held + part * size
                acc += gl.load(there, mask=stored, other=0.0, cache_modifier=".cg")
            _store_rows(y, row, out_token, acc, bias, stored, ROWS, BIAS)
            gl.store(counters + tile, 0)


def takes(weight: Weight) -> bool:
    """Weights as int4_order.py lays them out in chunks of 128 columns, without zero points, tokens
    in 16 bits."""
    return (
        not INTERPRETED  # Triton's interpreter does not support Gluon
        and weight.turned
        and weight.activation == "wide"
        and weight.zero is None
        and int4_order.chunk_of(weight) == CHUNK
        and int4_order.group_of(weight) in GROUPS_TAKEN
        and _has_room(weight, weight.columns)
    )


def takes_experts(down: Weight) -> bool:
    """Both products of experts with this `down` [slots, hidden, inner]."""
    hidden = down.data.shape[1]
    return hidden % CHUNK == 0 and _has_room(down, hidden) and takes(down)


def fits(columns: int, tokens: int, parts: int, split: int = 1) -> bool:
    """Whether a program's columns fit into shared memory and those of a warp into a kernel."""
    chunks = columns // CHUNK
    shares = parts * split
    own = chunks // shares
    return (
        chunks % shares == 0 and own <= MOST_CHUNKS and own * parts * tokens * 2 * CHUNK <= SHARED
    )


def _has_room(weight: Weight, columns: int) -> bool:
    """Whether some tile takes so many columns on the weight's GPU."""
    portable = not is_hopper(weight.data.device)
    if portable and columns * FEWEST_TOKENS * 2 > PORTABLE_SHARED:
        return False
    return any(fits(columns, FEWEST_TOKENS, parts) for parts in PARTS_TAKEN)


def with_parts(tile: DirectTile, fits: Callable[[int], bool]) -> DirectTile:
    """The tile for other columns than those it was found on: the nearest number of parts that
    `fits`, and about as many warps."""
    wanted = tile.parts.bit_length()
    among = sorted(PARTS_TAKEN, key=lambda parts: abs(parts.bit_length() - wanted))
    parts = next((parts for parts in among if fits(parts)), None)
    assert parts, f"no number of parts fits, {tile}"
    if parts == tile.parts:
        return tile
    return replace(tile, parts=parts, warps=max(1, tile.warps * tile.parts // parts))


def launched_with(tile: DirectTile, device: torch.device) -> dict[str, Any]:
    """Compile-time arguments of a kernel."""
    most = {"maxnreg": tile.registers} if tile.registers else {}
    return {
        "WARPS": tile.warps,
        "PARTS": tile.parts,
        "TILES": tile.tiles,
        "DEPTH": tile.depth,
        "num_warps": tile.warps * tile.parts,
        **most,
        **dependent(device),
    }


def _fitted(tile: DirectTile, columns: int, tokens: int, split: int = 1) -> DirectTile:
    return with_parts(tile, lambda parts: fits(columns, tokens, parts, split))


def _constants(weight: Weight, tile: DirectTile) -> dict[str, Any]:
    return {"GROUP": int4_order.group_of(weight), **launched_with(tile, weight.data.device)}


def gate_up(
    x: Tensor, weight: Weight, h: Tensor, places: Places, tile: DirectTile, m: int, top_k: int
) -> None:
    """h[row] = silu(gate x) * (up x). x [T, hidden] of 16 bits, weight [slots, 2 inner, hidden]
    that `takes` accepts, h [pairs, inner]."""
    inner = weight.data.shape[1] // 2
    order, table, count, limit = places
    tile = _fitted(tile, weight.columns, m)
    _int4_gate_up_kernel[limit * triton.cdiv(2 * inner, tile.rows),](
        x, weight.data, weight.scale, h, order, table, count, limit, x.stride(0),
        weight.columns, inner, top_k, m, SORTED=table is not None, **_constants(weight, tile),
    )  # fmt: skip


def down(
    h: Tensor, weight: Weight, y: Tensor, places: Places, tile: DirectTile, m: int, early: bool
) -> None:
    """y[pair] = down h[row]. h [pairs, inner], weight [slots, hidden, inner], y [pairs, hidden].
    early: the kernel before is `gate_up`, so `places` are there before it ends."""
    hidden = weight.data.shape[1]
    order, table, count, limit = places
    tile = _fitted(tile, weight.columns, m)
    _int4_down_kernel[limit * triton.cdiv(hidden, tile.rows),](
        h, weight.data, weight.scale, y, order, table, count, limit, h.stride(0),
        hidden, weight.columns, m, SORTED=table is not None, EARLY=early,
        **_constants(weight, tile),
    )  # fmt: skip


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None, y: Tensor, tile: DirectTile, m: int, split: int
) -> None:
    """y [T, rows] = x [T, columns] W^T + bias."""
    tokens, rows = y.shape
    if not fits(weight.columns, m, tile.parts, split):
        split = 1
        tile = _fitted(tile, weight.columns, m)
    tiles = triton.cdiv(tokens, m) * triton.cdiv(rows, tile.rows)
    if tiles > COUNTERS:
        split = 1
        tile = _fitted(tile, weight.columns, m)
    partials = None
    if split > 1:
        partials = torch.empty(split, tokens, rows, dtype=torch.float32, device=y.device)
    _int4_linear_kernel[tiles, split](
        x, weight.data, weight.scale, bias, y, partials,
        zeroed_counters(y.device, tiles) if split > 1 else None,
        tokens, x.stride(0), rows, weight.columns, m, SPLIT=split, BIAS=bias is not None,
        **_constants(weight, tile),
    )  # fmt: skip
