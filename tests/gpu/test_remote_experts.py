"""Expert servers on a card, and an engine on the same card that calls them, over sockets and over
shared memory. Where there are two cards, the servers are on the second as well."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual import LLM
from rorqual.bench.comm.handle_hop import HandleHopSetup, bench
from tests.disagg.expert_processes import ExpertProcess, write_secret
from tests.engine.mixed_batch import COMMON, TEXTS, params
from tests.gpu.choice import rarely

OPTIONS: dict[str, Any] = {**COMMON, "device": "cuda"}


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_secret(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def servers(secret_file: str) -> Iterator[list[ExpertProcess]]:
    """Every expert has a holder if one of these ends."""
    made = [
        ExpertProcess(slots, secret_file, more=("--device", "cuda")) for slots in ("all", "all")
    ]
    try:
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.kill()


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, params())]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    llm = LLM(**OPTIONS)
    try:
        return tokens(llm)
    finally:
        llm.engine.close()


@pytest.mark.parametrize("more", [*rarely({}), {"micro_batches": 2, "num_speculative_tokens": 1}])
def test_tokens_are_one_process_s_also_when_a_server_is_killed(
    more: dict[str, Any],
    servers: list[ExpertProcess],
    secret_file: str,
    expected: list[list[int]],
) -> None:
    ports = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    more = {"expert_transport": "tcp", **more}
    llm = LLM(**OPTIONS, **more, experts=(ports,), expert_secret_file=secret_file)
    try:
        assert tokens(llm) == expected
        stream = iter(llm.stream(TEXTS[0], params()))
        begun = list(itertools.islice(stream, 5))
        servers[0].kill()
        assert [token for delta in [*begun, *stream] for token in delta.token_ids] == expected[0]
        assert tokens(llm) == expected
        servers[0].start()
        servers[0].wait()
        assert tokens(llm) == expected
    finally:
        llm.engine.close()


OTHERS = ["cuda:0", "cuda:1"][: min(2, torch.cuda.device_count())]
SHORT = params(max_tokens=8)  # processes on one card take turns of milliseconds


def linked(llm: LLM, count: int) -> None:
    """Until so many servers are."""
    servers = llm.engine.worker.experts
    assert servers is not None
    for _ in range(600):
        if len(servers.links) == count:
            return
        time.sleep(0.05)
    raise AssertionError(servers.describe())


def short(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, SHORT)]


@pytest.fixture(scope="module", params=OTHERS)
def shared_servers(
    request: pytest.FixtureRequest, secret_file: str
) -> Iterator[list[ExpertProcess]]:
    made = [
        ExpertProcess(slots, secret_file, more=("--device", request.param))
        for slots in ("all", "all")
    ]
    try:
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.signal(signal.SIGCONT)
            server.kill()


@pytest.mark.parametrize("device", OTHERS)
@pytest.mark.parametrize("servers", [*rarely(1), 2])
def test_rows_come_back_right(device: str, servers: int) -> None:
    """By one program a row, by several of both widths, and at two servers."""
    setup = HandleHopSetup(
        (1, 8, 64, 256), servers, repeats=1, hops=5, device="cuda:0", server_device=device
    )
    assert [hop for hop in bench(setup) if not hop.right] == []


def by_handles(servers: list[ExpertProcess], secret_file: str, **more: Any) -> LLM:
    ports = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return LLM(
        **OPTIONS,
        **more,
        experts=(ports,),
        expert_secret_file=secret_file,
        expert_transport="handles",
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"exe_mode": "eager"},
        {"micro_batches": 2, "num_speculative_tokens": 1},
        {"piecewise_tokens": 64, "num_speculative_tokens": 1},
        {"pipeline_turns": 2},
    ],
    ids=str,
)
def test_over_shared_memory_tokens_are_one_process_s(
    more: dict[str, Any],
    shared_servers: list[ExpertProcess],
    secret_file: str,
    expected: list[list[int]],
) -> None:
    llm = by_handles(shared_servers, secret_file, **more)
    try:
        linked(llm, 2)
        worker = llm.engine.worker
        eager = "exe_mode" in more or "pipeline_turns" in more
        assert (worker.runner.graphs is not None) == (not eager)
        assert (worker.runner.pieces is not None) == ("piecewise_tokens" in more)
        begun = [found[:8] for found in expected]
        assert short(llm) == begun
        assert short(llm) == begun
        assert worker.remote.handles is not None
        assert worker.remote.handles.epoch == 0, worker.remote.handles.failure
    finally:
        llm.engine.close()


def test_a_server_killed_in_a_captured_step_is_left_out(
    shared_servers: list[ExpertProcess], secret_file: str, expected: list[list[int]]
) -> None:
    """Its memory stays mapped here, so the step's writes into it go on; and the step is done
    again."""
    llm = by_handles(shared_servers, secret_file)
    try:
        linked(llm, 2)
        assert short(llm) == [found[:8] for found in expected]
        stream = iter(llm.stream(TEXTS[0], params()))
        begun = list(itertools.islice(stream, 5))
        shared_servers[0].kill()
        found = [token for delta in [*begun, *stream] for token in delta.token_ids]
        assert found == expected[0]
        linked(llm, 1)
        shared_servers[0].start()
        shared_servers[0].wait()
        linked(llm, 2)
        assert short(llm) == [found[:8] for found in expected]
    finally:
        llm.engine.close()


def test_a_server_that_is_stopped_and_goes_on_disturbs_nobody(
    shared_servers: list[ExpertProcess], secret_file: str, expected: list[list[int]]
) -> None:
    llm = by_handles(shared_servers, secret_file, expert_timeout=0.5)
    try:
        linked(llm, 2)
        stream = iter(llm.stream(TEXTS[0], params()))
        begun = list(itertools.islice(stream, 5))
        shared_servers[0].signal(signal.SIGSTOP)
        found = [token for delta in [*begun, *stream] for token in delta.token_ids]
        assert found == expected[0]
        shared_servers[0].signal(signal.SIGCONT)
        assert short(llm) == [found[:8] for found in expected]
        linked(llm, 2)
        assert short(llm) == [found[:8] for found in expected]
    finally:
        llm.engine.close()


two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def server_on_each_card(secret_file: str) -> Iterator[list[ExpertProcess]]:
    made = [
        ExpertProcess("all", secret_file, more=("--device", device))
        for device in ("cuda:0", "cuda:1")
    ]
    try:
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.signal(signal.SIGCONT)
            server.kill()


@two_cards
@pytest.mark.parametrize(
    "more",
    [{"tp": 2}, {"dp": 2, "micro_batches": 2, "num_speculative_tokens": 1}],
    ids=str,
)
def test_two_ranks_give_one_process_s_tokens(
    more: dict[str, Any],
    server_on_each_card: list[ExpertProcess],
    secret_file: str,
    expected: list[list[int]],
) -> None:
    """Captured steps, whose waits for servers and for the other rank are in one graph."""
    llm = by_handles(server_on_each_card, secret_file, **more)
    try:
        linked(llm, 2)
        worker = llm.engine.worker
        assert llm.engine.stats.all2all_backend == "expert servers over shared memory"
        assert worker.runner.graphs is not None
        begun = [found[:8] for found in expected]
        assert short(llm) == begun
        assert short(llm) == begun
        assert worker.remote.handles is not None
        assert worker.remote.handles.epoch == 0, worker.remote.handles.failure
    finally:
        llm.engine.close()


@two_cards
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_two_ranks_give_up_a_captured_step_together(
    blow: signal.Signals,
    server_on_each_card: list[ExpertProcess],
    secret_file: str,
    expected: list[list[int]],
) -> None:
    lost = server_on_each_card[0]
    llm = by_handles(server_on_each_card, secret_file, tp=2, expert_timeout=0.5)
    try:
        linked(llm, 2)
        stream = iter(llm.stream(TEXTS[0], params()))
        begun = list(itertools.islice(stream, 5))
        lost.signal(blow)
        found = [token for delta in [*begun, *stream] for token in delta.token_ids]
        assert found == expected[0]
        if blow is signal.SIGKILL:
            lost.restart()
        else:
            lost.signal(signal.SIGCONT)
        linked(llm, 2)
        assert short(llm) == [found[:8] for found in expected]
    finally:
        lost.signal(signal.SIGCONT)
        llm.engine.close()
