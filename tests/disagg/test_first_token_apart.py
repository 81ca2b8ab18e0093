"""demo/first_token_apart.py: what comes to the first token where a prompt is computed elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.demo_script import load_demo


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load_demo("first_token_apart")


def test_it_times_prompts_both_ways(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "times.json"
    given = "--prompt 40 --repeats 2 --threads 1 --page-size 8 --devices cpu,cpu"
    monkeypatch.setattr(sys, "argv", ["demo", *given.split(), "--json", str(file)])
    demo.main()
    found = json.loads(file.read_text())["seconds"]
    assert {len(times) for times in found.values()} == {2}
    for pages, apart in zip(found["pages"], found["apart"], strict=True):
        assert 0 < pages < apart
    assert min(found["alone"]) > min(found["step"]) > 0
    assert "wanted at most" in capsys.readouterr().out


def test_pages_that_do_not_arrive_end_it(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = demo.ChildProcess.receive

    def without_keys(self: object) -> object:
        found = receive(self)
        if not isinstance(found, list):
            return found
        return [{**found[0], "remote_request_id": "00" * 32}, found[1]]

    monkeypatch.setattr(demo.ChildProcess, "receive", without_keys)
    trial = demo.Trial(prompt=20, repeats=1, threads=1, page_size=8, devices=("cpu", "cpu"))
    with pytest.raises(SystemExit, match="not all pages arrived: 0 of 3 pages"):
        demo.measure(trial)
