"""e4m3 and int8 data with a scale for each block, row or matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rorqual.layers.parameter import Convert, Target
from rorqual.layers.weight_format.base import DRAWN, Matrix, WeightFormat

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


class BlockScales(WeightFormat):
    """`weight`, and `weight_scale_inv` (DeepSeek) or `weight_scale` (compressed-tensors) with one
    scale for each block of the file, repeated if the weight stores one per row."""

    def _targets(self, matrix: Matrix) -> Iterator[Target]:
        weight = matrix.weight
        window = matrix.window
        assert weight.scale is not None
        drawn = DRAWN[self.scheme.kind]
        start = (window.row, window.column)
        yield matrix.target("weight", weight.data, std=drawn, whole=window.shape, start=start)
        rows, columns = self.scheme.block
        yield matrix.target(
            "weight_scale_inv" if self.scheme.layout == "scale_inv" else "weight_scale",
            weight.scale,
            fill=matrix.std / drawn,
            repeat=rows // weight.block[0],
            whole=(-(-window.shape[0] // rows), -(-window.shape[1] // columns)),
            start=(window.row // weight.block[0], window.column // columns),
            is_scale=True,
        )


class RowScales(WeightFormat):
    """`weight`, and `weight_scale` [rows, 1], or one number for all rows."""

    def _targets(self, matrix: Matrix) -> Iterator[Target]:
        weight = matrix.weight
        window = matrix.window
        scale = weight.scale
        assert scale is not None
        drawn = DRAWN[self.scheme.kind]
        start = (window.row, window.column)
        yield matrix.target("weight", weight.data, std=drawn, whole=window.shape, start=start)
        fill = matrix.std / drawn
        if self.scheme.layout == "tensor":
            one = Convert((1,), _everywhere(scale), FLOATS)
            yield matrix.target(
                "weight_scale", scale, fill=fill, whole=(1,), start=(0,), is_scale=True, convert=one
            )
            return
        rows = (window.shape[0], 1)
        start = (window.row, 0)
        yield matrix.target(
            "weight_scale", scale, fill=fill, whole=rows, start=start, is_scale=True
        )


def _everywhere(view: Tensor) -> Callable[[slice, Tensor], None]:
    """A store function that broadcasts one number to the view."""

    def store(places: slice, data: Tensor) -> None:
        view.copy_(data.float().expand_as(view))

    return store
