"""The queue around a step model: tokens conserved, seeds decide, one client is simple
arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rorqual.config.hardware import load_device
from rorqual.config.parallel import ParallelConfig
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.timing.profiles import load_profile
from rorqual.planner.timing.roofline import StepModel
from rorqual.planner.validation.closed_loop import Loop, _State, play

MODEL = StepModel(
    published("qwen3-30b-a3b"), ParallelConfig(), load_device("h200"), load_profile("sglang")
)


def test_one_client() -> None:
    result = play(MODEL, Loop(1, 640, 64, requests=3))
    prompt = MODEL.step(GroupWork(None, (BatchShape(1, 640),))).seconds
    steps = [
        MODEL.step(GroupWork(BatchShape.verify(1, round((640 + made + 1) / 64) * 64, 0))).seconds
        for made in range(1, 64)
    ]
    assert result.ttft == pytest.approx(prompt + MODEL.profile.first_token_us * 1e-6)
    assert result.tpot == pytest.approx(sum(steps) / 63)
    assert result.throughput == pytest.approx(64 / (prompt + sum(steps)))


@pytest.mark.parametrize("mixed", [False, True])
def test_every_request_is_answered_in_full(mixed: bool) -> None:
    model = replace(MODEL, profile=replace(MODEL.profile, mixed_chunks=mixed, max_chunk=700))
    state = _State(model, Loop(8, 500, 40, requests=30, ratio=0.5, seed=3))
    while state.busy:
        state.step()
    assert len(state.finished) == 30
    assert all(
        request.computed == request.prompt and request.made >= request.output
        for request in state.finished
    )
    assert all(request.arrived <= request.first <= request.done for request in state.finished)
    assert not state.left
    assert not state.running
    assert not state.waiting


def test_a_seed_decides() -> None:
    loop = Loop(8, 500, 40, ratio=0.8)
    assert play(MODEL, loop) == play(MODEL, loop)
    assert play(MODEL, loop) != play(MODEL, replace(loop, seed=1))


def test_more_clients_more_tokens_and_longer_waits() -> None:
    few, many = (play(MODEL, Loop(clients, 500, 60)) for clients in (2, 32))
    assert many.throughput > few.throughput
    assert many.tpot > few.tpot
    assert many.ttft > few.ttft
    assert few.batch <= 2
    assert many.batch <= 32


def test_accepted_drafts_shorten() -> None:
    config = published("deepseek-ai/DeepSeek-R1")
    model = StepModel(config, ParallelConfig(tp=8), load_device("h200"), load_profile("sglang"))
    plain = play(model, Loop(1, 500, 60, 2))
    drafted = play(model, Loop(1, 500, 60, 2, num_speculative_tokens=1, accepted=0.85))
    assert drafted.tpot < plain.tpot < 1.85 * drafted.tpot
