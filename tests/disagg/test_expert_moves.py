"""Experts that move between servers while requests run: the tokens of one process before, during
and after, whatever ends in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rorqual import LLM
from rorqual.engine.balance.slot_balancer import SlotBalancer
from rorqual.errors import ConfigError
from tests.disagg.expert_caller import Start
from tests.disagg.expert_processes import ExpertProcess, serving
from tests.engine.mixed_batch import COMMON, TEXTS, params

MOVING: dict[str, Any] = {
    "expert_rebalance": True,
    "eplb_window": 5,
    "eplb_threshold": 0.97,
    "expert_timeout": 1.0,
}


@pytest.fixture(scope="module")
def greedy() -> list[list[int]]:
    llm = LLM(**COMMON)
    try:
        return tokens(llm)
    finally:
        llm.engine.close()


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, params())]


@contextmanager
def engine(servers: list[Any], secret_file: str, **more: Any) -> Iterator[LLM]:
    experts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    llm = LLM(**{**COMMON, **MOVING, **more}, experts=(experts,), expert_secret_file=secret_file)
    try:
        yield llm
    finally:
        llm.engine.close()


def balancer(llm: LLM) -> SlotBalancer:
    found = llm.engine.slot_balancer
    assert found is not None
    return found


def run_until(
    llm: LLM, greedy: list[list[int]], done: Callable[[], Any], seconds: float = 120
) -> None:
    """Requests, one batch after another, all of whose tokens are right."""
    deadline = time.monotonic() + seconds
    while True:
        assert tokens(llm) == greedy
        if done():
            return
        assert time.monotonic() < deadline, balancer(llm).stats


def whole(llm: LLM) -> bool:
    servers = llm.engine.worker.experts
    assert servers is not None
    return not servers.without_holder()


@pytest.mark.exhaustive
def test_tokens_stay_while_experts_move(start: Start, secret_file: str, greedy: Any) -> None:
    """Two servers; then a third joins that holds nothing."""
    first, second = start("0-12", max_slots=13), start("13-15", max_slots=8)
    third = start("none", max_slots=8)
    third.close()
    with engine([first, second, third], secret_file) as llm:
        stats = balancer(llm).stats
        run_until(llm, greedy, lambda: stats.rebalances)
        assert stats.slots
        assert not stats.failed
        before = stats.rebalances
        joined = start("none", port=third.port, max_slots=8)
        run_until(llm, greedy, lambda: stats.rebalances > before and joined.stats.calls)
        assert any(joined.shard.holdings().values())
        assert whole(llm)
        for server in (first, second, joined):
            held = server.shard.holdings()
            assert all(len(experts) <= server.shard.max_slots for experts in held.values())


@pytest.mark.longest
@pytest.mark.parametrize("more", [{"tp": 2}, {"dp": 2, "micro_batches": 2}])
def test_several_ranks_follow_moves(
    more: dict[str, Any], start: Start, secret_file: str, greedy: Any
) -> None:
    with engine(
        [start("0-12", max_slots=13), start("13-15", max_slots=8)], secret_file, **more
    ) as llm:
        run_until(llm, greedy, lambda: balancer(llm).stats.rebalances)


@pytest.mark.exhaustive
def test_what_a_lost_server_held_is_loaded_by_others(
    start: Start, secret_file: str, greedy: Any
) -> None:
    first, second = start("0-9", max_slots=16), start("10-15", max_slots=16)
    with engine([first, second], secret_file, eplb_threshold=0.0, expert_wait=60.0) as llm:
        assert tokens(llm) == greedy
        second.close()
        assert tokens(llm) == greedy
        assert whole(llm)
        held = first.shard.holdings()
        assert all(len(held[layer]) == 16 for layer in balancer(llm).layers)


@pytest.mark.exhaustive
def test_one_engine_gives_orders(start: Start, secret_file: str, greedy: Any) -> None:
    """Of two that ask to; tokens of both stay right, and the other takes over where it ends."""
    servers = [start("0-12", max_slots=13), start("13-15", max_slots=8)]
    with engine(servers, secret_file) as second:
        with engine(servers, secret_file) as first:
            both = [balancer(llm) for llm in (first, second)]
            run_until(first, greedy, lambda: any(one.claimed for one in both))
            run_until(second, greedy, lambda: any(one.stats.rebalances for one in both))
            assert not all(one.claimed for one in both)
        run_until(second, greedy, lambda: balancer(second).claimed)


# ---- processes that end, stop and come back in the midst of a move


@pytest.fixture
def processes(secret_file: str) -> Iterator[list[ExpertProcess]]:
    """Any two hold everything."""
    room = ("--max-slots", "14")
    made = [ExpertProcess(slots, secret_file, room) for slots in ("0-12", "3-15", "0-2,13-15")]
    with serving(*made) as ready:
        yield ready


class Fault:
    """Once orders are under way: does something to a server, on a thread."""

    def __init__(self, llm: LLM, act: Callable[[], None]):
        self.balancer = balancer(llm)
        self.act = act
        self.during = False
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        deadline = time.monotonic() + 60
        while not self.balancer.orders_sent and time.monotonic() < deadline:
            time.sleep(0.001)
        self.during = bool(self.balancer.orders_sent)
        self.act()
        self.ended.set()


def faults(processes: list[ExpertProcess]) -> dict[str, Callable[[], None]]:
    _, second, _ = processes

    def another_set() -> None:
        second.kill()
        second.arguments[1] = "5-11"
        second.start()
        second.wait()

    return {
        "killed": second.kill,
        "stopped": lambda: second.pause(3.0),
        "stopped shortly": lambda: second.pause(0.3),
        "back with other experts": another_set,
    }


@pytest.mark.longest
@pytest.mark.parametrize(
    "name", ["killed", "stopped", "stopped shortly", "back with other experts"]
)
def test_a_server_fails_in_the_midst_of_a_move(
    name: str, processes: list[ExpertProcess], secret_file: str, greedy: Any
) -> None:
    with engine(processes, secret_file, expert_wait=60.0) as llm:
        fault = Fault(llm, faults(processes)[name])
        run_until(llm, greedy, fault.ended.is_set)
        assert fault.during
        stats = balancer(llm).stats
        before = stats.plans
        run_until(llm, greedy, lambda: whole(llm) and not balancer(llm).orders_sent)
        run_until(llm, greedy, lambda: stats.plans >= before)
        fault.thread.join()


def test_rebalancing_needs_servers() -> None:
    with pytest.raises(ConfigError, match="expert_rebalance goes with experts or experts_from"):
        LLM(**COMMON, expert_rebalance=True)
