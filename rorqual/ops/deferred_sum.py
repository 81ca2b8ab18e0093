"""An MoE layer's result before the sum over each token's experts; the next norm can do the sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rorqual.ops.padded_rows import PaddedRows

Combine = Callable[[Tensor, Tensor | None, Tensor, Tensor | None, PaddedRows | None], Tensor]


@dataclass(frozen=True)
class DeferredMoESum:
    """out[t] = base[t] + sum over k of weights[t, k] * y[t K + k], [T, hidden], computed by
    `total`.

    y [T K, hidden]; weights [T, K] fp32; ids [T, K], -1: the expert is not local and its row of y
    is uninitialized; None: all are local. base [T, hidden] or None. `combine`: the backend's sum of
    (y, ids, weights, base, padded). padded: rows without experts, whose rows of y are uninitialized
    as well."""

    y: Tensor
    ids: Tensor | None
    weights: Tensor
    base: Tensor | None
    combine: Combine
    padded: PaddedRows | None = None

    @property
    def tokens(self) -> int:
        return self.weights.shape[0]

    def total(self) -> Tensor:
        return self.combine(self.y, self.ids, self.weights, self.base, self.padded)


NormInput = Tensor | DeferredMoESum  # a feed-forward layer's result


def summed(x: NormInput) -> Tensor:
    """x as a tensor."""
    return x.total() if isinstance(x, DeferredMoESum) else x
