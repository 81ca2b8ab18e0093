"""Counters that kernels share: one set for each stream."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.ops.triton.moe.align import bucket_counts
from rorqual.ops.triton.runtime import launch

DEVICE = torch.device("cpu")


def test_those_of_every_stream_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else kernels are compiled for each alignment, and a stream that captures may meet another
    than those before it."""
    monkeypatch.setattr(launch, "_counters", {})
    places = []
    for owner in range(8):
        monkeypatch.setattr(launch, "_owners", {DEVICE: {0: owner}})
        counters = launch.zeroed_counters(DEVICE, launch.COUNTERS)
        tiles = launch.tile_counter(DEVICE)
        for one in (counters, tiles, bucket_counts(DEVICE, 64)):
            assert one.data_ptr() % 16 == 0
        assert tiles.shape == (1,)
        assert tiles.data_ptr() == counters.data_ptr() + 4 * launch.COUNTERS
        places.append(counters.data_ptr())
    assert len(set(places)) == 8
