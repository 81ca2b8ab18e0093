"""Processes that serve do not scan what they loaded when garbage is collected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serve.running import ROOT, start_server

pytest.importorskip("zmq")

# loaded by Python at the start of every process of the server: the figures of the first collection
# after a process has frozen what it loaded
RECORD = """
import gc, json, os
def record(phase, info):
    if phase == "stop" and gc.get_freeze_count():
        found = {"frozen": gc.get_freeze_count(), "scanned": len(gc.get_objects())}
        path = os.path.join(os.environ["RECORD_FOLDER"], str(os.getpid()))
        with open(path + ".new", "w") as file:
            json.dump(found, file)
        os.rename(path + ".new", path)
        gc.callbacks.remove(record)
        gc.set_threshold(700)
freeze = gc.freeze
def frozen():
    freeze()
    gc.callbacks.append(record)
    gc.set_threshold(20)
gc.freeze = frozen
"""


def test_later_collections_skip_what_was_loaded(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECORD)
    figures = tmp_path / "figures"
    figures.mkdir()
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "RECORD_FOLDER": str(figures)}
    with start_server("--dp", "2", environment=environment) as server:
        pids = [server.pid, *server.engine_pids()]

        def collected() -> bool:
            body = {"prompt": "Once", "max_tokens": 50, "ignore_eos": True}
            status, answer = server.request("POST", "/v1/completions", body)
            assert status == 200, answer
            return all((figures / str(pid)).exists() for pid in pids)

        server.wait_until(collected)
        for pid in pids:
            found = json.loads((figures / str(pid)).read_text())
            assert found["scanned"] < found["frozen"] / 2, (pid, found)
