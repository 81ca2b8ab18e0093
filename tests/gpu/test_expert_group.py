"""Expert servers on cards of their own that are called by messages of an NCCL group: two cards for
one server, three for two."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)
pytest.importorskip("triton")

from rorqual import LLM
from rorqual.bench.comm.group_hop import bench
from rorqual.bench.comm.handle_hop import HandleHopSetup
from rorqual.errors import ConfigError
from tests.disagg.expert_processes import ExpertProcess, serving, write_secret
from tests.engine.mixed_batch import COMMON, TEXTS, params

OPTIONS: dict[str, Any] = {**COMMON, "device": "cuda:0"}
OVER_NCCL = "expert servers in a process group over nccl"
COUNTS = [
    pytest.param(count, marks=pytest.mark.skipif(torch.cuda.device_count() <= count, reason="GPUs"))
    for count in (1, 2)
]


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_secret(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    llm = LLM(**OPTIONS)
    try:
        return tokens(llm)
    finally:
        llm.engine.close()


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, params())]


@pytest.fixture(scope="module")
def cards(secret_file: str) -> Iterator[list[ExpertProcess]]:
    """A server on each card but the first, as many as a test may want. It takes longer to start one
    than to run a test."""
    made = [
        ExpertProcess("all", secret_file, more=("--device", f"cuda:{number}"))
        for number in range(1, min(3, torch.cuda.device_count()))
    ]
    with serving(*made) as servers:
        yield servers


@contextmanager
def engine(servers: list[ExpertProcess], secret_file: str, **more: Any) -> Iterator[LLM]:
    ports = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    given = {"expert_transport": "group", "expert_secret_file": secret_file, **more}
    try:
        llm = LLM(**OPTIONS, experts=(ports,), **given)
    except BaseException:
        print_logs(servers)
        raise
    try:
        yield llm
    except BaseException:
        print_state(llm)
        print_logs(servers)
        raise
    finally:
        llm.engine.close()


def print_logs(servers: list[ExpertProcess]) -> None:
    for server in servers:
        print(f"---- the server at port {server.port}\n{server.log_end()}")


def print_state(llm: LLM) -> None:
    """What is needed to say where it stopped. On another thread: the device may not answer."""
    calls = llm.engine.worker.remote.group
    assert calls is not None
    print(f"---- over: {calls.over!r}; failure: {calls.failure!r}; epoch {calls.epoch}")
    print(llm.engine.worker.remote.servers.describe())

    def counts() -> None:
        for number, lane in enumerate(calls.lanes):
            sent, received = lane.counts.tolist()
            print(f"lane {number}: announced {lane.announced}, sent {sent}, received {received}")
        print(f"report {calls.sent.tolist()}")

    thread = threading.Thread(target=counts, daemon=True)
    thread.start()
    thread.join(10)
    if thread.is_alive():
        print("the device does not answer")


def linked(llm: LLM, count: int) -> None:
    """Until so many servers are."""
    servers = llm.engine.worker.experts
    assert servers is not None
    for _ in range(600):
        if len(servers.links) == count:
            return
        time.sleep(0.05)
    raise AssertionError(servers.describe())


@pytest.mark.parametrize("servers", COUNTS)
def test_rows_come_back_right(servers: int) -> None:
    setup = HandleHopSetup(
        (1, 8, 64, 256),
        servers,
        repeats=1,
        hops=5,
        device="cuda:0",
        server_device="cuda:1",
        own_gpus=True,
    )
    assert [hop for hop in bench(setup) if not hop.right] == []


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "more",
    [
        {"exe_mode": "eager"},
        {},
        {"fp8_dispatch": False, "micro_batches": 2, "num_speculative_tokens": 1},
        {"exe_mode": "eager", "micro_batches": 2},
    ],
    ids=str,
)
def test_tokens_are_one_process_s(
    more: dict[str, Any],
    count: int,
    cards: list[ExpertProcess],
    secret_file: str,
    expected: list[list[int]],
) -> None:
    """A server has one caller after the other."""
    with engine(cards[:count], secret_file, **more) as llm:
        worker = llm.engine.worker
        assert (worker.runner.graphs is not None) == (more.get("exe_mode") != "eager")
        assert tokens(llm) == expected
        assert tokens(llm) == expected
        assert llm.engine.stats.all2all_backend == OVER_NCCL


def test_a_server_killed_in_a_captured_step_ends_the_group_and_no_request(
    cards: list[ExpertProcess], secret_file: str, expected: list[list[int]]
) -> None:
    """Communicators are aborted while graphs with their calls are there, and go with these."""
    lost = cards[0]
    with engine(cards[:1], secret_file) as llm:
        assert tokens(llm) == expected
        stream = iter(llm.stream(TEXTS[0], params()))
        begun = list(itertools.islice(stream, 3))
        lost.restart()
        found = [token for delta in [*begun, *stream] for token in delta.token_ids]
        assert found == expected[0]
        assert llm.engine.worker.runner.graphs is None
        assert llm.engine.stats.all2all_backend.startswith("expert servers over tcp (")
        assert tokens(llm) == expected
        calls = llm.engine.worker.remote.group
        assert calls is not None
        assert calls.watch is not None
        calls.watch.join(30)
        assert not calls.watch.is_alive()


def test_a_stopped_server_that_goes_on_disturbs_nobody(
    cards: list[ExpertProcess], secret_file: str, expected: list[list[int]]
) -> None:
    """The next engine has a group with it again."""
    stopped = cards[0]
    with engine(cards[:1], secret_file, expert_timeout=0.5, expert_wait=60.0) as llm:
        stream = iter(llm.stream(TEXTS[0], params()))
        begun = list(itertools.islice(stream, 3))
        stopped.signal(signal.SIGSTOP)
        linked(llm, 0)
        stopped.signal(signal.SIGCONT)
        found = [token for delta in [*begun, *stream] for token in delta.token_ids]
        assert found == expected[0]
        assert tokens(llm) == expected
        assert "silent for 0.5 s" in llm.engine.stats.all2all_backend
    with engine(cards[:1], secret_file) as llm:
        assert tokens(llm) == expected
        assert llm.engine.stats.all2all_backend == OVER_NCCL


def test_two_ranks_on_one_card_are_refused(secret_file: str) -> None:
    with (
        serving(ExpertProcess("all", secret_file, more=("--device", "cuda:0"))) as servers,
        pytest.raises(ConfigError, match="expert_transport='group' over nccl") as raised,
        engine(servers, secret_file),
    ):
        pass
    assert "Duplicate GPU" in str(raised.value)
