"""`rorqual bench comm` on the ranks of the session, with sizes too small to say anything but that it works."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from rorqual.bench import comm
from rorqual.errors import ConfigError
from tests.parallel.pool import RankPool

SETUP = comm.Setup(4, "cpu", rows=(1, 3), hidden=256, experts=8, top_k=2, repeats=1, dtype="float32", calls=1)


def test_every_call_is_timed_and_counted(pool: RankPool) -> None:
    first, *others = pool.run("comm_rows", 4, sizes={"tp": 4}, setup=asdict(SETUP))
    rows = [comm.Row(**row) for row in first]
    assert all([row["us"] for row in other] == [row.us for row in rows] for other in others), "every rank reports the slowest"
    assert len(rows) == 18
    assert all(row.us > 0 and row.sent > 0 for row in rows)
    sent = {row.name: row.sent for row in rows if row.rows == 3}
    assert sent["all_reduce"] == 2 * 3 * 1024 * 3 // 4
    assert sent["all_gather"] == sent["reduce_scatter"] == sent["all_to_all"] == 3 * 3 * 1024
    assert sent["exchange allgather_ep"] == 3 * 3 * (1024 + 16 + 1024)
    assert sent["exchange low_latency fp8"] == 3 * 3 * (256 + 8 + 16 + 1024)
    assert len(json.loads(comm.as_json(rows, SETUP))["rows"]) == 18


@pytest.mark.parametrize(
    ("changes", "words"), [({"ranks": 1}, "ranks=1 must be at least 2"), ({"ranks": 3}, "experts=8 must be a multiple of ranks=3")]
)
def test_sizes_that_cannot_be_measured(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        comm.bench(comm.Setup(**{"device": "cpu", "experts": 8, **changes}))
