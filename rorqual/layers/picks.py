"""Experts that tokens get for a benchmark, in place of those that the router chose. What is
computed is as much as it would be; tokens mean nothing.

Rows of a step are counted from the first data-parallel rank's on, as if all had as many, and from
another number in each step and layer: what the router chose for the first row."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rorqual.config.model import MoEConfig

SAMPLES = 4096
STRIDE = 37  # few steps begin where others do


class Picks(Protocol):
    def __call__(self, ids: Tensor, rank: int) -> Tensor:
        """Other experts in place of ids [T, K]; `rank`: whose rows they are."""
        ...


def global_rows(ids: Tensor, rank: int) -> Tensor:
    """[T, 1]: numbers of the rows."""
    start = rank * ids.shape[0]
    rows = torch.arange(start, start + ids.shape[0], device=ids.device)[:, None]
    return rows + STRIDE * ids[:1].sum()


class EvenPicks:
    """Every expert as often as any other, of as many groups a token as the router's rules let it
    use."""

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


class SampledPicks:
    """As often as `counts` [experts] say: drawn beforehand for SAMPLES rows, taken in turn."""

    def __init__(self, counts: Any, top_k: int, seed: int, device: torch.device):
        self.table = torch.from_numpy(sampled(counts, top_k, SAMPLES, seed)).to(device)

    def __call__(self, ids: Tensor, rank: int) -> Tensor:
        rows = global_rows(ids, rank)[:, 0] % self.table.shape[0]
        return self.table.index_select(0, rows).to(ids.dtype)


def sampled(counts: Any, top_k: int, rows: int, seed: int) -> Any:
    """[rows, top_k] different experts, each expected as often as its share of the counts: points
    at equal distances along the shares, which lie in another order for each row."""
    generator = np.random.default_rng(seed)
    share = np.asarray(counts, np.float64)
    share = share / share.sum() * top_k
    while share.max() > 1 + 1e-9:  # no token picks an expert twice: others get what is over
        full = share >= 1
        rest = share[~full].sum()
        share = np.where(full, 1.0, share * ((top_k - full.sum()) / rest if rest else 1.0))
    order = generator.permuted(np.tile(np.arange(len(share)), (rows, 1)), axis=1)
    ends = share[order].cumsum(1)
    points = generator.random((rows, 1)) * (1 - 1e-9) + np.arange(top_k)
    places = (ends[:, None, :] <= points[..., None]).sum(2).clip(max=len(share) - 1)
    return np.take_along_axis(order, places, 1)
