"""Engines over several cards, recorded steps and all: the tokens of one card in fp32, whatever the layout."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
    pytest.skip("needs at least two CUDA devices", allow_module_level=True)
pytest.importorskip("triton")

from rorqual import LLM
from tests.engine.test_ranks import COMMON, TEXTS, everything, name_of

CARDS = torch.cuda.device_count()
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "next_n": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "ep": 2, "exe_mode": "eager"},
    {"dp": 2, "ep": 2, "next_n": 1},
    {"dp": 2, "ep": 2, "exchange": "low_latency", "next_n": 2},
    {"dp": 2, "ep": 2, "exchange": "alltoall"},
    {"pp": 2, "next_n": 2},
    {"pp": 2, "micro_batches": 1},
    {"tp": 2, "dp": 2, "ep": 4, "exchange": "low_latency", "next_n": 2},
    {"tp": 2, "pp": 2},
    {"dp": 4, "embed_tp": 4, "head_tp": 4},
    {"dp": 8, "ep": 8, "exchange": "low_latency", "next_n": 1},
    {"dp": 4, "tp": 2, "ep": 8, "dense_tp": 1},
    {"dp": 8, "ep": 8, "exchange": "alltoall"},
]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """One card, no speculation."""
    return everything(LLM(**{**COMMON, "device": "cuda"}), TEXTS)


def ranks(layout: dict[str, Any]) -> int:
    return prod(layout.get(name, 1) for name in ("tp", "dp", "pp"))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if ranks(layout) <= CARDS], ids=name_of)
def test_layouts_give_the_tokens_of_one_card(expected: list[Any], layout: dict[str, Any]) -> None:
    assert everything(LLM(**{**COMMON, "device": "cuda", **layout}), TEXTS) == expected
