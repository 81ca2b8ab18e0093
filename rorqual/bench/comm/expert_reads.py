"""Time of one row through local experts, to compare with calls to expert servers."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.select import ops_for
from rorqual.platforms import make_platform

WARM = 2
MAX_REPEATS = 30


@dataclass(frozen=True)
class Reads:
    """us, medians, of one row through `picks` experts, and through one. bytes: of one expert."""

    picks: int
    us: float
    one: float
    bytes: int


def bench_reads(hidden: int, intermediate: int, picks: int, device: str, repeats: int) -> Reads:
    """bf16 experts of one layer. Single experts are used in turn, so that none is in a cache that
    holds fewer than all."""
    platform = make_platform(device)
    ops = ops_for(platform.name)
    place = platform.device
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        part = torch.randn(*shape[1:], generator=generator).mul_(0.02).to(torch.bfloat16)
        return part.expand(shape).contiguous().to(place)

    experts = ExpertWeights(
        Weight(drawn(picks, 2 * intermediate, hidden)), Weight(drawn(picks, hidden, intermediate))
    )
    x = torch.randn(1, hidden, generator=generator).to(torch.bfloat16).to(place)
    everyone = torch.arange(picks, device=place)[None]
    times = {picks: [], 1: []}  # type: dict[int, list[float]]
    for number in range(WARM + min(repeats, MAX_REPEATS)):
        for count in times:
            ids = everyone if count == picks else everyone[:, number % picks, None]
            weights = torch.ones(ids.shape, dtype=torch.float32, device=place)
            platform.synchronize()
            start = time.perf_counter()
            ops.experts(x, ids, weights, experts)
            platform.synchronize()
            if number >= WARM:
                times[count].append(1e6 * (time.perf_counter() - start))
    size = 3 * hidden * intermediate * 2
    return Reads(picks, statistics.median(times[picks]), statistics.median(times[1]), size)
