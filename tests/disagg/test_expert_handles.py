"""Experts in other processes over shared memory, which is files here, with kernels in Triton's
interpreter: the tokens of one process, whatever ends in between."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.emulation.triton_interpreter import DEVICE, needs_triton  # before kernels are defined

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE != "cpu", reason="runs in the interpreter"),
    pytest.mark.exhaustive(but_first=True),
]

from rorqual import LLM  # noqa: E402
from rorqual.disagg.experts.server import ExpertServer  # noqa: E402
from rorqual.errors import ConfigError, ExpertsMissing  # noqa: E402
from rorqual.parallel import cuda_ipc  # noqa: E402
from rorqual.parallel.remote import handles  # noqa: E402
from rorqual.parallel.remote.handles import HandleCalls  # noqa: E402
from rorqual.parallel.remote.wire import SharedCall, Step  # noqa: E402
from tests.disagg.expert_caller import Start  # noqa: E402
from tests.disagg.expert_processes import ExpertProcess, serving  # noqa: E402
from tests.disagg.shared_memory_process import whole_steps  # noqa: E402
from tests.engine.mixed_batch import COMMON, TEXTS, params  # noqa: E402
from tests.parallel.memfd_driver import MemfdDriver, no_device  # noqa: E402

MODULE = "tests.disagg.shared_memory_process"
# the interpreter takes a tenth of a second for a call
FEW = {**COMMON, "weights": "random", "num_layers": 4}
FLAGS = ("--weights", "random", "--num-layers", "4")
SHORT = params(max_tokens=5)
SPREADS = {1: ("all",), 2: ("0-9", "6-15"), 3: ("0-5,14", "6-11", "10-15,0")}


@pytest.fixture(autouse=True, scope="module")
def driver() -> Iterator[MemfdDriver]:
    driver = MemfdDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ipc, "driver", lambda: driver)
        patch.setattr(cuda_ipc, "on_device", no_device)
        patch.setattr(handles, "DEVICES", ("cpu",))
        yield driver
        gc.collect()  # what is mapped goes as it came


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    llm = LLM(**FEW)
    try:
        return tokens(llm)
    finally:
        llm.engine.close()


def tokens(llm: LLM, count: int = 4) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS[:count], SHORT)]


def shared(slots: str, secret_file: str, *more: str) -> ExpertProcess:
    return ExpertProcess(slots, secret_file, (*FLAGS, *more), MODULE)


@contextmanager
def engine(servers: list[ExpertProcess], secret_file: str, **more: Any) -> Iterator[LLM]:
    ports = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    given = {"expert_transport": "handles", "expert_secret_file": secret_file, **more}
    llm = LLM(**FEW, experts=(ports,), **given)
    try:
        yield llm
    finally:
        llm.engine.close()


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (2, {"micro_batches": 2}),
        (1, {}),
        (1, {"num_speculative_tokens": 1}),
        (3, {"micro_batches": 3}),
        (2, {"pipeline_turns": 2}),
        (1, {"pipeline_turns": 2, "num_speculative_tokens": 1}),
    ],
)
def test_tokens_are_one_process_s(
    count: int, more: dict[str, Any], secret_file: str, expected: list[list[int]]
) -> None:
    with (
        serving(*(shared(slots, secret_file) for slots in SPREADS[count])) as servers,
        engine(servers, secret_file, **more) as llm,
    ):
        assert llm.engine.stats.all2all_backend == "expert servers over shared memory"
        assert tokens(llm) == expected
        calls = llm.engine.worker.remote.handles
        assert calls is not None
        announced = [link.handles.announced for link in calls.active if link.handles is not None]
        assert len(announced) == count
        assert all(sum(rows) for rows in announced)


@pytest.mark.longest
@pytest.mark.exhaustive
def test_a_step_is_told_whole_before_it_is_replayed(
    secret_file: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with captured graphs, with what records nothing and computes anew in their place."""
    steps: list[Step] = []
    replay_step = HandleCalls.announce_step
    for owner, name, value in whole_steps():
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(
        HandleCalls,
        "announce_step",
        lambda self, step: (steps.append(step), replay_step(self, step)),
    )
    more = {"precompile_kernels": False, "cudagraph_capture_sizes": (4,)}
    with (
        serving(*(shared(slots, secret_file) for slots in SPREADS[2])) as servers,
        engine(servers, secret_file, **more) as llm,
    ):
        assert tokens(llm) == expected
    layers = (1, 2, 3)
    assert steps
    assert list(steps[0]) == [0]
    assert [call.layer for call in steps[0][0]] == list(layers)
    assert {call.rows for step in steps for call in step[0]} == {4}


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.longest
def test_a_step_with_prompts_is_told_whole_too(
    drafts: int, secret_file: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose pieces lie between attention: padded to so many tokens. A server is killed in one."""
    steps: list[Step] = []
    replay_step = HandleCalls.announce_step
    for owner, name, value in whole_steps():
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(
        HandleCalls,
        "announce_step",
        lambda self, step: (steps.append(step), replay_step(self, step)),
    )
    more = {
        "precompile_kernels": False,
        "cudagraph_capture_sizes": (4,),
        "piecewise_tokens": 12,
        "num_speculative_tokens": drafts,
    }
    with (
        serving(shared("all", secret_file), shared("all", secret_file)) as servers,
        engine(servers, secret_file, **more) as llm,
    ):
        linked(llm, 2)
        pieces = llm.engine.worker.runner.pieces
        assert pieces is not None
        assert pieces.sizes == [12]
        whole = {0: tuple(SharedCall(layer, 12) for layer in (1, 2, 3))}
        assert pieces.called == {12: whole}
        steps.clear()
        assert tokens(llm, 2) == expected[:2]
        assert steps.count(whole) >= 1
        llm.engine.scheduler.restart()  # prompts are not cached any more
        launch = llm.engine.worker.runner.launch

        def killed(*given: Any) -> Any:
            if servers[0].process is not None and servers[0].process.returncode is None:
                threading.Thread(target=servers[0].kill).start()
            return launch(*given)

        llm.engine.worker.runner.launch = killed  # type: ignore[method-assign]
        steps.clear()
        assert tokens(llm, 2) == expected[:2]
        assert steps.count(whole) >= 1
        assert len(llm.engine.worker.remote.handles.active) == 1  # type: ignore[union-attr]


def linked(llm: LLM, count: int) -> None:
    """Until so many servers are."""
    for _ in range(400):
        if len(llm.engine.worker.experts.links) == count:
            return
        time.sleep(0.05)
    raise AssertionError(llm.engine.worker.experts.describe())


@pytest.mark.exhaustive
def test_a_server_that_is_killed_in_a_step_is_left_out_and_comes_back(
    secret_file: str, expected: list[list[int]], driver: MemfdDriver
) -> None:
    with (
        serving(shared("all", secret_file), shared("all", secret_file)) as servers,
        engine(servers, secret_file) as llm,
    ):
        calls = llm.engine.worker.remote.handles
        assert calls is not None
        linked(llm, 2)
        stream = iter(llm.stream(TEXTS[0], SHORT))
        begun = list(itertools.islice(stream, 2))
        servers[0].kill()
        found = [token for delta in [*begun, *stream] for token in delta.token_ids]
        assert found == expected[0]
        assert [link.address[1] for link in calls.active] == [servers[1].port]
        assert calls.epoch > 0
        servers[0].start()
        servers[0].wait()
        linked(llm, 2)
        assert tokens(llm) == expected
        assert len(calls.active) == 2


@pytest.mark.exhaustive
def test_a_server_lost_while_a_step_begins_costs_no_token(
    secret_file: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may find it lost at any time."""
    with (
        serving(shared("all", secret_file), shared("all", secret_file)) as servers,
        engine(servers, secret_file) as llm,
    ):
        calls = llm.engine.worker.remote.handles
        assert calls is not None
        linked(llm, 2)
        write_tables = calls._write_tables
        lost = []

        def meanwhile_lost(links: Any) -> None:
            write_tables(links)
            if not lost:
                lost.append(calls.active[0])
                llm.engine.worker.experts.drop(lost[0], "found lost")

        monkeypatch.setattr(calls, "_write_tables", meanwhile_lost)
        calls.tabled = None
        assert tokens(llm, 1) == expected[:1]
        assert lost
        assert calls.epoch > 0


@pytest.mark.longest
@pytest.mark.exhaustive
def test_steps_in_turns_go_by_the_servers_they_began_with(
    secret_file: str, expected: list[list[int]]
) -> None:
    """One that joins gets another's number, one is killed, and holdings are read anew again and
    again, while a step stands where its rows are away."""
    first = shared("all", secret_file)
    second = shared("all", secret_file)
    late, here = sorted((first, second), key=lambda server: server.port)
    with (
        serving(first, second) as servers,
        engine(servers, secret_file, pipeline_turns=2) as llm,
    ):
        late.kill()
        linked(llm, 1)
        runner = llm.engine.worker.runner
        known = llm.engine.worker.experts
        calls = llm.engine.worker.remote.handles
        assert known is not None
        assert calls is not None
        assert runner.turns is not None
        midway: list[bool] = []
        finish_begun = runner._finish_begun
        launch = runner.launch

        def finish() -> None:
            midway.append(runner.turns.begun is not None)  # type: ignore[union-attr]
            finish_begun()

        def launched(*given: Any) -> Any:
            with known.changed:
                known.links = (*known.links,)
            return launch(*given)

        runner._finish_begun = finish  # type: ignore[method-assign]
        runner.launch = launched  # type: ignore[method-assign]
        assert tokens(llm) == expected
        assert any(midway)
        runner.launch = launch  # type: ignore[method-assign]
        late.start()
        for _ in range(100):
            assert tokens(llm, 2) == expected[:2]
            if len(calls.active) == 2:
                break
        assert [link.address[1] for link in calls.active] == [late.port, here.port]
        stream = iter(llm.stream(TEXTS[0], SHORT))
        begun = list(itertools.islice(stream, 2))
        late.kill()
        assert [t for delta in [*begun, *stream] for t in delta.token_ids] == expected[0]


@pytest.mark.exhaustive
@pytest.mark.longest
def test_a_stopped_server_that_goes_on_disturbs_nobody(
    secret_file: str, expected: list[list[int]]
) -> None:
    with (
        serving(shared("all", secret_file), shared("all", secret_file)) as servers,
        engine(servers, secret_file, expert_timeout=0.5) as llm,
    ):
        linked(llm, 2)
        stream = iter(llm.stream(TEXTS[0], SHORT))
        begun = list(itertools.islice(stream, 2))
        servers[0].signal(signal.SIGSTOP)
        found = [token for delta in [*begun, *stream] for token in delta.token_ids]
        assert found == expected[0]
        servers[0].signal(signal.SIGCONT)
        assert tokens(llm) == expected
        time.sleep(1)
        assert tokens(llm) == expected


@pytest.mark.longest
def test_without_a_holder_a_step_waits_and_is_given_up(secret_file: str) -> None:
    with (
        serving(shared("0-9", secret_file), shared("6-15", secret_file)) as servers,
        engine(servers, secret_file, expert_wait=0.5) as llm,
    ):
        servers[1].kill()
        with pytest.raises(ExpertsMissing, match="no server holds 10-15 of layer"):
            llm.generate(TEXTS[0], SHORT)
        servers[1].start()
        servers[1].wait()


@pytest.mark.longest
def test_two_engines_share_a_server(secret_file: str, expected: list[list[int]]) -> None:
    with (
        serving(shared("all", secret_file)) as servers,
        engine(servers, secret_file) as first,
    ):
        with engine(servers, secret_file) as second:
            assert tokens(second) == expected
            assert tokens(first) == expected
        assert tokens(first) == expected


def test_servers_that_share_nothing_are_called_over_sockets(start: Start, secret_file: str) -> None:
    """Where the caller asks for nothing else."""
    server: ExpertServer = start("all", weights="random", num_layers=4)
    address = f"127.0.0.1:{server.port}"
    options = {**FEW, "experts": (address,), "expert_secret_file": secret_file}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ipc, "driver", lambda: MemfdDriver("cuMemCreate"))
        with pytest.raises(ConfigError, match=r"handles.*no shared memory: cuMemCreate"):
            LLM(**options, expert_transport="handles")
    llm = LLM(**options)
    try:
        assert llm.engine.stats.all2all_backend == (
            "expert servers over tcp (memory of cpu is not shared so)"
        )
    finally:
        llm.engine.close()


@pytest.mark.longest
def test_a_server_that_lives_and_does_not_compute_is_left_out(
    secret_file: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of nothing, and so answers no step."""
    monkeypatch.setattr(handles, "STEP_SECONDS", 12.0)  # interpreted steps are slow
    with (
        serving(shared("all", secret_file), shared("all", secret_file)) as servers,
        engine(servers, secret_file) as llm,
    ):
        linked(llm, 2)
        calls = llm.engine.worker.remote.handles
        assert calls is not None
        calls.begin()
        calls.abandon()
        deaf = calls.active[0]
        plain = handles.send

        def send(sock: Any, kind: int, data: bytes) -> None:
            if deaf.handles is None or sock is not deaf.handles.sock:
                plain(sock, kind, data)

        monkeypatch.setattr(handles, "send", send)
        assert tokens(llm)[0] == expected[0]
        assert deaf not in calls.active
        assert not deaf.alive
