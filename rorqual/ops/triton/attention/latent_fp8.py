"""Rows of an 8-bit latent cache (`reference.pack_latent`): quantize, write and gather. Also
quantization of heads (`reference.pack_heads`).

A row is bytes: latent [C], e4m3 or int8 by the cache's dtype | scales [C / 128] fp32 | rope key
[rope] unquantized; 656 bytes at 512 + 64 columns in bf16. The cache is addressed through a byte
pointer, cast for the parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.reference import ACTIVATION_BLOCK
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs


def groups_of(rank: int) -> int:
    """Scales of a row."""
    return -(-rank // ACTIVATION_BLOCK)


def supported(rank: int, rope: int) -> bool:
    """Whether the kernels support these sizes: powers of two."""
    return rank == next_power(rank) and rope == next_power(rope)


@triton.jit
def steps_of(groups, scales, INT8: tl.constexpr):
    """groups [n, columns] fp32 over scales [n], as e4m3 or int8; divided as torch does, half to
    even."""
    steps = tl.div_rn(groups, tl.broadcast_to(scales[:, None], groups.shape))
    if INT8:
        # at 1.5 * 2^23 the spacing of fp32 is 1: the addition rounds
        whole = (steps + 12582912.0) - 12582912.0
        return tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int8)
    else:
        return steps.to(tl.float8e4nv)


@triton.jit
def scale_of(most, INT8: tl.constexpr):
    """The scale of columns whose largest is `most`."""
    LARGEST: tl.constexpr = 127.0 if INT8 else 448.0
    return tl.div_rn(tl.maximum(most, 1e-4), LARGEST)


@triton.jit
def store_row(latent, key, row, write, RANK: tl.constexpr, ROPE: tl.constexpr):
    """Quantize latent, fp32 [RANK] holding values of the activations' dtype, and store it, its
    scales and the rope key [ROPE] at `row`.

    Divisions are correctly rounded, so the bytes equal the reference's.
    """
    GROUPS: tl.constexpr = (RANK + 127) // 128
    INT8: tl.constexpr = row.dtype.element_ty == tl.int8
    NUMBER: tl.constexpr = tl.int8 if INT8 else tl.float8e4nv
    blocks = tl.reshape(latent, (GROUPS, RANK // GROUPS))
    scales = scale_of(tl.max(tl.abs(blocks), 1), INT8)
    data = steps_of(blocks, scales, INT8)
    columns = tl.arange(0, RANK)
    group = tl.arange(0, GROUPS)
    rotary = tl.arange(0, ROPE)
    tl.store(
        row.to(tl.pointer_type(NUMBER)) + columns,
        tl.reshape(data, (RANK,)),
        mask=write & (columns >= 0),
    )
    tl.store(
        (row + RANK).to(tl.pointer_type(tl.float32)) + group, scales, mask=write & (group >= 0)
    )
    tl.store(
        (row + RANK + 4 * GROUPS).to(tl.pointer_type(key.dtype)) + rotary,
        key,
        mask=write & (rotary >= 0),
    )


@triton.jit
def _write_kernel(
    entries,
    plane,
    slots,
    entry_row,
    slot_row,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    base = entries + token * entry_row
    latent = tl.load(base + tl.arange(0, RANK)).to(tl.float32)
    key = tl.load(base + RANK + tl.arange(0, ROPE))
    store_row(latent, key, plane + slot * slot_row, slot >= 0, RANK, ROPE)


def write(plane: Tensor, slots: Tensor, entries: Tensor, rank: int) -> None:
    """plane [pages, page, bytes] uint8 or int8; slots [T] int, flat positions, negative ones not
    written; entries [T, C + rope]."""
    assert entries.stride(1) == 1
    assert plane.is_contiguous()
    if entries.shape[0]:
        _write_kernel[entries.shape[0],](
            entries,
            plane,
            slots,
            entries.stride(0),
            plane.stride(1),
            rank,
            entries.shape[1] - rank,
            num_warps=1,
            **dependent(entries.device),
        )


@triton.jit
def _read_kernel(
    plane, slots, out, slot_row, RANK: tl.constexpr, ROPE: tl.constexpr, DEPENDENT: tl.constexpr
):
    wait_for_inputs(DEPENDENT)
    GROUPS: tl.constexpr = (RANK + 127) // 128
    dtype: tl.constexpr = out.dtype.element_ty
    index = tl.program_id(0).to(tl.int64)
    row = plane + tl.load(slots + index).to(tl.int64) * slot_row
    target = out + index * (RANK + ROPE)
    columns = tl.arange(0, RANK)
    rotary = tl.arange(0, ROPE)
    NUMBER: tl.constexpr = tl.int8 if plane.dtype.element_ty == tl.int8 else tl.float8e4nv
    data = tl.load(row.to(tl.pointer_type(NUMBER)) + columns).to(tl.float32)
    scales = tl.load((row + RANK).to(tl.pointer_type(tl.float32)) + tl.arange(0, GROUPS))
    wide = tl.reshape(data, (GROUPS, RANK // GROUPS)) * scales[:, None]
    tl.store(target + columns, tl.reshape(wide, (RANK,)).to(dtype))
    tl.store(
        target + RANK + rotary,
        tl.load((row + RANK + 4 * GROUPS).to(tl.pointer_type(dtype)) + rotary),
    )


def read(plane: Tensor, slots: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """The entries at flat positions slots [N] of plane [pages, page, bytes], [N, C + rope] in
    `dtype`: gathered and dequantized at once."""
    rope = (plane.shape[2] - rank - 4 * groups_of(rank)) // dtype.itemsize
    assert plane.is_contiguous()
    out = torch.empty(slots.shape[0], rank + rope, dtype=dtype, device=plane.device)
    if slots.shape[0]:
        _read_kernel[slots.shape[0],](
            plane, slots, out, plane.stride(1), rank, rope, num_warps=1, **dependent(plane.device)
        )
    return out
