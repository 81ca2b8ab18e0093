"""demo/split_predictions.py: measured steps beside what was written down before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.demo_script import DEMO, load_demo

demo = load_demo("split_predictions")


def write(folder: Path, name: str, **steps: float) -> None:
    rows = [{"concurrency": int(key[1:]), "step_ms": ms} for key, ms in steps.items()]
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows}))


def test_files_say_what_they_measured(tmp_path: Path) -> None:
    write(tmp_path, "split2-v2-lite-8k", n8=5.0)
    write(tmp_path, "replica-v3-1k", n4=6.0)
    write(tmp_path, "something-else", n4=6.0)
    assert list(demo.measured(tmp_path)) == [
        ("V3, 8 layers", 1024, 8, "two replicas", 6.0),
        ("V2-Lite", 8192, 8, "split, 2 at once", 5.0),
    ]
    with pytest.raises(SystemExit, match="no file"):
        list(demo.measured(tmp_path / "nowhere"))


def test_errors_are_of_predictions_against_what_ran() -> None:
    found = [demo.Cell("V2-Lite", 1024, 8, "tp 2", 9.0, 0.0), demo.Cell("x", 1, 1, "tp 2", 1, 1)]
    rows = [("V2-Lite", 1024, 8, "tp 2", 10.0), ("V2-Lite", 1024, 3, "tp 2", 1.0)]
    said = list(demo.errors(found, rows))
    assert "| V2-Lite | 1,024 | tp 2 | 8 | 10.00 | 9.00 | -10% |" in said
    assert "| V2-Lite | 1,024 | tp 2 | 3 | 1.00 | - | |" in said
    assert said[-1] == "\nmean error 10.0%, worst 10.0%, 1 cells"


@pytest.mark.parametrize("name", ["split_predictions.json", "split_predictions_h100.json"])
def test_what_is_written_down_can_be_read(name: str) -> None:
    kept = [demo.Cell(**one) for one in json.loads((DEMO / name).read_text())]
    layouts = {*demo.LAYOUTS, *(f"split, {parts} at once" for parts in demo.PARTS)}
    assert {one.layout for one in kept} == layouts
    assert {one.model for one in kept} == set(demo.MODELS)
