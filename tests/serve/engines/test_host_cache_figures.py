"""What an engine process tells of pages in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("msgspec")

from rorqual.serve.engines.engine_metrics import EngineMetrics
from tests.engine.execution.test_host_memory import TIER, texts
from tests.engine.execution.test_identity import engine, greedy
from tests.models.checkpoints import save


def test_a_snapshot_counts_them(tmp_path: Path) -> None:
    save("qwen", tmp_path)
    llm = engine(tmp_path, **TIER)
    meter = EngineMetrics(llm.engine)
    assert meter.snapshot(0.0, [], {}).host_cache[1:] == [0, 0, 0, 0, 0]
    for _ in range(2):
        greedy(llm, texts(3), one_by_one=True)
    pages, held, queries, hits, bytes_out, bytes_in = meter.snapshot(0.0, [], {}).host_cache
    usage = llm.engine.scheduler.usage()
    size = llm.engine.worker.runner.host.size
    assert pages == int(TIER["kv_host_memory"] * 2**30) // size
    assert 0 < bytes_in == usage.host_pages_in * size == hits // 8 * size
    assert 0 < held * size <= bytes_out
    assert hits < queries
    assert EngineMetrics(engine(tmp_path).engine).snapshot(0.0, [], {}).host_cache == []
