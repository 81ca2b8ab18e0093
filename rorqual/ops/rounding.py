"""8-bit and 4-bit numbers: rounding of activations to them, and packing of two int4 in a byte."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
ACTIVATION_BLOCK = 128
LEAST_AMAX = 1e-4  # (DeepGEMM)


def pack_int4(values: Tensor) -> Tensor:
    """Pack numbers 0 to 15, [..., columns] uint8, to [..., columns / 2]; even columns in the low
    half."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def power_of_two(scale: Tensor) -> Tensor:
    """Round up to a power of two (UE8M0)."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))


def by_group(x: Tensor, group: int) -> Tensor:
    """x [T, columns] to fp32 [T, groups, group], padded with zeros."""
    tokens, columns = x.shape
    wide = F.pad(x.float(), (0, -columns % group))
    return wide.view(tokens, -(-columns // group), group)


def to_8_bits(groups: Tensor, number: torch.dtype, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize columns that share a scale, [..., n] fp32, to `number` (e4m3 or int8) with scales
    [...] fp32: amax, at least 1e-4, over the largest number of the format, and rounded up to a
    power of two if `ue8m0`."""
    # a tensor: dividing by a Python number, torch on a GPU multiplies by its rounded inverse
    most = torch.full((), FP8_MAX if number == FP8 else INT8_MAX, device=groups.device)
    scale = groups.abs().amax(-1).clamp(LEAST_AMAX) / most
    if ue8m0:
        scale = power_of_two(scale)
    steps = groups / scale[..., None]
    return (steps if number == FP8 else steps.round().clamp(-most, most)).to(number), scale


def rounded(x: Tensor, kind: str) -> Tensor:
    """x [T, columns] after a round trip through quantization, in fp32. kind: one of
    config.quant.ACTIVATIONS except "wide" and "fp8_group"."""
    number, _, share = kind.partition("_")
    columns = x.shape[1]
    groups = by_group(x, max(1, columns) if share == "token" else ACTIVATION_BLOCK)
    most = torch.full((), FP8_MAX if number == "fp8" else INT8_MAX, device=x.device)
    scale = groups.abs().amax(-1, keepdim=True).clamp(LEAST_AMAX) / most
    if share.endswith("ue8m0"):
        scale = power_of_two(scale)
    steps = groups / scale
    steps = steps.to(FP8).float() if number == "fp8" else steps.round().clamp(-most, most)
    return (steps * scale).flatten(1)[:, :columns]
