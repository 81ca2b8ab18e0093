"""What CPU benchmarks time with, and how fast memory is read, for the share that a step reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rorqual.bench.offline.run import READ_BYTES

Clock = Callable[[], float]


def clock_of(processor_time: bool) -> Clock:
    """Seconds: on the processor, or by the wall."""
    return time.process_time if processor_time else time.perf_counter


def seconds_of(work: Callable[[], object], clock: Clock) -> float:
    start = clock()
    work()
    return clock() - start


class ReadRate:
    """Sums a buffer larger than the caches. clock: seconds."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.data = torch.rand(READ_BYTES // 4)
        self.data.sum()

    def best(self, times: int = 2) -> float:
        """Bytes a second."""
        return READ_BYTES / min(seconds_of(self.data.sum, self.clock) for _ in range(times))
