"""Simulated routing for benchmarks: replaces the expert ids that the router chose. The amount of
work stays the same; the generated tokens are meaningless.

Rows are numbered across data-parallel ranks, as if all had equally many. The first number differs
by step and layer: it is derived from the router's choice for the first row."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rorqual.config.model import MoEConfig

SAMPLES = 4096
STRIDE = 37  # so that few steps start at the same row number


class SimulatedRouting(Protocol):
    def __call__(self, ids: Tensor, rank: int) -> Tensor:
        """Expert ids to use in place of ids [T, K], rows of data-parallel rank `rank`."""
        ...


def global_rows(ids: Tensor, rank: int) -> Tensor:
    """[T, 1]: the row numbers."""
    start = rank * ids.shape[0]
    rows = torch.arange(start, start + ids.shape[0], device=ids.device)[:, None]
    return rows + STRIDE * ids[:1].sum()


class UniformRouting:
    """Every expert equally often; each token uses as many expert groups as the router allows."""

    def __init__(self, moe: MoEConfig, device: torch.device):
        limited = moe.method != "greedy" and moe.n_group > 1
        self.count = moe.n_group if limited else 1
        used = moe.topk_group if limited else 1
        self.size = moe.num_experts // self.count
        place = torch.arange(moe.top_k, device=device)
        self.group = place % used * (self.count // used)
        self.inside = place // used * (self.size // -(-moe.top_k // used))

    def __call__(self, ids: Tensor, rank: int) -> Tensor:
        rows = global_rows(ids, rank)
        group = (rows + self.group) % self.count
        inside = (rows // self.count + self.inside) % self.size
        return (group * self.size + inside).to(ids.dtype)


class SampledRouting:
    """Experts in proportion to `counts` [experts], sampled once for SAMPLES rows and reused in
    turn."""

    def __init__(self, counts: Any, top_k: int, seed: int, device: torch.device):
        self.table = torch.from_numpy(sampled(counts, top_k, SAMPLES, seed)).to(device)

    def __call__(self, ids: Tensor, rank: int) -> Tensor:
        rows = global_rows(ids, rank)[:, 0] % self.table.shape[0]
        return self.table.index_select(0, rows).to(ids.dtype)


def sampled(counts: Any, top_k: int, rows: int, seed: int) -> Any:
    """[rows, top_k] distinct experts, each with an expected frequency proportional to its count.
    Systematic sampling: equidistant points along the cumulative shares, in a random expert order
    for each row."""
    generator = np.random.default_rng(seed)
    share = np.asarray(counts, np.float64)
    share = share / share.sum() * top_k
    while share.max() > 1 + 1e-9:  # a token has an expert once: the excess goes to the others
        full = share >= 1
        rest = share[~full].sum()
        share = np.where(full, 1.0, share * ((top_k - full.sum()) / rest if rest else 1.0))
    order = generator.permuted(np.tile(np.arange(len(share)), (rows, 1)), axis=1)
    ends = share[order].cumsum(1)
    points = generator.random((rows, 1)) * (1 - 1e-9) + np.arange(top_k)
    places = (ends[:, None, :] <= points[..., None]).sum(2).clip(max=len(share) - 1)
    return np.take_along_axis(order, places, 1)
