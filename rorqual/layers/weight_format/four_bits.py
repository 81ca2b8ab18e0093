"""int4 data as compressed-tensors (packed or unpacked) and w4afp8 checkpoints store it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rorqual.errors import ConfigError
from rorqual.layers.parameter import Convert, Target
from rorqual.layers.weight_format.base import DRAWN, Matrix, WeightFormat
from rorqual.ops.rounding import pack_int4, unpack_int4

WORD = 8  # int4 numbers in an int32
ZERO = 8  # zero point of symmetric numbers 0 to 15
Store = Callable[[slice, Tensor], None]


def nibbles(words: Tensor) -> Tensor:
    """Unpack int32 [..., n] to [..., 8 n] uint8, lowest four bits first."""
    return unpack_int4(words.contiguous().view(torch.uint8))


class Int4Format(WeightFormat):
    """Base of the int4 formats. Files pack eight rows or columns in a word, which cannot be
    split."""

    row_unit = 1

    def check(self, matrix: Matrix) -> None:
        super().check(matrix)
        row = matrix.window.row
        stop = row + matrix.weight.data.shape[0]
        rows, columns = matrix.window.shape
        if columns % WORD:
            raise ConfigError(
                f"{matrix.module}.weight: {columns} columns in int4; accepted: multiples of {WORD}"
            )
        if row % self.row_unit or stop % self.row_unit:
            raise ConfigError(
                f"{matrix.module}.weight: a cut at rows {row} to {stop} of {rows} goes through a "
                f"word of the file; accepted: multiples of {self.row_unit}"
            )

    def groups(self, matrix: Matrix) -> tuple[int, int, int]:
        """(groups in a row of the file, the first one here, how many are here)"""
        columns = matrix.window.shape[1]
        group = self.scheme.block[1] or columns
        assert matrix.weight.scale is not None
        here = matrix.weight.scale.shape[1]
        first = 0 if here == 1 and group >= columns else matrix.window.column // group
        return -(-columns // group), first, here

    def scale(self, matrix: Matrix, tensor: str) -> Target:
        """The scales, [rows, groups]."""
        assert matrix.weight.scale is not None
        groups, first, _ = self.groups(matrix)
        return matrix.target(
            tensor,
            matrix.weight.scale,
            fill=matrix.std / DRAWN["int4"],
            whole=(matrix.window.shape[0], groups),
            start=(matrix.window.row, first),
            is_scale=True,
        )

    @staticmethod
    def drawn(matrix: Matrix, target: Target) -> Target:
        """The target of the data, with random numbers drawn in int4."""
        return replace(target, std=DRAWN["int4"], place=matrix.window)


class PackedInt4(Int4Format):
    """compressed-tensors' pack-quantized: `weight_packed` int32 [rows, columns / 8], numbers plus
    8; `weight_scale` [rows, groups]; `weight_zero_point` int32 [rows / 8, groups], plus 8 as
    well."""

    @property
    def row_unit(self) -> int:  # type: ignore[override]
        return 1 if self.scheme.symmetric else WORD

    def _targets(self, matrix: Matrix) -> Iterator[Target]:
        weight = matrix.weight
        rows, columns = matrix.window.shape
        packed = Convert(
            (weight.data.shape[0], weight.columns // WORD), _bytes_of(weight.data), (torch.int32,)
        )
        whole = (rows, columns // WORD)
        start = (matrix.window.row, matrix.window.column // WORD)
        target = matrix.target(
            "weight_packed", weight.data, whole=whole, start=start, convert=packed
        )
        yield self.drawn(matrix, target)
        yield self.scale(matrix, "weight_scale")
        nothing = weight.data.new_empty(0)
        yield matrix.target("weight_shape", nothing, whole=(2,), optional=True)
        if weight.zero is not None:
            yield self._zero(matrix, weight.zero)

    def _zero(self, matrix: Matrix, zero: Tensor) -> Target:
        groups, first, here = self.groups(matrix)

        def store(places: slice, data: Tensor) -> None:
            numbers = nibbles(data.t()).t()
            zero[places.start * WORD : places.start * WORD + numbers.shape[0]] = numbers

        convert = Convert((zero.shape[0] // WORD, here), store, (torch.int32,))
        return matrix.target(
            "weight_zero_point",
            zero,
            fill=ZERO,
            whole=(matrix.window.shape[0] // WORD, groups),
            start=(matrix.window.row // WORD, first),
            convert=convert,
        )


class UnpackedInt4(Int4Format):
    """compressed-tensors' int-quantized: `weight` int8 [rows, columns], one number per byte."""

    def _targets(self, matrix: Matrix) -> Iterator[Target]:
        weight = matrix.weight

        def store(places: slice, data: Tensor) -> None:
            if data.numel() and (data.amin() < -ZERO or data.amax() >= ZERO):
                raise ValueError("holds a number outside -8 to 7, no int4")
            weight.data[places] = pack_int4((data + ZERO).view(torch.uint8))

        convert = Convert((weight.data.shape[0], weight.columns), store, (torch.int8,))
        whole = matrix.window.shape
        start = (matrix.window.row, matrix.window.column)
        target = matrix.target("weight", weight.data, whole=whole, start=start, convert=convert)
        yield self.drawn(matrix, target)
        yield self.scale(matrix, "weight_scale")


class SignedInt4(Int4Format):
    """w4afp8's experts: `weight` int8 [rows, columns / 2], 4-bit two's complement, even columns in
    the low half; `weight_scale_inv` [rows, groups]. A static `input_scale` is ignored: activations
    are scaled per token."""

    def _targets(self, matrix: Matrix) -> Iterator[Target]:
        weight = matrix.weight
        rows, columns = matrix.window.shape

        def store(places: slice, data: Tensor) -> None:
            weight.data[places] = data.view(torch.uint8) ^ 0x88

        convert = Convert(tuple(weight.data.shape), store, (torch.int8, torch.uint8))
        start = (matrix.window.row, matrix.window.column // 2)
        whole = (rows, columns // 2)
        target = matrix.target("weight", weight.data, whole=whole, start=start, convert=convert)
        yield self.drawn(matrix, target)
        yield self.scale(matrix, "weight_scale_inv")
        nothing = weight.data.new_empty(0)
        yield matrix.target("input_scale", nothing, whole=(1,), optional=True)


def _bytes_of(view: Tensor) -> Store:
    """A store function that reinterprets rows of words as bytes."""

    def store(places: slice, data: Tensor) -> None:
        view[places] = data.contiguous().view(torch.uint8)

    return store
