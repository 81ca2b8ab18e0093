"""Which format a scheme has."""

from __future__ import annotations

from functools import lru_cache

from rorqual.config.quant import WeightScheme
from rorqual.layers.weight_format.base import WeightFormat
from rorqual.layers.weight_format.eight_bits import BlockScales, RowScales

FORMATS: dict[str, type[WeightFormat]] = {
    "wide": WeightFormat,
    "scale_inv": BlockScales,
    "block": BlockScales,
    "channel": RowScales,
    "tensor": RowScales,
}


@lru_cache(maxsize=64)
def format_of(scheme: WeightScheme) -> WeightFormat:
    return FORMATS[scheme.layout](scheme)
