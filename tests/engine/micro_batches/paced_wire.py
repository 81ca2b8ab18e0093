"""A wire that is as slow as wanted: real collectives, that then keep whoever waits for them waiting
until their bytes would have come through it, one message after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from rorqual.parallel.group_axis import GroupAxis, Started


class PacedWork:
    def __init__(self, work: Any, until: float):
        self.work = work
        self.until = until

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))


def pace(patch: pytest.MonkeyPatch, seconds_per_byte: float) -> None:
    """Of this process' axes. All ranks wait for the slowest, so one is enough."""
    free = [0.0]
    count, started = GroupAxis.count, GroupAxis._started

    def counted(self: GroupAxis, call: str, message: int) -> None:
        free.append(message * seconds_per_byte)
        count(self, call, message)

    def paced(self: GroupAxis, work: Any, finish: Callable[[], Tensor]) -> Started:
        until = max(free[0], time.perf_counter()) + free[-1]
        free[:] = [until]
        return started(self, PacedWork(work, until), finish)

    patch.setattr(GroupAxis, "count", counted)
    patch.setattr(GroupAxis, "_started", paced)
