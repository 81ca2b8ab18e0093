"""The server under attack, as its owner sees it."""

from __future__ import annotations

import socket
import time
from typing import Any

from tests.serve.footprint import MIB, Footprint, settle
from tests.serve.running import Running

OWNER = {"authorization": "Bearer owner"}
GUEST = {"authorization": "Bearer guest"}
COMPLETE = "/v1/completions"
FILES = 4  # more may be open than before
MEMORY = 48 * MIB  # the allocators keep some of what a flood needed
PATIENCE = 5.0  # seconds an honest request may take on a busy machine, attack or not
BODY = {"prompt": "In the beginning", "max_tokens": 4, "ignore_eos": True}


class Victim:
    def __init__(self, server: Running):
        self.server = server
        self.before: Footprint | None = None
        self.kept = 0  # bytes that the engine may keep, on purpose, of what was asked
        for _ in range(3):
            self.honest()  # what is made once is made now
        assert self.ask({**BODY, "guided_choice": ["yes", "no"], "ignore_eos": False})[0] == 200

    def ask(self, body: Any, path: str = COMPLETE, **headers: str) -> tuple[int, Any]:
        return self.server.request("POST", path, body, **{**OWNER, **headers})

    def honest(self) -> float:
        """Seconds that the owner's small request takes; it must be answered."""
        start = time.monotonic()
        status, found = self.ask(BODY)
        assert status == 200, found
        assert found["usage"]["completion_tokens"] == 4
        return time.monotonic() - start

    def connect(self, source: str = "127.0.0.1", seconds: float = 20.0) -> socket.socket:
        """source: the attacker's address, any of the loopback network."""
        sock = socket.create_connection(
            ("127.0.0.1", self.server.port), timeout=seconds, source_address=(source, 0)
        )
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def head(self, length: int, key: str = "guest", **headers: str) -> bytes:
        lines = [
            f"POST {COMPLETE} HTTP/1.1",
            "host: x",
            "content-type: application/json",
            f"authorization: Bearer {key}",
            f"content-length: {length}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    def _most(self) -> dict[str, int]:
        return {"api": MEMORY, "engine 0": MEMORY + self.kept}

    def note(self) -> None:
        assert settle(self.server, **OWNER) == []
        self.before = Footprint.of(self.server, **OWNER)

    def check(self) -> None:
        """The server answers, holds nothing of anybody's, and is as large as it was."""
        assert self.honest() < PATIENCE
        assert settle(self.server, **OWNER) == []
        assert self.before is not None
        deadline = time.monotonic() + 20  # connections end a little later than requests
        while found := Footprint.of(self.server, **OWNER).grown(self.before, FILES, self._most()):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
