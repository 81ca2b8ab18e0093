"""Where checkpoint tensors go. A layer lists its Targets; the loader fills them from a file, or from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.config import QuantConfig
from rorqual.ops.reference import FP8
from rorqual.ops.table import Ops

# A random fp8 weight is drawn with this standard deviation in fp8 units: 448 then lies at five sigma.
FP8_STD = 89.6


@dataclass(frozen=True)
class Target:
    """One checkpoint tensor's place: `view` is (part of) a parameter. `covers` names the tensors it stands for when it holds
    several merged ones. Random weights are normal with `std`, or the constant `fill` where std is None. Each row of the file
    fills `repeat` rows of the view (scales of blocks kept row by row)."""

    name: str
    view: Tensor
    std: float | None = None
    fill: float = 0.0
    covers: tuple[str, ...] = ()
    repeat: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the file."""
        first = self.view.shape[:1]
        return tuple(-(-rows // self.repeat) for rows in first) + tuple(self.view.shape[1:])

    @property
    def stands_for(self) -> tuple[str, ...]:
        return self.covers or (self.name,)


@dataclass(frozen=True)
class Build:
    """What every layer needs to make its parameters."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    quant: QuantConfig | None = None
    residual_gain: float = 1.0  # shrinks the random weights that write to the residual stream

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def is_quantised(self, module: str) -> bool:
        return self.quant is not None and self.quant.covers(module)


def matrix_targets(
    name: str, data: Tensor, scale: Tensor | None, std: float, covers: tuple[str, ...] = (), repeat: int = 1
) -> Iterator[Target]:
    """Targets of one weight matrix: its data and, for fp8, its `_scale_inv`, each row of which fills `repeat` rows of `scale`."""
    if scale is None:
        yield Target(name, data, std=std, covers=covers)
        return
    assert data.dtype == FP8
    yield Target(name, data, std=FP8_STD, covers=covers)
    scales = tuple(part + "_scale_inv" for part in covers)
    yield Target(name + "_scale_inv", scale, fill=std / FP8_STD, covers=scales, repeat=repeat)
