"""Frames over a socket between rank 0 and another rank: a kind, a length, and that many bytes. No
torch.

On one host the socket is one of an inherited pair; between hosts it is TCP, and
engine/distributed/handshake.py comes before anything else on it.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from enum import IntEnum

from rorqual.errors import EngineError

HEADER = struct.Struct("!BI")
LARGEST = 1 << 30  # bytes of a frame; a step of a million prompt tokens has 7 MB
# a host that does not respond for PROBE_SECONDS * (PROBES + 1) counts as gone
PROBE_SECONDS = 5
PROBES = 4


class FrameKind(IntEnum):
    HELLO = 1  # JSON: configuration, rank, GPU, rendezvous
    READY = 2  # empty: the rank can compute; from rank 0: all can
    STEP = 3  # codec.encode_output, numbered
    RESULT = 4  # codec.encode_result, with the step's number
    ALIVE = 5  # empty, every second, both ways
    FAILED = 6  # text
    STOP = 7  # empty
    GRAMMAR = 8  # grammar_matcher.GrammarSender
    CHALLENGE = 9  # engine/distributed/handshake.py: this and the next three
    ANSWER = 10
    WELCOME = 11
    REFUSED = 12  # text
    LOAD = 13  # numbered: an empty request; the response is expert_load.encode_load
    TRACE = 14  # JSON, tracing.py: what to record, or null; to rank 0: the result
    MOVE = 15  # JSON: balance.moves.Move; the response balance.moves.MoveResult
    SERVICE_START = 16  # rank_service.py: its name, a newline, its configuration
    SERVICE = 17  # a service's message, either way


class FrameError(EngineError):
    """Not a valid frame, or larger than accepted."""


class Channel:
    """One end. `send` may be called from several threads, `receive` from one. `largest`: bytes
    of a frame that are accepted."""

    def __init__(self, connection: socket.socket, largest: int = LARGEST):
        self.socket = connection
        self.largest = largest
        self.lock = threading.Lock()
        if connection.family == socket.AF_INET:
            # small frames must not be delayed
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (
                ("TCP_KEEPIDLE", PROBE_SECONDS),
                ("TCP_KEEPINTVL", PROBE_SECONDS),
                ("TCP_KEEPCNT", PROBES),
            ):
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def peer(self) -> str:
        """The other end's address."""
        return str(self.socket.getpeername()[0])

    @property
    def own(self) -> str:
        """This end's address."""
        return str(self.socket.getsockname()[0])

    @property
    def network_address(self) -> str | None:
        """This end's address, where the other is on another host; else None."""
        between_hosts = self.socket.family == socket.AF_INET and self.own != self.peer
        return self.own if between_hosts else None

    def patience(self, seconds: float) -> None:
        """The other end counts as gone when nothing can be read or sent for `seconds`."""
        self.socket.settimeout(seconds)

    def send(self, kind: FrameKind, data: bytes = b"") -> None:
        """Raises OSError when the other end is gone."""
        with self.lock:
            self.socket.sendall(HEADER.pack(kind, len(data)) + data)

    def receive(self) -> tuple[FrameKind, bytes] | None:
        """The next frame, or None when the other end is gone. Raises FrameError, after which the
        channel is unusable."""
        header = self._read(HEADER.size)
        if header is None:
            return None
        kind, size = HEADER.unpack(header)
        if size > self.largest:
            raise FrameError(f"a frame of {size} bytes came; accepted: at most {self.largest}")
        try:
            known = FrameKind(kind)
        except ValueError:
            raise FrameError(
                f"a frame of kind {kind} came; accepted: {min(FrameKind)} to {max(FrameKind)}"
            ) from None
        data = self._read(size)
        return None if data is None else (known, data)

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

    def shut(self) -> None:
        """Disconnect both sides; threads waiting on the channel here return."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self.socket.close()
