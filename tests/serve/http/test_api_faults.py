"""What happens when something goes wrong or is too much: dead engines, clients that leave, full
queues, slow readers, wrong keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive

SMALL = (
    "--dtype",
    "float32",
    "--max-num-seqs",
    "4",
    "--max-model-len",
    "4096",
    "--no-structured-output",
)
KEY = "sesame"
LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}
SOONER = 5.0  # than the deadline of `small` would end a request
KILLED_SECONDS = 20.0  # until every request has heard of it, on a loaded machine


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """Room for 4 sequences and 2 more that wait; requests may take 6 seconds."""
    options = ("--max-waiting", "2", "--request-timeout", "6", "--client-seconds", "1")
    with start_server(*SMALL, *options) as running:
        yield running


def open_stream(
    server: Running, body: dict[str, Any], path: str = "/v1/completions", **headers: str
) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", server.port))
    data = json.dumps({**body, "stream": True}).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(data)}",
    ]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    return sock


def idle(server: Running) -> bool:
    engines = server.get("/stats")["engines"]
    return all(
        engine["open"] == engine["running"] == engine["waiting"] == engine["kv"]["used"] == 0
        for engine in engines
    )


def gone(pid: int) -> bool:
    return (
        not Path(f"/proc/{pid}").exists()
        or Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    )


def in_background(count: int, work: Any) -> list[threading.Thread]:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


# ---- clients that leave or cannot follow


def test_a_disconnect_frees_the_pages(small: Running):
    for _ in range(3):
        sock = open_stream(small, LONG)
        sock.recv(100)
        small.wait_until(lambda: small.held_pages() > 0)
        sock.close()
        small.wait_until(lambda: idle(small), SOONER)


def test_a_client_that_waits_for_the_whole_answer_and_leaves(small: Running):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(small.url + "/v1/completions", json=LONG, timeout=0.3)
    small.wait_until(lambda: idle(small), SOONER)


def test_deadline(small: Running):
    status, body = small.request("POST", "/v1/completions", {**LONG, "logprobs": 0})
    if status == 200:
        pytest.skip("this machine makes 4,000 tokens in 6 seconds")
    assert status == 504
    assert body["error"]["code"] == "request_timeout"
    small.wait_until(lambda: idle(small))


def test_a_full_queue_is_429_with_retry_after(small: Running):
    socks = [open_stream(small, LONG) for _ in range(6)]
    small.wait_until(lambda: small.get("/stats")["engines"][0]["open"] == 6)
    answer = httpx.post(small.url + "/v1/completions", json={"prompt": "a"}, timeout=10)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.headers["x-rorqual-error"] == answer.json()["error"]["code"] == "queue_full"
    for sock in socks:
        sock.close()
    small.wait_until(lambda: idle(small), SOONER)
    assert small.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


def test_a_body_that_never_comes(small: Running):
    with socket.create_connection(("127.0.0.1", small.port), timeout=10) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: "
            b"application/json\r\ncontent-length: 50\r\n\r\n{"
        )
        assert sock.recv(1000).startswith(b"HTTP/1.1 408")
    with socket.create_connection(("127.0.0.1", small.port), timeout=10) as sock:
        sock.sendall(b"GET /live HTT")
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1000) == b"", "cut off without an answer"


# ---- keys, and leaving


def test_keys_then_a_slow_reader_then_sigterm_drains():
    with start_server(
        *SMALL,
        "--drain-seconds",
        "90",
        "--max-buffered-tokens",
        "64",
        environment={"RORQUAL_API_KEY": KEY},
    ) as server:
        right = {"authorization": f"Bearer {KEY}"}
        paths = [
            path
            for path in server.request("GET", "/openapi.json", **right)[1]["paths"]
            if "{" not in path
        ]
        assert len(paths) > 8
        for path in [*paths, "/docs", "/openapi.json", "/v1/models/x", "/nowhere"]:
            expected = {200, 503} if path in ("/live", "/health") else {401}
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": KEY},
                {"authorization": "bearer é"},
            ):
                assert server.request("GET", path, **headers)[0] in expected, path
        assert server.request("GET", "/health")[0] == 200
        assert KEY not in server.text()
        info = server.request("GET", "/server_info", **right)[1]
        assert KEY not in json.dumps(info)
        _check_slow_reader(server, right)
        _check_drain(server, info["engines"][0]["pid"], right)


def _check_slow_reader(server: Running, headers: dict[str, str]) -> None:
    """Cut off, and nobody is held up. Log probabilities fill the socket's buffers, so that the
    server notices."""

    def busy() -> bool:
        engine = server.request("GET", "/stats", **headers)[1]["engines"][0]
        return engine["open"] + engine["running"] + engine["kv"]["used"] > 0

    body = {
        "messages": [{"role": "user", "content": "a"}],
        "logprobs": True,
        "top_logprobs": 20,
        "ignore_eos": True,
        "n": 2,
    }
    sock = open_stream(server, body, "/v1/chat/completions", **headers)
    assert (
        server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 5}, **headers)[0]
        == 200
    )
    server.wait_until(lambda: not busy(), 60)
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 20):
            received += part
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received, "an ending without a last event is a cut"
    sock.close()


def _check_drain(server: Running, engine: int, headers: dict[str, str]) -> None:
    done: list[int] = []
    body = {**LONG, "max_tokens": 300}
    threads = in_background(
        2, lambda: done.append(server.request("POST", "/v1/completions", body, **headers)[0])
    )
    server.wait_until(
        lambda: server.request("GET", "/stats", **headers)[1]["engines"][0]["open"] == 2
    )
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: server.request("GET", "/health")[0] == 503)
    assert server.request("POST", "/v1/completions", {"prompt": "a"}, **headers)[0] == 503
    for thread in threads:
        thread.join()
    assert done == [200, 200]
    assert server.process.wait(60) == 0
    assert gone(engine), "nobody is left behind"


# ---- engines that die


async def killed_under_load(server: Running) -> list[tuple[float, str]]:
    """Streams and plain requests under way when the engine is killed: seconds from then to each
    one's end, and what it was."""
    pid = server.engine_pids()[0]
    ends: list[tuple[float, str]] = []
    killed = 0.0
    started = 0

    async def one(client: httpx.AsyncClient, stream: bool) -> None:
        nonlocal started
        async with client.stream(
            "POST", server.url + "/v1/completions", json={**LONG, "stream": stream}
        ) as answer:
            started += 1
            text = "".join([part async for part in answer.aiter_text()])
        ends.append((time.monotonic() - killed, f"{answer.status_code} {'engine_dead' in text}"))

    async with httpx.AsyncClient(timeout=30) as client:
        tasks = [asyncio.create_task(one(client, i % 2 == 0)) for i in range(8)]
        while started < 2:
            await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        await asyncio.gather(*tasks)
    return ends


def test_kill_9_ends_every_request_and_the_server():
    with start_server(*SMALL) as server:
        ends = asyncio.run(killed_under_load(server))
        assert len(ends) == 8
        assert max(seconds for seconds, _ in ends) < KILLED_SECONDS
        assert {what for _, what in ends} == {"200 True", "500 True"}
        assert server.request("GET", "/health")[0] == 503
        assert server.request("GET", "/live")[0] == 200
        assert server.request("POST", "/v1/completions", {"prompt": "a"})[0] == 503
        assert server.process.wait(60) == 1


def test_kill_9_with_restart_answers_again_and_no_engine_outlives_its_server():
    with start_server(*SMALL, "--restart") as server:
        before = server.engine_pids()
        ends = asyncio.run(killed_under_load(server))
        assert max(seconds for seconds, _ in ends) < KILLED_SECONDS
        assert not server.healthy()
        server.wait_until(server.healthy, 90)
        (engine,) = server.engine_pids()
        assert [engine] != before
        assert server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200
        assert "rorqual:engine_restarts_total 1.0" in server.request("GET", "/metrics")[1]
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 60
        while not gone(engine):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_mistake_only_the_engine_sees_is_one_sentence():
    with start_server("--max-model-len", "1000000", "--no-structured-output", wait=False) as server:
        assert server.process.wait(60) == 2
        assert "4096 positions" in server.text()
        assert "Traceback" not in server.text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tool_format": "xml"}, "tool_format='xml'"),
        ({"reasoning": "maybe"}, "reasoning='maybe'"),
        ({"replicas": 0}, "replicas=0"),
        ({"port": 70000}, "port=70000"),
        ({"model": "/nowhere/at/all"}, "neither a folder"),
        ({"host": "no.such.address.invalid"}, "cannot listen"),
    ],
)
def test_mistakes_at_the_start_are_named(given: dict[str, Any], words: str):
    from rorqual.errors import RorqualError
    from rorqual.serve.launch import ServeConfig, run

    with pytest.raises(RorqualError, match=words):
        run(ServeConfig(**given), "0")


def test_limits_are_checked():
    from rorqual.errors import ConfigError
    from rorqual.serve.limits import ServerLimits

    for given in ({"n": 0}, {"body": 0}, {"waiting": -1}, {"timeout": 0.0}, {"drain": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(given))):
            ServerLimits(**given)


def test_a_port_in_use_is_said_at_once(small: Running):
    from rorqual.errors import ConfigError
    from rorqual.serve.launch import ServeConfig, run

    with pytest.raises(ConfigError, match="cannot listen"):
        run(ServeConfig(port=small.port), "0")


# ---- several engines


def test_replicas_share_the_work_and_prefixes_find_their_engine():
    with start_server(*SMALL, "--replicas", "2", "--restart", "--drain-seconds", "0.3") as server:
        assert len(set(server.engine_pids())) == 2
        done: list[int] = []
        threads = in_background(
            8,
            lambda: done.append(
                server.request("POST", "/v1/completions", {**LONG, "max_tokens": 100})[0]
            ),
        )
        for thread in threads:
            thread.join()
        assert done == [200] * 8
        server.wait_until(
            lambda: (
                sum(e["finished"].get("length", 0) for e in server.get("/stats")["engines"]) == 8
            ),
            5,
        )
        assert all(
            engine["finished"].get("length", 0) >= 2 for engine in server.get("/stats")["engines"]
        )
        _check_prefixes(server)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        server.wait_until(lambda: not server.healthy())
        assert (
            server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        ), "the other engine still serves"
        _check_bounded_drain(server)


def _check_prefixes(server: Running) -> None:
    cached = []
    for _ in range(3):
        body = server.request(
            "POST", "/v1/completions", {"prompt": list(range(3, 403)), "max_tokens": 1}
        )[1]
        cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert min(cached[1:]) >= 384


def _check_bounded_drain(server: Running) -> None:
    """SIGTERM does not wait for ever."""
    done: list[int] = []
    threads = in_background(
        1, lambda: done.append(server.request("POST", "/v1/completions", LONG)[0])
    )
    server.wait_until(lambda: sum(e["open"] for e in server.get("/stats")["engines"]) == 1)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert done == [503]
    assert server.process.wait(60) == 0
