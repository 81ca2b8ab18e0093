"""Calibration on the CPU: the file it writes is a GPU the planner can use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rorqual.bench import calibrate
from rorqual.config.hardware import load_device
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.timing.profiles import load_profile, profile_for
from rorqual.planner.timing.roofline import StepModel
from rorqual.platforms import make_platform

pytestmark = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "HOST_SHAPES", [(64, 32), (128, 64)])
    monkeypatch.setattr(calibrate, "HOST_ROWS", [1, 8])
    monkeypatch.setattr(calibrate, "bandwidth", lambda clock: 20e9)


def test_a_card_of_its_own(tmp_path: Path) -> None:
    path = calibrate.run("cpu", "mine", out=tmp_path / "mine.yaml")
    card = load_device(str(path))
    assert card.name == card.measured == "mine"
    assert card.bandwidth == 20e9
    assert card.launch_gap
    assert card.kernel
    assert set(card.flops) == {"bfloat16", "float32"}
    assert [row[:2] for row in card.gemm["tables"]["bfloat16"]] == [[64, 32], [128, 64]]
    assert "rorqual bench calibrate" in card.sources["bandwidth"]
    assert profile_for(card) == load_profile("calibrated")
    model = StepModel(
        published("qwen3-30b-a3b"), ParallelConfig(), card, load_profile("calibrated")
    )
    step = model.step(GroupWork(BatchShape.decode(1, 100)))
    assert step.seconds > 3.3e9 * 2 / 20e9, "no less than reading what a token uses"
    assert step.measured_share > 0


def test_fractions_of_a_datasheet(tmp_path: Path) -> None:
    card = load_device(
        str(calibrate.run("cpu", "mine", based_on="cpu", out=tmp_path / "mine.yaml"))
    )
    sheet = load_device("cpu")
    assert card.bandwidth == sheet.bandwidth
    assert card.achieved_bandwidth == pytest.approx(20 / 60, abs=1e-3)
    assert card.measured == "cpu"


def test_a_product_is_timed_in_each_dtype() -> None:
    clock = calibrate.Clock(make_platform("cpu"), samples=3)
    assert 0 < calibrate.product(clock, "float32", 4, 32, 32) < 0.1
    small, large = (calibrate.product(clock, "float32", 64, size, size) for size in (32, 512))
    assert large > small
    assert calibrate.launch_gap(clock) < 1e-3


def test_bad_names() -> None:
    with pytest.raises(ConfigError, match="name='a/b'"):
        calibrate.run("cpu", "a/b")
    with pytest.raises(ConfigError, match="device 'h201'"):
        calibrate.run("cpu", "mine", based_on="h201")


def test_collectives_need_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert calibrate.collectives(calibrate.Clock(make_platform("cpu"))) == {}
    assert calibrate.device_name(make_platform("cpu")).endswith(
        f"{torch.get_num_threads()} threads"
    )
