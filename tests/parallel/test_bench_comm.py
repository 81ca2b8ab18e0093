"""`rorqual bench comm` on the ranks of the session, with sizes too small to say anything but
that it works."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rorqual.bench.comm import exchanges
from rorqual.bench.comm import run as comm
from rorqual.errors import ConfigError, EngineError
from rorqual.parallel.collectives import NullAxis
from tests.emulation.triton_interpreter import DEVICE, needs_triton
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.exhaustive

SETUP = comm.CommSetup(
    4, "cpu", rows=(1, 3), hidden=256, experts=8, top_k=2, repeats=1, dtype="float32", calls=1
)


def test_every_call_is_timed_and_counted(pool: RankPool) -> None:
    first, *others = pool.run("comm_rows", 4, sizes={"tp": 4}, setup=asdict(SETUP))
    rows = [comm.CommRow(**row) for row in first]
    assert all([row["us"] for row in other] == [row.us for row in rows] for other in others), (
        "every rank reports the slowest"
    )
    assert len(rows) == 18
    assert all(row.us > 0 and row.sent > 0 for row in rows)
    sent = {row.name: row.sent for row in rows if row.rows == 3}
    assert sent["all_reduce"] == 2 * 3 * 1024 * 3 // 4
    assert sent["all_gather"] == sent["reduce_scatter"] == sent["all_to_all"] == 3 * 3 * 1024
    assert sent["exchange allgather_ep"] == 3 * 3 * (1024 + 16 + 1024)
    assert sent["exchange low_latency fp8"] == 3 * 3 * (256 + 8 + 16 + 1024)
    assert len(json.loads(comm.as_json(rows, SETUP))["rows"]) == 18


@needs_triton
@pytest.mark.skipif(DEVICE != "cpu", reason="runs in the interpreter")
@pytest.mark.longest
def test_shared_memory_has_rows_of_its_own(pool: RankPool, tmp_path: Path) -> None:
    """Checked against the process group on the way; bytes are those of the rows that were routed
    to other ranks."""
    setup = replace(SETUP, rows=(3,), top_k=1)
    first, second, *_ = pool.run(
        "comm_rows", 4, sizes={"tp": 4}, setup=asdict(setup), peers=str(tmp_path)
    )
    rows = {row["name"]: row for row in first if "symm" in row["name"]}
    parts = [
        f"{call} low_latency symm{fp8}"
        for fp8 in ("", " fp8")
        for call in ("exchange", "dispatch", "combine")
    ]
    assert list(rows) == ["exchange allgather_ep symm", *parts]
    assert [row["us"] for row in first] == [row["us"] for row in second]
    away = rows["combine low_latency symm"]["sent"] / 1024
    assert 0 < away < 3
    assert rows["dispatch low_latency symm"]["sent"] == away * (1024 + 8)
    assert rows["dispatch low_latency symm fp8"]["sent"] == away * (256 + 8 + 8)
    assert rows["exchange low_latency symm"]["sent"] == away * (1024 + 8 + 1024)


def test_a_difference_from_the_process_group_ends_the_bench(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Layer:
        """Stands for a layer of one rank."""

        def __init__(self, sums: float):
            self.x = torch.zeros(2, 4)
            self.sums = sums
            self.axis = NullAxis("dp")
            self.layout = SimpleNamespace(exchange="low_latency")

        def call(self) -> Tensor:
            return self.x * self.sums

    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    exchanges.check(Layer(2.0), Layer(2.0), 3)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="differs from the process group in 3 calls"):
        exchanges.check(Layer(2.0), Layer(2.0001), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 1}, "ranks=1 must be at least 2"),
        ({"ranks": 3}, "experts=8 must be a multiple of ranks=3"),
    ],
)
def test_sizes_that_cannot_be_measured(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        comm.bench(comm.CommSetup(**{"device": "cpu", "experts": 8, **changes}))
