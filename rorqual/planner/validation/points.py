"""Pairs of a predicted and a measured figure, and groups of them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class ValidationPoint:
    """One figure. `high`: the upper end of a predicted range, if overlap is not modeled. fitted: a
    parameter of the profile was fitted on it, so its error is meaningless."""

    label: str
    metric: str
    unit: str
    measured: float
    predicted: float
    high: float | None = None
    fitted: bool = False

    @property
    def error(self) -> float:
        """Of the prediction; 0 within a range, else from its nearer end."""
        if self.high is None:
            return self.predicted / self.measured - 1
        low, high = sorted((self.predicted, self.high))
        return (
            0.0
            if low <= self.measured <= high
            else (low if self.measured < low else high) / self.measured - 1
        )


@dataclass(frozen=True)
class ValidationGroup:
    name: str
    title: str
    source: str
    note: str
    target: str
    kind: str  # prediction | range | bound
    points: tuple[ValidationPoint, ...]
    origin: str = ""  # of our own figures: commit, day, command, and whether the tables know them
    stale: tuple[str, ...] = ()  # kernels that have changed since the times predicted with
    older: tuple[str, ...] = ()  # kernels that have changed since these steps were measured
    unrecorded: bool = False  # our own figures, whose kernels were not recorded

    def judged(self, metric: str) -> list[float]:
        """Errors of the figures that nothing was fitted to."""
        return [point.error for point in self.points if point.metric == metric and not point.fitted]

    def mean_error(self, metric: str) -> float:
        return fmean(map(abs, self.judged(metric)))

    def worst_error(self, metric: str) -> float:
        return max(map(abs, self.judged(metric)))

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(point.metric for point in self.points))
