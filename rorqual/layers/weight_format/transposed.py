"""int4 as GPTQ and AWQ store it, inputs by outputs: `qweight`, `qzeros`, `scales` [groups,
outputs]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rorqual.layers.parameter import Convert, Target
from rorqual.layers.weight_format.base import DRAWN, UNSET, Matrix
from rorqual.layers.weight_format.four_bits import WORD, ZERO, Int4Format, nibbles
from rorqual.ops.rounding import pack_int4

# AWQ's word holds outputs 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits up: the position of output i.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Transposed(Int4Format):
    """`qzeros` int32 [groups, outputs / 8] are packed along the outputs."""

    row_unit = WORD

    def _targets(self, matrix: Matrix) -> Iterator[Target]:
        yield self.drawn(matrix, self.data(matrix))
        yield self._scales(matrix)
        yield self._zeros(matrix)

    def data(self, matrix: Matrix) -> Target:
        raise AssertionError("subclasses know the order of numbers")

    def outputs(self, words: Tensor) -> Tensor:
        """Unpack words [n, outputs / 8] of zero points to [n, outputs]."""
        raise AssertionError("subclasses know the order of numbers")

    def _scales(self, matrix: Matrix) -> Target:
        scale = matrix.weight.scale
        assert scale is not None
        groups, first, here = self.groups(matrix)

        def store(places: slice, data: Tensor) -> None:
            scale[:, places] = data.t().to(scale.dtype)

        return matrix.target(
            "scales",
            scale,
            fill=matrix.std / DRAWN["int4"],
            whole=(groups, matrix.window.shape[0]),
            start=(first, matrix.window.row),
            is_scale=True,
            convert=Convert((here, scale.shape[0]), store, FLOATS),
        )

    def _zeros(self, matrix: Matrix) -> Target:
        """Stored if the scheme is asymmetric, else checked to be all 8."""
        weight = matrix.weight
        assert weight.scale is not None
        zero = weight.zero
        groups, first, here = self.groups(matrix)

        def store(places: slice, data: Tensor) -> None:
            numbers = self.outputs(data)
            if zero is not None:
                zero[:, places] = numbers.t()
            elif not (numbers == ZERO).all():
                raise ValueError("holds zero points other than 8, though the numbers are symmetric")

        into = () if zero is None else (zero,)
        extent = (here, weight.data.shape[0] // WORD)
        return matrix.target(
            "qzeros",
            weight.scale if zero is None else zero,
            fill=ZERO,
            whole=(groups, matrix.window.shape[0] // WORD),
            start=(first, matrix.window.row // WORD),
            convert=Convert(extent, store, (torch.int32,), into=into),
        )


class AWQ(Transposed):
    """`qweight` int32 [inputs, outputs / 8]."""

    def data(self, matrix: Matrix) -> Target:
        weight = matrix.weight

        def store(places: slice, data: Tensor) -> None:
            half = slice(places.start // 2, -(-places.stop // 2))
            weight.data[:, half] = pack_int4(self.outputs(data).t())

        rows, columns = matrix.window.shape
        extent = (weight.columns, weight.data.shape[0] // WORD)
        return matrix.target(
            "qweight",
            weight.data,
            whole=(columns, rows // WORD),
            start=(matrix.window.column, matrix.window.row // WORD),
            convert=Convert(extent, store, (torch.int32,), unit=2),
        )

    def outputs(self, words: Tensor) -> Tensor:
        return nibbles(words).unflatten(-1, (-1, WORD))[..., AWQ_PLACES].flatten(-2)


class GPTQ(Transposed):
    """`qweight` int32 [inputs / 8, outputs]; `g_idx` [inputs]: the group of each input, in order
    unless desc_act is set. The file's zero points are one less (GPTQ version 1)."""

    def _targets(self, matrix: Matrix) -> Iterator[Target]:
        yield from super()._targets(matrix)
        yield self._order(matrix)

    def data(self, matrix: Matrix) -> Target:
        weight = matrix.weight
        each = WORD // 2

        def store(places: slice, data: Tensor) -> None:
            weight.data[:, places.start * each : places.stop * each] = (
                data.t().contiguous().view(torch.uint8)
            )

        rows, columns = matrix.window.shape
        return matrix.target(
            "qweight",
            weight.data,
            whole=(columns // WORD, rows),
            start=(matrix.window.column // WORD, matrix.window.row),
            convert=Convert((weight.columns // WORD, weight.data.shape[0]), store, (torch.int32,)),
        )

    def outputs(self, words: Tensor) -> Tensor:
        more = 0 if self.scheme.layout == "gptq_v2" else 1
        return (nibbles(words) + more) & 15

    def _order(self, matrix: Matrix) -> Target:
        weight = matrix.weight
        columns = matrix.window.shape[1]
        group = self.scheme.block[1] or columns
        first = matrix.window.column
        held = weight.group_index

        def store(places: slice, data: Tensor) -> None:
            inputs = torch.arange(first + places.start, first + places.stop)
            if held is None:
                if not torch.equal(data.long(), inputs // group):
                    raise ValueError("is out of order, though desc_act is false")
                return
            before = held[places]
            if not ((before == UNSET) | (before == data.to(before.device))).all():
                raise ValueError("differs from that of a matrix beside it, merged into one here")
            if data.numel() and (data.amin() < 0 or data.amax() * group >= columns):
                raise ValueError(f"names a group outside 0 to {-(-columns // group) - 1}")
            held[places] = data

        def draw() -> None:
            assert held is not None
            held.copy_(torch.arange(held.shape[0]) // group)

        assert weight.scale is not None
        return matrix.target(
            "g_idx",
            weight.scale if held is None else held,
            whole=(columns,),
            start=(first,),
            optional=held is None,
            convert=Convert(
                (weight.columns,),
                store,
                (torch.int32, torch.int64),
                into=() if held is None else (held,),
                draw=None if held is None else draw,
            ),
        )
