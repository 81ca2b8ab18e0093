"""Weights of eight and four bits on the CPU: how they are packed, what they mean, and products with
them by the compiled kernels. Packed once; nothing is kept beside it.

w8a8: int8 as a checkpoint has it, one scale a row or for each `group` columns. w4a16 and w4a8:
nibbles with a scale and a zero point for each row and `group` columns. a8: activations are rounded
to eight bits with a scale a token.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.errors import ConfigError
from rorqual.ops.cpu.native import STORAGE, Native, unknown_expert

FORMATS = ("w8a8", "w4a16", "w4a8")  # in the order of quantized.h
NIBBLES = 32  # columns of a block, as in quantized.h
HALF = NIBBLES // 2
SYMMETRIC_ZERO = 8
INT8_MAX = 127


class _Packed(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("format", "rows", "columns", "group")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("data", "scales", "offsets")]


@dataclass
class CpuPackedWeight:
    """A matrix [rows, columns], or a stack of them. data [..., rows, columns] int8, or [..., rows,
    columns / 2] uint8; scales and, of four bits, offsets (scale times zero point) fp32 [..., rows,
    columns / group]."""

    format: str
    data: Tensor
    scales: Tensor
    offsets: Tensor | None
    columns: int

    @property
    def rows(self) -> int:
        return self.data.shape[-2]

    @property
    def group(self) -> int:
        return self.columns // self.scales.shape[-1]

    @property
    def bytes(self) -> int:
        parts = (self.data, self.scales, self.offsets)
        return sum(part.nbytes for part in parts if part is not None)

    def __getitem__(self, index: int) -> CpuPackedWeight:
        offsets = None if self.offsets is None else self.offsets[index]
        return CpuPackedWeight(
            self.format, self.data[index], self.scales[index], offsets, self.columns
        )

    def described(self) -> _Packed:
        """For the kernels; valid while this weight is."""
        offsets = 0 if self.offsets is None else self.offsets.data_ptr()
        sizes = (FORMATS.index(self.format), self.rows, self.columns, self.group)
        return _Packed(*sizes, self.data.data_ptr(), self.scales.data_ptr(), offsets)


def pack_int8(data: Tensor, scales: Tensor) -> CpuPackedWeight:
    """data [..., rows, columns] int8; scales [..., rows] or [..., rows, groups]."""
    _check(data, torch.int8)
    scales = scales if scales.dim() == data.dim() else scales[..., None]
    _check_groups(data.shape, scales, "scales", 1)
    return CpuPackedWeight(
        "w8a8", data.contiguous(), scales.float().contiguous(), None, data.shape[-1]
    )


def pack_int4(
    values: Tensor, scales: Tensor, zeros: Tensor | None = None, activation_bits: int = 16
) -> CpuPackedWeight:
    """values [..., rows, columns] uint8, 0 to 15: a weight is (value - zero) * scale; scales and
    zeros [..., rows, groups]. No zeros: 8 everywhere. activation_bits: 16 or 8."""
    _check(values, torch.uint8)
    if activation_bits not in (8, 16):
        raise ConfigError(f"activation_bits={activation_bits}; accepted: 8, 16")
    _check_groups(values.shape, scales, "scales", NIBBLES)
    zeros = torch.full_like(scales, SYMMETRIC_ZERO) if zeros is None else zeros
    _check_groups(values.shape, zeros, "zeros", NIBBLES)
    if values.numel() and int(values.max()) > 15:
        raise ConfigError(f"a value of {int(values.max())} has more than four bits")
    blocks = values.unflatten(-1, (-1, 2, HALF))
    data = (blocks[..., 0, :] | blocks[..., 1, :] << 4).flatten(-2)
    scales = scales.float()
    return CpuPackedWeight(
        f"w4a{activation_bits}",
        data.contiguous(),
        scales.contiguous(),
        (scales * zeros.float()).contiguous(),
        values.shape[-1],
    )


def _check(data: Tensor, dtype: torch.dtype) -> None:
    if data.dtype != dtype:
        raise ConfigError(f"values of {data.dtype}; accepted: {dtype}")


def _check_groups(shape: torch.Size, given: Tensor, name: str, least: int) -> None:
    groups = given.shape[-1]
    if given.shape[:-1] != shape[:-1] or not groups or shape[-1] % groups:
        told = f"{name} of shape {tuple(given.shape)} do not divide weights of {tuple(shape)}"
        raise ConfigError(told)
    if shape[-1] // groups % least:
        raise ConfigError(
            f"groups of {shape[-1] // groups} columns; accepted: multiples of {least}"
        )
    if not given.isfinite().all():
        raise ConfigError(f"{name} hold a number that is not finite")


def unpacked(weight: CpuPackedWeight) -> Tensor:
    """What it stands for, in fp32: the definition of its products."""
    if weight.offsets is None:
        return weight.data.float() * weight.scales.repeat_interleave(weight.group, -1)
    blocks = weight.data.unflatten(-1, (-1, HALF))
    values = torch.stack((blocks & 15, blocks >> 4), -2).flatten(-3).float()
    scales, offsets = (
        part.repeat_interleave(weight.group, -1) for part in (weight.scales, weight.offsets)
    )
    return values * scales - offsets


def rounded_to_int8(x: Tensor) -> Tensor:
    """Activations [T, columns] after a round trip through eight bits, in fp32: a scale a token."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / INT8_MAX
    return (wide / scale.clamp(min=torch.finfo(torch.float32).tiny)).round() * scale


def linear(
    native: Native | None, x: Tensor, weight: CpuPackedWeight, bias: Tensor | None = None
) -> Tensor:
    """x [T, columns] times the matrix transposed: [T, rows] in x's dtype."""
    if native is None or x.dtype not in STORAGE:
        rows = x.float() if weight.format == "w4a16" else rounded_to_int8(x)
        y = rows @ unpacked(weight).t()
        return (y if bias is None else y + bias.float()).to(x.dtype)
    x = x.contiguous()
    assert x.shape[1] == weight.columns
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    y = x.new_empty(x.shape[0], weight.rows)
    held = weight.described()
    native.lib.rq_linear_packed(
        int(x.dtype == torch.float32),
        ctypes.addressof(held),
        x.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.shape[0],
    )
    return y


def experts(
    native: Native,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: CpuPackedWeight,
    down: CpuPackedWeight,
) -> Tensor:
    """The weighted sum of each token's experts, as reference.experts, of stacks of one format."""
    slots, hidden = down.data.shape[:2]
    assert gate_up.format == down.format
    assert x.dtype in STORAGE
    assert x.shape == (ids.shape[0], hidden)
    assert gate_up.columns == hidden
    assert gate_up.rows == 2 * down.columns
    assert gate_up.data.shape[0] == slots
    assert weights.shape == ids.shape
    assert weights.dtype == torch.float32
    x, ids, weights = x.contiguous(), ids.long().contiguous(), weights.contiguous()
    y = torch.empty_like(x)
    held = (gate_up.described(), down.described())
    unknown = native.lib.rq_experts_packed(
        int(x.dtype == torch.float32),
        *(ctypes.addressof(matrix) for matrix in held),
        x.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        y.data_ptr(),
        *ids.shape,
        slots,
    )
    if unknown < ids.numel():
        raise unknown_expert(int(ids.flatten()[unknown]), slots)
    return y
