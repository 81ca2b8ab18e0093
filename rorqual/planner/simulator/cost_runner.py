"""Times of simulated steps: constant, or from a table measured on the engine. No torch.

The ranks of a stage step together, so a step takes as long as its slowest rank. layout_costs.py has
the runners that use the cost model.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from rorqual.errors import ConfigError
from rorqual.planner.timing.split_schedule import Task


class StepLoad(NamedTuple):
    """One rank's step: `rows` requests decode with `context` tokens on average, the new one
    counted; `prompts` chunks of `new` tokens after `cached` ones, as many tokens and query-key
    pairs as the real chunks have."""

    rows: int = 0
    context: int = 0
    prompts: int = 0
    new: int = 0
    cached: int = 0

    def tokens(self, num_speculative_tokens: int) -> int:
        return self.rows * (num_speculative_tokens + 1) + self.prompts * self.new


IDLE = StepLoad()


@dataclass(frozen=True, slots=True)
class StepCost:
    """seconds: until the step's tokens are there; stage: until the next step may enter a
    pipeline (equal to seconds without one); busy: of these, seconds of each of the runner's
    resources."""

    seconds: float
    stage: float
    busy: tuple[float, ...]


class StepCosts(Protocol):
    """`loads`: one for each rank of the stage, in order. `resources`: what StepCost.busy is
    about."""

    @property
    def resources(self) -> tuple[str, ...]: ...

    def step(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> StepCost: ...

    def tasks(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> list[Task]:
        """The step as pieces on resources, from its start."""
        ...


@dataclass(frozen=True)
class HostTimes:
    """Seconds of a server's processor that its steps do not include, where its engine waits for
    them because both share a core; 0 on a device. They delay the next step: `step`, and `row` for
    each token, after a step that brought tokens to decoding requests; `request` for each request
    that comes while a step runs or is about to; `sent` for each cache that is sent to another pool,
    and `received` for each that arrives."""

    step: float = 0.0
    row: float = 0.0
    request: float = 0.0
    sent: float = 0.0
    received: float = 0.0

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{name}={seconds} s must be at least 0 and finite")

    def after(self, rows: int) -> float:
        return self.step + rows * self.row if rows else 0.0


@dataclass(frozen=True)
class ConstantCosts:
    """Every step takes the same time."""

    each: float
    resources: ClassVar[tuple[str, ...]] = ("busy",)

    def step(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> StepCost:
        return StepCost(self.each, self.each, (self.each,))

    def tasks(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> list[Task]:
        return [Task("compute", "step", 0, 0.0, self.each)]


class MeasuredCosts:
    """Seconds measured at (decoding rows, prompt tokens of the step), for every pair of the rows
    and tokens that occur. Linear between them, and beyond the largest with the last slope."""

    resources: ClassVar[tuple[str, ...]] = ("busy",)

    def __init__(self, seconds: Mapping[tuple[int, int], float]):
        self.rows = sorted({rows for rows, _ in seconds})
        self.prompts = sorted({prompt for _, prompt in seconds})
        missing = [
            pair
            for pair in ((r, p) for r in self.rows for p in self.prompts)
            if pair not in seconds and pair != (0, 0)
        ]
        if missing or min(len(self.rows), len(self.prompts)) < 2:
            raise ConfigError(
                "measured step times lack (rows, prompt tokens) "
                f"{missing or 'of two sizes each'}; they must fill a table"
            )
        self.seconds = {(0, 0): 0.0, **seconds}

    def at(self, rows: int, prompt: int) -> float:
        low, high, share = _between(self.rows, rows)
        left, right, part = _between(self.prompts, prompt)
        table = self.seconds
        first = table[low, left] * (1 - part) + table[low, right] * part
        second = table[high, left] * (1 - part) + table[high, right] * part
        return first * (1 - share) + second * share

    def step(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> StepCost:
        seconds = max(
            self.at(load.rows * (num_speculative_tokens + 1), load.prompts * load.new)
            for load in loads
        )
        return StepCost(seconds, seconds, (seconds,))

    def tasks(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> list[Task]:
        return [Task("compute", "step", 0, 0.0, self.step(loads, num_speculative_tokens).seconds)]


def _between(points: Sequence[int], at: float) -> tuple[int, int, float]:
    index = min(max(bisect_right(points, at), 1), len(points) - 1)
    low = points[index - 1]
    high = points[index]
    return low, high, (at - low) / (high - low)
