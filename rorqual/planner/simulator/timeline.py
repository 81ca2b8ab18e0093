"""What a pool's resources and queues did over time, and the gaps between tokens. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rorqual.errors import ConfigError
from rorqual.planner.simulator.cost_runner import StepCost, StepLoad

MOST_SAMPLES = 600
MOST_POINTS = 1_000_000  # that are kept during a run


@dataclass
class Timeline:
    """busy: by interval, seconds that each of `resources` was busy, all replicas together, and last
    the seconds of running steps. A step counts in the interval in which it started. replicas:
    number that held GPUs."""

    resources: tuple[str, ...]
    interval: float
    busy: list[list[float]] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    gaps: Counter[float] = field(default_factory=Counter)
    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    sent: float = 0.0

    @property
    def next_sample(self) -> float:
        return len(self.waiting) * self.interval

    def step(self, now: float, cost: StepCost, loads: Sequence[StepLoad]) -> None:
        self._check_length(now)
        index = int(now / self.interval)
        while len(self.busy) <= index:
            self.busy.append([0.0] * (len(self.resources) + 1))
        bucket = self.busy[index]
        for place, seconds in enumerate(cost.busy):
            bucket[place] += seconds
        bucket[-1] += cost.stage
        self.steps += 1
        self.rows += sum(load.rows for load in loads)
        self.prompt_tokens += sum(load.prompts * load.new for load in loads)

    def _check_length(self, until: float) -> None:
        """Raises ConfigError."""
        if not until / self.interval < MOST_POINTS:
            raise ConfigError(
                f"the run has more than {MOST_POINTS:,} points of interval={self.interval:g} s; "
                "accepted: a longer interval, or requests that come sooner"
            )

    def sample(self, until: float, waiting: int, running: int, live: int, replicas: int) -> None:
        """Queues as they were at every full interval up to `until`."""
        self._check_length(until)
        while self.next_sample <= until:
            self.waiting.append(waiting)
            self.running.append(running)
            self.live.append(live)
            self.replicas.append(replicas)

    def utilization(self, seconds: float) -> dict[str, float]:
        """Shares of so many seconds of all replicas."""
        totals = [sum(column) for column in zip(*self.busy, strict=True)] or [0.0] * (
            len(self.resources) + 1
        )
        return {
            name: total / seconds
            for name, total in zip((*self.resources, "steps"), totals, strict=True)
        }

    def series(self) -> dict[str, Any]:
        """At most MOST_SAMPLES points: means over several intervals where there are more."""
        each = -(-max(len(self.waiting), 1) // MOST_SAMPLES)
        columns = list(zip(*self.busy, strict=True)) or [()] * (len(self.resources) + 1)
        found: dict[str, Any] = {
            "seconds": [index * self.interval for index in range(0, len(self.waiting), each)]
        }
        for name, values in (
            ("waiting", self.waiting),
            ("running", self.running),
            ("live_tokens", self.live),
            ("replicas", self.replicas),
        ):
            found[name] = _means(values, each)
        whole = [max(1, held) * self.interval for held in self.replicas]
        padded = [(*column, *[0.0] * (len(self.waiting) - len(column))) for column in columns]
        shares = zip((*self.resources, "steps"), padded, strict=True)
        found["utilization"] = {
            name: _means([s / held for s, held in zip(column, whole, strict=False)], each)
            for name, column in shares
        }
        return found


def _means(values: Sequence[float], each: int) -> list[float]:
    groups = (values[index : index + each] for index in range(0, len(values), each))
    return [round(sum(group) / len(group), 4) for group in groups]
