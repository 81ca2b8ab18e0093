"""`rorqual plan` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rorqual.cli.app import app
from rorqual.config.hf import read_config_file
from rorqual.errors import ConfigError
from rorqual.planner.costs import costs
from rorqual.planner.timing import digests


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_home_cluster_page() -> None:
    text = run("deepseek-ai/DeepSeek-R1", "--gpu", "rtx4090", "--count", "32")
    for part in (
        "lower bounds",
        "Best deployments",
        "What limits it",
        "What does not work",
        "The network's floor",
        "29 expert GPUs",
    ):
        assert part in text.replace("\n", " "), part
    assert len(text.splitlines()) < 60, "a page"


def test_a_node(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    text = run(
        "qwen3-30b-a3b",
        "--gpu",
        "h200",
        "--count",
        "1",
        "--tpot",
        "20",
        "--no-splits",
        "--csv",
        str(path),
    )
    assert "rorqual serve qwen3-30b-a3b --max-num-seqs" in text
    assert path.read_text().startswith("kind,layout,")


def test_nothing_fits() -> None:
    text = run("deepseek-ai/DeepSeek-R1", "--gpu", "h100", "--count", "4")
    assert "Nothing fits." in text
    assert "The weights alone need 9 such GPUs." in text


def test_nothing_meets_the_goal() -> None:
    text = run("qwen3-30b-a3b", "--gpu", "h200", "--count", "1", "--tpot", "0.5", "--no-splits")
    assert "Nothing that fits meets the goal." in text
    assert "Nearest to the goal" in text


def test_instead_of_a_plan() -> None:
    assert "data-parallel" in run("--questions")
    assert "152,797 tokens" in run("--question", "kv-tokens")
    assert "bandwidth: NVIDIA H200 datasheet" in run("--gpus").replace("\n", " ")
    assert "a lower bound" in run("--validate", "--group", "a3-d").lower()


def test_stale_tables_fail_the_validation_and_label_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = digests.present()
    changed = {name: "0" if name in ("experts", "gqa_decode") else now[name] for name in now}
    monkeypatch.setattr(digests, "present", lambda: changed)
    found = CliRunner().invoke(app, ["plan", "--validate", "--group", "offline-qwen3"])
    assert found.exit_code == 1
    assert "mean absolute error" in found.output, "the figures are shown all the same"
    assert "rorqual bench calibrate --full" in found.output
    path = tmp_path / "all.csv"
    asked = ("qwen3-30b-a3b", "--count", "1", "--no-splits", "--csv", str(path))
    text = run(*asked)
    assert "one GPU (stale)" in text
    assert "(stale): the times of" in text
    assert "experts" in path.read_text().splitlines()[1]
    assert "gqa_decode" in path.read_text().splitlines()[1]
    assert "stale" not in run(*asked[:4], "--profile", "roofline")


def test_an_fp8_cache_counts_scales_and_rope_keys() -> None:
    for name in ("fp8", "float8_e4m3fn"):
        text = run(
            "deepseek-v3",
            "--gpu",
            "h200",
            "--count",
            "8",
            "--profile",
            "roofline",
            "--kv-dtype",
            name,
            "--no-splits",
            "--top",
            "1",
        )
        assert "cache 40,016 B a token" in text  # 61 x 656


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_8bit_keys_and_values_hold_nearly_twice_the_tokens(dtype: str) -> None:
    config = read_config_file("rorqual/shapes/qwen3-30b-a3b")
    plain, packed = (
        costs.kv_bytes_per_token(config, costs.Format(kv_dtype=name)) for name in (None, dtype)
    )
    assert packed == plain // 2 * 132 // 128


def test_mistakes() -> None:
    for arguments, message in (
        ((), "name a model"),
        (("deepseek-v3", "--gpu", "h201"), "device 'h201' is not known"),
        (
            ("deepseek-v3", "--gpu", "ascend-a3", "--profile", "sglang"),
            "no kernel times for device ascend-a3",
        ),
        (("deepseek-v3", "--routing", "odd"), "kind='odd'"),
        (("deepseek-v3", "--count", "0"), "count=0"),
        (("deepseek-v3", "--count", "100001"), "--count=100001 is .* accepted: 1 to 100,000"),
        (("deepseek-v3", "--tpot", "0"), "--tpot=0.0 is out of range; accepted: above 0"),
        (("deepseek-v3", "--tpot", "nan"), "--tpot=nan is not a finite number"),
        (("deepseek-v3", "--ttft", "0"), "--ttft=0.0 is out of range; accepted: above 0"),
        (("deepseek-v3", "--ttft", "inf"), "--ttft=inf is not a finite number"),
        (("deepseek-v3", "--network", "nan"), "--network=nan is not a finite number"),
        (("deepseek-v3", "--acceptance", "nan"), "--acceptance=nan is not a finite number"),
        (("deepseek-v3", "--memory-utilization", "0"), "above 0, up to 1"),
        (("deepseek-v3", "--kv-dtype", "float8_e4m3fn"), "bf16 cache alone"),
        (("deepseek-v3", "--kv-dtype", "fp4"), "accepted: auto, bfloat16, float16, float32, fp8"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
