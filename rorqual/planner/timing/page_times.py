"""Transfer times of a prompt's pages between engines, as measured by `rorqual bench pages`. No
torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rorqual.errors import ConfigError


@dataclass(frozen=True)
class PageTimes:
    """latency: seconds per prompt. per_byte: additional seconds per byte."""

    latency: float
    per_byte: float

    def seconds(self, size: float) -> float:
        """Of so many bytes."""
        return self.latency + size * self.per_byte

    @staticmethod
    def fit(points: Sequence[tuple[float, float]]) -> PageTimes:
        """(bytes, seconds): the line with the least squares that is nowhere below 0; of one point
        a line through 0."""
        sizes = [size for size, _ in points]
        middle = fmean(sizes)
        late = fmean(seconds for _, seconds in points)
        spread = sum((size - middle) ** 2 for size in sizes)
        slope = late / middle
        if spread:
            slope = sum((size - middle) * (seconds - late) for size, seconds in points) / spread
        if not 0 <= slope <= late / middle:
            slope = late / middle if slope > 0 else 0.0
        return PageTimes(late - slope * middle, slope)

    @staticmethod
    def read(path: Path, transport: str) -> PageTimes:
        """What `rorqual bench pages --json` wrote, of one transport: medians. Raises
        ConfigError."""
        try:
            runs = json.loads(path.read_text())["runs"]
            points = [point for run in runs for point in _points(run["figures"], transport)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: {error!r}; it should be a file of `rorqual bench pages --json`"
            ) from None
        if not points:
            raise ConfigError(f"{path}: pages by {transport} were not measured")
        return PageTimes.fit(points)


def _points(figures: dict[str, Any], transport: str) -> list[tuple[float, float]]:
    return [
        (float(figures["bytes"]), median(times["pages"]))
        for times in figures["transports"]
        if times["transport"] == transport
    ]
