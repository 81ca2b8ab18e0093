"""RMSNorm, alone or joined with the addition to the residual stream before it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from rorqual.layers.parameter import Build, Target


class Norm:
    def __init__(self, build: Build, name: str, size: int, eps: float):
        self.ops = build.ops
        self.name = name
        self.eps = eps
        self.weight = build.empty(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self.ops.add_norm(x, residual, self.weight, self.eps)

    def targets(self) -> Iterator[Target]:
        yield Target(self.name + ".weight", self.weight, fill=1.0)
