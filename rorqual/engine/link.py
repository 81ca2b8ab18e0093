"""Frames over a socket between rank 0 and another rank on the same host: a kind, a length, and that many bytes. No torch."""

from __future__ import annotations

import socket
import struct
import threading
from enum import IntEnum

HEADER = struct.Struct("!BI")
LARGEST = 1 << 30


class Kind(IntEnum):
    HELLO = 1  # JSON: configuration, rank, where to meet
    READY = 2  # empty: the rank can compute
    PLAN = 3  # wire.encode_plan
    RESULT = 4  # wire.encode_result
    ALIVE = 5  # empty, every second
    FAILED = 6  # text
    STOP = 7  # empty
    GRAMMAR = 8  # xmatcher.GrammarSender


class Link:
    """One end. `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.lock = threading.Lock()

    def send(self, kind: Kind, data: bytes = b"") -> None:
        with self.lock:
            self.socket.sendall(HEADER.pack(kind, len(data)) + data)

    def receive(self) -> tuple[Kind, bytes] | None:
        """The next frame, or None when the other end is gone."""
        header = self._read(HEADER.size)
        if header is None:
            return None
        kind, size = HEADER.unpack(header)
        assert size <= LARGEST, f"a frame of {size} bytes"
        data = self._read(size)
        return None if data is None else (Kind(kind), data)

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                more = self.socket.recv(min(size - len(parts), 1 << 20))
            except OSError:
                return None
            if not more:
                return None
            parts += more
        return bytes(parts)

    def close(self) -> None:
        self.socket.close()
