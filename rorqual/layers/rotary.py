"""cos and sin tables. A step gathers its rows once; all layers read the same two tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rorqual.config.model import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """[dim/2] fp32. YaRN blends interpolated and original frequencies by wavelength (arXiv
    2309.00071, section 3.2)."""
    powers = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    plain = 1.0 / rope.theta**powers
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    low, high = _correction_range(rope)
    ramp = (
        (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _correction_range(rope: RopeConfig) -> tuple[float, float]:
    def column(rotations: float) -> float:
        return (
            rope.dim
            * math.log(rope.original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = column(rope.beta_fast)
    high = column(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    return max(low, 0), min(high, rope.dim - 1)


class Rotary:
    """Tables [positions, dim/2] in fp32 for positions below `length`."""

    def __init__(self, rope: RopeConfig, length: int, device: torch.device):
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
        self.cos = (angles.cos() * rope.table_scale).to(device)
        self.sin = (angles.sin() * rope.table_scale).to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)
