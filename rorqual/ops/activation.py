"""Rows between two layers: a tensor, or what a kernel left that quantized them on the way."""

from __future__ import annotations

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


Activation = Tensor | NormOutput


def hidden_of(x: Activation) -> Tensor:
    """x as a tensor, for whoever has no use for fp8."""
    return x.hidden if isinstance(x, NormOutput) else x


def output_of(hidden: Tensor, quantized: Quantized | None) -> Activation:
    """What a kernel made that quantizes on request."""
    return hidden if quantized is None else NormOutput(hidden, quantized)
