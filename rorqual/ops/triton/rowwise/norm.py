"""RMSNorm (arXiv 1910.07467) and SwiGLU by rows, with the output quantized on the way where an
fp8 product follows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.activation import Activation, PendingNorm, Quantized, output_of
from rorqual.ops.triton.rowwise.quantize import (
    FEW_ROWS,
    TILE_WARPS,
    room_for,
    store_fp8,
    store_rows_fp8,
    tile_at,
    tile_of,
    tiles_each,
)
from rorqual.ops.triton.runtime.launch import (
    dependent,
    multiprocessors,
    next_power,
    wait_for_inputs,
)

# More 16-bit rows than these for each program that a GPU runs at once are normed in turn, by
# programs of so many warps in all on each multiprocessor. Fewer rows have a program each; so have
# fp32 and very long ones, of which no second finds room in registers.
MANY_ROWS = 2
RESIDENT_WARPS = 32
REGISTERS = 65536  # of a multiprocessor


@triton.jit
def normed(x, weight, columns, eps, dtype: tl.constexpr):
    """RMSNorm of one row x, fp32 with zeros beyond `columns`: rounded to `dtype` before the
    weight multiplies it, and after."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    return ((x * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def _store_norm(
    values,
    other,
    factor,
    out,
    total,
    data,
    scale,
    row,
    offsets,
    inside,
    columns,
    eps,
    scale_row,
    scale_block,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    QUANT: tl.constexpr,
):
    """Everything that is made of one row, `values` in the dtype of `out`, and `other` if it is
    added."""
    if ADD:
        values = (values.to(tl.float32) + other.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(total + row * columns + offsets, values, mask=inside)
    y = normed(values.to(tl.float32), factor, columns, eps, out.dtype.element_ty)
    tl.store(out + row * columns + offsets, y, mask=inside)
    if QUANT:
        store_fp8(
            y.to(tl.float32), data, scale, row, 0, columns, columns, scale_row, scale_block, SIZE
        )


@triton.jit(do_not_specialize=["scale_block"])
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    data,
    scale,
    columns,
    x_row,
    r_row,
    eps,
    scale_row,
    scale_block,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    QUANT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, SIZE)
    inside = offsets < columns
    values = tl.load(x + row * x_row + offsets, mask=inside, other=0.0)
    factor = tl.load(weight + offsets, mask=inside, other=0.0)
    other = values
    if ADD:
        other = tl.load(residual + row * r_row + offsets, mask=inside, other=0.0)
    _store_norm(
        values, other, factor, out, total, data, scale, row, offsets, inside, columns, eps,
        scale_row, scale_block, SIZE, ADD, QUANT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["scale_block", "rows"])
def _norm_rows_kernel(
    x,
    residual,
    weight,
    out,
    total,
    data,
    scale,
    columns,
    x_row,
    r_row,
    eps,
    scale_row,
    scale_block,
    rows,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    QUANT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """_norm_kernel for many rows: a program takes one after another, each as it does, and asks for
    the next before it begins with one."""
    wait_for_inputs(DEPENDENT)
    offsets = tl.arange(0, SIZE)
    inside = offsets < columns
    first = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    values = tl.load(x + first * x_row + offsets, mask=inside, other=0.0)
    factor = tl.load(weight + offsets, mask=inside, other=0.0)
    other = values
    if ADD:
        other = tl.load(residual + first * r_row + offsets, mask=inside, other=0.0)
    for row in range(first, rows, programs):
        after = row + programs
        coming = inside & (after < rows)
        next_values = tl.load(x + after * x_row + offsets, mask=coming, other=0.0)
        next_other = next_values
        if ADD:
            next_other = tl.load(residual + after * r_row + offsets, mask=coming, other=0.0)
        _store_norm(
            values, other, factor, out, total, data, scale, row, offsets, inside, columns, eps,
            scale_row, scale_block, SIZE, ADD, QUANT,
        )  # fmt: skip
        values = next_values
        other = next_other


def warps_for(size: int) -> int:
    """Of a program that takes a whole row of so many columns; the order in which their squares
    are added hangs on it."""
    return min(16, max(1, size // 512))


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    made: Quantized | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    tokens, columns = x.shape
    assert x.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    total: Tensor | None = None
    if into:
        out, total = into
    else:
        out = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
        total = torch.empty_like(out) if residual is not None else None
    data, scale, strides = room_for(made)
    size = max(16 if made is None else 128, next_power(columns))
    warps = warps_for(size)
    arguments = (
        x,
        residual,
        weight,
        out,
        total,
        data,
        scale,
        columns,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        eps,
        *strides,
    )
    constants = (size, residual is not None, made is not None)
    each = max(1, RESIDENT_WARPS // warps)
    programs = each * multiprocessors(x.device)
    fits = x.element_size() == 2 and size <= 512 * warps
    if fits and tokens > MANY_ROWS * programs:
        _norm_rows_kernel[programs,](
            *arguments,
            tokens,
            *constants,
            num_warps=warps,
            maxnreg=min(255, REGISTERS // (32 * warps * each)),
            **dependent(x.device),
        )
    elif tokens:
        _norm_kernel[tokens,](*arguments, *constants, num_warps=warps, **dependent(x.device))
    return out, total


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., columns], rows evenly spaced, to the same shape; weight [columns]."""
    return _launch(_rows(x), None, weight, eps)[0].view(x.shape)


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    quantize_output: bool = False,
) -> tuple[Activation, Tensor]:
    """(norm(x + residual), x + residual), both [T, columns]. Without a residual the sum is x
    itself, not a copy. quantize_output: the norm is a NormOutput, quantized on the way; the
    compiler then lays rows out for stores of bytes, and squares are added in another order."""
    made = Quantized.empty(x.shape[0], x.shape[1], x.device) if quantize_output else None
    out, total = _launch(x, residual, weight, eps, made)
    return output_of(out, made), x if total is None else total


def pending(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> PendingNorm:
    """`add_norm` for a router that may compute it."""

    def compute(one: PendingNorm) -> None:
        _launch(one.x, one.residual, one.weight, one.eps, into=(one.out, one.total))

    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return PendingNorm(x, residual, weight, eps, out, total, compute)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])


@triton.jit
def silu(x):
    """x / (1 + exp(-x)), x fp32. By exp2, which takes results below 2^-126 for zero where exp
    spends four instructions on them: beside the 1 none of them counts."""
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit(do_not_specialize=["scale_block"])
def _swiglu_kernel(
    x,
    out,
    data,
    scale,
    columns,
    x_row,
    scale_row,
    scale_block,
    SIZE: tl.constexpr,
    QUANT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SIZE
    offsets = first + tl.arange(0, SIZE)
    inside = offsets < columns
    gate = tl.load(x + row * x_row + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + columns + offsets, mask=inside, other=0.0).to(tl.float32)
    factor = silu(gate).to(x.dtype.element_ty).to(tl.float32)
    y = (factor * up).to(x.dtype.element_ty)
    if QUANT:
        store_fp8(
            y.to(tl.float32),
            data,
            scale,
            row,
            first,
            columns,
            columns,
            scale_row,
            scale_block,
            SIZE,
        )
    else:
        tl.store(out + row * columns + offsets, y, mask=inside)


@triton.jit(do_not_specialize=["scale_block", "rows"])
def _swiglu_rows_kernel(
    x,
    out,
    data,
    scale,
    columns,
    x_row,
    scale_row,
    scale_block,
    rows,
    pieces,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    QUANT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """_swiglu_kernel for many rows, TILES tiles a program."""
    wait_for_inputs(DEPENDENT)
    first = tl.program_id(0) * TILES
    for tile in range(first, first + TILES):
        row, column, offsets = tile_at(tile, pieces, ROWS, SIZE)
        real = row < rows
        inside = real[:, None] & (offsets < columns)[None, :]
        place = x + (row * x_row)[:, None] + offsets[None, :]
        gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(place + columns, mask=inside, other=0.0).to(tl.float32)
        factor = silu(gate).to(x.dtype.element_ty).to(tl.float32)
        y = (factor * up).to(x.dtype.element_ty)
        if QUANT:
            store_rows_fp8(
                y.to(tl.float32), data, scale, row, column, offsets, real, columns, scale_row,
                scale_block,
            )  # fmt: skip
        else:
            tl.store(out + (row * columns)[:, None] + offsets[None, :], y, mask=inside)


def _swiglu(x: Tensor, out: Tensor | None, packed: Quantized | None) -> None:
    tokens = x.shape[0]
    columns = x.shape[1] // 2
    assert x.stride(1) == 1
    data, scale, strides = room_for(packed)
    size = min(1024, max(128, next_power(columns)))
    if tokens > FEW_ROWS:
        rows, size = tile_of(columns)
        pieces = triton.cdiv(columns, size)
        tiles = triton.cdiv(tokens, rows) * pieces
        each = tiles_each(tiles, x.device)
        _swiglu_rows_kernel[triton.cdiv(tiles, each),](
            x,
            out,
            data,
            scale,
            columns,
            x.stride(0),
            *strides,
            tokens,
            pieces,
            rows,
            size,
            each,
            packed is not None,
            num_warps=TILE_WARPS,
            **dependent(x.device),
        )
    elif tokens:
        _swiglu_kernel[tokens, triton.cdiv(columns, size)](
            x,
            out,
            data,
            scale,
            columns,
            x.stride(0),
            *strides,
            size,
            packed is not None,
            num_warps=4,
            **dependent(x.device),
        )


def swiglu(x: Tensor) -> Tensor:
    """[T, 2 I] holding gate and up side by side to silu(gate) * up, [T, I]."""
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    _swiglu(x, out, None)
    return out


def swiglu_fp8(x: Tensor) -> Quantized:
    """The same, in fp8."""
    out = Quantized.empty(x.shape[0], x.shape[1] // 2, x.device)
    _swiglu(x, None, out)
    return out
