"""Shared parts of int4 kernels: unpacking two numbers per byte (even column in the low half) to the
activations' dtype in registers.

A byte has two adjacent columns, so there are two products: low halves with the even columns of x,
and high halves with the odd ones. x is read in words of two columns, whose halves need no shuffle.
Numbers -8 to 15 are exact in every dtype; sums are multiplied by the scale in fp32, once per group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.reference import Weight
from rorqual.ops.triton.runtime.launch import INTERPRETED

LEAST_GROUP = 32  # a step's low halves are the depth of one tensor core instruction
# weight rows of a tile before sm_90, where sums and unpacked numbers share registers
PORTABLE_ROWS = 64
_WORDS = {2: torch.int32, 4: torch.int64}
ARITHMETIC = tl.constexpr(bool(INTERPRETED))  # the interpreter does not support inline assembly


@triton.jit
def unpacked(packed, kind: tl.constexpr):
    """(low halves, high halves) minus 8, in `kind`."""
    if kind == tl.bfloat16 and not ARITHMETIC:
        # a number below 16 in the mantissa of 128 gives 128 plus the number; then subtract 136
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one, off;
            mov.b32 one, 0x3f803f80;
            mov.b32 off, 0xc308c308;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, a, one, off;
            fma.rn.bf16x2 $1, b, one, off;
            fma.rn.bf16x2 $2, c, one, off;
            fma.rn.bf16x2 $3, d, one, off;
            }""",
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = (packed & 15).to(tl.float32) - 8.0
        high = (packed >> 4).to(tl.float32) - 8.0
        return low.to(kind), high.to(kind)


@triton.jit
def halves(words, kind: tl.constexpr):
    """(even columns, odd columns) of words with two numbers of `kind` each."""
    if kind == tl.float32:
        return (
            words.to(tl.int32).to(kind, bitcast=True),
            (words >> 32).to(tl.int32).to(kind, bitcast=True),
        )
    else:
        return (
            words.to(tl.int16).to(kind, bitcast=True),
            (words >> 16).to(tl.int16).to(kind, bitcast=True),
        )


@triton.jit
def group_scale(scales, zeros, at, ZERO: tl.constexpr):
    """(scales in fp32, zero points) of rows' groups at offsets `at`."""
    scale = tl.load(scales + at).to(tl.float32)
    return scale, tl.load(zeros + at) if ZERO else 0


@triton.jit
def add_int4(acc, packed, scale, zero, even, odd, SWAP: tl.constexpr, ZERO: tl.constexpr):
    """acc + w x^T [n, rows] if swapped, else acc + x w^T [rows, n], over columns of one group.
    packed [n, k / 2]; scale [n] fp32; zero [n] uint8, ignored without zero points."""
    kind: tl.constexpr = even.dtype
    low, high = unpacked(packed, kind)
    if ZERO:
        off = (zero.to(tl.float32) - 8.0)[:, None]
        low = (low.to(tl.float32) - off).to(kind)
        high = (high.to(tl.float32) - off).to(kind)
    if SWAP:
        partial = tl.dot(low, even.T, input_precision="ieee")
        partial = tl.dot(high, odd.T, partial, input_precision="ieee")
        return acc + partial * scale[:, None]
    else:
        partial = tl.dot(even, low.T, input_precision="ieee")
        partial = tl.dot(odd, high.T, partial, input_precision="ieee")
        return acc + partial * scale[None, :]


@triton.jit
def int4_terms(packed, scale, zero, even, odd, ZERO: tl.constexpr):
    """Products before their sum over columns, without tensor cores: all have the shape of `packed`
    [.., n, k / 2], or are broadcast to it; even and odd fp32."""
    low, high = unpacked(packed, tl.bfloat16)
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    if ZERO:
        off = zero.to(tl.float32) - 8.0
        low -= off
        high -= off
    return (low * even + high * odd) * scale


def group_of(weight: Weight) -> int:
    """Columns that share a scale."""
    return min(weight.block[1], weight.columns)


def step_of(weight: Weight, columns: int) -> int:
    """Columns of a step: at most `k`, a power of 2 that divides a group."""
    group = group_of(weight)
    return min(columns, group & -group)


def supported(weight: Weight) -> bool:
    """Whether this is int4 with unquantized activations, and each row has scales for consecutive
    groups of a multiple of 32 columns."""
    if weight.scale is None or not weight.is_int4 or weight.activation != "wide":
        return False
    group = group_of(weight)
    whole = weight.block[0] == 1 and group % LEAST_GROUP == 0 and weight.columns % group == 0
    plain = all(part.is_contiguous() for part in weight.tensors())
    return whole and plain and weight.group_index is None


def words_of(x: Tensor) -> Tensor:
    """x [T, columns] as integers of two columns each."""
    if x.stride(1) != 1 or x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.contiguous()
    return x.view(_WORDS[x.element_size()])
