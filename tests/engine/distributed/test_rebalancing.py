"""Experts that move between ranks while the engine serves: the tokens of a run without, and what
happens where a move fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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


def started_with_tokens(ended: list[LLM], **options: Any) -> tuple[LLM, Tokens]:
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
    llm, found = started_with_tokens(ended, **sizes, **EPLB)
    stats = balancer_of(llm).stats
    assert stats.rebalances > 1, stats
    assert stats.slots > 5, stats
    assert stats.failed == 0
    assert found == expected


@full
def test_fp8_experts_move_with_their_scales(ended: list[LLM], tmp_path: Path) -> None:
    save_fp8("fp8", tmp_path)
    expected = alone(model=str(tmp_path))
    llm, found = started_with_tokens(
        ended, model=str(tmp_path), dp=2, ep=2, redundant_experts=4, **EPLB
    )
    assert balancer_of(llm).stats.slots > 5
    assert found == expected


@full
def test_experts_of_a_prediction_module_move_too(ended: list[LLM], tmp_path: Path) -> None:
    save_with_mtp(tmp_path, agreement=0.5)
    drafts = {"num_speculative_tokens": 2}
    expected = alone(model=str(tmp_path), **drafts)
    llm, found = started_with_tokens(ended, model=str(tmp_path), dp=2, ep=2, **drafts, **EPLB)
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


# what a rank other than 0 runs in place of a mover's method; Python imports it at its start
ON_RANK_1 = """
import sys
if "rorqual.engine.distributed.worker_process" in sys.orig_argv:
    import torch.distributed as dist
    from rorqual.engine.balance.mover import ExpertMover
    real = ExpertMover.{method}
    def wrong(self, *given):
        if dist.get_rank() == 1:
            raise {error}
        return real(self, *given)
    ExpertMover.{method} = wrong
"""


@full
@pytest.mark.longest
@pytest.mark.parametrize(
    ("method", "error", "off"),
    [("_tables", "MemoryError('none on rank 1')", False), ("_pack", "OSError('torn there')", True)],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_another_rank_that_fails(
    ended: list[LLM],
    expected: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ranks: int,
    method: str,
    error: str,
    off: bool,
) -> None:
    """Not the one that decides: the map in force stays on all ranks."""
    (tmp_path / "sitecustomize.py").write_text(ON_RANK_1.format(method=method, error=error))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    llm = LLM(**OPTIONS, **BUNDLED, dp=ranks, ep=ranks, **EPLB, watchdog_seconds=20)
    ended.append(llm)
    balancer = balancer_of(llm)
    before = balancer.policy.placement.tolist()
    assert tokens_of(llm) == expected
    assert balancer.stats.failed > 0
    assert balancer.stats.moves == 0
    assert balancer.policy.placement.tolist() == before
    assert bool(balancer.off) == off, balancer.off


# ---- ranks that are killed in a move


def kill_when(
    monkeypatch: pytest.MonkeyPatch, balancer: ExpertBalancer, when: str, blow: Any
) -> None:
    """begun: all ranks have been told of the move; bringing: rank 0 sends its first expert; ready:
    all ranks are through, and the next step would switch."""
    struck: list[str] = []

    def once(real: Any, after: bool = True) -> Any:
        def called(*given: Any) -> Any:
            found = real(*given)
            if not struck and (after or found):
                struck.append(when)
                blow()
            return found

        return called

    if when == "begun":
        monkeypatch.setattr(balancer, "_begin", once(balancer._begin))
    elif when == "bringing":
        monkeypatch.setattr(balancer.mover, "_pack", once(balancer.mover._pack))
    else:
        monkeypatch.setattr(balancer, "ready", once(balancer.ready, after=False))


@full
@pytest.mark.parametrize(
    ("ranks", "rank", "when"),
    [
        (2, 1, "begun"),
        (4, 3, "bringing"),
        *(
            pytest.param(ranks, rank, when, marks=pytest.mark.longest)
            for ranks in (2, 4)
            for rank in range(1, ranks)
            for when in ("begun", "bringing", "ready")
        ),
    ],
)
def test_a_rank_that_is_killed_in_a_move(
    ended: list[LLM], monkeypatch: pytest.MonkeyPatch, ranks: int, rank: int, when: str
) -> None:
    llm = LLM(**OPTIONS, **BUNDLED, dp=ranks, ep=ranks, **EPLB)
    ended.append(llm)
    balancer = balancer_of(llm)
    pid = balancer.workers[rank - 1].pid
    kill_when(monkeypatch, balancer, when, lambda: os.kill(pid, signal.SIGKILL))
    start = time.monotonic()
    with pytest.raises(EngineError, match=rf"rank {rank} .* ended with status -9"):
        tokens_of(llm, 60)
    assert time.monotonic() - start < 30


FIRST_RANK = """
import os, signal, sys
import pytest
from rorqual import LLM
from rorqual.engine.balance import policy
from tests.engine.distributed.test_rebalancing import (
    BUNDLED, EPLB, OPTIONS, balancer_of, kill_when, tokens_of,
)
if __name__ == "__main__":
    policy.MIN_GAIN, policy.HORIZON, policy.noise_limit = 0.0, 10**9, lambda load, ranks: 1.0
    ranks = int(sys.argv[1])
    llm = LLM(**OPTIONS, **BUNDLED, dp=ranks, ep=ranks, **EPLB)
    balancer = balancer_of(llm)
    print(*(worker.pid for worker in balancer.workers), flush=True)
    patch = pytest.MonkeyPatch()
    kill_when(patch, balancer, sys.argv[2], lambda: os.kill(os.getpid(), signal.SIGKILL))
    tokens_of(llm, 60)
"""


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@full
@pytest.mark.longest
@pytest.mark.parametrize("when", ["begun", "bringing", "ready"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_deciding_rank_that_is_killed_in_a_move(ranks: int, when: str) -> None:
    """Nobody is left to name it: the others end themselves, whatever they wait in."""
    command = [sys.executable, "-c", FIRST_RANK, str(ranks), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == ranks - 1
    deadline = time.monotonic() + 30
    while any(map(running, pids)):
        assert time.monotonic() < deadline, f"ranks that outlive rank 0: {pids}"
        time.sleep(0.1)
