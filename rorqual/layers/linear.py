"""Linear layers: each owns its weight's format and the names of the checkpoint tensors merged into it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.layers.parameter import Build, Target, matrix_targets
from rorqual.ops.reference import FP8, Weight


@dataclass(frozen=True)
class Part:
    """One checkpoint matrix inside a merged weight: its module name (no `.weight`), its rows, and whether it has a bias."""

    name: str
    rows: int
    bias: bool = False


def empty_weight(build: Build, rows: int, columns: int, quantised: bool, aligned: bool = True, stack: tuple[int, ...] = ()) -> Weight:
    """Uninitialised storage. Merged fp8 parts whose rows are no multiple of the block keep one scale a row instead."""
    if not quantised:
        return Weight(build.empty(*stack, rows, columns))
    assert build.quant is not None
    block_rows, block_columns = build.quant.block
    block_rows = block_rows if aligned else 1
    scale = build.empty(*stack, -(-rows // block_rows), -(-columns // block_columns), dtype=torch.float32)
    return Weight(build.empty(*stack, rows, columns, dtype=FP8), scale, (block_rows, block_columns))


class Linear:
    """y = x W^T + b with W [sum of part rows, columns]; `merged` names a checkpoint tensor that may hold all parts at once."""

    def __init__(self, build: Build, parts: Sequence[Part], columns: int, gain: float = 1.0, merged: str | None = None):
        self.ops = build.ops
        self.parts = tuple(parts)
        self.merged = merged
        self.std = gain * columns**-0.5
        rows = sum(part.rows for part in parts)
        quantised = all(build.is_quantised(part.name) for part in parts)
        block = build.quant.block[0] if build.quant else 1
        aligned = all(part.rows % block == 0 for part in parts[:-1])
        self.weight = empty_weight(build, rows, columns, quantised, aligned)
        self.repeat = block // self.weight.block[0] if quantised else 1
        self.bias = build.empty(rows).zero_() if any(part.bias for part in parts) else None

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def targets(self) -> Iterator[Target]:
        start = 0
        for part in self.parts:
            stop = start + part.rows
            yield from matrix_targets(
                part.name + ".weight", self.weight.data[start:stop], self._scale(start, stop), self.std, repeat=self.repeat
            )
            if part.bias:
                assert self.bias is not None
                yield Target(part.name + ".bias", self.bias[start:stop])
            start = stop
        if self.merged and len(self.parts) > 1:
            yield from self._merged_targets()

    def _merged_targets(self) -> Iterator[Target]:
        names = tuple(part.name for part in self.parts)
        weights = tuple(name + ".weight" for name in names)
        yield from matrix_targets(f"{self.merged}.weight", self.weight.data, self.weight.scale, self.std, weights, self.repeat)
        if self.bias is not None and all(part.bias for part in self.parts):
            yield Target(f"{self.merged}.bias", self.bias, covers=tuple(name + ".bias" for name in names))

    def _scale(self, start: int, stop: int) -> Tensor | None:
        if self.weight.scale is None:
            return None
        rows = self.weight.block[0]
        return self.weight.scale[start // rows : -(-stop // rows)]
