"""Products that do not round their rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rorqual.ops.cpu import quantized
from rorqual.ops.reference import Weight


def wide_rows(patch: pytest.MonkeyPatch) -> None:
    """Products of weights loaded from here on take their rows as they are: what is left of a
    difference is the weights'. Compiled kernels know no int8 without rounded rows: of those the
    reference is left."""
    refusal = quantized.refusal
    form = quantized._format
    described = quantized._described

    def wide(weight: Weight) -> Weight:
        return replace(weight, activation="wide")

    patch.setattr(quantized, "refusal", lambda weight: refusal(wide(weight)))
    patch.setattr(quantized, "_format", lambda weight: form(wide(weight)))
    patch.setattr(quantized, "_described", lambda weight, kind: described(wide(weight), kind))
    patch.setattr("rorqual.ops.reference.rounded", lambda x, kind: x.float())
    patch.setattr("rorqual.ops.reference.rounded_to_fp8", lambda x: x.float())
