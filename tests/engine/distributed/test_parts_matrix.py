"""Steps in 1, 2 and 3 parts over every exchange, with drafts and without, with experts in order,
with copies and while they move, on 2 and 4 ranks: the tokens of one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from rorqual import LLM
from rorqual.config.parallel import EXCHANGES
from rorqual.engine.balance import policy
from rorqual.engine.distributed.executor import DistributedExecutor
from rorqual.engine.micro_batches.policy import FixedParts
from tests.engine.mixed_batch import COMMON, MIXED, TEXTS, comparable

OPTIONS: dict[str, Any] = {
    **COMMON,
    "enable_prefix_caching": False,
    "micro_batches": 3,
    "watchdog_seconds": 120,
}
SIZES: dict[int, dict[str, dict[str, int]]] = {
    2: {
        "local": {"tp": 2, "ep": 2},
        "allgather_tp": {"dp": 2},
        "allgather_ep": {"dp": 2, "ep": 2},
        "alltoall": {"dp": 2, "ep": 2},
        "low_latency": {"dp": 2, "ep": 2},
    },
    4: {
        "local": {"tp": 4, "ep": 4},
        "allgather_tp": {"dp": 4},
        "allgather_ep": {"dp": 4, "ep": 2},
        "alltoall": {"tp": 2, "dp": 2, "ep": 4},
        "low_latency": {"dp": 4, "ep": 4},
    },
}
MAPS: dict[str, dict[str, Any]] = {
    "in-order": {},
    "copies": {"redundant_experts": 4},
    "moving": {"redundant_experts": 4, "enable_eplb": True, "eplb_window": 3, "eplb_threshold": 1},
}
DRAFTS = (0, 2)
# in CI as well, on two ranks: of three exchanges one
SHORT = {
    ("local", 2, "copies"),
    ("allgather_ep", 0, "moving"),
    ("low_latency", 2, "moving"),
}


def cases() -> Iterator[Any]:
    for ranks, exchange, drafts, experts in product(SIZES, EXCHANGES, DRAFTS, MAPS):
        if exchange == "auto" or (exchange == "allgather_tp" and experts != "in-order"):
            continue  # experts that are cut by columns are all on every rank
        short = ranks == 2 and (exchange, drafts, experts) in SHORT
        marks = () if short else (pytest.mark.longest,)
        yield pytest.param(ranks, exchange, drafts, experts, marks=(pytest.mark.exhaustive, *marks))


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """One process, no drafts."""
    llm = LLM(**{**COMMON, "enable_prefix_caching": False})
    return [comparable(out) for out in llm.generate(TEXTS, MIXED)]


def test_every_exchange_has_sizes() -> None:
    for sizes in SIZES.values():
        assert set(sizes) == set(EXCHANGES) - {"auto"}


@pytest.mark.longest
@pytest.mark.parametrize(("ranks", "exchange", "drafts", "experts"), cases())
def test_tokens_are_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
    expected: list[Any],
    ranks: int,
    exchange: str,
    drafts: int,
    experts: str,
) -> None:
    monkeypatch.setattr(policy, "MIN_GAIN", 0.0)  # experts move for the least gain
    monkeypatch.setattr(policy, "HORIZON", 10**9)
    monkeypatch.setattr(policy, "noise_limit", lambda load, ranks: 1.0)
    more = {**SIZES[ranks][exchange], **MAPS[experts], "exchange": exchange}
    llm = LLM(**{**OPTIONS, **more, "num_speculative_tokens": drafts})
    count = more.get("dp", 1)  # all texts for each data-parallel rank
    try:
        for parts in (3, 1, 2):
            llm.engine.scheduler.micro_batches = FixedParts(parts)
            before = llm.engine.stats.steps_by_parts.copy()
            found = llm.generate(TEXTS * count, MIXED * count)
            assert [comparable(out) for out in found] == expected * count, parts
            steps = llm.engine.stats.steps_by_parts - before
            assert set(steps) <= {1, parts}
            assert steps[parts] > 3, steps
        if experts == "moving":
            executor = llm.engine.executor
            assert isinstance(executor, DistributedExecutor)
            assert executor.balance is not None
            assert executor.balance.rebalances > 1
            assert executor.balance.failed == 0
    finally:
        llm.engine.close()
