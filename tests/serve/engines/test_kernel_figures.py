"""What an engine process tells of kernels: those that steps waited for, and of its start."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")

from rorqual.engine.execution import worker
from rorqual.engine.execution.worker import Worker
from rorqual.serve.engines.engine_metrics import EngineMetrics
from tests.engine.execution.test_identity import engine
from tests.models.checkpoints import save


@pytest.mark.parametrize("ahead", [True, False])
def test_a_snapshot_counts_them(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those since the start, if it compiles kernels: else every kernel would be one."""
    save("qwen", tmp_path)
    watching: list[Any] = []
    monkeypatch.setattr(Worker, "_watch_kernels", lambda self, noted: watching.append(noted))
    llm = engine(tmp_path, precompile_kernels=ahead)
    assert watching[0] is None, "not those of the start"
    assert len(watching) == 1 + ahead
    meter = EngineMetrics(llm.engine)
    found = meter.snapshot(0.0, [], {})
    assert (found.late_kernels, found.late_kernel_seconds) == (0, 0.0)
    if ahead:
        with caplog.at_level(logging.INFO, "rorqual.engine"):
            watching[1]("first_kernel", 0.5)
            watching[1]("second_kernel", 1.25)
        found = meter.snapshot(0.0, [], {})
        assert (found.late_kernels, found.late_kernel_seconds) == (2, 1.75)
        assert "kernel second_kernel was not met at the start; a step waited 1.25 s" in caplog.text


def test_compiling_for_a_cpu_is_no_part_of_reading_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("qwen", tmp_path)
    found = worker.ops_for

    def slow(name: str) -> Any:
        time.sleep(0.3)
        return found(name)

    monkeypatch.setattr(worker, "ops_for", slow)
    startup = engine(tmp_path).engine.stats.startup
    assert list(startup)[:2] == ["kernels", "weights"]
    assert startup["kernels"] >= 0.3
