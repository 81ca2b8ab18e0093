"""Rows of `rorqual bench cpu`: what share of the memory's speed a step reaches."""

from __future__ import annotations

import statistics

import pytest

from rorqual.bench.cpu import formats, run
from rorqual.bench.cpu.read_rate import ReadRate
from rorqual.bench.cpu.work import CpuWork

pytestmark = pytest.mark.exhaustive(but_first=True)


@pytest.mark.parametrize("names", ["w4a16", ""])
def test_floors_are_of_memory_as_it_was_during_the_row(
    names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads ever faster here: each row has the median of its own turns."""
    reads: list[float] = []

    def best(self: ReadRate, times: int = 2) -> float:
        reads.append(1e9 * (len(reads) + 1))
        return reads[-1]

    monkeypatch.setattr(ReadRate, "best", best)
    lines: list[str] = []
    small = {"prompt": 8, "context": 8, "steps": 1, "turns": 3, "seconds": 0.0, "threads": 1}
    work = CpuWork(shapes=1, seed=2, formats=names, **small)
    report = run.run(work, lines.append)
    assert report.bandwidth == 1e9, "read before the first row"
    sides = (formats.WIDE, names) if names else ("",)
    rows = [row for row in report.rows if row.work.startswith("decode")]
    assert len(rows) == 2 * len(sides)
    expected = [statistics.median([2.0, 3.0, 4.0]), statistics.median([5.0, 6.0, 7.0])]
    assert [row.read_gb_s for row in rows] == [read for read in expected for _ in sides]
    for row in rows:
        assert row.share == pytest.approx(row.floor_ms / row.ours_ms)
        assert any(f"of {row.read_gb_s:.0f} GB/s" in line for line in lines)
    first, *_, last = rows
    assert last.read_gb_s is not None
    assert first.read_gb_s is not None
    prompts = [row for row in report.rows if row.work.startswith("prompt")]
    assert [row.read_gb_s for row in prompts] == [None] * len(sides)
