"""The results file, one JSON object per line, and pairs of its rows.

A row of ours and one of the peer's are a pair if both are from one call of the command, and so from
one machine on one day. An interrupted call keeps its rows; the next one measures those without a
pair.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rorqual.bench.serving.metrics import Figures
from rorqual.errors import ConfigError

SCHEMA = "rorqual.bench.peers/1"
OURS = "rorqual"
OFFLINE = "offline"


@dataclass(frozen=True)
class Measured:
    """One row of one server, or (engine: offline) a step of ours without one. settings: how the
    engine was started, by name; spread: whether its routing is known to be; api_us: processor time
    of the process that serves HTTP, microseconds a token printed."""

    call: str
    date: str
    commit: str | None
    card: str
    model: str
    engine: str
    version: str
    settings: str
    row: str
    command: list[str]
    prefix_cache: bool
    ready_seconds: float
    spread: bool | None
    routing: str
    api_us: float | None
    figures: Figures = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return self.engine == OFFLINE or (
            not self.figures["failed"] and self.figures["completed"] > 0
        )


@dataclass(frozen=True)
class Pair:
    ours: Measured
    peer: Measured


class Results:
    """The file, which only grows."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[Measured] = []
        self.cut = False
        if path.exists():
            text = path.read_text(encoding="utf-8")
            *lines, last = text.split("\n")
            self.cut = bool(last)  # a call was ended while it wrote: that row is measured again
            self.rows = [
                _row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)
            ]

    def add(self, row: Measured) -> None:
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.cut:
            whole, _, _ = self.path.read_text(encoding="utf-8").rpartition("\n")
            self.path.write_text(whole + "\n" if whole else "", encoding="utf-8")
            self.cut = False
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"schema": SCHEMA, **asdict(row)}) + "\n")

    def of(self, model: str, engine: str, settings: str | None = None) -> list[Measured]:
        return [
            row
            for row in self.rows
            if (row.model, row.engine) == (model, engine)
            and settings in (None, row.settings)
            and row.good
        ]

    def pairs(self, model: str, engine: str, settings: str) -> dict[str, Pair]:
        """By row; of several the last."""
        ours = {(row.call, row.row): row for row in self.of(model, OURS)}
        found: dict[str, Pair] = {}
        for theirs in self.of(model, engine, settings):
            own = ours.get((theirs.call, theirs.row))
            if own is not None and own.card == theirs.card:
                found[theirs.row] = Pair(own, theirs)
        return found

    def best(self, model: str, engine: str) -> dict[str, Pair]:
        """By row, the peer's settings of most output tokens/s against ours of the same call."""
        found: dict[str, Pair] = {}
        for settings in dict.fromkeys(row.settings for row in self.of(model, engine)):
            for name, pair in self.pairs(model, engine, settings).items():
                if name not in found or _rate(found[name].peer) < _rate(pair.peer):
                    found[name] = pair
        return found

    def peak(self, model: str, engine: str, settings: str, lengths: tuple[int, int]) -> float:
        """Most requests a second in closed rows of these lengths; 0 where there are none."""
        start = "{}/{}@".format(*lengths)
        return max(
            (
                float(row.figures["request_throughput"])
                for row in self.of(model, engine, settings)
                if row.row.startswith(start)
            ),
            default=0.0,
        )


def _rate(row: Measured) -> float:
    return float(row.figures["output_throughput"])


def _row(line: str, where: str) -> Measured:
    try:
        found: dict[str, Any] = json.loads(line)
        if found.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        return Measured(**found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} is no result of this command: {error}") from None


def in_order(names: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """As they were asked for, then the others."""
    place = {name: number for number, name in enumerate(wanted)}
    return sorted(names, key=lambda name: (place.get(name, len(place)), name))
