"""Online quantization: matrices of an unquantized checkpoint are rounded piece by piece while
loading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rorqual.layers.parameter import Convert, Target
from rorqual.layers.weight_format.base import Matrix, WeightFormat
from rorqual.layers.weight_format.rounding import round_matrix
from rorqual.ops.reference import Weight

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Elements that a CPU rounds at a time: they fit its cache for a dozen passes.
PIECE = 2**17


class RoundedWhileReading(WeightFormat):
    """`weight` in a floating-point type. Blocks are those of the whole matrix, so that all ranks
    round alike: a window is read from a block's edge on, and in whole rows if a scale covers a
    row."""

    def _targets(self, matrix: Matrix) -> Iterator[Target]:
        weight = matrix.weight
        window = matrix.window
        share, group = self.scheme.block
        rows = weight.data.shape[0]
        top = window.row // share * share
        bottom = min(window.shape[0], -(-(window.row + rows) // share) * share)
        columns = slice(window.column, window.column + weight.columns)
        read = columns if group else slice(0, window.shape[1])
        inside = slice(columns.start - read.start, columns.stop - read.start)

        def store(places: slice, data: Tensor) -> None:
            if not data.isfinite().all():
                raise ValueError("holds a number that is not finite and cannot be rounded")
            at = weight.data.device
            dtype = weight.scale.dtype if weight.scale is not None else torch.float32
            step = _rows_of_a_piece(data, share) if at.type == "cpu" else data.shape[0]
            for start in range(0, data.shape[0], step):
                found, _ = round_matrix(data[start : start + step].to(at), self.scheme, dtype)
                _place(found, weight, top + places.start + start - window.row, inside)

        yield matrix.target(
            "weight",
            weight.data,
            std=matrix.std,
            whole=window.shape,
            start=(top, read.start),
            convert=Convert(
                (bottom - top, read.stop - read.start),
                store,
                FLOATS,
                unit=share,
                into=tuple(weight.tensors()),
            ),
        )


def _rows_of_a_piece(data: Tensor, share: int) -> int:
    """Rows of a piece: whole blocks of `share` rows, at least one."""
    return max(1, PIECE // (share * data.shape[1])) * share


def _place(found: Weight, weight: Weight, row: int, columns: slice) -> None:
    """Copy the `columns` of rounded rows to the weight, from its row `row` on (negative: skip the
    rows before its first)."""
    rows = weight.data.shape[0]
    first = max(0, -row)
    last = min(found.data.shape[0], rows - row)
    here = slice(row + first, row + last)
    each = 2 if found.is_int4 else 1
    held = slice(columns.start // each, columns.stop // each)
    weight.data[here] = found.data[first:last, held]
    for kept, made in ((weight.scale, found.scale), (weight.zero, found.zero)):
        if kept is None or made is None:
            continue
        share = found.block[0]
        by_row = made.repeat_interleave(share, 0)[first:last]
        places = kept[here.start // weight.block[0] : -(-here.stop // weight.block[0])]
        places.copy_(by_row[:: weight.block[0]])
