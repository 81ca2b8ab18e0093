"""rorqual.ops.rng on a GPU, bit for bit: integer overflow wraps in the same way, and each float
operation is rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.rng import FIELDS_DEVIATION
from rorqual.ops.triton.runtime.launch import dependent, wait_for_inputs

# per program of draw_normal
COLUMNS = 1024
ROWS = 8


@triton.jit
def hash_bits(counter, key):
    """splitmix64, as in rorqual/ops/rng.py."""
    z = counter * -7046029254386353131 + key
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["count", "stream"])
def _uniform_kernel(
    seeds, positions, out, count, stream, SIZE: tl.constexpr, DEPENDENT: tl.constexpr
):
    wait_for_inputs(DEPENDENT)
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    seed = tl.load(seeds + index, mask=index < count, other=0)
    position = tl.load(positions + index, mask=index < count, other=0)
    key = 0x70C5 + stream.to(tl.int64) * 0x9E3779B9
    bits = hash_bits(hash_bits(seed, 0x5EED) + position, key)
    tl.store(
        out + index,
        ((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16,
        mask=index < count,
    )


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """rorqual.ops.rng.uniform, bit for bit."""
    positions = positions.contiguous()
    seeds = seeds.contiguous()
    out = torch.empty(positions.shape, dtype=torch.float64, device=positions.device)
    if out.numel():
        _uniform_kernel[triton.cdiv(out.numel(), 128),](
            seeds, positions, out, out.numel(), stream, 128, num_warps=1, **dependent(out.device)
        )
    return out


@triton.jit(do_not_specialize=["rows", "columns", "stride", "key", "first", "width"])
def _normal_kernel(
    out,
    rows,
    columns,
    stride,
    key,
    first,
    width,
    factor,
    CLIP: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    start = tl.program_id(1).to(tl.int64) * ROWS
    for row in range(start, start + ROWS):
        bits = hash_bits(first.to(tl.int64) + row * width.to(tl.int64) + column, key.to(tl.int64))
        total = (
            (bits & 0xFFFF)
            + ((bits >> 16) & 0xFFFF)
            + ((bits >> 32) & 0xFFFF)
            + ((bits >> 48) & 0xFFFF)
        )
        values = (total - 0x1FFFE).to(tl.int32).to(tl.float32) * factor
        if CLIP:
            values = tl.minimum(tl.maximum(values, -448.0), 448.0)
        tl.store(
            out + row * stride + column,
            values.to(out.dtype.element_ty),
            mask=(column < columns) & (row < rows),
        )


def draw_normal(view: Tensor, key: int, std: float, first: int, width: int) -> None:
    """rorqual.ops.rng.draw_normal, bit for bit; columns of view contiguous."""
    rows, columns = view.shape
    assert view.stride(1) == 1
    if view.numel():
        grid = triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS)
        _normal_kernel[grid](
            view,
            rows,
            columns,
            view.stride(0),
            key,
            first,
            width,
            std / FIELDS_DEVIATION,
            view.dtype == torch.float8_e4m3fn,
            COLUMNS,
            ROWS,
            num_warps=4,
            **dependent(view.device),
        )
