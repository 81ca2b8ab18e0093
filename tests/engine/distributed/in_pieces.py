"""Results of experts in two pieces of columns, as a backend with kernels for them has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rorqual.ops.interface import Ops
from rorqual.ops.reference import ExpertWeights

VARIABLE = "PIECES_IN_TESTS"
calls: list[int] = []  # rows of those that were computed


def put_in_place(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    experts, experts_fp8 = Ops.experts, Ops.experts_fp8  # each recorded as one call

    def experts_in_pieces(
        self: Ops,
        rows: Sequence[Tensor],
        dtype: torch.dtype,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
    ) -> Iterator[Tensor]:
        calls.append(len(rows[0]))
        if len(rows) > 1:
            whole = experts_fp8(self, *rows, dtype, ids, weights, w)
        else:
            whole = experts(self, rows[0], ids, weights, w)
        return (piece.contiguous() for piece in whole.chunk(2, 1))

    replace(Ops, "experts_in_pieces", experts_in_pieces)
