"""A server tells what its start took, in its log and at /metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PHASES = {"api", "process", "imports", "weights", "cache", "kernels", "graphs", "grammars", "other"}


def test_phases_of_the_start(server: Any) -> None:
    text = server.get("/metrics")
    found = {
        phase: float(seconds)
        for phase, seconds in re.findall(
            r'rorqual:startup_seconds\{engine="0",phase="(\w+)"\} (\S+)', text
        )
    }
    assert found.keys() == PHASES
    assert all(seconds >= 0 for seconds in found.values())
    assert min(found["api"], found["imports"], found["weights"]) > 0
    (line,) = (line for line in server.text().splitlines() if "ready after" in line)
    total, phases = re.findall(r"ready after (\S+) s: (.*)", line)[0]
    assert float(total) == pytest.approx(sum(found.values()), abs=0.1)
    assert {part.split()[0] for part in phases.split(", ")} == PHASES


def test_the_engine_tells_its_own_phases(server: Any) -> None:
    (engine,) = server.get("/server_info")["engines"]
    assert engine["startup"].keys() == PHASES - {"api", "process"}


def test_the_api_process_starts_without_torch(server: Any) -> None:
    """Which takes seconds to import, and memory; the engine's process has it."""
    pids = (server.pid, *server.engine_pids())
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    assert ["libtorch" in text for text in maps] == [False, True]
