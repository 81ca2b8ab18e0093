"""demo/decode_cells.py: steps of several sizes in one engine, and its file beside predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.demo_script import load_demo


def test_cells_are_timed_and_those_that_do_not_fit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = load_demo("decode_cells")
    out = tmp_path / "tp2-v2-lite.json"
    arguments = ["--cells", "1x20,3x40,3x300", "--steps", "6", "--json", str(out)]
    options = ["threads=1", "num_pages=40", "page_size=16"]
    for option in options:
        arguments += ["--set", option]
    monkeypatch.setattr("sys.argv", ["decode_cells.py", *arguments])
    demo.main()
    printed = capsys.readouterr().out
    assert "3 requests of 300 tokens: do not fit" in printed
    rows = json.loads(out.read_text())["rows"]
    assert [(row["concurrency"], row["prompt"]) for row in rows] == [(1, 20), (3, 40)]
    assert all(row["step_ms"] > 0 and row["steps"] >= 4 for row in rows)


def test_predictions_read_contexts_from_rows(tmp_path: Path) -> None:
    demo = load_demo("split_predictions")
    rows = [
        {"concurrency": 8, "prompt": 1000, "step_ms": 2.5},
        {"concurrency": 4, "prompt": 32000, "step_ms": 3.5},
    ]
    (tmp_path / "replica-v3.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "split2-qwen3-30b-8k.json").write_text(json.dumps({"rows": rows[:1]}))
    assert sorted(demo.measured(tmp_path)) == [
        ("Qwen3-30B-A3B", 8192, 8, "split, 2 at once", 2.5),
        ("V3, 8 layers", 1024, 16, "two replicas", 2.5),
        ("V3, 8 layers", 32768, 8, "two replicas", 3.5),
    ]
