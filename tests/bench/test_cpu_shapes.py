"""The shapes of `rorqual bench cpu`: other ones with every seed, the same with the same, in their
bands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rorqual.bench.cpu.peer import Peer, Setting
from rorqual.bench.cpu.run import FLAGS, processor
from rorqual.bench.cpu.shapes import BANDS, FAMILIES, draw_shapes
from rorqual.bench.cpu.work import CpuWork
from rorqual.errors import ConfigError


def test_nine_shapes_are_every_family_in_every_band() -> None:
    for seed in range(5):
        shapes = draw_shapes(seed, 9)
        found = set()
        for shape in shapes:
            band = next(band for band in BANDS if band[0] <= shape.parameters / 1e6 <= band[1])
            found.add((shape.family, band))
        assert found == {(family, band) for family in FAMILIES for band in BANDS}


def test_a_seed_gives_the_same_shapes_and_another_gives_others() -> None:
    first = [shape.data for shape in draw_shapes(7, 3)]
    assert [shape.data for shape in draw_shapes(7, 3)] == first
    assert [shape.data for shape in draw_shapes(8, 3)] != first


def test_latent_heads_divide_the_hidden_size() -> None:
    for seed in range(20):
        for shape in draw_shapes(seed, 3):
            assert shape.family == "qwen3" or (
                shape.config.hidden_size % shape.config.attention.num_heads == 0
            )


def test_the_processor_is_named_with_its_instructions() -> None:
    name, _, flags = processor().partition(" (")
    assert name
    assert set(flags.rstrip(")").split()) <= set(FLAGS)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="shapes=0 is out of range; accepted: at least 1"):
        CpuWork(shapes=0)
    with pytest.raises(ConfigError, match="threads=0 is out of range; accepted: at least 1"):
        CpuWork(threads=0)


@pytest.mark.parametrize(("tokens", "tries"), [(8, True), (64, False)])
def test_copies_of_experts_that_would_fill_memory_are_not_tried(
    tokens: int, tries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 tokens 4.4 GB in bf16."""
    peer: Any = Peer.__new__(Peer)
    peer.static = None
    sizes = {"moe_intermediate_size": 1408, "hidden_size": 2048, "num_experts_per_tok": 6}
    peer.model = SimpleNamespace(config=SimpleNamespace(**sizes))
    tried: list[Setting] = []

    def probe(self: Peer, prompts: torch.Tensor, steps: int, setting: Setting) -> float:
        tried.append(setting)
        return 1.0

    monkeypatch.setattr(Peer, "_probe", probe)
    peer.best(torch.zeros(1, tokens, dtype=torch.int64), 3, 60.0)
    assert {setting.experts for setting in tried} >= {"grouped_mm", "eager"}
    assert any(setting.experts == "batched_mm" for setting in tried) == tries
