"""A real server in a process of its own, for tests and measurements."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


class Running:
    """`pid` is the API process. Leaving the context ends it and whatever it started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path):
        self.process = process
        self.log = log
        self.pid = process.pid
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and decoded body; any status is an answer."""
        data = (
            None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        made = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json", **headers}, method=method
        )
        try:
            with urllib.request.urlopen(made, timeout=60) as answer:
                return answer.status, _decoded(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _decoded(error.read())

    def get(self, path: str) -> Any:
        status, body = self.request("GET", path)
        assert status == 200, (status, body)
        return body

    def wait_until(self, condition: Any, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, (
                f"the server ended with {self.process.returncode}:\n{self.text()}"
            )
            assert time.monotonic() < deadline, f"still waiting after {seconds} s:\n{self.text()}"
            time.sleep(0.02)

    def healthy(self) -> bool:
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def engine_pids(self) -> list[int]:
        return [engine["pid"] for engine in self.get("/server_info")["engines"]]

    def held_pages(self) -> int:
        return sum(engine["kv"]["used"] for engine in self.get("/stats")["engines"])

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:
            print(self.text())  # a failed test shows what the server said
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.unlink(missing_ok=True)


def start_server(
    *options: str, wait: bool = True, environment: dict[str, str] | None = None
) -> Running:
    """`rorqual serve` on a free port."""
    import tempfile

    handle, name = tempfile.mkstemp(prefix="rorqual-server-", suffix=".log")
    root = os.environ.get("PYTHONPATH", str(ROOT)).split(":")[0] or str(ROOT)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **(environment or {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "rorqual", "serve", "--port", "0", *options],
        stdout=handle,
        stderr=handle,
        env=env,
        cwd=root,
    )
    os.close(handle)
    server = Running(process, Path(name))
    try:
        if wait:
            server.wait_until(lambda: served_port(server))
            server.port = served_port(server)
    except BaseException:
        process.kill()
        raise
    return server


def served_port(server: Running) -> int:
    found = re.search(r"serving .* on http://\S+:(\d+)", server.text())
    return int(found[1]) if found else 0


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")
