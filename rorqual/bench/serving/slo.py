"""Searches the highest concurrency that meets a service level objective, for `bench serve --slo
ttft=2s,tps_user=20`.

Probes grow by a factor from the start until one violates the objective (or shrink until one meets
it), then bisect the bracket geometrically. The search assumes that latency grows with concurrency
and does not repeat measurements: noise near the limit shifts the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from rorqual.bench.serving.metrics import seconds
from rorqual.errors import ConfigError

GROWTH = 4
TOLERANCE = 1.05  # the bracket's ratio at which the search ends
STATISTICS = ("median", "mean", "p90", "p95", "p99")
TIME_KEYS = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2el"}
ACCEPTED = (
    "ttft, tpot, itl or e2el with a time (2s, 50ms), tps_user with tokens/s; mean_, p90_, "
    "p95_ or p99_ before the name"
)


@dataclass(frozen=True)
class Term:
    """One condition: `key` of a row is at most `most` (in the row's unit, milliseconds)."""

    text: str
    key: str
    most: float

    def kept(self, row: Mapping[str, Any]) -> bool:
        value = row.get(self.key)
        return value is not None and value <= self.most


@dataclass(frozen=True)
class Objective:
    """All terms hold, and no request failed. Medians unless a term names another statistic."""

    terms: tuple[Term, ...]

    @classmethod
    def parse(cls, text: str) -> Objective:
        return cls(tuple(_term(item.strip()) for item in text.split(",")))

    def __str__(self) -> str:
        return ", ".join(term.text for term in self.terms)

    @property
    def tps_user(self) -> float | None:
        """The least median tokens/s/user asked for, which a Pareto chart can show."""
        return max(
            (1e3 / term.most for term in self.terms if term.key == "median_tpot_ms"), default=None
        )

    def kept(self, row: Mapping[str, Any]) -> bool:
        return (
            not row["failed"]
            and row["completed"] > 0
            and all(term.kept(row) for term in self.terms)
        )

    def broken_by(self, row: Mapping[str, Any]) -> list[str]:
        """The terms a row breaks, in words."""
        failed = [f"{row['failed']} failed requests"] if row["failed"] else []
        return failed + [
            f"{term.key} {_number(row.get(term.key))} > {term.most:g}"
            for term in self.terms
            if not term.kept(row)
        ]


def _term(item: str) -> Term:
    name, _, value = item.replace(":", "=", 1).partition("=")
    head, _, tail = name.partition("_")
    statistic, quantity = (head, tail) if head in STATISTICS else ("median", name)
    if quantity in TIME_KEYS:
        return Term(item, f"{statistic}_{quantity}_ms", 1e3 * seconds(value, item))
    if quantity != "tps_user":
        raise ConfigError(f"objective {item!r}; accepted: {ACCEPTED}")
    try:
        rate = float(value)
    except ValueError:
        rate = 0.0
    if rate <= 0:
        raise ConfigError(f"objective {item!r}: {value!r} is no number of tokens/s above 0")
    # a user's tokens/s are 1/TPOT; of the slowest 1 % with p99
    return Term(item, f"{statistic}_tpot_ms", 1e3 / rate)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


@dataclass
class ConcurrencySearch:
    """Call `next` for a concurrency, measure it, and `tell` whether it met the objective. At most
    `probes` measurements, none above `most`. `known`: results that exist already, such as the rows
    of a sweep."""

    start: int = 4
    most: int = 4096
    probes: int = 10
    known: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (1 <= self.start <= self.most and self.probes >= 1):
            given = f"start={self.start}, most={self.most}, probes={self.probes}"
            raise ConfigError(f"SLO search: {given}; needed: 1 <= start <= most and probes >= 1")

    def tell(self, concurrency: int, kept: bool) -> None:
        self.known[concurrency] = kept
        self.probes -= 1

    @property
    def bracket(self) -> tuple[int | None, int | None]:
        """(highest concurrency that keeps the objective below every one that breaks it, lowest
        that breaks it)."""
        broken = min((c for c, kept in self.known.items() if not kept), default=None)
        kept = max(
            (c for c, kept in self.known.items() if kept and (broken is None or c < broken)),
            default=None,
        )
        return kept, broken

    def next(self) -> int | None:
        """The next concurrency to measure; None when the answer stands (`bracket[0]`) or the
        probes are used up."""
        return self._candidate() if self.probes > 0 else None

    def _candidate(self) -> int | None:
        kept, broken = self.bracket
        if broken is None:
            candidate = self.start if kept is None else min(self.most, kept * GROWTH)
            return candidate if candidate != kept else None
        if kept is None:
            return max(1, min(broken, self.most + 1) // GROWTH) if broken > 1 else None
        if broken - kept <= 1 or broken / kept <= TOLERANCE:
            return None
        return min(broken - 1, max(kept + 1, round(sqrt(kept * broken))))
