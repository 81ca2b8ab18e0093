"""Dequantize int4 weights to 16 bits, for GEMMs with many rows. From some thousand tokens on GEMMs
are compute-bound, and kernels for 16-bit weights are faster by more than the conversion takes (2.5
bytes per weight: 0.36 ms for the 604 M of a layer's experts of Qwen3-30B-A3B at 4.2 TB/s).

(number - zero point) * scale is rounded once, to the activations' dtype: by at most 2^-9 of a
weight in bf16. The other kernels multiply sums of exact numbers with scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.quantized import operands
from rorqual.ops.triton.quantized.int4_order import high_half, in_order, low_half
from rorqual.ops.triton.runtime.launch import dependent, wait_for_inputs

TILE_ROWS = 32
TILE_CHUNKS = 4  # chunks that a program loads before it converts the first
# most bytes of one dequantized matrix: a full GPU's cache leaves little memory
MOST_BYTES = 2 << 30


@triton.jit
def _wide(numbers, w_zero, w_scale, at, ZERO: tl.constexpr, kind: tl.constexpr):
    """(numbers [R, columns] - zero point) * scale [R] of the group at `at`."""
    value = numbers.to(tl.float32)
    if ZERO:
        value -= tl.load(w_zero + at).to(tl.float32)[:, None] - 8.0
    return (value * tl.load(w_scale + at).to(tl.float32)[:, None]).to(kind)


@triton.jit
def _widen_kernel(
    w,
    w_scale,
    w_zero,
    out,
    rows,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    W_GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    ZERO: tl.constexpr,
    R: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (R rows, CHUNKS chunks of K columns). W_GROUP: columns that share a scale, 0: all;
    SHARE: rows that do."""
    wait_for_inputs(DEPENDENT)
    kind: tl.constexpr = out.dtype.element_ty
    HALF: tl.constexpr = K // 2
    LAST: tl.constexpr = COLUMNS // K - 1
    PER: tl.constexpr = W_GROUP if W_GROUP > 0 else COLUMNS
    groups: tl.constexpr = (COLUMNS + PER - 1) // PER
    row = tl.minimum(tl.program_id(0) * R + tl.arange(0, R), rows - 1).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    source = w + row[:, None] * (COLUMNS // 2) + column
    target = out + row[:, None] * COLUMNS + column
    scales = row // SHARE * groups
    packed = ()
    for i in tl.static_range(CHUNKS):
        chunk = tl.minimum(tl.program_id(1) * CHUNKS + i, LAST)  # may repeat the last chunk
        packed += (tl.load(source + chunk * HALF),)  # type: ignore[assignment]
    for i in tl.static_range(CHUNKS):
        chunk = tl.minimum(tl.program_id(1) * CHUNKS + i, LAST)
        bytes_ = in_order(packed[i], HALF, 2)
        first = scales + chunk * K // PER
        second = scales + (chunk * K + HALF) // PER
        low = _wide(low_half(bytes_, kind), w_zero, w_scale, first, ZERO, kind)
        high = _wide(high_half(bytes_, kind), w_zero, w_scale, second, ZERO, kind)
        tl.store(target + chunk * K, low)
        tl.store(target + (chunk * K + HALF), high)


def takes(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether this is repacked int4 with unquantized 16-bit activations, and the dequantized matrix
    is not too large."""
    wide = weight.is_int4 and weight.turned and weight.activation == "wide"
    fits = weight.data.numel() * 4 <= MOST_BYTES
    return wide and fits and dtype in (torch.bfloat16, torch.float16)


def widened(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A repacked int4 weight as [..., rows, columns] in `dtype`, bf16 or fp16."""
    *shape, packed = weight.data.shape
    columns = 2 * packed
    out = torch.empty(*shape, columns, dtype=dtype, device=weight.data.device)
    rows = out.numel() // columns
    step = operands.step_of(weight)
    _widen_kernel[triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns // step, TILE_CHUNKS)](
        weight.data,
        weight.scale,
        weight.zero,
        out,
        rows,
        columns,
        step,
        operands.group_of(weight),
        weight.block[0],
        weight.zero is not None,
        TILE_ROWS,
        TILE_CHUNKS,
        num_warps=4,
        **dependent(out.device),
    )
    return out


def wide_experts(w: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """The experts with weights in `dtype`."""
    both = (Weight(widened(w.gate_up, dtype)), Weight(widened(w.down, dtype)))
    return ExpertWeights(*both, w.num_fused_shared_experts, w.local_fraction)
