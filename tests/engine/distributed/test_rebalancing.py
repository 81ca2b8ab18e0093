"""Experts that move between ranks while the engine serves: the tokens of a run without, and what
happens where a move fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from rorqual.engine.balance import policy
from rorqual.engine.balance.moves import Move
from rorqual.engine.distributed.executor import DistributedExecutor
from rorqual.engine.distributed.expert_balancer import ExpertBalancer
from rorqual.errors import EngineError
from tests.models.checkpoints import save_fp8, save_with_mtp

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "page_size": 8,
    "threads": 1,
    "num_pages": 120,
    "chunked_prefill_size": 7,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
}
BUNDLED: dict[str, Any] = {"weights": "random", "num_layers": 4}
EPLB: dict[str, Any] = {"enable_eplb": True, "eplb_window": 3, "eplb_threshold": 1.0}
PROMPTS = [[7, 30, 2, 9, 41], [100, 3], [8] * 19, [55, 56, 57], [1], [90, 91, 92, 93]]
Tokens = list[list[int]]
full = pytest.mark.exhaustive
matrix = (pytest.mark.exhaustive, pytest.mark.full_matrix)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move experts for the least gain, and whatever noise says."""
    monkeypatch.setattr(policy, "MIN_GAIN", 0.0)
    monkeypatch.setattr(policy, "HORIZON", 10**9)
    monkeypatch.setattr(policy, "noise_limit", lambda load, ranks: 1.0)


@pytest.fixture(autouse=True)
def ended() -> Iterator[list[LLM]]:
    """Engines of a test, ended with it."""
    engines: list[LLM] = []
    yield engines
    for llm in engines:
        llm.engine.close()


def balancer_of(llm: LLM) -> ExpertBalancer:
    executor = llm.engine.executor
    assert isinstance(executor, DistributedExecutor)
    assert executor.balancer is not None
    return executor.balancer


def tokens_of(llm: LLM, new: int = 40) -> Tokens:
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    return [list(found.outputs[0].token_ids) for found in llm.generate(PROMPTS, params)]


def alone(**options: Any) -> Tokens:
    """Of one rank, whose experts stay in order."""
    return tokens_of(LLM(**{**OPTIONS, **options}))


@pytest.fixture(scope="module")
def expected() -> Tokens:
    return alone(**BUNDLED)


def told(ended: list[LLM], **options: Any) -> tuple[LLM, Tokens]:
    llm = LLM(**{**OPTIONS, **({} if "model" in options else BUNDLED), **options})
    ended.append(llm)
    return llm, tokens_of(llm)


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 2, "ep": 2, "redundant_experts": 4},
        pytest.param({"dp": 2, "ep": 2}, marks=full),
        pytest.param({"tp": 2, "ep": 2, "redundant_experts": 2}, marks=full),
        pytest.param({"dp": 4, "ep": 4, "redundant_experts": 8}, marks=full),
        pytest.param({"dp": 4, "ep": 4, "exchange": "alltoall"}, marks=matrix),
        pytest.param({"dp": 4, "ep": 2, "exchange": "low_latency"}, marks=matrix),
        pytest.param({"tp": 2, "pp": 2, "ep": 2, "redundant_experts": 2}, marks=full),
    ],
    ids=str,
)
def test_tokens_are_those_of_a_run_without(
    ended: list[LLM], expected: Tokens, sizes: dict[str, Any]
) -> None:
    """Whatever the number of ranks, copies and ways; and the counts are those of all tokens."""
    llm, found = told(ended, **sizes, **EPLB)
    stats = balancer_of(llm).stats
    assert stats.rebalances > 1, stats
    assert stats.slots > 5, stats
    assert stats.failed == 0
    assert found == expected


@full
def test_fp8_experts_move_with_their_scales(ended: list[LLM], tmp_path: Path) -> None:
    save_fp8("fp8", tmp_path)
    expected = alone(model=str(tmp_path))
    llm, found = told(ended, model=str(tmp_path), dp=2, ep=2, redundant_experts=4, **EPLB)
    assert balancer_of(llm).stats.slots > 5
    assert found == expected


@full
def test_experts_of_a_prediction_module_move_too(ended: list[LLM], tmp_path: Path) -> None:
    save_with_mtp(tmp_path, agreement=0.5)
    drafts = {"num_speculative_tokens": 2}
    expected = alone(model=str(tmp_path), **drafts)
    llm, found = told(ended, model=str(tmp_path), dp=2, ep=2, **drafts, **EPLB)
    balancer = balancer_of(llm)
    assert balancer.policy.layers == [1, 2, 3], "the module stands behind three layers"
    assert balancer.policy.placement[2].tolist() != list(range(16))
    assert found == expected


# ---- moves that fail


@full
def test_a_rank_that_cannot_take_part(
    ended: list[LLM], expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two moves are refused before anything is sent; what is in force stays, and later
    moves succeed."""
    llm = LLM(**OPTIONS, **BUNDLED, dp=2, ep=2, **EPLB)
    ended.append(llm)
    balancer = balancer_of(llm)
    real = balancer.mover._tables
    refused: list[Move] = []

    def short_of_memory(move: Move) -> Any:
        if len(refused) < 2:
            refused.append(move)
            assert balancer.stats.moves == 0
            raise MemoryError("no memory for tables")
        return real(move)

    monkeypatch.setattr(balancer.mover, "_tables", short_of_memory)
    assert tokens_of(llm) == expected
    assert balancer.stats.failed == 2
    assert not balancer.off
    assert balancer.stats.moves > 0


@full
def test_a_move_that_fails_part_way_is_the_last(
    ended: list[LLM],
    expected: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Messages are under way when it does: nothing is put in force, and nothing is moved again."""
    llm = LLM(**OPTIONS, **BUNDLED, dp=2, ep=2, **EPLB, watchdog_seconds=5)
    ended.append(llm)
    balancer = balancer_of(llm)

    def torn(*_: Any) -> None:
        raise RuntimeError("the copy was torn")

    monkeypatch.setattr(balancer.mover, "_pack", torn)
    before = balancer.policy.placement.tolist()
    assert tokens_of(llm) == expected
    assert "the copy was torn" in balancer.off
    assert "experts are moved no more" in caplog.text
    assert (balancer.stats.failed, balancer.stats.moves) == (1, 0)
    assert balancer.policy.placement.tolist() == before


@full
@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_that_is_killed_in_a_move(
    ended: list[LLM], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    sizes = {"dp": 2, "ep": 2} if rank == 1 else {"dp": 4, "ep": 4}
    llm = LLM(**OPTIONS, **BUNDLED, **sizes, **EPLB)
    ended.append(llm)
    balancer = balancer_of(llm)
    worker = balancer.workers[rank - 1]
    real = balancer._begin

    def killed(move: Move, send: Any) -> None:
        real(move, send)
        os.kill(worker.pid, signal.SIGKILL)

    monkeypatch.setattr(balancer, "_begin", killed)
    start = time.monotonic()
    with pytest.raises(EngineError, match=rf"rank {rank} .* ended with status -9"):
        tokens_of(llm, 60)
    assert time.monotonic() - start < 20
    assert balancer.stats.moves == 0
