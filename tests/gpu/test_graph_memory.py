"""Captured graphs share a pool of memory that outlives each of them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from rorqual.platforms.cuda import CudaPlatform


def test_what_a_graph_allocated_may_outlive_all_graphs() -> None:
    platform = CudaPlatform(torch.device("cuda:0"))
    x = torch.arange(4.0, device="cuda")
    kept: list[Tensor] = []

    def work() -> Tensor:
        kept.append(x + 1)
        return kept[-1] * 2

    with platform.stream():
        replay = platform.capture(work)
        assert replay().tolist() == [2, 4, 6, 8]
        del replay
        gc.collect()
        again = platform.capture(lambda: x * 3)
        assert again().tolist() == [0, 3, 6, 9]
    assert len(kept) > 1  # each call's, recorded or not, outlives the graph
