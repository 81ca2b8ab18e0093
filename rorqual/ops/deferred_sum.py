"""What a token's experts gave, each by itself: a value that an MoE layer may return for a norm
to add up where it reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Combine = Callable[[Tensor, Tensor | None, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class DeferredMoESum:
    """Stands for the tensor [T, hidden] that `total` makes: out[t] = sum over k of weights[t, k]
    * y[t K + k], + base[t].

    y [T K, hidden]; weights [T, K] fp32; ids [T, K], -1 where an expert is not here and its row
    of y was never written, or None: all are here. base [T, hidden] or None. `combine` is the
    backend's sum of (y, ids, weights, base)."""

    y: Tensor
    ids: Tensor | None
    weights: Tensor
    base: Tensor | None
    combine: Combine

    @property
    def tokens(self) -> int:
        return self.weights.shape[0]

    def total(self) -> Tensor:
        return self.combine(self.y, self.ids, self.weights, self.base)


NormInput = Tensor | DeferredMoESum  # what a feed-forward layer hands to a norm


def summed(x: NormInput) -> Tensor:
    """x as a tensor."""
    return x.total() if isinstance(x, DeferredMoESum) else x
