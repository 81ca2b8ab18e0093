"""Rows between two layers: a tensor, or what a kernel left that quantized them on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.ops.reference import ACTIVATION_BLOCK, FP8


@dataclass
class Quantized:
    """data [T, columns] e4m3; scale [T, ceil(columns/128)] fp32, stored column after column so
    that GEMMs read it coalesced."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @staticmethod
    def empty(tokens: int, columns: int, device: torch.device) -> Quantized:
        scale = torch.empty(
            -(-columns // ACTIVATION_BLOCK), tokens, dtype=torch.float32, device=device
        )
        return Quantized(torch.empty(tokens, columns, dtype=FP8, device=device), scale.t())


@dataclass(frozen=True)
class NormOutput:
    """Rows `hidden` [T, columns], and the same rows in fp8 for the products that follow: what a
    norm returns that was asked for both, and what joins the heads of attention. Nobody may change
    the values of either."""

    hidden: Tensor
    quantized: Quantized


@dataclass
class PendingNorm:
    """A norm's rows [T, columns], not computed yet: the router that follows may do it on the way,
    which saves a kernel. Whoever asks for `hidden` first has the norm computed.

    x, residual [T, columns], weight [columns], eps: what it is the norm of. out, total: room for
    the rows and for x + residual, which a step reads after them."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
    out: Tensor
    total: Tensor
    compute: Callable[[PendingNorm], None]
    done: bool = False

    @property
    def hidden(self) -> Tensor:
        if not self.done:
            self.compute(self)
            self.done = True
        return self.out


Activation = Tensor | NormOutput | PendingNorm


def hidden_of(x: Activation) -> Tensor:
    """x as a tensor, for whoever has no use for fp8."""
    return x.hidden if isinstance(x, NormOutput | PendingNorm) else x


def room_of(x: Activation) -> Tensor:
    """`hidden_of`, whose values may not be there yet: for sizes and types."""
    return x.out if isinstance(x, PendingNorm) else hidden_of(x)


def output_of(hidden: Tensor, quantized: Quantized | None) -> Activation:
    """What a kernel made that quantizes on request."""
    return hidden if quantized is None else NormOutput(hidden, quantized)
