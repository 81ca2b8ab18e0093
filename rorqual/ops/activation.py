"""Activations between two ops: a tensor, or one that a kernel has also quantized or postponed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.ops.reference import ACTIVATION_BLOCK, FP8


@dataclass
class Quantized:
    """data [T, columns] e4m3; scale [T, ceil(columns/128)] fp32, column-major so that GEMM reads
    are coalesced. ue8m0: scales are powers of two."""

    data: Tensor
    scale: Tensor
    ue8m0: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @staticmethod
    def empty(tokens: int, columns: int, device: torch.device, ue8m0: bool = False) -> Quantized:
        scale = torch.empty(
            -(-columns // ACTIVATION_BLOCK), tokens, dtype=torch.float32, device=device
        )
        return Quantized(torch.empty(tokens, columns, dtype=FP8, device=device), scale.t(), ue8m0)

    @staticmethod
    def room(x: Tensor, activation: str | None) -> Quantized | None:
        """For the rows of x [T, columns], rounded to `activation`, one of config.quant.ACTIVATIONS
        with e4m3 groups; None: nothing."""
        if activation is None:
            return None
        return Quantized.empty(x.shape[0], x.shape[1], x.device, activation.endswith("ue8m0"))


@dataclass(frozen=True)
class NormOutput:
    """Rows `hidden` [T, columns], and the same rows in fp8 for the GEMMs that follow. Returned by
    norms with quantize_output and by attention. Both are read-only."""

    hidden: Tensor
    quantized: Quantized


@dataclass
class PendingNorm:
    """A norm that is not computed yet: the router that follows may compute it in its own kernel.
    Reading `hidden` computes it.

    x, residual [T, columns], weight [columns], eps: inputs of the norm. out, total [T, columns]:
    buffers for the norm and for x + residual, valid only after `hidden` was read."""

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
    """x as a tensor, without the fp8 rows."""
    return x.hidden if isinstance(x, NormOutput | PendingNorm) else x


def room_of(x: Activation) -> Tensor:
    """The tensor of `hidden_of`, possibly not computed yet: only for its shape and dtype."""
    return x.out if isinstance(x, PendingNorm) else hidden_of(x)


def output_of(hidden: Tensor, quantized: Quantized | None) -> Activation:
    """A kernel's output as an Activation; `quantized` is None if it did not quantize."""
    return hidden if quantized is None else NormOutput(hidden, quantized)
