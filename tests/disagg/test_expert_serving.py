"""`rorqual serve --role attention` before `rorqual experts`, as the README starts them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.disagg.expert_processes import ExpertProcess, write_secret
from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive
ASKED = {
    "model": "rorqual-bundled",
    "prompt": "In the beginning",
    "max_tokens": 32,
    "temperature": 0,
    "ignore_eos": True,
}
HEALTH_SECONDS = 5  # within which /health knows of experts that came or went
ENGINE = ("--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512", "--threads", "1")


@pytest.fixture(scope="module")
def expected() -> str:
    with start_server(*ENGINE) as server:
        return text(server)


@pytest.fixture
def experts(tmp_path: Path) -> Iterator[list[ExpertProcess]]:
    secret = write_secret(tmp_path)
    made = [ExpertProcess(slots, secret, fork=False) for slots in ("0-9", "6-15,0-5")]
    try:
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.kill()


@pytest.fixture
def server(experts: list[ExpertProcess], tmp_path: Path) -> Iterator[Running]:
    ports = ",".join(f"127.0.0.1:{one.port}" for one in experts)
    secret = ("--expert-secret-file", str(tmp_path / "secret"))
    waits = ("--expert-timeout", "1", "--expert-wait", "2")
    with start_server(
        *ENGINE, "--role", "attention", "--experts", ports, *secret, *waits
    ) as running:
        yield running


def text(server: Running) -> str:
    status, answer = server.request("POST", "/v1/completions", ASKED)
    assert status == 200, answer
    found: str = answer["choices"][0]["text"]
    return found


def metric(server: Running, name: str) -> list[float]:
    lines = server.get("/metrics").splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(f"rorqual:{name}" + "{")]


@pytest.mark.longest
def test_several_ranks_live_on_without_their_experts(
    experts: list[ExpertProcess], tmp_path: Path, expected: str
) -> None:
    """Killed, started again, stopped and continued: 503 or the right text, and always the same
    server."""
    ports = ",".join(f"127.0.0.1:{one.port}" for one in experts)
    secret = ("--expert-secret-file", str(tmp_path / "secret"))
    waits = ("--expert-timeout", "1", "--expert-wait", "2", "--tp", "2")
    with start_server(
        *ENGINE, "--role", "attention", "--experts", ports, *secret, *waits
    ) as running:
        assert text(running) == expected
        for one in experts:
            one.kill()
        status, answer = running.request("POST", "/v1/completions", ASKED)
        error: Any = answer["error"]
        assert (status, error["code"]) == (503, "experts_missing"), answer
        for one in experts:
            one.start()
            one.wait()
        running.wait_until(lambda: metric(running, "expert_server_up") == [1.0, 1.0])
        assert text(running) == expected
        pause = threading.Thread(target=experts[1].pause, args=(1.5,))
        pause.start()
        assert text(running) == expected
        pause.join()
        running.wait_until(lambda: metric(running, "expert_server_up") == [1.0, 1.0])
        assert text(running) == expected
        assert metric(running, "engine_restarts") in ([], [0.0])


def test_health_follows_the_experts(server: Running, experts: list[ExpertProcess]) -> None:
    """Without a request, which would notice as well."""
    assert server.healthy()
    experts[0].kill()
    server.wait_until(lambda: sorted(metric(server, "expert_server_up")) == [0.0, 1.0])
    assert server.healthy(), "the second holds all"
    experts[1].kill()
    server.wait_until(lambda: not server.healthy(), HEALTH_SECONDS)
    status, answer = server.request("GET", "/health")
    assert status == 503
    assert "no server holds" in answer["error"]["message"]
    status, answer = server.request("POST", "/v1/completions", ASKED)
    assert (status, answer["error"]["code"]) == (503, "experts_missing")
    assert not server.healthy()
    for one in experts:
        one.start()
        one.wait()
    server.wait_until(server.healthy, HEALTH_SECONDS)
    assert text(server)


@pytest.mark.longest
def test_servers_come_and_go_under_a_server(
    server: Running, experts: list[ExpertProcess], expected: str
) -> None:
    """The second holds all, the first does not."""
    assert text(server) == expected
    server.wait_until(lambda: metric(server, "expert_server_up") == [1.0, 1.0])
    assert all(metric(server, "expert_server_call_seconds"))
    experts[0].kill()
    assert text(server) == expected
    server.wait_until(lambda: sorted(metric(server, "expert_server_up")) == [0.0, 1.0])
    experts[1].kill()
    began = time.monotonic()
    status, answer = server.request("POST", "/v1/completions", ASKED)
    assert 1.5 < time.monotonic() - began < 30
    error: Any = answer["error"]
    assert (status, error["code"]) == (503, "experts_missing")
    assert "no server holds expert" in error["message"]
    for one in experts:
        one.start()
        one.wait()
    server.wait_until(lambda: metric(server, "expert_server_up") == [1.0, 1.0])
    assert text(server) == expected
