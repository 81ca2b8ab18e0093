"""The WeightFormat of a WeightScheme."""

from __future__ import annotations

from functools import lru_cache

from rorqual.config.quant import WeightScheme
from rorqual.layers.weight_format.base import WeightFormat
from rorqual.layers.weight_format.eight_bits import BlockScales, RowScales
from rorqual.layers.weight_format.four_bits import PackedInt4, SignedInt4, UnpackedInt4
from rorqual.layers.weight_format.transposed import AWQ, GPTQ
from rorqual.layers.weight_format.while_reading import RoundedWhileReading

FORMATS: dict[str, type[WeightFormat]] = {
    "wide": WeightFormat,
    "scale_inv": BlockScales,
    "block": BlockScales,
    "channel": RowScales,
    "tensor": RowScales,
    "packed": PackedInt4,
    "unpacked": UnpackedInt4,
    "signed": SignedInt4,
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq_v2": GPTQ,
}


@lru_cache(maxsize=64)
def format_of(scheme: WeightScheme) -> WeightFormat:
    if scheme.rounds_while_reading:
        return RoundedWhileReading(scheme)
    return FORMATS[scheme.layout](scheme)
