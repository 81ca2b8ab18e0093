"""RMSNorm (arXiv 1910.07467) and SwiGLU by rows, with optional quantization of the output for fp8
GEMMs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.activation import Activation, PendingNorm, Quantized, output_of
from rorqual.ops.triton.rowwise.quantize import room_for, store_fp8
from rorqual.ops.triton.rowwise.silu import silu
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs
from rorqual.ops.triton.runtime.prefetch import fetch_row_ahead


@triton.jit
def normed(x, weight, columns, eps, dtype: tl.constexpr):
    """RMSNorm of one row x, fp32 with zeros beyond `columns`: rounded to `dtype` before the
    weight multiplies it, and after."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    return ((x * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


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
    UE8M0: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, SIZE)
    inside = offsets < columns
    # loaded before the wait: no kernel of a step writes weights
    factor = tl.load(weight + offsets, mask=inside, other=0.0)
    if ADD:
        fetch_row_ahead(residual + row * r_row, columns, SIZE, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    values = tl.load(x + row * x_row + offsets, mask=inside, other=0.0)
    if ADD:
        other = tl.load(residual + row * r_row + offsets, mask=inside, other=0.0)
        values = (values.to(tl.float32) + other.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + row * columns + offsets, values, mask=inside)
    y = normed(values.to(tl.float32), factor, columns, eps, x.dtype.element_ty)
    tl.store(out + row * columns + offsets, y, mask=inside)
    if QUANT:
        store_fp8(
            y.to(tl.float32), data, scale, row, 0, columns, columns, scale_row, scale_block, SIZE,
            UE8M0,
        )  # fmt: skip


def warps_for(size: int) -> int:
    """Warps of a program with a whole row of this many columns. The order in which squares are
    added depends on it."""
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
    if tokens:
        _norm_kernel[tokens,](
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
            size,
            residual is not None,
            made is not None,
            made is not None and made.ue8m0,
            num_warps=warps_for(size),
            **dependent(x.device),
        )
    return out, total


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., columns], rows evenly spaced, to the same shape; weight [columns]."""
    return _launch(_rows(x), None, weight, eps)[0].view(x.shape)


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    quantize_output: str | None = None,
) -> tuple[Activation, Tensor]:
    """(norm(x + residual), x + residual), both [T, columns]. Without a residual the sum is x
    itself, not a copy. quantize_output (how: Quantized.room): the norm is a NormOutput; the
    compiler then lays rows out for byte stores, and squares are added in another order."""
    made = Quantized.room(x, quantize_output)
    out, total = _launch(x, residual, weight, eps, made)
    return output_of(out, made), x if total is None else total


def pending(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> PendingNorm:
    """`add_norm` as a PendingNorm, which the router may compute."""

    def compute(one: PendingNorm) -> None:
        _launch(one.x, one.residual, one.weight, one.eps, into=(one.out, one.total))

    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return PendingNorm(x, residual, weight, eps, out, total, compute)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])


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
    UE8M0: tl.constexpr,
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
            UE8M0,
        )
    else:
        tl.store(out + row * columns + offsets, y, mask=inside)


def _swiglu(x: Tensor, out: Tensor | None, packed: Quantized | None) -> None:
    tokens = x.shape[0]
    columns = x.shape[1] // 2
    assert x.stride(1) == 1
    data, scale, strides = room_for(packed)
    size = min(1024, max(128, next_power(columns)))
    if tokens:
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
            packed is not None and packed.ue8m0,
            num_warps=4,
            **dependent(x.device),
        )


def swiglu(x: Tensor) -> Tensor:
    """[T, 2 I], gate and up concatenated, to silu(gate) * up, [T, I]."""
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    _swiglu(x, out, None)
    return out


def swiglu_fp8(x: Tensor, ue8m0: bool = False) -> Quantized:
    """`swiglu` with fp8 output."""
    out = Quantized.empty(x.shape[0], x.shape[1] // 2, x.device, ue8m0)
    _swiglu(x, None, out)
    return out
