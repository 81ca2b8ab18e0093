"""What runs between two pieces of a captured pass, and the memory that it shares with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.layers.forward_batch import Between, ForwardBatch
from rorqual.platforms.base import Platform


@dataclass
class Gap:
    """An operation between pieces: `out` receives `work` applied to the step and `inputs`. index:
    among the gaps of a forward pass."""

    index: int
    work: Between
    inputs: tuple[Tensor, ...]
    out: Tensor


class Buffers:
    """Memory that outlives a piece, by use: shared by all layers and all captures."""

    def __init__(self, platform: Platform):
        self.platform = platform
        self.held: dict[tuple[object, ...], Tensor] = {}

    def get(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Rows of a buffer; the largest size must be requested first. Initially zeros: padding rows
        are read, and must be finite."""
        key = (use, shape[1:], dtype)
        if key not in self.held:
            self.held[key] = torch.zeros(shape, dtype=dtype, device=self.platform.device)
        return self.held[key][: shape[0]]

    def room(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As `get`, for any shape of as many elements at most as the first one."""
        count = math.prod(shape)
        if count > self.get(use, (count,), dtype).shape[0]:
            del self.held[use, (), dtype]
        return self.get(use, (count,), dtype).view(*shape)


class Recorder:
    """The PieceRecorder of one capture."""

    def __init__(self, buffers: Buffers, gap: Callable[[Gap], None]):
        self.buffers = buffers
        self.gap = gap
        self.gaps = 0

    def between(self, work: Between, inputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        dtype = inputs[0].dtype
        kept = []
        for place, tensor in enumerate(inputs):
            buffer = self.buffers.get(f"input {place}", tuple(tensor.shape), tensor.dtype)
            kept.append(buffer.copy_(tensor))
        out = self.buffers.get("output", shape, dtype)
        self.gap(Gap(self.gaps, work, tuple(kept), out))
        self.gaps += 1
        return out


def hold_tokens(columns: Tensor, num_tokens: Tensor, step: ForwardBatch) -> None:
    """Put a step's tokens into columns [3, size], where a replay reads them: ids, positions, cache
    slots, then padding; and their number into num_tokens [1]."""
    tokens = step.num_tokens
    for row, given in enumerate((step.token_ids, step.positions, step.places.slots)):
        columns[row, :tokens].copy_(given)
    columns[:, tokens:].zero_()
    num_tokens.fill_(tokens)
