"""Rows in the order of their experts: what lies between tokens and grouped products whose tiles
take rows that lie one after another (align.py).

Many rows go out token by token: a row is read once and written to the place of each of its picks.
Read row by row of the order instead, it would come from memory again for most of its picks, since
an expert's rows go through all tokens. Few rows, whose sorting leaves no places, go by blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.moe.align import ExpertBlocks
from rorqual.ops.triton.rowwise.quantize import store_fp8
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs

# Bytes of a row that a thread of a program which copies whole rows has on their way.
THREAD_BYTES = 64
# Columns of a row that one program copies at most.
COPIED_COLUMNS = 8192


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
    DEPENDENT: tl.constexpr,
):
    """Grid: (rows of all blocks, pieces of a row). A row of x, with its scales if it has any, to
    its position in the order; QUANTIZE: in fp8."""
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
            )
        else:
            tl.store(data + row * columns + offsets, values, mask=offsets < columns)
            if x_scale is not None:
                part = column // 128 + tl.arange(0, SIZE // 128)
                factors = tl.load(
                    x_scale + token * xs_row + part * xs_block, mask=part * 128 < columns
                )
                tl.store(
                    scale + row * scale_row + part * scale_block, factors, mask=part * 128 < columns
                )


@triton.jit
def _copies_kernel(
    x,
    data,
    places,
    columns,
    x_row,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (tokens, pieces of a row). A token's row to the places of all its picks, none of which
    waits for another: neither do loads for loads."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = offsets < columns
    values = tl.load(x + token * x_row + offsets, mask=inside, other=0.0)
    rows = ()
    for k in tl.static_range(TOP_K):
        rows += (tl.load(places + token * TOP_K + k).to(tl.int64),)  # type: ignore[assignment]
    for k in tl.static_range(TOP_K):
        tl.store(data + rows[k] * columns + offsets, values, mask=inside & (rows[k] >= 0))


def _copying(columns: int, itemsize: int) -> tuple[int, int]:
    """(columns of a program, its warps) where whole rows are copied."""
    size = min(COPIED_COLUMNS, max(128, next_power(columns)))
    return size, min(16, max(1, size * itemsize // (32 * THREAD_BYTES)))


def in_order_wide(x: Tensor, blocks: ExpertBlocks, top_k: int) -> Tensor:
    """Rows of x [T, columns], evenly spaced, as `blocks` orders their picks: [picks, columns] in
    x's dtype; those behind the last pick stay unwritten."""
    tokens, columns = x.shape
    assert x.stride(1) == 1
    assert blocks.num_picks == tokens * top_k, (blocks.num_picks, tokens, top_k)
    out = torch.empty(blocks.num_picks, columns, dtype=x.dtype, device=x.device)
    size, warps = _copying(columns, x.element_size())
    if blocks.places is not None:
        _copies_kernel[tokens, triton.cdiv(columns, size)](
            x,
            out,
            blocks.places,
            columns,
            x.stride(0),
            top_k,
            size,
            num_warps=warps,
            **dependent(x.device),
        )
    elif tokens:
        _order_kernel[blocks.limit * blocks.rows, triton.cdiv(columns, size)](
            x,
            None,
            out,
            None,
            blocks.order,
            blocks.blocks,
            blocks.count,
            blocks.limit,
            columns,
            x.stride(0),
            *(0, 0, 0, 0),  # no scales
            top_k,
            blocks.rows,
            size,
            False,
            num_warps=warps,
            **dependent(x.device),
        )
    return out
