"""The bandwidth of memory that an engine has nearly filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rorqual.bench.offline import run
from rorqual.platforms.cpu import CpuPlatform


class NearlyFull(CpuPlatform):
    name = "nearly full"

    def available_memory(self) -> int:
        return 9_000_001


def test_the_buffer_fits_beside_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    rand = torch.rand

    def recorded(count: int, **options: Any) -> torch.Tensor:
        made.append(4 * count)
        return rand(count, **options)

    monkeypatch.setattr(torch, "rand", recorded)
    assert run.read_bandwidth(NearlyFull(torch.device("cpu"))) > 1e6
    assert made == [9_000_001 // 2 // 512 * 512]
