"""Workloads of a simulation: arrival times and lengths of requests, and shared prefixes. No torch.

Token ids are synthetic: each block of a prompt starts with a unique id, the rest is filler by
position. So prompts share exactly the specified prefixes in the engine's own prefix cache, and a
run depends only on its seed.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from rorqual.errors import ConfigError
from rorqual.planner.simulator.settings import MOST_REQUESTS, SimulationSettings

FILLER = list(range(1 << 16)) * 4
# first ids of requests and of shared blocks, above every filler
OWN = 1 << 40
SHARED = 1 << 20
LENGTHS = ("fixed", "uniform", "lognormal")
ARRIVALS = ("poisson", "gamma", "fixed", "at-once", "closed")


def filler(start: int, stop: int) -> list[int]:
    """The tokens of positions start to stop - 1 where nothing else is said."""
    return (
        FILLER[start:stop]
        if stop <= len(FILLER)
        else [position & 0xFFFF for position in range(start, stop)]
    )


@dataclass(frozen=True)
class Arrivals:
    """kind: `poisson` (rate requests/s), `gamma` (the same with intervals of shape `burstiness`:
    below 1 is burstier than Poisson), `fixed` (equal intervals), `at-once`, or `closed`
    (`clients` of which each sends its next request when the last is answered)."""

    kind: str = SimulationSettings.arrivals
    rate: float = 1.0
    burstiness: float = SimulationSettings.burstiness
    clients: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ARRIVALS:
            raise ConfigError(
                f"arrivals={self.kind!r} is not known; accepted: {', '.join(ARRIVALS)}"
            )
        for name in ("rate", "burstiness", "clients"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0 and finite")

    def times(self, draw: random.Random) -> Iterator[float]:
        """Endless arrival times in seconds from the start; all 0 if requests arrive at once or when
        clients become free."""
        now = 0.0
        while True:
            if self.kind in ("poisson", "gamma"):
                shape = self.burstiness if self.kind == "gamma" else 1.0
                now += draw.gammavariate(shape, 1 / (self.rate * shape))
            yield now
            if self.kind == "fixed":
                now += 1 / self.rate


@dataclass(frozen=True)
class LengthDistribution:
    """Tokens: `fixed` (mean), `uniform` (between low and high), or `lognormal` (mean, spread:
    deviation of the logarithm)."""

    kind: str = "fixed"
    mean: float = 1000
    low: int = 1
    high: int = 1 << 20
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in LENGTHS:
            raise ConfigError(
                f"lengths of kind {self.kind!r} are not known; accepted: {', '.join(LENGTHS)}"
            )
        if not 1 <= self.low <= self.high:
            raise ConfigError(
                f"lengths from {self.low} to {self.high} are out of range; accepted: at least 1 "
                "token, and no more than the longest"
            )
        if not 1 <= self.mean < math.inf or not 0 <= self.spread < math.inf:
            raise ConfigError(
                f"lengths of {self.mean:g} tokens with a spread of {self.spread:g} are out of "
                "range; accepted: at least 1 token, and a spread of at least 0"
            )

    @staticmethod
    def parse(text: str) -> LengthDistribution:
        """1000 | uniform:LOW:HIGH | lognormal:MEAN:SPREAD"""
        kind, *values = text.split(":")
        try:
            if not values:
                return LengthDistribution("fixed", float(int(kind)))
            first, second = (float(value) for value in values)
            if kind == "uniform":
                return LengthDistribution(kind, (first + second) / 2, int(first), int(second))
            if kind != "lognormal":
                raise ValueError
        except (ValueError, OverflowError):
            raise ConfigError(
                f"lengths {text!r} are not understood; accepted: N, uniform:LOW:HIGH, "
                "lognormal:MEAN:SPREAD"
            ) from None
        return LengthDistribution(kind, first, spread=second)

    def draw(self, draw: random.Random) -> int:
        if self.kind == "fixed":
            return round(self.mean)
        if self.kind == "uniform":
            return draw.randint(self.low, self.high)
        value = draw.lognormvariate(math.log(self.mean) - self.spread**2 / 2, self.spread)
        return min(max(round(value), self.low), self.high)


@dataclass(frozen=True)
class SharedPrefix:
    """Each prompt starts with one of `groups` prefixes of `tokens` tokens, before its own tokens,
    chosen with weights 1 / rank^exponent (0: evenly)."""

    groups: int = SimulationSettings.prefix_groups
    tokens: int = SimulationSettings.prefix_len
    exponent: float = SimulationSettings.prefix_zipf

    def __post_init__(self) -> None:
        for name in ("groups", "tokens", "exponent"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"shared prefixes: {name}={getattr(self, name)} must be at least 0"
                )
        if (self.groups == 0) != (self.tokens == 0):
            raise ConfigError(
                f"{self.groups} shared prefixes of {self.tokens} tokens: prefix_groups and "
                "prefix_len go together"
            )


@dataclass(frozen=True)
class Arrival:
    """A future request. `blocks` of (id, tokens) start its prompt; equal blocks at equal positions
    are equal text."""

    number: int
    arrival: float
    prompt: int
    output: int
    blocks: tuple[tuple[int, int], ...] = ()

    def tokens(self) -> tuple[int, ...]:
        """The prompt, made when it is needed: a run may have more prompts than memory."""
        made: list[int] = []
        for block, size in (*self.blocks, (OWN + self.number, self.prompt)):
            size = min(size, self.prompt - len(made))
            if size > 0:
                made.append(block)
                made += filler(1, size)
        return tuple(made)


@dataclass(frozen=True)
class Workload:
    """`requests` of them, or all that arrive within `seconds`. With a trace its file says when
    and how long, `speed` times as fast."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    prompt: LengthDistribution = field(default_factory=LengthDistribution)
    output: LengthDistribution = field(default_factory=lambda: LengthDistribution(mean=300))
    prefix: SharedPrefix = field(default_factory=SharedPrefix)
    requests: int | None = None
    seconds: float | None = None
    trace: str | None = None
    trace_block: int = SimulationSettings.trace_block
    speed: float = SimulationSettings.speed

    def __post_init__(self) -> None:
        timed = self.arrivals.kind in ("poisson", "gamma", "fixed")
        if self.trace is None and self.requests is None and (self.seconds is None or not timed):
            raise ConfigError(
                f"arrivals={self.arrivals.kind} need a number of requests"
                + (", or seconds" if timed else "")
            )
        for name in ("requests", "seconds", "speed", "trace_block"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} must be above 0 and finite")
        self._check_number(timed)

    def _check_number(self, timed: bool) -> None:
        """Of requests, where only time limits it."""
        if self.trace is None and self.requests is None and timed:
            assert self.seconds is not None
            number = self.arrivals.rate * self.seconds
            if number > MOST_REQUESTS:
                raise ConfigError(
                    f"rate={self.arrivals.rate:g} for seconds={self.seconds:g} makes {number:,.0f} "
                    f"requests; accepted: {MOST_REQUESTS:,}"
                )

    def jobs(self, seed: int) -> Iterator[Arrival]:
        return read_trace(self) if self.trace is not None else self._drawn(seed)

    def _drawn(self, seed: int) -> Iterator[Arrival]:
        when, lengths, prefixes = (
            random.Random(f"{seed} {name}") for name in ("arrivals", "lengths", "prefixes")
        )
        groups = range(self.prefix.groups)
        weights = ((group + 1) ** -self.prefix.exponent for group in groups)
        totals = list(accumulate(weights))
        for number, arrival in enumerate(self.arrivals.times(when)):
            if (self.requests is not None and number >= self.requests) or (
                self.seconds is not None and arrival >= self.seconds
            ):
                return
            blocks = (
                ((SHARED + prefixes.choices(groups, cum_weights=totals)[0], self.prefix.tokens),)
                if groups
                else ()
            )
            prompt = self.prompt.draw(lengths)
            output = self.output.draw(lengths)
            yield Arrival(number, arrival, prompt + self.prefix.tokens, output, blocks)


def read_trace(workload: Workload) -> Iterator[Arrival]:
    """JSON lines of timestamp (ms), input_length, output_length and, optionally, hash_ids: the
    prompt's blocks of trace_block tokens, equal ids meaning equal text (the Mooncake format).
    Sorted by time, the first at 0 s."""
    assert workload.trace is not None
    path = Path(workload.trace)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    rows = sorted(
        _trace_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    )
    if not rows:
        raise ConfigError(f"{path} holds no requests")
    start = rows[0][0]
    for number, (at, _, prompt, output, ids) in enumerate(rows[: workload.requests]):
        arrival = (at - start) / 1e3 / workload.speed
        if workload.seconds is not None and arrival >= workload.seconds:
            return
        yield Arrival(
            number,
            arrival,
            prompt,
            output,
            tuple((SHARED + block, workload.trace_block) for block in ids),
        )


def _trace_row(path: Path, number: int, line: str) -> tuple[float, int, int, int, tuple[int, ...]]:
    try:
        row = json.loads(line)
        at = float(row["timestamp"])
        prompt = int(row["input_length"])
        output = int(row["output_length"])
        ids = tuple(int(block) for block in row.get("hash_ids") or ())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}, line {number}: {error}; needed: timestamp (ms), input_length, output_length"
        ) from None
    if prompt < 1 or output < 1 or not math.isfinite(at) or min(ids, default=0) < 0:
        raise ConfigError(
            f"{path}, line {number}: lengths must be at least 1, and hash_ids at least 0"
        )
    return at, number, prompt, output, ids
