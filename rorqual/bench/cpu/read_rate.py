"""How fast memory is read, for the share of it that a step reaches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rorqual.bench.offline.run import READ_BYTES


class ReadRate:
    """Sums a buffer larger than the caches. clock: seconds."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.data = torch.rand(READ_BYTES // 4)
        self.data.sum()

    def best(self, times: int = 2) -> float:
        """Bytes a second."""
        return READ_BYTES / min(self._seconds() for _ in range(times))

    def _seconds(self) -> float:
        start = self.clock()
        self.data.sum()
        return self.clock() - start
