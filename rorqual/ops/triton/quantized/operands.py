"""The inner loop of all GEMMs with quantized weights: sums over columns for one tile.

Weights are on the M side of the tensor cores and tokens on the N side, which may be as narrow as
16. int8 sums are exact integers; e4m3 sums are promoted to fp32 every step. With scales for groups
of columns (int4 groups, 128x128 blocks, activations scaled in groups) each step's sum is multiplied
by them in fp32; scales of whole rows and tokens are applied at the end.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.reference import Weight
from rorqual.ops.rounding import FP8
from rorqual.ops.triton.quantized import int4_order, rows
from rorqual.ops.triton.quantized.int4_order import (
    ARITHMETIC,
    FP8_UNIT,
    INT8_UNIT,
    high_half,
    in_order,
    low_half,
)
from rorqual.ops.triton.quantized.rows import RoundedRows
from rorqual.ops.triton.runtime.launch import takes_fp8

STEP = 128  # most columns of a step of 8-bit weights
LEAST_STEP = 32  # one tensor core instruction
# int8 sums stay below 2^31, also with int4 weights times 16
MOST_COLUMNS = 2**31 // (128 * 128) - 1


@triton.jit
def _scales(pointers, group):
    return tl.load(pointers + group).to(tl.float32)


@triton.jit
def _less(numbers, zero):
    """[N, columns] minus [N]: integers up to 15, exact in every type."""
    if ARITHMETIC:  # the interpreter has no bf16 arithmetic
        return (numbers.to(tl.float32) - zero.to(tl.float32)[:, None]).to(numbers.dtype)
    else:
        return numbers - zero[:, None]


@triton.jit
def _int4_step(
    acc, w_tile, x_tile, present, zero_low, zero_high, low_scale, high_scale, x_factor, step,
    K: tl.constexpr, W_GROUP: tl.constexpr, GROUPED: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """acc + one chunk's products."""
    kind: tl.constexpr = x_tile.dtype.element_ty
    HALF: tl.constexpr = K // 2
    EACH: tl.constexpr = 32 // kind.primitive_bitwidth
    packed = in_order(tl.load(w_tile + step * HALF), HALF, EACH)
    low = low_half(packed, kind)
    high = high_half(packed, kind)
    if ZERO:
        low = _less(low, zero_low)
        high = _less(high, zero_high)
    TOTAL: tl.constexpr = tl.int32 if kind == tl.int8 else tl.float32
    first = tl.load(x_tile + step * K, mask=present[:, None], other=0.0).T
    second = tl.load(x_tile + step * K + HALF, mask=present[:, None], other=0.0).T
    if not GROUPED:
        if kind == tl.float8e4nv:
            return acc + tl.dot(high, second, tl.dot(low, first))
        else:
            acc = tl.dot(low, first, acc, out_dtype=TOTAL)
            return tl.dot(high, second, acc, out_dtype=TOTAL)
    elif W_GROUP == HALF:
        # sequential: only one group's sums are alive at a time
        acc += tl.dot(low, first).to(tl.float32) * (low_scale[:, None] * x_factor[None, :])
        return acc + tl.dot(high, second).to(tl.float32) * (high_scale[:, None] * x_factor[None, :])
    else:
        part = tl.dot(high, second, tl.dot(low, first, out_dtype=TOTAL), out_dtype=TOTAL)
        return acc + part.to(tl.float32) * (low_scale[:, None] * x_factor[None, :])


@triton.jit
def sums(
    x_tile,
    present,
    x_scale,
    xs_group,
    w_tile,
    w_scale,
    w_zero,
    first,
    last,
    N: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    INT4: tl.constexpr,
    W_GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_SCALED: tl.constexpr,
    ZERO: tl.constexpr,
):
    """[N weight rows, M tokens] fp32: sums over steps `first` to `last` of K columns, times all
    scales. x_tile [M, K] (int4: [M, K / 2]) and w_tile [N, K] (int4: [N, K / 2] bytes) point to the
    first step's numbers, x_scale [M] and w_scale, w_zero [N] to the first scales. Of tokens that
    are not `present` [M] only scales are read. W_GROUP, X_GROUP: columns that share one, 0:
    all."""
    kind: tl.constexpr = x_tile.dtype.element_ty
    EIGHT: tl.constexpr = FP8_UNIT if kind == tl.float8e4nv else INT8_UNIT
    UNIT: tl.constexpr = EIGHT if INT4 and kind.primitive_bitwidth == 8 else 1.0
    GROUPED: tl.constexpr = W_GROUP > 0 or X_GROUP > 0
    HALVES: tl.constexpr = INT4 and W_GROUP == K // 2  # a chunk's halves are of two groups
    WHOLE: tl.constexpr = kind == tl.int8 and not GROUPED
    acc = tl.zeros((N, M), tl.int32 if WHOLE else tl.float32)
    scale = tl.full((N,), 1.0, tl.float32)
    other = scale
    zero_low = tl.zeros((N,), kind if ZERO else tl.float32)
    zero_high = zero_low
    factor = tl.full((M,), 1.0, tl.float32)
    PER: tl.constexpr = W_GROUP if W_GROUP > 0 else 1
    X_PER: tl.constexpr = X_GROUP if X_GROUP > 0 else 1
    # load scales one step ahead to hide their latency
    if W_GROUP:
        scale = _scales(w_scale, first * K // PER) * UNIT
        other = _scales(w_scale, (first * K + K // 2) // PER) * UNIT if HALVES else scale
    if X_GROUP:
        factor = tl.load(x_scale + first * K // X_PER * xs_group)
    for step in tl.range(first, last):
        next_step = tl.minimum(step + 1, last - 1)
        coming = scale
        coming_other = other
        coming_factor = factor
        if W_GROUP:
            coming = _scales(w_scale, next_step * K // PER) * UNIT
            if HALVES:
                coming_other = _scales(w_scale, (next_step * K + K // 2) // PER) * UNIT
        if X_GROUP:
            coming_factor = tl.load(x_scale + next_step * K // X_PER * xs_group)
        if INT4:
            if ZERO:
                at = step * K // PER if W_GROUP else 0
                zero_low = (tl.load(w_zero + at).to(tl.float32) - 8.0).to(kind)
                zero_high = zero_low
                if HALVES:
                    zero_high = (tl.load(w_zero + at + 1).to(tl.float32) - 8.0).to(kind)
            acc = _int4_step(
                acc, w_tile, x_tile, present, zero_low, zero_high, scale, other, factor, step,
                K, W_GROUP, GROUPED, ZERO,
            )  # fmt: skip
        else:
            weights = tl.load(w_tile + step * K)
            tokens = tl.load(x_tile + step * K, mask=present[:, None], other=0.0).T
            if WHOLE:
                acc = tl.dot(weights, tokens, acc, out_dtype=tl.int32)
            elif GROUPED:
                part = tl.dot(weights, tokens).to(tl.float32)
                acc += part * (scale[:, None] * factor[None, :])
            else:
                acc += tl.dot(weights, tokens)
        scale = coming
        other = coming_other
        factor = coming_factor
    out = acc.to(tl.float32)
    if W_GROUP == 0:
        out *= (_scales(w_scale, 0) * UNIT)[:, None]
    if X_SCALED and X_GROUP == 0:
        out *= tl.load(x_scale)[None, :]
    return out


def kind_of(weight: Weight) -> str:
    """The name in tuning rules: the weights' format, plus the activations' for int4 with quantized
    ones; _blocks if activations are scaled in groups of columns."""
    rows_in, _, share = weight.activation.partition("_")
    kind = "fp8" if weight.data.dtype == FP8 else "int8"
    if weight.is_int4:
        kind = "int4" if rows_in == "wide" else f"int4_{rows_in}"
    return f"{kind}_blocks" if share == "group" else kind


def group_of(weight: Weight) -> int:
    """Columns that share a scale; 0: all."""
    group = weight.block[1]
    return 0 if group >= weight.columns else group


def step_of(weight: Weight) -> int:
    """Columns of a step; 0 if no step divides the columns and is inside one group."""
    if weight.is_int4:
        return int4_order.chunk_of(weight)
    step = min(STEP, weight.columns & -weight.columns)
    group = group_of(weight)
    if group:
        step = min(step, group & -group)
    return step if step >= LEAST_STEP else 0


def takes_int4(weight: Weight) -> bool:
    """Whether to repack int4 weights for the kernels here: with 16-bit activations, or with 8-bit
    ones if there are no zero points."""
    if weight.scale is None or not weight.is_int4 or weight.group_index is not None:
        return False
    kind = weight.activation
    rounded = weight.zero is None and rows.supported(kind, weight.columns)
    # scales have the model's dtype: fp32 models need the exact kernels elsewhere
    wide = kind == "wide" and weight.scale.dtype in (torch.bfloat16, torch.float16)
    return (wide or rounded) and _fits(weight)


def supported(weight: Weight) -> bool:
    """Whether the kernels support the weight: int4 repacked by int4_order.py; int8 with a scale per
    row or block, and int8 activations; e4m3 and e4m3 activations, of weights with blocks those
    that fp8_gemm.py does not take."""
    if weight.scale is None:
        return False
    if weight.is_int4:
        return weight.turned
    taken = weight.fp8_blocks and weight.columns % weight.block[1] == 0
    if taken or not rows.supported(weight.activation, weight.columns):
        return False
    number = rows.ROUNDED[weight.activation][0]
    return weight.data.dtype == number and weight.zero is None and _fits(weight)


def _fits(weight: Weight) -> bool:
    parts = all(part.is_contiguous() for part in weight.tensors())
    rounds_to_fp8 = weight.activation.startswith("fp8")
    runs = takes_fp8(weight.data.device) or not rounds_to_fp8
    return parts and runs and 0 < weight.columns <= MOST_COLUMNS and step_of(weight) > 0


def operand(x: Tensor | RoundedRows, weight: Weight) -> tuple[Tensor, Tensor | None, int, int, int]:
    """x quantized for a GEMM with `weight`: (data, scales or None, strides of the scales, columns
    of a scale)."""
    if isinstance(x, Tensor):
        if weight.activation == "wide":
            aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.storage_offset() % 8 == 0
            return (x if aligned else x.clone(memory_format=torch.contiguous_format)), None, 0, 0, 0
        x = rows.rounded_rows(x if x.stride(1) == 1 else x.contiguous(), weight.activation)
    group = 0 if x.group >= weight.columns else x.group
    return x.data, x.scale, *x.scale.stride(), group  # type: ignore[return-value]


def constants(weight: Weight, x_group: int, scaled: bool) -> dict[str, Any]:
    """Compile-time arguments of a kernel that uses `sums`."""
    return {
        "K": step_of(weight), "INT4": weight.is_int4, "SHARE": weight.block[0],
        "W_GROUP": group_of(weight), "X_GROUP": x_group, "X_SCALED": scaled,
        "ZERO": weight.zero is not None,
    }  # fmt: skip
