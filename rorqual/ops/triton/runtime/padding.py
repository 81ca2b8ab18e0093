"""Rows of a captured step that are padding (rorqual.ops.padded_rows), as kernels see them.

Their number is loaded before a kernel waits for the previous one: no kernel of a step writes it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.padded_rows import PaddedRows


@triton.jit
def real_rows(rows, requests, each, first):
    """How many of `rows` rows are not padding (PaddedRows); all if `requests` is None."""
    if requests is not None:
        real = (tl.load(requests) * each).to(tl.int32) - first
        rows = tl.minimum(rows, tl.maximum(real, 0))
    return rows


def padding(padded: PaddedRows | None) -> tuple[Tensor, int, int] | tuple[None, None, None]:
    """The kernels' arguments (requests, each, first). Without padding the compiled kernel has none
    of them."""
    return (None, None, None) if padded is None else (padded.requests, padded.each, padded.first)
