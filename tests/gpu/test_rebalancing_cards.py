"""Experts that move between two GPUs while steps are replayed: the same tokens, and steps that are
hardly longer. `-s` prints the times."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
    pytest.skip("needs at least two CUDA devices", allow_module_level=True)
pytest.importorskip("triton")

from rorqual import LLM, SamplingParams
from rorqual.config.process import loaded_frozen
from rorqual.engine.balance import policy
from rorqual.engine.distributed.executor import DistributedExecutor

EPLB: dict[str, Any] = {"enable_eplb": True, "eplb_window": 20, "eplb_threshold": 1.0}
PAIR: dict[str, Any] = {"dp": 2, "ep": 2, "weights": "random", "skip_tokenizer_init": True}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move experts for the least gain."""
    monkeypatch.setattr(policy, "MIN_GAIN", 0.0)
    monkeypatch.setattr(policy, "HORIZON", 10**9)
    monkeypatch.setattr(policy, "noise_limit", lambda load, ranks: 1.0)


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


@pytest.mark.parametrize("exchange", ["auto", "low_latency", "alltoall"])
@pytest.mark.parametrize("redundant", [0, 4])
def test_tokens_are_those_of_a_run_without(exchange: str, redundant: int) -> None:
    found = []
    options = {**PAIR, "dtype": "float32", "num_layers": 4, "max_model_len": 256}
    for extra in ({}, {**EPLB, "redundant_experts": redundant}):
        llm = LLM(**options, max_num_seqs=8, exchange=exchange, **extra)
        params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
        outs = llm.generate(prompts(16, 12, 4096), params)
        found.append([list(out.outputs[0].token_ids) for out in outs])
        executor = llm.engine.executor
        if extra:
            assert isinstance(executor, DistributedExecutor)
            assert executor.balance is not None
            assert executor.balance.rebalances > 1, executor.balance
        llm.engine.close()
    assert found[0] == found[1]


def test_steps_during_a_move(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-30B's experts, eight layers: p99 of the steps with a move under way against the others
    of the same run, and the longest."""
    llm = LLM(
        "rorqual/shapes/qwen3-30b-a3b", **PAIR, **EPLB, num_layers=8, redundant_experts=16,
        max_num_seqs=128, max_model_len=1100, cudagraph_capture_sizes=(64,),
    )  # fmt: skip
    executor = llm.engine.executor
    assert isinstance(executor, DistributedExecutor)
    balancer = executor.balancer
    assert balancer is not None
    step = llm.engine.step
    moving: list[float] = []
    still: list[float] = []

    def timed() -> Any:
        before = balancer.moving is not None
        start = time.perf_counter()
        outs = step()
        seconds = time.perf_counter() - start
        if len(llm.engine.scheduler.decoding) == 128:
            (moving if before or balancer.moving is not None else still).append(seconds)
        return outs

    llm.engine.step = timed  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    with loaded_frozen():  # as in a server: to collect all that tests loaded takes several steps
        llm.generate(prompts(128, 64, 100_000), params)
    stats = balancer.stats
    llm.engine.close()
    p99 = [sorted(times)[int(0.99 * len(times))] for times in (still[20:], moving)]
    with capsys.disabled():
        print(
            f"\n{stats.moves} moves, {stats.slots} slots; steps without {len(still)}, p99 "
            f"{1e3 * p99[0]:.3f} ms; with {len(moving)}, p99 {1e3 * p99[1]:.3f} ms, longest "
            f"{1e3 * max(moving):.3f} ms"
        )
    assert stats.moves > 1  # of a load that stays the same; four have been seen
    assert len(moving) > 20
    assert p99[1] <= 1.1 * p99[0]
    assert max(moving) <= 1.5 * p99[0]
