"""Linear layers: each owns its weight's format, the names of the checkpoint tensors merged into
it, and what part of them it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.layers.parameter import Build, Target, Window, matrix_targets
from rorqual.ops.activation import Activation
from rorqual.ops.reference import FP8, Weight
from rorqual.parallel.shard import WHOLE, Shard


@dataclass(frozen=True)
class Part:
    """One checkpoint matrix inside a merged weight: its module name (no `.weight`), its rows in
    the file, whether it has a bias, and which of its rows are here."""

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


def empty_weight(
    build: Build,
    rows: int,
    columns: int,
    quantized: bool,
    aligned: bool = True,
    stack: tuple[int, ...] = (),
) -> Weight:
    """Uninitialised storage. Merged or cut fp8 parts whose rows are no multiple of the block
    keep one scale a row instead."""
    if not quantized:
        return Weight(build.empty(*stack, rows, columns))
    assert build.quant is not None
    block_rows, block_columns = build.quant.block
    block_rows = block_rows if aligned else 1
    scale = build.empty(
        *stack, -(-rows // block_rows), -(-columns // block_columns), dtype=torch.float32
    )
    return Weight(build.empty(*stack, rows, columns, dtype=FP8), scale, (block_rows, block_columns))


def rows_of(weight: Weight, start: int, stop: int) -> Weight:
    """A view of rows that begin on a block's edge."""
    if weight.scale is None:
        return Weight(weight.data[start:stop])
    rows = weight.block[0]
    return Weight(
        weight.data[start:stop], weight.scale[start // rows : -(-stop // rows)], weight.block
    )


class Linear:
    """y = x W^T + b with W [sum of part rows, columns]; `merged` names a checkpoint tensor that may
    hold all parts at once.

    Column-parallel: the parts say which rows are here, and y holds those columns. Row-parallel:
    `cut` says which columns are here, x holds those columns, and y is a partial sum; rank 0 alone
    adds the bias.
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
        quantized = all(build.is_quantized(part.name) for part in parts)
        self.block = build.quant.block if build.quant else (128, 128)
        assert not quantized or self.first_column % self.block[1] == 0, (
            "fp8 columns are cut between blocks (check_parallel)"
        )
        edges = [part.start for part in parts] + [part.local for part in parts[:-1]]
        self.weight = empty_weight(
            build, rows, width, quantized, aligned=not any(edge % self.block[0] for edge in edges)
        )
        self.biased = any(part.bias for part in parts)
        self.bias = build.empty(rows).zero_() if self.biased and shard.index == 0 else None

    def forward(self, x: Activation) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def targets(self) -> Iterator[Target]:
        for part, start, stop in self._places():
            window = Window((part.rows, self.columns), part.start, self.first_column)
            yield from matrix_targets(
                f"{part.name}.weight",
                rows_of(self.weight, start, stop),
                self.std,
                window,
                self.block,
            )
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
        """Each part with its rows in the weight."""
        start = 0
        for part in self.parts:
            yield part, start, start + part.local
            start += part.local

    def _bias(self, start: int, stop: int) -> Tensor:
        return self.weight.data.new_empty(0) if self.bias is None else self.bias[start:stop]

    def _merged_targets(self) -> Iterator[Target]:
        names = tuple(part.name for part in self.parts)
        weights, biases = (tuple(f"{name}.{kind}" for name in names) for kind in ("weight", "bias"))
        total = sum(part.rows for part in self.parts)
        for row, start, stop in self._runs():
            window = Window((total, self.columns), row, self.first_column)
            yield from matrix_targets(
                f"{self.merged}.weight",
                rows_of(self.weight, start, stop),
                self.std,
                window,
                self.block,
                weights,
            )
            if self.biased and all(part.bias for part in self.parts):
                yield Target(
                    f"{self.merged}.bias",
                    self._bias(start, stop),
                    covers=biases,
                    whole=(total,),
                    start=(row,),
                )

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """(first row in the merged tensor, start and stop in the weight) of each run of rows:
        one where nothing is cut."""
        if all(part.shard.count == 1 for part in self.parts):
            yield 0, 0, sum(part.rows for part in self.parts)
            return
        first = 0
        for part, start, stop in self._places():
            yield first + part.start, start, stop
            first += part.rows
