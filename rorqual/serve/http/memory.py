"""Memory of large bodies goes back to the system. The C library keeps what was freed, for each
thread that tokenized a long text: hundreds of MB after a few bodies of the largest size."""

from __future__ import annotations

import asyncio
import ctypes

from rorqual.serve.limits import LARGE_BODIES, TRIM_SECONDS

TRIMS = 4


class MemoryTrimmer:
    """`note` what came in; where that was enough, `run` asks the C library to give back what is
    free, TRIMS times: a large body is still being worked on when it has come."""

    def __init__(self) -> None:
        # glibc's alone; other libraries give back by themselves
        self.trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self.size = 0
        self.due = 0

    def note(self, size: int) -> None:
        """A body of `size` bytes has come."""
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
