"""fp8 e4m3 activations: one fp32 scale a token and 128 columns, as
rorqual.ops.reference.quantize_activation defines them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.activation import Activation, NormOutput, Quantized, hidden_of
from rorqual.ops.triton.runtime.launch import (
    dependent,
    multiprocessors,
    next_power,
    wait_for_inputs,
)

# More rows than these go by tiles of several rows and so many columns in all, to programs of so
# many warps that take so many tiles one after another where there are enough for all
# multiprocessors: a program for each row's piece costs more than it copies.
FEW_ROWS = 256
TILE = 8192
TILE_WARPS = 8
TILES = 4


def tile_of(columns: int) -> tuple[int, int]:
    """(rows, columns) of a program's tile where there are many rows. Pieces of a row are whole
    where they can be, and rows lie side by side for the sake of their scales, which are stored
    column after column."""
    size = next((size for size in (2048, 1024, 512, 256) if columns % size == 0), 128)
    return TILE // size, size


def tiles_each(tiles: int, device: torch.device) -> int:
    """Of a program, if there are so many in all."""
    return TILES if tiles >= 8 * TILES * multiprocessors(device) else 1


def room_for(
    made: Quantized | None,
) -> tuple[Tensor | None, Tensor | None, tuple[int, ...]]:
    """(data, scale, strides of the scale) for a kernel that quantizes what it makes, if asked."""
    return (None, None, (0, 0)) if made is None else (made.data, made.scale, made.scale.stride())


@triton.jit
def to_fp8(x, BLOCKS: tl.constexpr, EXACT: tl.constexpr = False):
    """fp32 [BLOCKS * 128] to (e4m3 [BLOCKS, 128], scale [BLOCKS]); amax is clamped at 1e-4.
    EXACT: divisions are correctly rounded, so that the bytes are the reference's; else a
    quotient may be off by a bit, and an e4m3 value by a step."""
    blocks = tl.reshape(x, (BLOCKS, 128))
    peak = tl.maximum(tl.max(tl.abs(blocks), 1), 1e-4)
    if EXACT:
        scale = tl.div_rn(peak, 448.0)
        data = tl.div_rn(blocks, tl.broadcast_to(scale[:, None], (BLOCKS, 128)))
    else:
        scale = peak / 448.0
        data = blocks / scale[:, None]
    return data.to(tl.float8e4nv), scale


@triton.jit
def store_fp8(
    x, data, scale, row, column, columns, stride, scale_row, scale_block, BLOCK: tl.constexpr
):
    """Quantize x, fp32 [BLOCK] that starts at `column` of `row`, and store both parts."""
    BLOCKS: tl.constexpr = BLOCK // 128
    values, factors = to_fp8(x, BLOCKS)
    offsets = column + tl.arange(0, BLOCK)
    tl.store(data + row * stride + offsets, tl.reshape(values, (BLOCK,)), mask=offsets < columns)
    blocks = column // 128 + tl.arange(0, BLOCKS)
    tl.store(scale + row * scale_row + blocks * scale_block, factors, mask=blocks * 128 < columns)


@triton.jit
def tile_at(tile, pieces, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """(rows [ROWS] int64, first column, columns [SIZE]) of a tile: the pieces of rows come one
    after another, as they lie in memory. 8 numbers at a time, 16 bytes of 16-bit ones, are
    neighbours in a thread: left to itself the compiler has 16 of them, for stores of 16 bytes of
    fp8, and reads every other 16 bytes."""
    row = (tile // pieces * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tile % pieces * SIZE
    return row, column, column + tl.max_contiguous(tl.arange(0, SIZE), 8)


@triton.jit
def store_rows_fp8(x, data, scale, row, column, offsets, real, columns, scale_row, scale_block):
    """Quantize x, fp32 [rows, SIZE], of a tile as `tile_at` has it, and store both parts of rows
    that are `real` [rows]."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    BLOCKS: tl.constexpr = SIZE // 128
    values, factors = to_fp8(tl.reshape(x, (ROWS * SIZE,)), ROWS * BLOCKS)
    tl.store(
        data + (row * columns)[:, None] + offsets[None, :],
        tl.reshape(values, (ROWS, SIZE)),
        mask=real[:, None] & (offsets < columns)[None, :],
    )
    blocks = column // 128 + tl.arange(0, BLOCKS)
    tl.store(
        scale + (row * scale_row)[:, None] + (blocks * scale_block)[None, :],
        tl.reshape(factors, (ROWS, BLOCKS)),
        mask=real[:, None] & (blocks * 128 < columns)[None, :],
    )


@triton.jit(do_not_specialize=["scale_block"])  # it is the number of tokens
def _quantize_kernel(
    x,
    data,
    scale,
    columns,
    x_stride,
    scale_row,
    scale_block,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK
    offsets = column + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
    store_fp8(values, data, scale, row, column, columns, columns, scale_row, scale_block, BLOCK)


@triton.jit(do_not_specialize=["scale_block", "rows"])
def _quantize_rows_kernel(
    x,
    data,
    scale,
    columns,
    x_stride,
    scale_row,
    scale_block,
    rows,
    pieces,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """_quantize_kernel for many rows, TILES tiles a program."""
    wait_for_inputs(DEPENDENT)
    first = tl.program_id(0) * TILES
    for tile in range(first, first + TILES):
        row, column, offsets = tile_at(tile, pieces, ROWS, SIZE)
        real = row < rows
        values = tl.load(
            x + (row * x_stride)[:, None] + offsets[None, :],
            mask=real[:, None] & (offsets < columns)[None, :],
            other=0.0,
        )
        store_rows_fp8(
            values.to(tl.float32), data, scale, row, column, offsets, real, columns, scale_row,
            scale_block,
        )  # fmt: skip


def quantize(x: Tensor) -> Quantized:
    """x [T, columns] in any float dtype, rows `x.stride(0)` apart."""
    tokens, columns = x.shape
    assert x.stride(1) == 1
    out = Quantized.empty(tokens, columns, x.device)
    if tokens > FEW_ROWS:
        rows, size = tile_of(columns)
        pieces = triton.cdiv(columns, size)
        tiles = triton.cdiv(tokens, rows) * pieces
        each = tiles_each(tiles, x.device)
        _quantize_rows_kernel[triton.cdiv(tiles, each),](
            x,
            out.data,
            out.scale,
            columns,
            x.stride(0),
            *out.scale.stride(),
            tokens,
            pieces,
            rows,
            size,
            each,
            num_warps=TILE_WARPS,
            **dependent(x.device),
        )
        return out
    block = min(max(128, next_power(columns)), 1024)
    _quantize_kernel[tokens, triton.cdiv(columns, block)](
        x,
        out.data,
        out.scale,
        columns,
        x.stride(0),
        *out.scale.stride(),
        BLOCK=block,
        num_warps=4,
        **dependent(x.device),
    )
    return out


def quantized(x: Activation | Quantized) -> Quantized:
    """x in fp8, made here unless it comes in fp8."""
    if isinstance(x, NormOutput):
        return x.quantized
    return x if isinstance(x, Quantized) else quantize(hidden_of(x))
