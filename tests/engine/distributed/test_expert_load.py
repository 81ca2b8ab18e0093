"""How often experts are picked: the same counts however many ranks the tokens are spread over."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from rorqual import LLM, SamplingParams
from tests.engine.execution.replaying import ReplayingPlatform

pytestmark = pytest.mark.exhaustive

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "weights": "random",
    "num_layers": 3,
    "max_model_len": 64,
    "max_num_seqs": 3,
    "page_size": 8,
    "threads": 1,
    "num_pages": 60,
    "chunked_prefill_size": 7,
    "enable_prefix_caching": False,
    "record_expert_load": True,
}
TEXTS = [
    "The captain of the ship",
    "In the beginning",
    "It was a dark night",
    "Once",
    "Words: a, b",
]
NEW = [9, 4, 1, 12, 7]
Counts = list[list[int]]


def counted(llm: LLM) -> tuple[Counts, list[Counts]]:
    """The counts once all is done, and those told on the way."""
    engine = llm.engine
    params = [SamplingParams(temperature=0, max_tokens=new, ignore_eos=True) for new in NEW]
    seen: list[Counts] = []
    try:
        prompts = [llm.get_tokenizer().encode(text) for text in TEXTS]
        for _ in llm.stream(prompts, params):
            seen.append(engine.expert_load())
        tokens = sum(map(len, prompts)) + sum(NEW) - len(NEW)  # nothing follows the last of each
        picks = tokens * engine.model_config.moe.top_k
        deadline = time.monotonic() + 60
        while not (found := engine.expert_load()) or sum(found[0]) != picks:
            assert time.monotonic() < deadline, f"{sum(found[0])} picks were counted, not {picks}"
            time.sleep(0.02)
        return found, [counts for counts in seen if counts]
    finally:
        engine.close()


@pytest.fixture(scope="module")
def expected() -> Counts:
    """Of one process."""
    return counted(LLM(**OPTIONS))[0]


full = pytest.mark.full_matrix


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "ep": 2},
        {"tp": 2},
        pytest.param({"dp": 2}, marks=full),
        pytest.param({"pp": 2}, marks=full),
        pytest.param({"tp": 2, "sequence_parallel": True}, marks=full),
        pytest.param({"tp": 2, "dp": 2, "ep": 4, "exchange": "low_latency"}, marks=full),
    ],
    ids=str,
)
def test_every_token_is_counted_once(expected: Counts, layout: dict[str, int]) -> None:
    """And counts told on the way are those of whole steps, in which every layer has the same."""
    found, seen = counted(LLM(**OPTIONS, **layout))
    assert found == expected
    assert len(found) == 2, "the first of three layers is dense"
    assert len({str(counts) for counts in seen}) > 1
    assert all(len({sum(layer) for layer in counts}) == 1 for counts in seen)


def test_padding_of_captured_steps_is_not_counted(
    expected: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five requests end one after the other, and three of them replay a step of four."""
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    found, _ = counted(LLM(**{**OPTIONS, "max_num_seqs": 5}))
    assert found == expected
    assert platform.replays > 8


def test_nothing_is_told_that_is_not_recorded() -> None:
    options = {**OPTIONS, "record_expert_load": False}
    assert LLM(**options).engine.expert_load() == []


def test_balancedness_of_ranks_that_share_experts() -> None:
    """As experts lie, of what was counted lately."""
    llm = LLM(**OPTIONS, dp=2, ep=2, eplb_window=2)
    assert llm.engine.expert_balancedness() == []
    found, _ = counted(llm)
    shares = [[sum(layer[:8]), sum(layer[8:])] for layer in found]
    lately = llm.engine.expert_balancedness()
    assert len(lately) == len(found)
    assert all(0.5 <= value <= 1 for value in lately)
    llm.engine.expert_window.load = np.array(found)
    assert llm.engine.expert_balancedness() == pytest.approx(
        [sum(share) / 2 / max(share) for share in shares]
    )
