"""Quantize a GEMM's input to int8 or e4m3, with one fp32 scale per token or per 128 columns of it.
Byte for byte as rorqual.ops.rounding.rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.rounding import ACTIVATION_BLOCK, FP8
from rorqual.ops.triton.rowwise.silu import silu_exp
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs

# supported config.quant.ACTIVATIONS: (dtype, columns of a scale; 0: all)
ROUNDED = {
    "int8_token": (torch.int8, 0),
    "int8_group": (torch.int8, ACTIVATION_BLOCK),
    "fp8_token": (FP8, 0),
    "fp8_group": (FP8, ACTIVATION_BLOCK),
}
WIDEST = 65536  # most columns of a program


@dataclass
class RoundedRows:
    """data [T, columns] int8 or e4m3; scale [T, 1], or [T, ceil(columns / 128)] column-major;
    group: columns of a scale, 0: all."""

    data: Tensor
    scale: Tensor
    group: int


@triton.jit
def _nearest(x):
    """Round fp32 below 2^22 to integers, half to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["scale_group"])  # it is the number of rows
def _round_kernel(
    x,
    data,
    scale,
    columns,
    x_row,
    scale_row,
    scale_group,
    SIZE: tl.constexpr,
    SHARE: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """SHARE: columns of a scale. GATED: x holds gate and up side by side, and silu(gate) * up is
    rounded. Program (row, SIZE columns)."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = offsets < columns
    values = tl.load(x + row * x_row + offsets, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        kind: tl.constexpr = x.dtype.element_ty
        up = tl.load(x + row * x_row + columns + offsets, mask=inside, other=0.0).to(tl.float32)
        gate = silu_exp(values).to(kind).to(tl.float32)
        values = (gate * up).to(kind).to(tl.float32)
    # rows of experts on other ranks are uninitialized, and their results are not read
    values = tl.where(values == values, values, 0.0)
    groups = tl.reshape(values, (SIZE // SHARE, SHARE))
    INT8: tl.constexpr = data.dtype.element_ty == tl.int8
    factor = tl.div_rn(tl.maximum(tl.max(tl.abs(groups), 1), 1e-4), 127.0 if INT8 else 448.0)
    steps = tl.div_rn(groups, tl.broadcast_to(factor[:, None], (SIZE // SHARE, SHARE)))
    if INT8:
        steps = tl.minimum(tl.maximum(_nearest(steps), -127.0), 127.0)
    steps = tl.reshape(steps, (SIZE,)).to(data.dtype.element_ty)
    tl.store(data + row * columns + offsets, steps, mask=inside)
    group = tl.program_id(1) * (SIZE // SHARE) + tl.arange(0, SIZE // SHARE)
    tl.store(scale + row * scale_row + group * scale_group, factor, mask=group * SHARE < columns)


def supported(activation: str, columns: int) -> bool:
    return activation in ROUNDED and columns <= WIDEST


def rounded_rows(x: Tensor, activation: str, gated: bool = False) -> RoundedRows:
    """Quantize x [T, columns], any float dtype, row stride x.stride(0). gated: x is [T, 2 columns];
    quantize silu of the first half times the second, rounded as in reference.swiglu."""
    kind, group = ROUNDED[activation]
    tokens = x.shape[0]
    columns = x.shape[1] // (2 if gated else 1)
    assert x.stride(1) == 1
    groups = -(-columns // group) if group else 1
    data = torch.empty(tokens, columns, dtype=kind, device=x.device)
    scale = torch.empty(groups, tokens, dtype=torch.float32, device=x.device).t()
    size = next_power(columns) if not group else min(1024, max(128, next_power(columns)))
    if tokens:
        _round_kernel[tokens, triton.cdiv(columns, size)](
            x,
            data,
            scale,
            columns,
            x.stride(0),
            *scale.stride(),
            size,
            group or size,
            gated,
            num_warps=min(16, max(1, size // 512)),
            **dependent(x.device),
        )
    return RoundedRows(data, scale, group)
