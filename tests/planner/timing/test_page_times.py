"""Seconds of pages, from what `rorqual bench pages` wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rorqual.errors import ConfigError
from rorqual.planner.timing.page_times import PageTimes


def written(folder: Path, *points: tuple[int, float]) -> Path:
    runs = [
        {"figures": {"bytes": size, "transports": [{"transport": "tcp", "pages": [9, t, 0]}]}}
        for size, t in points
    ]
    path = folder / "pages.json"
    path.write_text(json.dumps({"runs": runs}))
    return path


def test_a_line_through_the_medians(tmp_path: Path) -> None:
    found = PageTimes.read(written(tmp_path, (1000, 0.5), (3000, 0.9)), "tcp")
    assert found.seconds(0) == pytest.approx(0.3)
    assert found.seconds(2000) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("points", "latency", "at_2000"),
    [
        ([(1000, 0.5)], 0.0, 1.0),
        ([(1000, 0.5), (3000, 0.3)], 0.4, 0.4),  # longer is no faster: noise
        ([(1000, 0.1), (3000, 0.9)], 0.0, 0.5),  # nothing takes less than no time
    ],
)
def test_nothing_is_below_zero(
    tmp_path: Path, points: list[tuple[int, float]], latency: float, at_2000: float
) -> None:
    found = PageTimes.read(written(tmp_path, *points), "tcp")
    assert found.seconds(0) == pytest.approx(latency)
    assert found.seconds(2000) == pytest.approx(at_2000)


def test_what_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bench pages --json"):
        PageTimes.read(tmp_path / "none.json", "tcp")
    with pytest.raises(ConfigError, match="pages by nixl were not measured"):
        PageTimes.read(written(tmp_path, (1000, 0.5)), "nixl")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ConfigError, match="bench pages --json"):
        PageTimes.read(tmp_path / "other.json", "tcp")
