"""demo/steps_with_arrivals.py: pages arrive beside steps of as many requests as without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.demo_script import load_demo


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load_demo("steps_with_arrivals")


def test_pages_arrive_beside_steps_of_as_many_requests(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "arrivals.json"
    given = "--streams 3 --prompt 40 --every 4 --steps 16 --turns 2 --threads 1 --page-size 8"
    monkeypatch.setattr(sys, "argv", ["demo", *given.split(), "--json", str(file)])
    demo.main()
    found = json.loads(file.read_text())["figures"]
    assert found["requests"] == 3
    assert found["came"] == 2 * 4
    assert found["uneven"] == 0
    steps = found["steps"]
    assert steps["nothing arrives"] == 2 * 16
    assert steps["pages arrive"] + steps.get("between arrivals", 0) == 2 * 16
    assert steps["pages arrive"] >= 2 * 4
    arrive, nothing = found["times"]["pages arrive"], found["times"]["nothing arrives"]
    assert all(0 < arrive[low] <= arrive[high] for low, high in (("50", "90"), ("90", "99")))
    for p, ratio in found["ratios"].items():
        assert ratio == pytest.approx(arrive[p] / nothing[p])
    assert len(found["by_turn"]) == 2
    assert "at most 1.1 between the medians of a pair: " in capsys.readouterr().out


def test_pages_that_do_not_arrive_end_it(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are computed here after all would say nothing about pages that arrive."""
    computed = demo.Keeper.computed

    def without_keys(self: object, prompts: list[list[int]]) -> list[dict[str, object]]:
        found: list[dict[str, object]] = computed(self, prompts)
        return [{**one, "remote_request_id": "00" * 32} for one in found]

    monkeypatch.setattr(demo.Keeper, "computed", without_keys)
    setting = demo.Setting(streams=2, prompt=16, every=4, steps=4, turns=1, threads=1, page_size=8)
    with pytest.raises(SystemExit, match="not all pages arrived: 0 of 2 pages"):
        demo.measure(setting)
