"""Linear layers. Each knows its weight's format, the checkpoint matrices merged into it, and its
shard of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.config.quant import WIDE
from rorqual.layers.parameter import Build, Target, Window
from rorqual.layers.weight_format.base import Matrix
from rorqual.layers.weight_format.select import format_of
from rorqual.ops.activation import Activation
from rorqual.ops.reference import Weight, dequantize
from rorqual.parallel.shard import WHOLE, Shard


@dataclass(frozen=True)
class Part:
    """One checkpoint matrix inside a merged weight: its module name (no `.weight`), its rows in
    the file, whether it has a bias, and this rank's shard of the rows."""

    name: str
    rows: int
    bias: bool = False
    shard: Shard = WHOLE

    @property
    def start(self) -> int:
        return self.shard.span(self.rows)[0]

    @property
    def local(self) -> int:
        start, stop = self.shard.span(self.rows)
        return stop - start


class Linear:
    """y = x W^T + b with W [sum of part rows, columns]. `merged`: name of a checkpoint tensor that
    may hold all parts at once.

    Column-parallel: the parts have shards, and y has this rank's columns. Row-parallel: `shard`
    splits the columns of W, x has this rank's columns, and y is a partial sum; only rank 0 adds the
    bias.
    """

    def __init__(
        self,
        build: Build,
        parts: Sequence[Part],
        columns: int,
        gain: float = 1.0,
        merged: str | None = None,
        shard: Shard = WHOLE,
    ):
        self.ops = build.ops
        self.parts = tuple(parts)
        self.merged = merged
        self.columns = columns
        self.first_column = shard.span(columns)[0]
        self.std = gain * columns**-0.5
        rows = sum(part.local for part in parts)
        width = shard.span(columns)[1] - self.first_column
        self.format = format_of(build.scheme([part.name for part in parts], columns))
        edges = [part.start for part in parts] + [part.local for part in parts[:-1]]
        self.weight = self.format.empty(build, rows, width, edges)
        self.biased = any(part.bias for part in parts)
        self.bias = build.empty(rows).zero_() if self.biased and shard.index == 0 else None

    def forward(self, x: Activation) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def finalize(self) -> None:
        """Call once, after loading: converts the weight to the backend's layout."""
        self.ops.prepare_weight(self.weight, self.merged or self.parts[0].name)

    def widen(self, dtype: torch.dtype) -> None:
        """Convert the loaded matrix to `dtype`."""
        self.weight = Weight(dequantize(self.weight, dtype))
        self.format = format_of(WIDE)

    def targets(self) -> Iterator[Target]:
        for part, start, stop in self._places():
            window = Window((part.rows, self.columns), part.start, self.first_column)
            weight = self.weight.part(start, stop)
            yield from self.format.targets(Matrix(part.name, weight, window, self.std))
            if part.bias:
                yield Target(
                    f"{part.name}.bias",
                    self._bias(start, stop),
                    whole=(part.rows,),
                    start=(part.start,),
                )
        if self.merged and len(self.parts) > 1:
            yield from self._merged_targets()

    def _places(self) -> Iterator[tuple[Part, int, int]]:
        """Each part with the start and stop of its rows in the weight."""
        start = 0
        for part in self.parts:
            yield part, start, start + part.local
            start += part.local

    def _bias(self, start: int, stop: int) -> Tensor:
        return self.weight.data.new_empty(0) if self.bias is None else self.bias[start:stop]

    def _merged_targets(self) -> Iterator[Target]:
        assert self.merged is not None
        names = tuple(part.name for part in self.parts)
        biases = tuple(f"{name}.bias" for name in names)
        total = sum(part.rows for part in self.parts)
        for row, start, stop in self._runs():
            window = Window((total, self.columns), row, self.first_column)
            weight = self.weight.part(start, stop)
            matrix = Matrix(self.merged, weight, window, self.std, names)
            yield from self.format.targets(matrix)
            if self.biased and all(part.bias for part in self.parts):
                yield Target(
                    f"{self.merged}.bias",
                    self._bias(start, stop),
                    covers=biases,
                    whole=(total,),
                    start=(row,),
                )

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """(first row in the merged tensor, start and stop in the weight) of each run of rows; one
        run if nothing is sharded."""
        if all(part.shard.count == 1 for part in self.parts):
            yield 0, 0, sum(part.rows for part in self.parts)
            return
        first = 0
        for part, start, stop in self._places():
            yield first + part.start, start, stop
            first += part.rows
