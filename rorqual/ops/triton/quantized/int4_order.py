"""The memory layout of repacked int4 weights, and their conversion to operands in registers.

A chunk is 128 adjacent columns of a row (64 if groups have 32 columns, or 128 does not divide the
columns). Byte c of it has column c in the low half and column c + chunk / 2 in the high half, so
that a step's halves are two tiles of adjacent columns and x needs no permutation. Bytes are ordered
so that the columns of one tensor core thread are adjacent: of 16 columns (8-bit operands: 32) it
needs those at 2 q, 2 q + 1 (4 q to 4 q + 3) and as many 8 (16) columns later, and loads them for
the whole chunk in one 16-byte load.

A half byte is the number plus 8. For e4m3 activations it is the low bits of an e4m3 number: 0 to 7
unchanged, and 8 - v - 1 for negative v, from which one multiplication makes the sign bit. These are
e4m3's smallest numbers, 2^-9 times the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.reference import Weight
from rorqual.ops.rounding import pack_int4, unpack_int4
from rorqual.ops.triton.runtime.launch import INTERPRETED

CHUNKS = (128, 64)
LEAST_GROUP = 32
PIECE = 64 << 20  # bytes that are repacked at once
ARITHMETIC = tl.constexpr(bool(INTERPRETED))  # the interpreter does not support inline assembly


def group_of(weight: Weight) -> int:
    """Columns that share a scale."""
    return min(weight.block[1], weight.columns)


def chunk_of(weight: Weight) -> int:
    """Columns of a chunk; 0 if the weight cannot be repacked. A chunk is inside one group, or its
    halves are two adjacent groups."""
    group = group_of(weight)
    for chunk in CHUNKS:
        alike = group % chunk == 0 or group == chunk // 2
        if alike and group >= LEAST_GROUP and weight.columns % max(chunk, group) == 0:
            return chunk
    return 0


def _coded(numbers: Tensor, activation: str) -> Tensor:
    """Numbers plus 8, [...] uint8, to e4m3 half bytes; its own inverse."""
    if not activation.startswith("fp8"):
        return numbers
    # 0 to 7 are negative here and 8 to 15 there: 15 - v mirrors the former, v - 8 shifts the latter
    return torch.where(numbers < 8, 15 - numbers, numbers - 8)


def _decoded(codes: Tensor, activation: str) -> Tensor:
    if not activation.startswith("fp8"):
        return codes
    return torch.where(codes < 8, codes + 8, 15 - codes)


def _shape(chunk: int, activation: str) -> tuple[int, int, int, int]:
    """Shape of a chunk's bytes in column order: pieces of an instruction's depth, halves, threads,
    adjacent columns."""
    each = 2 if activation == "wide" else 4
    return chunk // 2 // (8 * each), 2, 4, each


def turned(packed: Tensor, chunk: int, activation: str) -> Tensor:
    """Repack data [..., columns / 2] of rounding.pack_int4."""
    low, high = unpack_int4(packed).unflatten(-1, (-1, 2, chunk // 2)).unbind(-2)
    bytes_ = _coded(low, activation) | _coded(high, activation) << 4
    parts = bytes_.unflatten(-1, _shape(chunk, activation))
    return parts.movedim(-2, -4).flatten(-5)


def turned_back(data: Tensor, chunk: int, activation: str) -> Tensor:
    """The inverse of `turned`."""
    pieces, halves, threads, each = _shape(chunk, activation)
    parts = data.unflatten(-1, (-1, threads, pieces, halves, each)).movedim(-4, -2)
    bytes_ = parts.flatten(-4)
    numbers = torch.cat((bytes_ & 15, bytes_ >> 4), -1)
    return pack_int4(_decoded(numbers, activation).flatten(-2))


def turn(weight: Weight) -> None:
    """Repack a weight in place, in pieces: a layer's experts may need most of the free memory."""
    chunk = chunk_of(weight)
    assert chunk
    assert not weight.turned
    weight.turned = True
    if weight.data.is_meta:
        return
    rows = weight.data.view(-1, weight.data.shape[-1])
    for piece in rows.split(max(1, PIECE // rows.shape[1])):
        piece.copy_(turned(piece, chunk, weight.activation))


def plain(weight: Weight) -> Weight:
    """The weight in the reference's layout: a copy if it was repacked."""
    if not weight.turned:
        return weight
    data = turned_back(weight.data, chunk_of(weight), weight.activation)
    parts = (data, weight.scale, weight.block, weight.zero, weight.activation, weight.group_index)
    return Weight(*parts)


# ---- in a kernel


@triton.jit
def in_order(packed, HALF: tl.constexpr, EACH: tl.constexpr):
    """A chunk's bytes [n, HALF] in column order. EACH: adjacent columns of a thread, 2 of 16 bits
    or 4 of 8. No byte moves between threads."""
    parts = tl.reshape(packed, (packed.shape[0], 4, HALF // (8 * EACH), 2, EACH))
    return tl.reshape(tl.permute(parts, (0, 2, 3, 1, 4)), (packed.shape[0], HALF))


# factors from the numbers of `low_half` and `high_half` to weights
FP8_UNIT = tl.constexpr(512.0)
INT8_UNIT = tl.constexpr(0.0625)


@triton.jit
def _numbers(half, kind: tl.constexpr):
    """Half bytes, in the low bits, converted by ordinary arithmetic."""
    wide = half.to(tl.int32)
    if kind == tl.int8:
        return ((wide - 8) * 16).to(tl.int8)
    elif kind == tl.float8e4nv:
        value = tl.where(wide < 8, wide, 7 - wide)
        return (value.to(tl.float32) / 512.0).to(kind)
    else:
        return (wide - 8).to(tl.float32).to(kind)


# With one operand and one result the compiler loads bytes from shared memory in the layout of the
# tensor cores, and moves nothing after unpacking. 16-bit types: a number below 16 in the lowest
# bits of 128 (fp16: 1024) gives 128 plus the number; 136 (1032) is then subtracted.


def _to_16_bits(take: str, magic: str, one: str, off: str, pair: str) -> tl.constexpr:
    """Assembly that converts the half bytes of four bytes, extracted by `take` to a, to two pairs
    of numbers."""
    return tl.constexpr(
        f"""{{
        .reg .b32 a, high, one, off;
        mov.b32 high, {magic};
        mov.b32 one, {one};
        mov.b32 off, {off};
        {take}
        prmt.b32 $0, a, high, 0x4140;
        prmt.b32 $1, a, high, 0x4342;
        fma.rn.{pair} $0, $0, one, off;
        fma.rn.{pair} $1, $1, one, off;
        }}"""
    )


_LOW = "and.b32 a, $2, 0x0f0f0f0f;"
_HIGH = "shr.u32 a, $2, 4; and.b32 a, a, 0x0f0f0f0f;"
BF16_LOW = _to_16_bits(_LOW, "0x43434343", "0x3f803f80", "0xc308c308", "bf16x2")
BF16_HIGH = _to_16_bits(_HIGH, "0x43434343", "0x3f803f80", "0xc308c308", "bf16x2")
FP16_LOW = _to_16_bits(_LOW, "0x64646464", "0x3c003c00", "0xe408e408", "f16x2")
FP16_HIGH = _to_16_bits(_HIGH, "0x64646464", "0x3c003c00", "0xe408e408", "f16x2")
INT8_LOW = tl.constexpr("""{
    .reg .b32 a;
    shl.b32 a, $1, 4;
    lop3.b32 $0, a, 0xf0f0f0f0, 0x80808080, 0x6a;
    }""")
INT8_HIGH = tl.constexpr("lop3.b32 $0, $1, 0xf0f0f0f0, 0x80808080, 0x6a;")


def _to_e4m3(shift: str, sign: int) -> tl.constexpr:
    """sign: the bit of a half byte that becomes the sign."""
    return tl.constexpr(
        f"""{{
        .reg .b32 a, s;
        {shift}
        and.b32 a, a, 0x0f0f0f0f;
        shr.u32 s, $1, {sign};
        and.b32 s, s, 0x01010101;
        mad.lo.u32 $0, s, 0x79, a;
        }}"""
    )


FP8_LOW = _to_e4m3("mov.b32 a, $1;", 3)
FP8_HIGH = _to_e4m3("shr.u32 a, $1, 4;", 7)


@triton.jit
def low_half(packed, kind: tl.constexpr):
    """The low half bytes in `kind`, without the factor above."""
    if ARITHMETIC:
        return _numbers(packed & 15, kind)
    elif kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            BF16_LOW, "=&r,=&r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif kind == tl.float16:
        return tl.inline_asm_elementwise(
            FP16_LOW, "=&r,=&r,r", [packed], dtype=tl.float16, is_pure=True, pack=4
        )
    elif kind == tl.int8:
        return tl.inline_asm_elementwise(
            INT8_LOW, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            FP8_LOW, "=r,r", [packed], dtype=tl.float8e4nv, is_pure=True, pack=4
        )


@triton.jit
def high_half(packed, kind: tl.constexpr):
    """The high half bytes in `kind`, without the factor above."""
    if ARITHMETIC:
        return _numbers(packed >> 4, kind)
    elif kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            BF16_HIGH, "=&r,=&r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif kind == tl.float16:
        return tl.inline_asm_elementwise(
            FP16_HIGH, "=&r,=&r,r", [packed], dtype=tl.float16, is_pure=True, pack=4
        )
    elif kind == tl.int8:
        return tl.inline_asm_elementwise(
            INT8_HIGH, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            FP8_HIGH, "=r,r", [packed], dtype=tl.float8e4nv, is_pure=True, pack=4
        )
