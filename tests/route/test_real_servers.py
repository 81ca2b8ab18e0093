"""The router before real servers: the tokens are those of one server undisturbed, whoever is
killed, stopped or restarted meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("fastapi")

from tests.child_process import stand_still
from tests.route.running import start_router
from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive

# A request must not be over when it is looked for: eager steps take three times as long.
ENGINE = ("--exe-mode", "eager", "--dtype", "float32", "--max-num-seqs", "8")
ENGINE += ("--max-model-len", "512", "--restart")
WORDS = ("captain", "ship", "said", "sister", "would", "not", "walk", "again", "the", "and")
BODIES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5, "top_p": 0.9},
    {"temperature": 1.0, "seed": 6, "presence_penalty": 0.5, "stop": [" whale"]},
    {"temperature": 0.7, "seed": 7, "n": 2},
    {"temperature": 0.0, "logprobs": 2},
]
LENGTH = 200


def body(number: int, **more: Any) -> dict[str, Any]:
    draw = random.Random(number)
    prompt = " ".join(draw.choices(WORDS, k=40))
    return {
        "model": "rorqual-bundled",
        "prompt": prompt,
        "max_tokens": LENGTH,
        "ignore_eos": True,
        **BODIES[number % len(BODIES)],
        **more,
    }


@dataclass
class Read:
    """Texts by choice, and where requested token ids; error: the code of what ended it before its
    end."""

    texts: dict[int, str]
    ends: dict[int, str]
    error: str | None = None
    ids: dict[int, list[int]] = field(default_factory=dict)


def stream(url: str, asked: dict[str, Any], seen: Callable[[int], None] = lambda n: None) -> Read:
    """seen: called after each event with how many there were."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({**asked, "stream": True}).encode(),
        {"content-type": "application/json"},
    )
    read = Read({}, {})
    done = False
    count = 0
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: "):
                assert line in (b"\n", b""), line
                continue
            if line == b"data: [DONE]\n":
                done = True
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                read.error = event["error"]["code"]
                continue
            for choice in event["choices"]:
                index = choice["index"]
                read.texts[index] = read.texts.get(index, "") + choice["text"]
                if choice.get("token_ids"):
                    read.ids.setdefault(index, []).extend(choice["token_ids"])
                if choice["finish_reason"]:
                    assert index not in read.ends
                    read.ends[index] = choice["finish_reason"]
            count += 1
            seen(count)
    assert done
    return read


@dataclass
class Cluster:
    router: Running
    servers: list[Running]

    def seen(self) -> None:
        """Until the router knows that all are ready."""
        wanted = [f'server_ready{{server="{server.url}"}} 1.0' for server in self.servers]
        self.router.wait_until(lambda: all(line in self.router.get("/metrics") for line in wanted))

    def stop_one_with_work(self) -> Running:
        """A server that has a request."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for server in self.servers:
                running = server.get("/stats")["engines"][0].get("running", 0)
                if running:
                    return server
        raise AssertionError("no server has had a request for 30 s")


def make_cluster(stack: ExitStack) -> Cluster:
    servers = [stack.enter_context(start_server(*ENGINE)) for _ in range(2)]
    urls = [word for server in servers for word in ("--replica", server.url)]
    router = stack.enter_context(
        start_router(*urls, "--health-interval", "0.1", "--policy", "round_robin")
    )
    router.wait_until(router.healthy)
    return Cluster(router, servers)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield make_cluster(stack)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> dict[int, Read]:
    """By number, from one server without a router."""
    return {number: stream(cluster.servers[0].url, body(number)) for number in range(5)}


@pytest.mark.longest
def test_it_is_only_in_the_way(cluster: Cluster, undisturbed: dict[int, Read]) -> None:
    for number, want in undisturbed.items():
        assert stream(cluster.router.url, body(number)) == want
        status, whole = cluster.router.request("POST", "/v1/completions", body(number))
        assert status == 200
        assert {one["index"]: one["text"] for one in whole["choices"]} == want.texts
    assert cluster.router.get("/v1/models")["data"][0]["id"] == "rorqual-bundled"
    status, answer = cluster.router.request("POST", "/v1/completions", {"prompt": 3})
    assert (status, "error" in answer) == (400, True)


@pytest.mark.parametrize(
    ("number", "after"), [pytest.param(0, 1, marks=pytest.mark.longest), (1, 20), (3, 30), (4, 10)]
)
def test_an_engine_is_killed_in_the_midst(
    cluster: Cluster, undisturbed: dict[int, Read], number: int, after: int
) -> None:
    """Few times: a server whose engine dies again and again ends."""
    for server in cluster.servers:
        server.wait_until(server.healthy)
    cluster.seen()

    def kill(count: int) -> None:
        if count == after:
            (pid,) = cluster.stop_one_with_work().engine_pids()
            os.kill(pid, signal.SIGKILL)

    assert stream(cluster.router.url, body(number), kill) == undisturbed[number]


def test_a_server_is_stopped_and_continued(cluster: Cluster, undisturbed: dict[int, Read]) -> None:
    """What it sends when it is awake again reaches nobody."""
    for server in cluster.servers:
        server.wait_until(server.healthy)
    cluster.seen()
    stopped: list[int] = []

    def stop(count: int) -> None:
        if count == 5:
            stopped.append(cluster.stop_one_with_work().pid)
            stand_still(stopped[0])

    try:
        assert stream(cluster.router.url, body(1), stop) == undisturbed[1]
    finally:
        os.kill(stopped[0], signal.SIGCONT)
    for server in cluster.servers:
        server.wait_until(lambda server=server: server.held_pages() == 0)


def killed(server: Running) -> None:
    """All of it at once, as by a machine that loses its power."""
    engines = server.engine_pids()
    for pid in (server.pid, *engines):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()


@pytest.mark.longest
def test_many_streams_while_servers_die_and_come_back(undisturbed: dict[int, Read]) -> None:
    """Everybody gets the tokens of an undisturbed server, or an error that says what happened."""
    done = threading.Event()
    problems: list[str] = []
    outcomes = Counter[str]()

    def trouble(cluster: Cluster, stack: ExitStack) -> None:
        turn = 0
        while not done.wait(0.5):
            old = cluster.servers[turn % 2]
            killed(old)
            new = stack.enter_context(start_server(*ENGINE, "--port", str(old.port)))
            new.wait_until(new.healthy)
            cluster.servers[turn % 2] = new
            outcomes["killed"] += 1
            turn += 1

    def ask(url: str, number: int) -> None:
        for turn in range(60):
            if outcomes["killed"] >= 3 and outcomes["whole"] >= 40:  # servers may start quickly
                return
            which = (number + turn) % 5
            try:
                read = stream(url, body(which))
            except urllib.error.HTTPError as error:
                outcomes["refused"] += 1
                if error.code not in (502, 503):
                    problems.append(f"status {error.code}: {error.read()[:200]!r}")
                continue
            outcomes[read.error or "whole"] += 1
            if read.error is None and read != undisturbed[which]:
                problems.append(f"{which}: {read} is not {undisturbed[which]}")
            elif read.error not in (None, "stream_lost"):
                problems.append(f"error {read.error}")

    with ExitStack() as stack:
        cluster = make_cluster(stack)
        killer = threading.Thread(target=trouble, args=(cluster, stack))
        askers = [threading.Thread(target=ask, args=(cluster.router.url, i)) for i in range(6)]
        for thread in (killer, *askers):
            thread.start()
        for thread in askers:
            thread.join()
        done.set()
        killer.join()
        print(dict(outcomes))
        assert problems == []
        assert outcomes["killed"] >= 3
        assert outcomes["whole"] >= 40
        for server in cluster.servers:
            server.wait_until(lambda server=server: server.held_pages() == 0)
        figures = cluster.router.get("/metrics")
        assert "rorqual_router_open_requests 0.0" in figures
        assert "rorqual_router_resumes_total 0.0" not in figures


@pytest.mark.longest
def test_prompts_and_answers_apart(tmp_path: Path, undisturbed: dict[int, Read]) -> None:
    """As README and docs/serving.md say, and one decode server more, which joins by itself."""
    secret = tmp_path / "kv-secret"
    secret.write_text("of all who exchange pages")
    admin = tmp_path / "router-secret"
    admin.write_text("of all who join the router")
    transfer = ("--kv-secret-file", str(secret))
    with ExitStack() as stack:
        prefill = stack.enter_context(
            start_server(*ENGINE[:-1], "--role", "prefill", "--kv-port", "0", *transfer)
        )
        peers = ("--role", "decode", "--kv-peers", "127.0.0.1", *transfer)
        first = stack.enter_context(start_server(*ENGINE[:-1], *peers))
        router = stack.enter_context(
            start_router(
                *("--prefill", prefill.url, "--decode", first.url, "--prefill-from", "20"),
                *("--admin-secret-file", str(admin), "--health-interval", "0.1"),
            )
        )
        router.wait_until(router.healthy)
        for number, want in undisturbed.items():
            assert stream(router.url, body(number)) == want
        assert 'prefills_total{outcome="ok"} 5.0' in router.get("/metrics")
        second = stack.enter_context(
            start_server(
                *ENGINE[:-1],
                *peers,
                *("--register", router.url, "--register-secret-file", str(admin)),
            )
        )
        router.wait_until(lambda: f'ready{{server="{second.url}"}} 1.0' in router.get("/metrics"))

        def kill(count: int) -> None:
            if count == 10:
                os.kill(first.pid, signal.SIGKILL)

        for engine in first.engine_pids():
            stack.callback(lambda engine=engine: _end(engine))
        assert stream(router.url, body(2), kill) == undisturbed[2]
        assert stream(router.url, body(3)) == undisturbed[3]
        os.kill(prefill.pid, signal.SIGKILL)
        assert stream(router.url, body(4)) == undisturbed[4]
        os.kill(second.pid, signal.SIGTERM)
        router.wait_until(lambda: second.url not in router.get("/metrics"))
        status, answer = router.request("POST", "/v1/completions", body(0))
        assert (status, answer["error"]["code"]) == (503, "no_server")


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
