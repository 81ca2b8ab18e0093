"""Engines killed and servers told to go while they are under load: every client hears of it, and
nothing of the server stays."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.attacks.victim import FILES, MEMORY
from tests.serve.footprint import Footprint, children, settle
from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive

OPTIONS = ("--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "4096")
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}


class Load:
    """So many clients, every other one with a stream, and what each of them was told in the
    end."""

    def __init__(self, server: Running, count: int, tokens: int):
        self.answers: list[bytes] = []
        self.server = server
        self.threads = [
            threading.Thread(target=self._ask, args=({**LONG, "max_tokens": tokens}, i % 2 == 0))
            for i in range(count)
        ]
        for thread in self.threads:
            thread.start()
        server.wait_until(lambda: self._open() == count)

    def _open(self) -> int:
        return self.server.get("/load")["server_load"]

    def _ask(self, body: dict[str, Any], stream: bool) -> None:
        data = json.dumps({**body, "stream": stream}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        said = b""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=120) as sock:
            sock.sendall(head.encode() + data)
            while part := sock.recv(1 << 16):
                said += part
        self.answers.append(said)

    def end(self, seconds: float) -> list[bytes]:
        """What everybody was told; all must have been within so many seconds."""
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a client still waits"
        return self.answers


def all_gone(pids: list[int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.longest
def test_an_engine_killed_again_and_again_leaves_nothing_open() -> None:
    """Three lives, each ended by SIGKILL under load; the fourth serves, and the API process has
    no more files open than with the first."""
    with start_server(*OPTIONS, "--restart") as server:
        small = {**LONG, "max_tokens": 3}
        assert server.request("POST", "/v1/completions", small)[0] == 200
        first = Footprint.of(server)
        for life in range(3):
            (engine,) = server.engine_pids()
            below = children(engine)
            load = Load(server, 40, 4000)
            os.kill(engine, signal.SIGKILL)
            answers = load.end(5)
            assert len(answers) == 40
            assert all(b"engine_dead" in said for said in answers), life
            server.wait_until(server.healthy, 90)
            all_gone([engine, *below])
        status, found = server.request("POST", "/v1/completions", small)
        assert status == 200, found
        assert settle(server) == []
        limits = {"api": MEMORY, "engine 0": 4 * MEMORY}  # a new process: as large as it likes
        deadline = time.monotonic() + 20
        while grown := Footprint.of(server).grown(first, FILES, limits):
            assert time.monotonic() < deadline, grown
            time.sleep(0.2)


def test_a_server_killed_under_load_takes_all_with_it() -> None:
    with start_server(*OPTIONS) as server:
        server.wait_until(lambda: len(children(server.pid)) >= 2)  # an engine, its compiler
        below = children(server.pid)
        load = Load(server, 30, 4000)
        server.process.kill()
        server.process.wait()
        for said in load.end(10):
            assert b"[DONE]" not in said
            assert b'"finish_reason":"length"' not in said
        all_gone(below)


def test_a_drain_under_load_ends_every_answer() -> None:
    """What was open when SIGTERM came is answered whole; what comes after is told to go."""
    with start_server(*OPTIONS, "--drain-seconds", "120") as server:
        below = children(server.pid)
        load = Load(server, 40, 60)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.request("GET", "/health")[0] == 503)
        refused = server.request("POST", "/v1/completions", {"prompt": "a"})
        assert refused[0] == 503
        assert refused[1]["error"]["code"] == "not_ready"
        answers = load.end(120)
        assert len(answers) == 40
        for said in answers:
            assert said.startswith(b"HTTP/1.1 200")
            assert b'"finish_reason":"length"' in said
            assert b'"error"' not in said
        assert sum(b"data: [DONE]" in said for said in answers) == 20
        assert server.process.wait(60) == 0
        all_gone(below)


def test_a_drain_that_takes_too_long_tells_everybody() -> None:
    with start_server(*OPTIONS, "--drain-seconds", "0.5") as server:
        below = children(server.pid)
        load = Load(server, 40, 4000)
        server.process.send_signal(signal.SIGTERM)
        answers = load.end(10)
        assert len(answers) == 40
        assert all(b"shutting_down" in said for said in answers)
        assert server.process.wait(60) == 0
        all_gone(below)
