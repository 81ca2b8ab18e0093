"""RMSNorm, alone or fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from rorqual.layers.parameter import Build, Target
from rorqual.ops.activation import Activation
from rorqual.ops.deferred_sum import DeferredMoESum, NormInput
from rorqual.parallel.collectives import Axis


class Norm:
    """quantize_output: only linear layers of the layer itself read the output, so it is quantized
    if their weights are fp8. before_router: a router reads the output first."""

    def __init__(
        self,
        build: Build,
        name: str,
        size: int,
        eps: float,
        quantize_output: bool = False,
        before_router: bool = False,
    ):
        self.ops = build.ops
        self.quantize_output = build.fp8_rows if quantize_output else None
        self.before_router = before_router
        self.name = name
        self.eps = eps
        self.weight = build.empty(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.weight, self.eps)

    def add(
        self, x: NormInput, residual: Tensor | None, axis: Axis | None = None
    ) -> tuple[Activation, Tensor]:
        """(norm(x + residual), x + residual), x being a partial sum over `axis`. Fuses all-reduce,
        addition and norm, or the sum over a token's experts, addition and norm."""
        if isinstance(x, DeferredMoESum):
            if residual is not None and (axis is None or axis.size == 1):
                return self.ops.sum_add_norm(
                    x, residual, self.weight, self.eps, self.quantize_output
                )
            x = x.total()
        if axis is None:
            if self.before_router and residual is not None:
                return self.ops.add_norm_for_router(
                    x, residual, self.weight, self.eps, self.quantize_output
                )
            return self.ops.add_norm(x, residual, self.weight, self.eps, self.quantize_output)
        return axis.add_norm(x, residual, self.weight, self.eps, self.ops.add_norm)

    def targets(self) -> Iterator[Target]:
        yield Target(self.name + ".weight", self.weight, fill=1.0)
