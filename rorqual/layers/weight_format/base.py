"""Weight formats: how a layer stores a weight, and which checkpoint tensors fill it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rorqual.config.quant import WeightScheme
from rorqual.errors import ConfigError
from rorqual.layers.parameter import Build, Target, Window
from rorqual.ops.reference import Weight
from rorqual.ops.rounding import FP8

# Standard deviation of random quantized weights before the scale. Draws end at 3.46 deviations;
# fp8's 448 is at five, so that products of fp8 numbers look like a trained model's.
DRAWN = {"fp8": 89.6, "int8": 25.4, "int4": 2.3}
UNSET = -1  # group_index before loading


@dataclass(frozen=True)
class Matrix:
    """A matrix of the file, or the window of it that `weight` holds. `module`: its name, without
    the tensor suffix. `covers`: the modules that a merged matrix replaces. `std`: standard
    deviation of random weights."""

    module: str
    weight: Weight
    window: Window
    std: float = 1.0
    covers: tuple[str, ...] = ()

    def target(self, tensor: str, view: Tensor, **more: Any) -> Target:
        """The target of one of its tensors."""
        covers = tuple(f"{module}.{tensor}" for module in self.covers)
        return Target(f"{self.module}.{tensor}", view, covers=covers, **more)


@dataclass
class WeightFormat:
    """The unquantized format: `weight` in a floating-point type, stored in the model's dtype.

    Subclasses differ in `targets`, the file's tensors that fill a matrix. Storage depends on the
    scheme alone, so kernels see one layout for every packing of the file."""

    scheme: WeightScheme
    _others: dict[tuple[int, int], list[Target]] = field(default_factory=dict)

    @property
    def whole_stacks(self) -> bool:
        """Whether a file may hold the experts of a layer in one tensor."""
        return self.scheme.is_wide

    def empty(
        self,
        build: Build,
        rows: int,
        columns: int,
        edges: Sequence[int] = (),
        stack: tuple[int, ...] = (),
    ) -> Weight:
        """Uninitialized. `edges`: first rows of the merged parts, in the file and here; if one is
        inside a block, scales are stored per row."""
        scheme = self.scheme
        if scheme.is_wide:
            return Weight(build.empty(*stack, rows, columns))
        share, group = scheme.block[0], scheme.block[1] or max(1, columns)
        share = 1 if any(edge % share for edge in edges) else share
        places = (*stack, -(-rows // share), -(-columns // group))
        if scheme.kind != "int4":
            kind = FP8 if scheme.kind == "fp8" else torch.int8
            data = build.empty(*stack, rows, columns, dtype=kind)
            scale = build.empty(*places, dtype=torch.float32)
            return Weight(data, scale, (share, group), activation=scheme.activation)
        data = build.empty(*stack, rows, columns // 2, dtype=torch.uint8)
        zero = None if scheme.symmetric else build.empty(*places, dtype=torch.uint8)
        order = (
            build.empty(*stack, columns, dtype=torch.int32).fill_(-1) if scheme.ordered else None
        )
        return Weight(data, build.empty(*places), (share, group), zero, scheme.activation, order)

    def targets(self, matrix: Matrix) -> Iterator[Target]:
        """Targets of the matrix or of its window."""
        self.check(matrix)
        yield from self._targets(matrix)

    def _targets(self, matrix: Matrix) -> Iterator[Target]:
        window = matrix.window
        start = (window.row, window.column)
        view = matrix.weight.data
        yield matrix.target("weight", view, std=matrix.std, whole=window.shape, start=start)

    def absent(self, module: str, build: Build, shape: tuple[int, int]) -> Iterator[Target]:
        """A matrix of another rank: its names are accepted and its shapes checked, nothing is
        read."""
        if shape not in self._others:
            meta = replace(build, device=torch.device("meta"))
            matrix = Matrix("", self.empty(meta, *shape), Window(shape))
            self._others[shape] = list(self._targets(matrix))
        nothing = build.empty(0)
        for target in self._others[shape]:
            yield Target(
                module + target.name, nothing, whole=target.shape, optional=target.optional
            )

    def check(self, matrix: Matrix) -> None:
        """Raises ConfigError if the window's edge is inside a block, group or packed word."""
        unit = self.scheme.column_unit
        window = matrix.window
        stop = window.column + matrix.weight.columns
        whole = matrix.weight.columns == window.shape[1]
        if not whole and self.scheme.ordered:
            raise ConfigError(
                f"{matrix.module}.weight: desc_act gives every column a group of its own choice, "
                "so that its columns cannot be cut over ranks; accepted: tp, expert_tp and "
                "dense_tp of 1"
            )
        if window.column % unit or (stop % unit and stop != window.shape[1]):
            raise ConfigError(
                f"{matrix.module}.weight: a cut at columns {window.column} to {stop} of "
                f"{window.shape[1]} goes through {self.scheme.describe()}; accepted: multiples of "
                f"{unit}"
            )
