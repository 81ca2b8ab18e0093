"""The interface of a library that reads another engine's memory. No torch.

An engine gives it one piece of memory, its staging memory, at start. Peers read from this memory
and no other; data read from a peer is written to it.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from rorqual.errors import RorqualError

MAX_DESCRIPTION = 16_384  # bytes


class TransportError(RorqualError):
    """A library does not start, does not know a peer, or rejects a read."""


class ReadState(Enum):
    """DONE: the bytes are in place. FAILED: they are not, and some may still be written. ENDED:
    they are not, and none will be written any more. REVOKED: they are, but may be others than the
    peer offered."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    ENDED = "ended"
    REVOKED = "revoked"


class Transport(Protocol):
    """Offsets and sizes are bytes in the staging memory of their side."""

    def describe(self) -> bytes:
        """The address that a peer needs to read from here, at most MAX_DESCRIPTION bytes. Changes
        with `restart`."""

    def serve(self, windows: int) -> None:
        """`windows` more (fewer, if negative) parts of the memory here may be read by peers now."""

    def read(self, peer: bytes, remote: int, local: int, size: int) -> int:
        """Start to read `size` bytes of the peer with this description into the memory here;
        returns a ticket for `poll`. Raises TransportError."""

    def poll(self, ticket: int, seconds: float) -> ReadState:
        """The read's state, after waiting at most `seconds` for its end. The ticket of an ended
        read becomes invalid."""

    def cancel(self, ticket: int) -> None:
        """Drop a read. Its bytes may still be written."""

    def restart(self) -> None:
        """When this returns, no read begun before it writes into the memory here."""

    def close(self) -> None: ...
