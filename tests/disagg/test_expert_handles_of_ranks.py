"""Several ranks that call expert servers over shared memory, which is files here: the tokens of one
process; and what one rank alone loses, all of them give up."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.triton_interpreter import DEVICE, needs_triton  # before kernels are defined

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE != "cpu", reason="runs in the interpreter"),
    pytest.mark.exhaustive,
]

from rorqual import LLM  # noqa: E402
from rorqual.errors import ConfigError, ExpertsMissing  # noqa: E402
from rorqual.parallel.remote.link import LinkError, shut  # noqa: E402
from rorqual.parallel.remote.wire import Join  # noqa: E402
from tests.disagg.expert_processes import ExpertProcess, serving  # noqa: E402
from tests.disagg.link_proxy import LinkProxy  # noqa: E402
from tests.disagg.shared_memory_process import WHOLE_STEPS, whole_steps  # noqa: E402
from tests.disagg.test_expert_handles import (  # noqa: E402
    FEW,
    SPREADS,
    driver,
    linked,
    shared,
)
from tests.engine.distributed.starting import ROOT  # noqa: E402
from tests.engine.mixed_batch import TEXTS, params  # noqa: E402

__all__ = ["driver"]
SHORT = params(max_tokens=4)
PROMPTS = TEXTS[:3]
SITE = Path(__file__).parent / "shared_memory_site"


@pytest.fixture(autouse=True)
def ranks_share_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SITE}{os.pathsep}{ROOT}")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Of one process."""
    llm = LLM(**FEW)
    try:
        return tokens(llm)
    finally:
        llm.engine.close()


@contextmanager
def engine(ports: list[int], secret_file: str, **more: Any) -> Iterator[LLM]:
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    given = {"expert_transport": "handles", "expert_secret_file": secret_file, **more}
    llm = LLM(**FEW, experts=(addresses,), **given)
    try:
        assert llm.engine.stats.all2all_backend == "expert servers over shared memory"
        yield llm
    finally:
        llm.engine.close()


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, SHORT)]


def ports_of(servers: list[ExpertProcess]) -> list[int]:
    return [server.port for server in servers]


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (2, {"tp": 2, "micro_batches": 2}),
        (1, {"dp": 2, "num_speculative_tokens": 1}),
        pytest.param(1, {"tp": 2, "num_speculative_tokens": 1}, marks=[pytest.mark.longest]),
        pytest.param(2, {"dp": 2, "micro_batches": 2}, marks=[pytest.mark.longest]),
        pytest.param(2, {"tp": 2, "dp": 2}, marks=[pytest.mark.longest]),
    ],
    ids=str,
)
def test_tokens_are_one_process_s(
    count: int, more: dict[str, Any], secret_file: str, expected: list[list[int]]
) -> None:
    """The second time fewer requests: some ranks have no row, or nothing but padding."""
    with (
        serving(*(shared(slots, secret_file) for slots in SPREADS[count])) as servers,
        engine(ports_of(servers), secret_file, **more) as llm,
    ):
        assert tokens(llm) == expected
        assert llm.generate(TEXTS[0], SHORT)[0].outputs[0].token_ids == expected[0]
        calls = llm.engine.worker.remote.handles
        assert calls is not None
        assert len(calls.active) == count
        assert calls.epoch == 0, calls.failure


def test_what_one_rank_cannot_none_does(secret_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 could: it says why the other one cannot."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with serving(shared("all", secret_file)) as servers:
        found = rf"rank 1: 127\.0\.0\.1:{servers[0].port}: memory of cpu is not shared so"
        with (
            pytest.raises(ConfigError, match=rf"handles': {found}$"),
            engine(ports_of(servers), secret_file, tp=2),
        ):
            pass


@pytest.mark.longest
@pytest.mark.parametrize(
    ("killed", "more"),
    [
        (False, {"tp": 2, "micro_batches": 2}),
        (True, {"tp": 2}),
        pytest.param(True, {"dp": 2}, marks=[pytest.mark.longest]),
    ],
    ids=str,
)
def test_steps_that_are_told_whole(
    killed: bool,
    more: dict[str, Any],
    secret_file: str,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with captured graphs: a server has all calls of a rank's step while that rank waits for
    another one, which waits for its own calls at the same server."""
    monkeypatch.setenv(WHOLE_STEPS, "1")
    for owner, name, value in whole_steps():
        monkeypatch.setattr(owner, name, value)
    more = {**more, "precompile_kernels": False, "cudagraph_capture_sizes": (3,)}
    with (
        serving(shared("all", secret_file), shared("all", secret_file)) as servers,
        engine(ports_of(servers), secret_file, **more) as llm,
    ):
        assert tokens(llm) == expected
        assert llm.engine.worker.runner.graphs is not None
        assert llm.engine.worker.runner.graphs.called
        if killed:
            with in_a_step(llm, servers[0].kill):
                assert tokens(llm) == expected
            assert tokens(llm) == expected


@pytest.mark.longest
def test_a_server_that_is_killed_in_a_step_is_left_out_and_comes_back(
    secret_file: str, expected: list[list[int]]
) -> None:
    with (
        serving(shared("all", secret_file), shared("all", secret_file)) as servers,
        engine(ports_of(servers), secret_file, tp=2) as llm,
    ):
        linked(llm, 2)
        with in_a_step(llm, servers[0].kill):
            assert tokens(llm) == expected
        calls = llm.engine.worker.remote.handles
        assert calls is not None
        assert [link.address[1] for link in calls.active] == [servers[1].port]
        servers[0].start()
        servers[0].wait()
        linked(llm, 2)
        assert tokens(llm) == expected
        assert len(calls.active) == 2


@pytest.mark.longest
def test_a_server_that_is_stopped_in_a_step_and_goes_on_disturbs_nobody(
    secret_file: str, expected: list[list[int]]
) -> None:
    with (
        serving(shared("all", secret_file), shared("all", secret_file)) as servers,
        engine(ports_of(servers), secret_file, dp=2, expert_timeout=1.0) as llm,
    ):
        linked(llm, 2)
        with in_a_step(llm, lambda: servers[0].signal(signal.SIGSTOP)):
            assert tokens(llm) == expected
        servers[0].signal(signal.SIGCONT)
        assert tokens(llm) == expected
        linked(llm, 2)
        assert tokens(llm) == expected


class ProxyOfRanks(LinkProxy):
    """Knows which link is whose. links: of callers that are linked; kept_out: who may not be."""

    def __init__(self, port: int):
        self.links: dict[str, list[socket.socket]] = {}
        self.kept_out: set[str] = set()
        super().__init__(port, 0)

    def _link(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError, LinkError):
            self._message(far, near)
            self._message(near, far)
            self._message(far, near)
            caller = Join.unpack(self._message(near, far)).caller
            with self.lock:
                self.links.setdefault(caller, []).append(near)
                let_in = caller not in self.kept_out
            if let_in:
                threading.Thread(target=self._pass, args=(near, far), daemon=True).start()
                self._pass(far, near)
        shut(near)
        shut(far)

    def end_links(self, caller: str) -> None:
        with self.lock:
            self.kept_out.add(caller)
            for sock in self.links.pop(caller):
                shut(sock)

    def let_in(self, caller: str) -> None:
        with self.lock:
            self.kept_out.discard(caller)

    def other_than(self, caller: str) -> str:
        (found,) = (name for name in self.links if name not in ("", caller))
        return found


@contextmanager
def proxied(server: ExpertProcess) -> Iterator[ProxyOfRanks]:
    proxy = ProxyOfRanks(server.port)
    try:
        yield proxy
    finally:
        proxy.close()


@contextmanager
def in_a_step(llm: LLM, act: Any) -> Iterator[None]:
    """While another thread steps: `act` once the second step has begun on this rank."""
    runner = llm.engine.worker.runner
    launch = runner.launch
    count = itertools.count()

    def launched(*given: Any) -> Any:
        if next(count) == 1:
            thread.start()
        return launch(*given)

    thread = threading.Thread(target=act)
    runner.launch = launched  # type: ignore[method-assign]
    try:
        yield
    finally:
        runner.launch = launch  # type: ignore[method-assign]
        thread.join()


def reasons_of(llm: LLM) -> list[str]:
    """Why steps are given up from now on."""
    found: list[str] = []
    wait = llm.engine._wait_for_experts

    def noted(error: ExpertsMissing) -> None:
        found.append(str(error))
        wait(error)

    llm.engine._wait_for_experts = noted  # type: ignore[method-assign]
    return found


def stuck(llm: LLM, port: int) -> None:
    """Until this rank waits for that server."""
    calls = llm.engine.worker.remote.handles
    assert calls is not None
    (link,) = (link for link in calls.active if link.address[1] == port)
    assert link.handles is not None
    same = 0
    for _ in range(2000):
        heads = link.handles.heads.read(60)
        assert heads is not None
        same = same + 1 if any(answered != due for answered, due in heads) else 0
        if same == 50:
            return
        time.sleep(0.02)
    raise AssertionError("the server has answered all that it was told")


@pytest.mark.parametrize(
    ("rank", "more"),
    [
        (1, {"tp": 2}),
        (0, {"dp": 2}),
        pytest.param(0, {"tp": 2}, marks=[pytest.mark.longest]),
        pytest.param(1, {"dp": 2}, marks=[pytest.mark.longest]),
    ],
    ids=str,
)
def test_what_one_rank_loses_in_a_step_all_give_up(
    rank: int, more: dict[str, Any], secret_file: str, expected: list[list[int]]
) -> None:
    """The other one has its sums."""
    with (
        serving(shared("all", secret_file), shared("all", secret_file)) as servers,
        proxied(servers[0]) as proxy,
        engine([proxy.port, servers[1].port], secret_file, expert_timeout=60.0, **more) as llm,
    ):
        linked(llm, 2)
        calls = llm.engine.worker.remote.handles
        assert calls is not None
        caller = proxy.other_than(calls.caller) if rank else calls.caller
        reasons = reasons_of(llm)

        def lose() -> None:
            servers[0].signal(signal.SIGSTOP)
            stuck(llm, proxy.port)
            proxy.end_links(caller)
            time.sleep(0.2)
            servers[0].signal(signal.SIGCONT)

        with in_a_step(llm, lose):
            assert tokens(llm) == expected
        assert len(reasons) >= 1
        assert ("rank 1 " in reasons[0]) == (rank == 1), reasons
        assert len(calls.active) == 1 + rank
        proxy.let_in(caller)
        linked(llm, 2)
        assert tokens(llm) == expected


@pytest.mark.longest
def test_without_a_holder_on_one_rank_steps_are_given_up_until_it_is_back(
    secret_file: str, expected: list[list[int]]
) -> None:
    with (
        serving(shared("0-9", secret_file), shared("6-15", secret_file)) as servers,
        proxied(servers[1]) as proxy,
        engine([servers[0].port, proxy.port], secret_file, expert_wait=3.0, tp=2) as llm,
    ):
        calls = llm.engine.worker.remote.handles
        assert calls is not None
        assert tokens(llm) == expected
        caller = proxy.other_than(calls.caller)
        proxy.end_links(caller)
        with pytest.raises(ExpertsMissing, match="rank 1 found no holder of an expert"):
            llm.generate(PROMPTS, SHORT)
        threading.Timer(0.5, proxy.let_in, (caller,)).start()
        for _ in range(10):
            with suppress(ExpertsMissing):
                assert tokens(llm) == expected
                break
        else:
            raise AssertionError("rank 1 is not linked again")
        servers[1].kill()
        with pytest.raises(ExpertsMissing, match="no server holds 10-15 of layer"):
            llm.generate(TEXTS[0], SHORT)


@pytest.mark.longest
def test_an_interrupt_between_steps_leaves_both_sides_counting_alike(
    secret_file: str, expected: list[list[int]]
) -> None:
    """Steps on their way are abandoned by rank 0 alone, and run on every rank all the same."""
    with (
        serving(shared("all", secret_file)) as servers,
        engine(ports_of(servers), secret_file, tp=2, steps_in_flight=2) as llm,
    ):
        runner = llm.engine.worker.runner
        collect = runner.collect
        count = itertools.count()

        def interrupted(pending: Any) -> Any:
            if next(count) == 1:
                raise KeyboardInterrupt
            return collect(pending)

        runner.collect = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, SHORT)
        assert tokens(llm) == expected
        assert tokens(llm) == expected
