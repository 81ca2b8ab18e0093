"""Stands in for a GPU where whole steps are timed."""

from __future__ import annotations

from rorqual.bench.step_times.measure import DoesNotFit
from rorqual.planner.timing.timed_steps import StepMeasurement, TimedStep

RATES = {"bandwidth_gb_s": 4000.0, "bf16_tflops": 700.0}


class FakeEngine:
    """Steps longer than any kernels' times, by 1 ms for each 100 tokens."""

    def __init__(self, rows: list[TimedStep]):
        self.rows = rows

    def measure(self, row: TimedStep) -> StepMeasurement:
        assert row in self.rows
        if row.requests == 256:
            raise DoesNotFit("too many")
        return StepMeasurement(1e6 + row.works()[0].tokens / 100, row.context)

    def close(self) -> None:
        self.rows = []
