"""Processes that serve do not scan what they loaded when garbage is collected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serve.running import ROOT, start_server

pytest.importorskip("zmq")

# loaded by Python at the start of every process of the server: the figures of the first collection
# after a process has frozen what it loaded, which a thread brings about
RECORD = """
import gc, json, os, threading
def record(phase, info):
    if phase == "stop":
        gc.callbacks.remove(record)
        found = {"frozen": gc.get_freeze_count(), "scanned": len(gc.get_objects())}
        path = os.path.join(os.environ["RECORD_FOLDER"], str(os.getpid()))
        with open(path + ".new", "w") as file:
            json.dump(found, file)
        os.rename(path + ".new", path)
def allocate():
    [[] for _ in range(5000)]
freeze = gc.freeze
def frozen():
    freeze()
    gc.callbacks.append(record)
    threading.Thread(target=allocate, daemon=True).start()
gc.freeze = frozen
"""


@pytest.mark.exhaustive
def test_later_collections_skip_what_was_loaded(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECORD)
    figures = tmp_path / "figures"
    figures.mkdir()

    def names() -> set[str]:
        return {path.name for path in figures.iterdir() if path.suffix != ".new"}

    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "RECORD_FOLDER": str(figures)}
    with start_server("--dp", "2", environment=environment) as server:
        server.wait_until(lambda: len(names()) == 3)  # API, engine, the engine's second rank
        assert {str(server.pid), *map(str, server.engine_pids())} < names()
    for name in names():
        found = json.loads((figures / name).read_text())
        assert found["scanned"] < found["frozen"] / 2, (name, found)
