"""Ascend in the planner: devices, W8A8 and C8 bytes, the recipes' layouts, and predictions beside
published figures (docs/planning.md states the errors)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rorqual.config.hardware import load_device
from rorqual.config.parallel import ParallelConfig
from rorqual.engine.config import EngineConfig, read_recipe
from rorqual.errors import ConfigError
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, Format, GroupWork, kv_bytes_per_token
from rorqual.planner.costs.shards import rank_weight_bytes
from rorqual.planner.search.from_settings import question_of
from rorqual.planner.search.planner import search
from rorqual.planner.search.report import settings
from rorqual.planner.search.settings import PlanSettings
from rorqual.planner.timing.profiles import load_profile, profile_for
from rorqual.planner.timing.roofline import StepModel
from rorqual.planner.validation.validation import validate

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted((ROOT / "configs" / "ascend").glob("*.yaml"))
SHAPES = {
    "DeepSeek-R1-W8A8": ("deepseek-v3", "w8a8"),
    "Kimi-K2-W8A8": ("kimi-k2", "w8a8"),
    "Qwen3-235B-A22B": ("qwen3-235b-a22b", "none"),
}
C8 = Format(kv_dtype="int8", split_latent=True)


def test_the_devices() -> None:
    a2 = load_device("ascend-a2")
    a3 = load_device("ascend-a3")
    assert a2.link.span == 8, "HCCS joins a node; RoCE beyond"
    assert a3.link.span == 768, "HCCS joins a supernode"
    assert a3.ranks_per_chip == 2
    for device in (a2, a3):
        assert device.peak("int8") == 752e12
        assert device.peak("fp8") == device.peak("bfloat16"), "no fp8: widened"
        assert device.network.bandwidth == 25e9
        assert profile_for(device).name == "ascend"
        assert "assumed" in device.sources["network"]
    with pytest.raises(ConfigError, match=r"profile ascend is for NPUs .*not h200"):
        load_profile("ascend").check(load_device("h200"))


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "b3.yaml"
    path.write_text("b3: {based_on: ascend-a2, tflops: {bfloat16: 294.9, int8: 626}}")
    assert profile_for(load_device(str(path))).name == "ascend"
    path.write_text("b3: {based_on: ascend-a2, engine_device: tpu}")
    with pytest.raises(ConfigError, match="engine_device='tpu'; accepted: auto, npu"):
        load_device(str(path))


def test_a_plan_names_the_device_and_the_cache() -> None:
    asked = PlanSettings(
        gpu="ascend-a3", count=16, quant="w8a8", kv_dtype="int8", prompt=512, output=512
    )
    question = question_of("deepseek-v3", replace(asked, splits=False))
    assert question.fmt == C8
    found = search(question)
    chosen = settings(question, found.options[0])
    assert (chosen["device"], chosen["kv_cache_dtype"]) == ("npu", "int8")
    assert EngineConfig("x", **chosen).for_npu


def test_bytes_of_int8() -> None:
    """C8: 512 latent columns in int8, 64 of the rope key in bf16, no scale; W8A8: a byte an
    element and a scale a row."""
    config = published("deepseek-v3", "w8a8")
    assert kv_bytes_per_token(config, C8) == 61 * (512 + 128)
    assert kv_bytes_per_token(config, replace(C8, kv_dtype=None)) == 61 * (512 + 64) * 2
    sizes = ParallelConfig(dp=128, ep=128)
    wide = rank_weight_bytes(published("deepseek-v3", "none"), sizes)
    experts = 2 * 3 * 7168 * 2048 * 58
    held = rank_weight_bytes(config, sizes)
    assert wide - held > 0.98 * experts, "a byte less for each element of the experts at least"
    assert held < 26e9


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_costed_and_fits(path: Path) -> None:
    model, options = read_recipe(path)
    engine = EngineConfig(model or "", **options)
    shape, quant = SHAPES[Path(engine.model).name]
    fmt = C8 if engine.kv_cache_dtype == "int8" else Format()
    found = StepModel(
        published(shape, quant),
        engine.parallel,
        load_device("ascend-a3"),
        load_profile("ascend"),
        fmt,
        utilization=engine.memory_utilization,
        longest=engine.max_model_len,
    )
    drafts = engine.num_speculative_tokens
    tokens = (engine.max_model_len or 8192) * engine.max_num_seqs
    rows = engine.max_num_seqs * (1 + drafts)
    decode = GroupWork(
        BatchShape.verify(engine.max_num_seqs, tokens // engine.max_num_seqs, drafts), drafts=drafts
    )
    assert found.cache_tokens(rows, mtp=drafts > 0) >= tokens, "weights and cache fit in a die"
    bound = replace(found, profile=load_profile("roofline"))
    assert 0 < bound.step(decode).seconds < found.step(decode).seconds


def test_predictions_are_those_of_the_documentation() -> None:
    """docs/planning.md states them; a change of the model changes that table as well."""
    points = [point for group in validate(["ascend"]) for point in group.points]
    assert all(-0.6 < point.error < 0 for point in points), "all too fast, and none by more"
    text = (ROOT / "docs" / "planning.md").read_text()
    section = text.split("## Ascend")[1].split("\n## ")[0]
    table = re.findall(r"^\|.*\| ([\d.,]+) ms \| [^|]+\|$", section, re.MULTILINE)
    stated = [float(value.replace(",", "")) for value in table]
    assert stated == pytest.approx([point.predicted for point in points], rel=0.01)


def test_the_bound_lies_below_the_prediction() -> None:
    bound = validate(["a3-decode"])[0].points[0].predicted
    predicted = validate(["ascend-r1-decode"])[0].points[0].predicted
    published_step = 44.9 * 1.7
    assert bound < predicted < published_step
