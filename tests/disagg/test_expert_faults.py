"""Expert servers, processes of their own, that fail at every point of a call, answer garbage, are
slow, or come back with another checkpoint: the tokens of one process all the same."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rorqual import LLM
from rorqual.parallel.remote.servers import ExpertServers
from tests.disagg.expert_processes import ExpertProcess, serving
from tests.disagg.link_proxy import GARBAGE, POINTS, Cut, LinkProxy
from tests.engine.mixed_batch import COMMON, TEXTS, params

pytestmark = pytest.mark.longest
OTHER = ["--set", "weights=random"]


@pytest.fixture(scope="module")
def pair(secret_file: str) -> Iterator[list[ExpertProcess]]:
    """Both hold all; the first is behind a proxy, and fails."""
    made = [ExpertProcess("all", secret_file) for _ in range(2)]
    with serving(*made) as ready:
        yield ready


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    llm = LLM(**COMMON)
    yield llm
    llm.engine.close()


@pytest.fixture(scope="module")
def greedy(alone: LLM) -> list[list[int]]:
    return tokens(alone)


@pytest.fixture
def proxy(pair: list[ExpertProcess], alone: LLM) -> Iterator[LinkProxy]:
    made = LinkProxy(pair[0].port, alone.engine.worker.model_config.hidden_size)
    yield made
    made.close()


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, params())]


@contextmanager
def engine(ports: list[int], secret_file: str, **more: Any) -> Iterator[LLM]:
    llm = LLM(
        **{**COMMON, "micro_batches": 2, "expert_timeout": 0.5, **more},
        experts=tuple(f"127.0.0.1:{port}" for port in ports),
        expert_secret_file=secret_file,
    )
    try:
        yield llm
    finally:
        llm.engine.close()


def servers_of(llm: LLM) -> ExpertServers:
    found = llm.engine.worker.experts
    assert found is not None
    return found


def until(done: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_server_fails_at_a_point_of_a_call(
    fault: str,
    point: str,
    pair: list[ExpertProcess],
    proxy: LinkProxy,
    secret_file: str,
    greedy: list[list[int]],
) -> None:
    """kill -9, or SIGSTOP for longer than --expert-timeout."""
    first, second = pair
    process = first.process
    assert process is not None

    def act() -> None:
        process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault == "kill":
            process.wait()

    with engine([proxy.port, second.port], secret_file) as llm:
        servers = servers_of(llm)
        assert tokens(llm) == greedy
        cut = Cut(point, proxy.calls + 30, act)
        proxy.cut = cut
        while not cut.done.is_set():
            assert tokens(llm) == greedy
        until(lambda: len(servers.links) == 1)
        assert tokens(llm) == greedy
        if fault == "kill":
            first.restart()
        else:
            first.signal(signal.SIGCONT)
        until(lambda: len(servers.links) == 2)
        before = proxy.calls
        assert tokens(llm) == greedy
        assert proxy.calls > before


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_in_the_head_of_a_reply(
    name: str,
    pair: list[ExpertProcess],
    proxy: LinkProxy,
    secret_file: str,
    greedy: list[list[int]],
) -> None:
    """The link ends, and is made anew."""
    with engine([proxy.port, pair[1].port], secret_file) as llm:
        servers = servers_of(llm)
        assert tokens(llm) == greedy
        links = servers.links
        for _ in range(3):
            proxy.garbage = GARBAGE[name]
            assert tokens(llm) == greedy
            until(lambda: len(servers.links) == 2)
        assert proxy.garbled == 3
        assert set(servers.links) != set(links)
        assert tokens(llm) == greedy


def test_another_checkpoint_at_the_same_address(
    pair: list[ExpertProcess], secret_file: str, greedy: list[list[int]]
) -> None:
    """A server that was forgotten, with other weights: nobody calls it."""
    first, second = pair
    with engine([first.port, second.port], secret_file) as llm:
        servers = servers_of(llm)
        assert tokens(llm) == greedy
        first.kill()
        first.arguments += OTHER
        try:
            first.start()
            first.wait()
            until(lambda: "weights is" in servers.describe())
            assert tokens(llm) == greedy
            assert len(servers.links) == 1
        finally:
            first.kill()
            del first.arguments[-len(OTHER) :]
        first.restart()
        until(lambda: len(servers.links) == 2)
        assert tokens(llm) == greedy


def test_a_network_that_stalls(
    pair: list[ExpertProcess], proxy: LinkProxy, secret_file: str, greedy: list[list[int]]
) -> None:
    """For 2 s, longer than --expert-timeout; and for less, in which its rows are waited for."""
    with engine([proxy.port, pair[1].port], secret_file) as llm:
        servers = servers_of(llm)
        assert tokens(llm) == greedy
        links = servers.links
        for seconds in (0.2, 2.0):
            stalled = threading.Thread(target=proxy.stall, args=(seconds,))
            stalled.start()
            left_out = False
            while stalled.is_alive():
                assert tokens(llm) == greedy
                left_out = left_out or len(servers.links) < 2
            assert left_out == (seconds == 2.0)
            until(lambda: len(servers.links) == 2)
        assert tokens(llm) == greedy
        assert links[0] is not servers.links[0]


def test_the_share_of_a_slow_network_falls_and_comes_back(
    pair: list[ExpertProcess], proxy: LinkProxy, secret_file: str, greedy: list[list[int]]
) -> None:
    """Both are behind proxies, so that they are alike but for the delay."""
    other = LinkProxy(pair[1].port, *proxy.width)
    with engine([proxy.port, other.port], secret_file) as llm:
        servers = servers_of(llm)

        def share() -> float:
            assert tokens(llm) == greedy
            found = {stats.name: stats.share for stats in servers.stats()}
            return found[f"127.0.0.1:{proxy.port}"]

        proxy.delay = 0.02
        until(lambda: share() < 0.3, 60)
        proxy.delay = 0.0
        until(lambda: share() > 0.6, 60)
    other.close()
