"""fp8 e4m3 activations: one fp32 scale a token and 128 columns, as
rorqual.ops.reference.quantize_activation defines them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.reference import ACTIVATION_BLOCK, FP8
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs


@dataclass
class Quantized:
    """data [T, columns] e4m3; scale [T, ceil(columns/128)] fp32, stored column after column so
    that GEMMs read it coalesced."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @staticmethod
    def empty(tokens: int, columns: int, device: torch.device) -> Quantized:
        scale = torch.empty(
            -(-columns // ACTIVATION_BLOCK), tokens, dtype=torch.float32, device=device
        )
        return Quantized(torch.empty(tokens, columns, dtype=FP8, device=device), scale.t())


TWIN = "_rorqual_fp8"  # attribute of a tensor whose rows exist in fp8 as well


def keep_beside(x: Tensor, packed: Quantized) -> None:
    """packed: what `quantize(x)` would make, made already. It goes with this tensor object
    alone, no copy or view of it, and nobody may change the values."""
    setattr(x, TWIN, packed)


def room_beside(out: Tensor, pack: bool) -> tuple[Tensor | None, Tensor | None, tuple[int, ...]]:
    """(data, scale, strides of the scale) for a kernel that is to quantize the rows of `out` as
    it makes them, if `pack`."""
    if not pack:
        return None, None, (0, 0)
    packed = Quantized.empty(out.shape[0], out.shape[1], out.device)
    keep_beside(out, packed)
    return packed.data, packed.scale, packed.scale.stride()


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


def quantize(x: Tensor) -> Quantized:
    """x [T, columns] in any float dtype, rows `x.stride(0)` apart. What the kernel that made x
    has quantized is not quantized again."""
    made: Quantized | None = getattr(x, TWIN, None)
    if made is not None:
        return made
    tokens, columns = x.shape
    assert x.stride(1) == 1
    out = Quantized.empty(tokens, columns, x.device)
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
        num_warps=4 if block <= 1024 else 8,
        **dependent(x.device),
    )
    return out
