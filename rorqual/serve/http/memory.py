"""Returns the memory of large bodies to the system. The C library keeps freed memory for each
thread that tokenized a long text: hundreds of MB after a few bodies of the largest size."""

from __future__ import annotations

import asyncio
import ctypes

from rorqual.serve.limits import LARGE_BODIES, TRIM_SECONDS

TRIMS = 4


class MemoryTrimmer:
    """`note` received bytes; once they exceed LARGE_BODIES, `run` makes the C library return free
    memory, TRIMS times, as a large body is still being processed when it has arrived."""

    def __init__(self) -> None:
        # glibc only; other C libraries return memory themselves
        self.trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self.size = 0
        self.due = 0

    def note(self, size: int) -> None:
        """A body of `size` bytes was received."""
        self.size += size
        if self.size >= LARGE_BODIES:
            self.size = 0
            self.due = TRIMS

    async def run(self) -> None:
        while self.trim is not None:
            await asyncio.sleep(TRIM_SECONDS)
            if self.due:
                self.due -= 1
                await asyncio.to_thread(self.trim, 0)
