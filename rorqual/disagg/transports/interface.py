"""What is asked of a library that reads another engine's memory. No torch.

An engine gives it one piece of memory, its staging memory, at the start. A peer reads from there
what lies in it, and nothing else; what is read from a peer comes to lie there.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from rorqual.errors import RorqualError

MOST_DESCRIPTION = 16_384  # bytes


class TransportError(RorqualError):
    """A library that does not start, does not know its peer, or takes no read."""


class ReadState(Enum):
    """DONE: the bytes are in place. FAILED: they are not, and some may come yet. ENDED: they are
    not, and none can come any more."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    ENDED = "ended"


class Transport(Protocol):
    """Offsets and sizes are bytes in the staging memory of their side."""

    def describe(self) -> bytes:
        """What a peer must know to read from here, at most MOST_DESCRIPTION bytes. Another one
        after `restart`."""

    def serve(self, windows: int) -> None:
        """So many more (fewer, if negative) parts of the memory here may be read by peers now."""

    def read(self, peer: bytes, remote: int, local: int, size: int) -> int:
        """Starts to read `size` bytes of the peer of this description into the memory here; a
        number to ask for by. Raises TransportError."""

    def poll(self, ticket: int, seconds: float) -> ReadState:
        """Waits so long at most. What has ended is forgotten with the answer."""

    def cancel(self, ticket: int) -> None:
        """Nobody asks for this read any more. The bytes may come all the same."""

    def restart(self) -> None:
        """When this returns, no read begun before it writes into the memory here."""

    def close(self) -> None: ...
