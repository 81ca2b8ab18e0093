"""Rows sorted by expert, as moe/align.py sorts them, and what grouped GEMMs make of them."""

from __future__ import annotations

import torch
from torch import Tensor

SHIFT = 3  # of a row to its pair in the order
B = torch.bfloat16


class Experts:
    """Experts with so many rows each, in blocks of m, followed by unused rows; both GEMMs'
    operands, and their results in fp64. weights: gate and up, down; random in bf16 if not given."""

    def __init__(
        self,
        counts: list[int],
        hidden: int,
        inner: int,
        top_k: int,
        m: int = 128,
        unused: int = 5,
        weights: tuple[Tensor, Tensor] | None = None,
    ):
        torch.manual_seed(sum(counts))
        total = sum(counts)
        pairs = -(-(total + unused) // top_k) * top_k
        self.total = total
        if weights is None:
            gate_up = (torch.randn(len(counts), 2 * inner, hidden) / hidden**0.5).to(B)
            weights = gate_up, (torch.randn(len(counts), hidden, inner) / inner**0.5).to(B)
        self.gate_up, self.down = weights
        self.x = torch.randn(pairs // top_k, hidden).to(B)
        self.h = torch.randn(pairs, inner).to(B)
        starts = [sum(counts[:expert]) for expert in range(len(counts))]
        spans = [
            (e, at, start + n)
            for e, (start, n) in enumerate(zip(starts, counts, strict=True))
            for at in range(start, start + n, m)
        ]
        self.limit = len(spans) + 2
        self.blocks = torch.full((4, self.limit), -(10**6), dtype=torch.int32)
        for index, (expert, at, end) in enumerate(spans):
            self.blocks[:, index] = torch.tensor([expert, at, end, SHIFT])
        self.count = torch.tensor([len(spans)], dtype=torch.int32)
        self.places = torch.randperm(pairs).int()
        self.order = torch.cat((torch.full((SHIFT,), -(10**6), dtype=torch.int32), self.places))
        self.gated = torch.full((pairs, inner), float("nan"), dtype=torch.float64)
        self.out = torch.full((pairs, hidden), float("nan"), dtype=torch.float64)
        for expert, (start, n) in enumerate(zip(starts, counts, strict=True)):
            own = slice(start, start + n)
            tokens = self.x[self.places[own].long() // top_k].double()
            gate, up = (tokens @ self.gate_up[expert].double().T).chunk(2, 1)
            self.gated[own] = torch.nn.functional.silu(gate) * up
            self.out[own] = self.h[own].double() @ self.down[expert].double().T
