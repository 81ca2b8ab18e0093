"""What a model's matrices are multiplied with: of every linear layer and every expert, the sum of
x x^T over the rows x that a text brings it."""

from __future__ import annotations

from bisect import bisect_right

import torch
import torch.nn.functional as F
from torch import Tensor

from rorqual.models.transformer import Transformer
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.reference import ExpertWeights, Weight, swiglu

MEMORY = 4 * 2**30  # bytes for matrices of moments; beyond it only diagonals are kept


class RecordingOps(CpuOps):
    """The CPU backend in torch, which accumulates the moments of every product's input. A matrix is
    identified by its data's address."""

    def __init__(self, memory: int = MEMORY) -> None:
        super().__init__(native=False)
        self.memory = memory
        self.moments: dict[int, Tensor] = {}
        self.ends: dict[int, int] = {}

    def see(self, weight: Tensor, rows: Tensor) -> None:
        start = weight.data_ptr()
        wide = rows.float()
        if start not in self.moments:
            columns = wide.shape[1]
            whole = 4 * columns**2
            fits = whole <= self.memory
            self.memory -= whole if fits else 0
            self.moments[start] = torch.zeros((columns, columns) if fits else (columns,))
            self.ends[start] = start + weight.numel() * weight.element_size()
        kept = self.moments[start]
        if kept.dim() == 2:
            kept.addmm_(wide.T, wide)
        else:
            kept += wide.square().sum(0)

    def linear(self, x: Activation, weight: Weight, bias: Tensor | None = None) -> Tensor:
        self.see(weight.data, hidden_of(x))
        return super().linear(x, weight, bias)

    def experts(
        self,
        x: Activation,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
        base: Tensor | None = None,
    ) -> Tensor:
        rows = hidden_of(x)
        for slot in ids.unique().tolist():
            chosen = rows[(ids == slot).any(1)]
            gate_up = w.gate_up.data[slot]
            self.see(gate_up, chosen)
            self.see(w.down.data[slot], swiglu(F.linear(chosen, gate_up)))
        return super().experts(x, ids, weights, w, base)


def moments_by_name(model: Transformer, ops: RecordingOps) -> dict[str, Tensor]:
    """By the checkpoint's names of matrices: parts of a merged one share their rows."""
    starts = sorted(ops.moments)
    found = {}
    for target in model.targets():
        at = target.view.data_ptr()
        place = bisect_right(starts, at) - 1
        inside = place >= 0 and at < ops.ends[starts[place]]
        if inside and target.view.numel() and not target.covers:
            found[target.name] = ops.moments[starts[place]]
    return found
