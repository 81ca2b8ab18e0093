"""etcd for tests: the real one, where it is installed, and one in this process that says the same
to what we ask. Both can be stopped, emptied, and put to sleep."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.child_process import stand_still


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class RealEtcd:
    def __init__(self, folder: Path):
        self.folder = folder
        self.port = free_port()
        self.peer = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"

    def start(self) -> None:
        url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [
                "etcd",
                *("--data-dir", str(self.folder / "data"), "--log-level", "error"),
                *("--listen-client-urls", url, "--advertise-client-urls", url),
                *("--listen-peer-urls", f"http://127.0.0.1:{self.peer}"),
                *("--unsafe-no-fsync",) * _knows_no_fsync(),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while True:
            with suppress(OSError):
                self.ask("kv/range", {"key": _encoded(b"x")})
                return
            assert time.monotonic() < deadline, "etcd does not start"
            time.sleep(0.05)

    def ask(self, path: str, fields: dict[str, Any]) -> Any:
        url = f"http://127.0.0.1:{self.port}/v3/{path}"
        request = urllib.request.Request(url, json.dumps(fields).encode())
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.loads(answer.read())

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wipe(self) -> None:
        shutil.rmtree(self.folder / "data")

    def sleep(self) -> None:
        assert self.process is not None
        stand_still(self.process.pid)

    def wake(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)


def _knows_no_fsync() -> bool:
    done = subprocess.run(["etcd", "--help"], capture_output=True, text=True)
    return "unsafe-no-fsync" in done.stdout + done.stderr


class FakeEtcd:
    def __init__(self) -> None:
        self.port = free_port()
        self.wipe()
        self.server: ThreadingHTTPServer | None = None
        self.awake = threading.Event()
        self.awake.set()

    @property
    def address(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"

    def wipe(self) -> None:
        self.lock = threading.Condition()
        self.revision = 1
        self.kept: dict[str, tuple[str, str]] = {}  # value and lease by key, in base64
        self.leases: dict[str, tuple[int, float]] = {}  # seconds, and when it ends
        self.events: list[tuple[int, dict[str, Any]]] = []

    def start(self) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                fields = json.loads(self.rfile.read(size))
                fake.awake.wait()
                if self.path == "/v3/watch":
                    fake.watch(fields["create_request"], self)
                    return
                status, found = fake.answer(self.path.removeprefix("/v3/"), fields)
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.wake()
        if self.server is not None:
            server, self.server = self.server, None
            server.shutdown()
            server.server_close()

    def sleep(self) -> None:
        self.awake.clear()

    def wake(self) -> None:
        self.awake.set()

    def ask(self, path: str, fields: dict[str, Any]) -> Any:
        return self.answer(path, fields)[1]

    def answer(self, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self._end_leases()
            gone = (404, {"error": "etcdserver: requested lease not found", "code": 5})
            if path == "lease/grant":
                name = str(len(self.leases) + 7000)
                self.leases[name] = (fields["TTL"], time.monotonic() + fields["TTL"])
                return 200, {"ID": name, "TTL": str(fields["TTL"])}
            if path == "lease/keepalive":
                name = fields["ID"]
                if name not in self.leases:
                    return 200, {"result": {"ID": name}}
                seconds, _ = self.leases[name]
                self.leases[name] = (seconds, time.monotonic() + seconds)
                return 200, {"result": {"ID": name, "TTL": str(seconds)}}
            if path == "lease/revoke":
                if fields["ID"] not in self.leases:
                    return gone
                self._end(fields["ID"])
                return 200, {}
            if path == "kv/put":
                if fields.get("lease", "") not in (*self.leases, ""):
                    return gone
                self.kept[fields["key"]] = (fields["value"], fields.get("lease", ""))
                self._tell({"kv": {"key": fields["key"], "value": fields["value"]}})
                return 200, {}
            assert path == "kv/range"
            kvs = [
                {"key": key, "value": value}
                for key, (value, _) in self.kept.items()
                if _within(key, fields)
            ]
            return 200, {"header": {"revision": str(self.revision)}, "kvs": kvs}

    def _end(self, lease: str) -> None:
        del self.leases[lease]
        for key in [key for key, (_, of) in self.kept.items() if of == lease]:
            del self.kept[key]
            self._tell({"type": "DELETE", "kv": {"key": key}})

    def _end_leases(self) -> None:
        now = time.monotonic()
        for name in [name for name, (_, end) in self.leases.items() if end < now]:
            self._end(name)

    def _tell(self, event: dict[str, Any]) -> None:
        self.revision += 1
        event["kv"]["mod_revision"] = str(self.revision)
        self.events.append((self.revision, event))
        self.lock.notify_all()

    def watch(self, asked: dict[str, Any], handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        server = self.server
        seen = int(asked["start_revision"]) - 1
        with suppress(OSError):
            handler.wfile.write(b'{"result":{"created":true}}\n')
            while self.server is server:
                self.awake.wait()
                with self.lock:
                    self._end_leases()
                    if self.revision <= seen:
                        self.lock.wait(0.05)
                    found = [
                        event
                        for revision, event in self.events
                        if revision > seen and _within(event["kv"]["key"], asked)
                    ]
                    seen = max(seen, self.revision)
                if found:
                    response = {"result": {"events": found}}
                    handler.wfile.write(json.dumps(response).encode() + b"\n")
        handler.close_connection = True


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _within(key: str, asked: dict[str, Any]) -> bool:
    first, last = base64.b64decode(asked["key"]), base64.b64decode(asked["range_end"])
    return first <= base64.b64decode(key) < last


Etcd = RealEtcd | FakeEtcd


@contextmanager
def etcd(kind: str, folder: Path) -> Iterator[Etcd]:
    made: Etcd = RealEtcd(folder) if kind == "real" else FakeEtcd()
    made.start()
    try:
        yield made
    finally:
        made.stop()


KINDS = [
    "fake",
    pytest.param(
        "real",
        marks=[
            pytest.mark.exhaustive,
            pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed"),
        ],
    ),
]
