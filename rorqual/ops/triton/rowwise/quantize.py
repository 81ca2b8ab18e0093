"""fp8 e4m3 activations with one fp32 scale per token and 128 columns:
rorqual.ops.reference.quantize_activation. UE8M0: scales are powers of two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.activation import Activation, NormOutput, Quantized, hidden_of
from rorqual.ops.reference import FP8
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs


def room_for(
    made: Quantized | None,
) -> tuple[Tensor | None, Tensor | None, tuple[int, ...]]:
    """(data, scale, strides of the scale) for a kernel that may quantize its output; None: not
    quantized."""
    return (None, None, (0, 0)) if made is None else (made.data, made.scale, made.scale.stride())


@triton.jit
def scale_of(peak, UE8M0: tl.constexpr):
    """peak / 448, fp32, of an amax of at least 1e-4. UE8M0: the power of two that is not below.
    448 is 1.75 * 2^8, so that is the peak's own power of two over 2^8, or twice it if the mantissa
    is above 1.75 (its bits above 0x600000)."""
    if UE8M0:
        exponent = (peak.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
        return ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    else:
        return peak / 448.0


@triton.jit
def to_fp8(x, BLOCKS: tl.constexpr, UE8M0: tl.constexpr, EXACT: tl.constexpr = False):
    """fp32 [BLOCKS * 128] to (e4m3 [BLOCKS, 128], scale [BLOCKS]); amax is clamped at 1e-4.
    EXACT: divisions are correctly rounded, so that the bytes are the reference's; else a
    quotient may be off by a bit, and an e4m3 value by a step. With UE8M0 they always are."""
    blocks = tl.reshape(x, (BLOCKS, 128))
    peak = tl.maximum(tl.max(tl.abs(blocks), 1), 1e-4)
    if EXACT and not UE8M0:
        scale = tl.div_rn(peak, 448.0)
        divisor = tl.broadcast_to(scale[:, None], (BLOCKS, 128))
        # 0 / x would leave the fast path of the division; a zero keeps its sign
        data = tl.where(
            blocks == 0, blocks, tl.div_rn(tl.where(blocks == 0, divisor, blocks), divisor)
        )
    else:
        scale = scale_of(peak, UE8M0)
        data = blocks / scale[:, None]
    return data.to(tl.float8e4nv), scale


@triton.jit
def store_fp8(
    x,
    data,
    scale,
    row,
    column,
    columns,
    stride,
    scale_row,
    scale_block,
    BLOCK: tl.constexpr,
    UE8M0: tl.constexpr,
    EXACT: tl.constexpr = False,
):
    """Quantize x, fp32 [BLOCK] from `column` of `row` on, and store data and scales."""
    BLOCKS: tl.constexpr = BLOCK // 128
    values, factors = to_fp8(x, BLOCKS, UE8M0, EXACT)
    offsets = column + tl.arange(0, BLOCK)
    tl.store(data + row * stride + offsets, tl.reshape(values, (BLOCK,)), mask=offsets < columns)
    blocks = column // 128 + tl.arange(0, BLOCKS)
    tl.store(scale + row * scale_row + blocks * scale_block, factors, mask=blocks * 128 < columns)


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
    UE8M0: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK
    offsets = column + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
    store_fp8(
        values, data, scale, row, column, columns, columns, scale_row, scale_block, BLOCK, UE8M0,
        EXACT,
    )  # fmt: skip


def quantize(x: Tensor, ue8m0: bool = False) -> Quantized:
    """x [T, columns] in any float dtype, row stride `x.stride(0)`."""
    return _quantize(x, Quantized.empty(x.shape[0], x.shape[1], x.device, ue8m0), exact=False)


def quantize_exactly(x: Tensor, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """The bits of rorqual.ops.reference.quantize_activation: `quantize` with divisions rounded
    correctly, and scales row by row."""
    tokens, columns = x.shape
    scale = torch.empty(tokens, -(-columns // 128), dtype=torch.float32, device=x.device)
    data = torch.empty(tokens, columns, dtype=FP8, device=x.device)
    made = _quantize(x, Quantized(data, scale, ue8m0), exact=True)
    return made.data, made.scale


def _quantize(x: Tensor, out: Quantized, exact: bool) -> Quantized:
    tokens, columns = x.shape
    assert x.stride(1) == 1
    # few rows: more programs, many rows: longer ones
    block = min(max(128, next_power(columns)), 1024 if tokens <= 512 else 4096)
    _quantize_kernel[tokens, triton.cdiv(columns, block)](
        x,
        out.data,
        out.scale,
        columns,
        x.stride(0),
        *out.scale.stride(),
        BLOCK=block,
        UE8M0=out.ue8m0,
        EXACT=exact,
        num_warps=4 if block <= 1024 else 8,
        **dependent(x.device),
    )
    return out


def quantized(x: Activation | Quantized, ue8m0: bool) -> Quantized:
    """x in fp8; quantized here if it is not yet, or by another rule."""
    if isinstance(x, Quantized):
        return x
    if isinstance(x, NormOutput) and x.quantized.ue8m0 == ue8m0:
        return x.quantized
    return quantize(hidden_of(x), ue8m0)
