"""Times of a case, and its lower bound.

`call`: from an idle device to an idle device, including the host's work. `graph`: the call is
captured and replayed many times in a row, so only the device's work counts; weights that fit its
cache are then read from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rorqual.ops.interface import Ops
from rorqual.planner.costs.costs import Op
from rorqual.platforms.base import Platform

log = logging.getLogger("rorqual.bench")

TIMINGS = ("auto", "call", "graph")
WARM_UPS = 2
MAX_CALLS = 1000
SHORTEST = 2e-3  # seconds of replays that are worth a clock
READ_BYTES = 4 << 30
SQUARE = 8192  # of the product whose rate counts as the device's


@dataclass(frozen=True)
class DeviceRates:
    """What this device reaches: bytes/s of a large sum, operations/s of a large bf16 product."""

    bandwidth: float
    operations: float

    @staticmethod
    def measured(platform: Platform) -> DeviceRates:
        device = platform.device
        data = torch.rand(READ_BYTES // 4, device=device)
        read = min(measure(data.sum, platform, 5, 0.0))
        del data
        x = torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16)
        product = min(measure(lambda: x @ x, platform, 5, 0.0))
        return DeviceRates(READ_BYTES / read, 2 * SQUARE**3 / product)

    def floor(self, cost: Op) -> float:
        """Seconds below which bf16 operations, or bytes, cannot be."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.operations)


def measure(
    run: Callable[[], object], platform: Platform, repeats: int, min_seconds: float
) -> list[float]:
    """Seconds of each call."""
    for _ in range(WARM_UPS):
        run()
    platform.synchronize()
    times: list[float] = []
    while len(times) < repeats or (sum(times) < min_seconds and len(times) < MAX_CALLS):
        start = time.perf_counter()
        run()
        platform.synchronize()
        times.append(time.perf_counter() - start)
    return times


def measure_captured(
    run: Callable[[], object], platform: Platform, repeats: int, min_seconds: float
) -> list[float]:
    """Seconds of a replay, one average for each row of replays."""
    replay = platform.capture(run)  # type: ignore[arg-type]  # the result is not used
    once = min(measure(replay, platform, 3, 0.0))
    count = max(1, min(MAX_CALLS, round(SHORTEST / once)))

    def several() -> None:
        for _ in range(count):
            replay()

    return [seconds / count for seconds in measure(several, platform, repeats, min_seconds)]


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many of torch's; None: as many as there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compile_ahead(ops: Ops, runs: list[Callable[[], object]]) -> None:
    """Compile the kernels of these calls in parallel; at their first calls they would compile one
    by one."""
    try:
        with ops.compiling():
            for run in runs:
                run()
    except RuntimeError as error:
        log.warning("not all kernels were compiled ahead: %s", error)
