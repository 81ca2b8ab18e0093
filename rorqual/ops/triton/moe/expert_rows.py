"""Permutes rows to expert order (align.py), for grouped GEMMs whose tiles are contiguous rows.

Many rows are copied token by token: a row is read once and written to the position of each of its
experts. Reading in sorted order instead would load a row from memory again for most of its experts.
Few rows, whose sorting leaves no places, are copied by blocks, one program per row, counting the
unused rows of blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.activation import Quantized
from rorqual.ops.triton.moe.align import ExpertBlocks
from rorqual.ops.triton.rowwise.quantize import store_fp8, to_fp8
from rorqual.ops.triton.rowwise.silu import silu
from rorqual.ops.triton.runtime.launch import (
    dependent,
    multiprocessors,
    next_power,
    wait_for_inputs,
)

# Bytes per thread in flight, in programs that copy whole rows.
THREAD_BYTES = 64
# Most columns of a row that one program copies.
COPIED_COLUMNS = 8192
# SwiGLU of many rows: elements of a tile of several rows, warps of a program, and tiles per program
# if there are enough for all multiprocessors. One program per piece of a row would cost more than
# it computes.
TILE = 8192
TILE_WARPS = 8
TILES = 2


def tile_of(columns: int) -> tuple[int, int]:
    """(rows, columns) of a program's tile: whole rows if possible, and consecutive ones, since
    scales are stored column-major."""
    size = next((size for size in (2048, 1024, 512, 256) if columns % size == 0), 128)
    return TILE // size, size


def tiles_each(tiles: int, device: torch.device) -> int:
    """Tiles per program, if there are `tiles` in all."""
    return TILES if tiles >= 8 * TILES * multiprocessors(device) else 1


@triton.jit
def _row(blocks, count, limit, ROWS: tl.constexpr):
    """(block of this program, its row, whether there is such a row)"""
    block = tl.program_id(0) // ROWS
    real = block < tl.load(count)
    row = tl.load(blocks + limit + block, mask=real, other=0) + tl.program_id(0) % ROWS
    return block, row.to(tl.int64), row < tl.load(blocks + 2 * limit + block, mask=real, other=0)


@triton.jit(do_not_specialize=["limit", "xs_block", "scale_block"])
def _order_kernel(
    x,
    x_scale,
    data,
    scale,
    order,
    blocks,
    count,
    limit,
    columns,
    x_row,
    xs_row,
    xs_block,
    scale_row,
    scale_block,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (rows of all blocks, pieces of a row). Copies a row of x and its scales to its sorted
    position. QUANTIZE: x has no scales and is quantized here."""
    wait_for_inputs(DEPENDENT)
    column = tl.program_id(1) * SIZE
    block, row, real = _row(blocks, count, limit, ROWS)
    if real:
        token = (tl.load(order + tl.load(blocks + 3 * limit + block) + row) // TOP_K).to(tl.int64)
        offsets = column + tl.arange(0, SIZE)
        values = tl.load(x + token * x_row + offsets, mask=offsets < columns, other=0.0)
        if QUANTIZE:
            store_fp8(
                values.to(tl.float32),
                data,
                scale,
                row,
                column,
                columns,
                columns,
                scale_row,
                scale_block,
                SIZE,
                UE8M0,
            )
        else:
            tl.store(data + row * columns + offsets, values, mask=offsets < columns)
            part = column // 128 + tl.arange(0, SIZE // 128)
            factors = tl.load(x_scale + token * xs_row + part * xs_block, mask=part * 128 < columns)
            tl.store(
                scale + row * scale_row + part * scale_block, factors, mask=part * 128 < columns
            )


@triton.jit(do_not_specialize=["xs_block", "scale_block"])
def _spread_kernel(
    x,
    x_scale,
    data,
    scale,
    places,
    columns,
    x_row,
    xs_row,
    xs_block,
    scale_row,
    scale_block,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tokens, pieces of a row). As _order_kernel, from a token to the positions of all its
    experts."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE
    offsets = column + tl.arange(0, SIZE)
    inside = offsets < columns
    part = column // 128 + tl.arange(0, SIZE // 128)
    scaled = part * 128 < columns
    rows = ()
    for k in tl.static_range(TOP_K):
        rows += (tl.load(places + token * TOP_K + k).to(tl.int64),)  # type: ignore[assignment]
    # with one expert per row the load waits until the row is known to be needed
    needed = (rows[0] >= 0) if TOP_K == 1 else True  # type: ignore[misc]
    values = tl.load(x + token * x_row + offsets, mask=inside & needed, other=0.0)
    if QUANTIZE:
        found, factors = to_fp8(values.to(tl.float32), SIZE // 128, UE8M0)
        values = tl.reshape(found, (SIZE,))
    else:
        factors = tl.load(x_scale + token * xs_row + part * xs_block, mask=scaled & needed)
    for k in tl.static_range(TOP_K):
        here = rows[k] >= 0
        tl.store(data + rows[k] * columns + offsets, values, mask=inside & here)
        tl.store(scale + rows[k] * scale_row + part * scale_block, factors, mask=scaled & here)


@triton.jit(do_not_specialize=["limit", "scale_block"])
def _join_kernel(
    both,
    data,
    scale,
    blocks,
    count,
    limit,
    columns,
    scale_row,
    scale_block,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid as _order_kernel. silu(gate) * up of a row with gate and up concatenated, quantized."""
    wait_for_inputs(DEPENDENT)
    column = tl.program_id(1) * SIZE
    _, row, real = _row(blocks, count, limit, ROWS)
    if real:
        offsets = column + tl.arange(0, SIZE)
        gate = tl.load(both + row * (2 * columns) + offsets, mask=offsets < columns, other=0.0).to(
            tl.float32
        )
        up = tl.load(
            both + row * (2 * columns) + columns + offsets, mask=offsets < columns, other=0.0
        ).to(tl.float32)
        store_fp8(
            silu(gate) * up,
            data,
            scale,
            row,
            column,
            columns,
            columns,
            scale_row,
            scale_block,
            SIZE,
            UE8M0,
        )


@triton.jit
def tile_at(tile, pieces, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """(rows [ROWS] int64, first column, columns [SIZE]) of a tile; tiles are in memory order. A
    thread has 8 adjacent elements, 16 bytes of 16-bit input. By itself the compiler would give it
    16, for 16-byte stores of fp8, and load every other 16 bytes."""
    row = (tile // pieces * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tile % pieces * SIZE
    return row, column, column + tl.max_contiguous(tl.arange(0, SIZE), 8)


@triton.jit
def store_rows_fp8(
    x, data, scale, row, column, offsets, real, columns, scale_row, scale_block,
    UE8M0: tl.constexpr,
):  # fmt: skip
    """Quantize a tile x, fp32 [rows, SIZE], at `tile_at`'s indices, and store data and scales of
    rows that are `real` [rows]."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    BLOCKS: tl.constexpr = SIZE // 128
    values, factors = to_fp8(tl.reshape(x, (ROWS * SIZE,)), ROWS * BLOCKS, UE8M0)
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


@triton.jit(do_not_specialize=["limit", "scale_block"])
def _join_rows_kernel(
    both,
    data,
    scale,
    blocks,
    count,
    limit,
    columns,
    scale_row,
    scale_block,
    pieces,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    UE8M0: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """_join_kernel for many rows, TILES tiles per program. Sorted rows are contiguous from row 0,
    so only their end is looked up."""
    wait_for_inputs(DEPENDENT)
    last = tl.load(count) - 1
    end = tl.load(blocks + 2 * limit + last, mask=last >= 0, other=0)
    begin = tl.program_id(0) * TILES
    # skips tiles without rows
    for tile in range(begin, tl.minimum(begin + TILES, tl.cdiv(end, ROWS) * pieces)):
        row, column, offsets = tile_at(tile, pieces, ROWS, SIZE)
        real = row < end
        inside = real[:, None] & (offsets < columns)[None, :]
        place = both + (row * (2 * columns))[:, None] + offsets[None, :]
        gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(place + columns, mask=inside, other=0.0).to(tl.float32)
        store_rows_fp8(
            silu(gate) * up, data, scale, row, column, offsets, real, columns, scale_row,
            scale_block, UE8M0,
        )  # fmt: skip


def _copying(columns: int, itemsize: int) -> tuple[int, int]:
    """(columns, warps) of a program that copies whole rows."""
    size = min(COPIED_COLUMNS, max(128, next_power(columns)))
    return size, min(16, max(1, size * itemsize // (32 * THREAD_BYTES)))


def in_order(
    x: Tensor | Quantized, blocks: ExpertBlocks, top_k: int, ue8m0: bool = False
) -> Quantized:
    """Rows of x [T, columns] in the order of `blocks`, [pairs, columns], quantized if they are not
    yet (ue8m0: with scales that are powers of two); rows after the last used one are
    uninitialized."""
    tokens, columns = x.shape
    made = isinstance(x, Quantized)
    data, scale = (x.data, x.scale) if isinstance(x, Quantized) else (x, None)
    assert data.stride(1) == 1
    assert blocks.num_picks == tokens * top_k, (blocks.num_picks, tokens, top_k)
    powers = x.ue8m0 if isinstance(x, Quantized) else ue8m0
    out = Quantized.empty(blocks.num_picks, columns, blocks.order.device, powers)
    strides = (data.stride(0), *((0, 0) if scale is None else scale.stride()), *out.scale.stride())
    if blocks.places is not None:
        size, warps = _copying(columns, data.element_size())
        _spread_kernel[tokens, triton.cdiv(columns, size)](
            data,
            scale,
            out.data,
            out.scale,
            blocks.places,
            columns,
            *strides,
            top_k,
            size,
            not made,
            powers,
            num_warps=warps,
            **dependent(data.device),
        )
    elif tokens:
        size = min(4096, max(128, next_power(columns)))
        _order_kernel[blocks.limit * blocks.rows, triton.cdiv(columns, size)](
            data,
            scale,
            out.data,
            out.scale,
            blocks.order,
            blocks.blocks,
            blocks.count,
            blocks.limit,
            columns,
            *strides,
            top_k,
            blocks.rows,
            size,
            not made,
            powers,
            num_warps=8,
            **dependent(data.device),
        )
    return out


def joined(both: Tensor, blocks: ExpertBlocks, ue8m0: bool = False) -> Quantized:
    """silu(gate) * up of sorted rows [pairs, 2 inner]: [pairs, inner]."""
    num_picks = both.shape[0]
    columns = both.shape[1] // 2
    assert both.is_contiguous()
    out = Quantized.empty(num_picks, columns, both.device, ue8m0)
    sorting = (blocks.blocks, blocks.count, blocks.limit)
    if blocks.places is not None:
        rows, size = tile_of(columns)
        pieces = triton.cdiv(columns, size)
        tiles = triton.cdiv(num_picks, rows) * pieces
        each = tiles_each(tiles, both.device)
        _join_rows_kernel[triton.cdiv(tiles, each),](
            both,
            out.data,
            out.scale,
            *sorting,
            columns,
            *out.scale.stride(),
            pieces,
            rows,
            size,
            each,
            ue8m0,
            num_warps=TILE_WARPS,
            **dependent(both.device, after_long=True),
        )
    elif num_picks:
        size = min(2048, max(128, next_power(columns)))
        _join_kernel[blocks.limit * blocks.rows, triton.cdiv(columns, size)](
            both,
            out.data,
            out.scale,
            *sorting,
            columns,
            *out.scale.stride(),
            blocks.rows,
            size,
            ue8m0,
            num_warps=4,
            **dependent(both.device, after_long=True),
        )
    return out
