"""Engines that measure, and decide for each step, into how many parts it is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rorqual import LLM
from rorqual.engine.execution import worker
from rorqual.engine.micro_batches import policy
from rorqual.engine.micro_batches.measure import measure
from rorqual.engine.micro_batches.policy import MeasuredParts
from tests.engine.micro_batches.paced_wire import pace
from tests.engine.mixed_batch import COMMON, TEXTS, everything, params

SHORT = partial(measure, seconds=4.0)  # rank 0's limit ends it for all
OPTIONS: dict[str, Any] = {
    **COMMON,
    "dp": 2,
    "ep": 2,
    "micro_batches": "auto",
    "max_num_batched_tokens": 192,
    "enable_prefix_caching": False,
}
PROMPTS = [[7 * i + 3 * j for j in range(30)] for i in range(1, 13)]


def engine(monkeypatch: pytest.MonkeyPatch, **options: Any) -> LLM:
    monkeypatch.setattr(worker, "measure", SHORT)
    return LLM(**{**OPTIONS, **options})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param(
            {"exchange": "alltoall", "num_speculative_tokens": 1}, marks=pytest.mark.longest
        ),
    ],
)
def test_steps_are_cut_where_the_wire_is_slow(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """As long as computing, or longer, for prompts. Tokens are those of one process."""
    single = LLM(**{**COMMON, "enable_prefix_caching": False})
    expected = [out.outputs[0].token_ids for out in single.generate(PROMPTS, params(max_tokens=6))]
    mixed = everything(single, TEXTS)
    pace(monkeypatch, 40e-9)
    monkeypatch.setattr(policy, "noise_at", lambda *_: 0.0)  # of whatever else runs here
    llm = engine(monkeypatch, **more)
    times = llm.engine.worker.step_times
    assert times is not None
    largest = times.prompts.sizes[-1]
    assert largest.wire > 0.3 * largest.compute, times
    found = llm.generate(PROMPTS, params(max_tokens=6))
    assert [out.outputs[0].token_ids for out in found] == expected
    assert max(llm.engine.stats.steps_by_parts) > 1, times
    assert everything(llm, TEXTS) == mixed
    llm.engine.close()


@pytest.mark.exhaustive
def test_short_steps_stay_whole_where_the_wire_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of few tokens costs as much as the whole."""
    llm = engine(monkeypatch)
    times = llm.engine.worker.step_times
    assert times is not None
    assert times.layers == llm.engine.model_config.num_layers - sum(
        not sparse for sparse in llm.engine.model_config.moe_layers
    )
    llm.generate([[5, 6, 7]] * 8, params(max_tokens=9))
    assert set(llm.engine.stats.steps_by_parts) == {1}, times
    rows = llm.engine.worker.runner.rows
    assert isinstance(llm.engine.scheduler.micro_batches, MeasuredParts)
    assert not rows.length[rows.padding]
    llm.engine.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"dp": 1, "ep": 1, "tp": 2}, "nothing travels"),
        pytest.param({"pp": 2}, "pipeline", marks=pytest.mark.longest),
    ],
)
def test_where_nothing_can_overlap_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], told: str
) -> None:
    llm = engine(monkeypatch, **sizes)
    times = llm.engine.worker.step_times
    assert times is not None
    assert told in times.decode.reason
    assert told in times.prompts.reason
    llm.generate([[5, 6, 7]] * 8, params(max_tokens=3))
    assert set(llm.engine.stats.steps_by_parts) == {1}
    llm.engine.close()
