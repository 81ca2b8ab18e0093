"""Captured graphs share a pool of memory that outlives each of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

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


def test_graphs_between_pieces_leave_what_pieces_keep() -> None:
    platform = CudaPlatform(torch.device("cuda:0"))
    x = torch.arange(1024.0, device="cuda")
    between = torch.zeros_like(x)

    def pieces(gap: Callable[[int], None]) -> Tensor:
        kept = x + 1  # lives on over both gaps
        gap(0)
        sums = kept + between
        gap(1)
        return sums + between + kept

    def middle(factor: float) -> None:
        for _ in range(4):  # as large as what is kept
            between.copy_(torch.full_like(x, factor) * 2)

    with platform.stream():
        replay = platform.capture_pieces(pieces)
        graphs = platform.capture_each([partial(middle, 3.0), partial(middle, 5.0)])
        for _ in range(3):
            x.add_(1)
            out = replay(lambda index: graphs[index]())
            assert torch.equal(out, 2 * (x + 1) + 6 + 10)


def test_gaps_with_nothing_between_them_share_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = CudaPlatform(torch.device("cuda:0"))
    x = torch.zeros(4, device="cuda")
    found: list[str] = []
    launch = torch.cuda.CUDAGraph.replay

    def pieces(gap: Callable[[str], None]) -> Tensor:
        kept = x + 1
        gap("first")
        gap("second")
        sums = kept * 2 + x
        gap("third")
        return sums + x

    def between(what: str) -> None:
        found.append(what)
        x.add_(1)

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        found.append("piece")
        launch(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    with platform.stream():
        replay = platform.capture_pieces(pieces)
        assert replay(between).tolist() == [7] * 4
    assert found == ["piece", "first", "second", "piece", "third", "piece"]
