"""`rorqual plan` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rorqual.cli.main import app
from rorqual.config.hf import read_config_file
from rorqual.errors import ConfigError
from rorqual.planner.costs import costs


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
    assert "mean absolute error" in run("--validate", "--group", "own-v3")


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
            ("deepseek-v3", "--gpu", "atlas-a3", "--profile", "sglang"),
            "no kernel times for device atlas-a3",
        ),
        (("deepseek-v3", "--routing", "odd"), "kind='odd'"),
        (("deepseek-v3", "--count", "0"), "count=0"),
        (("deepseek-v3", "--kv-dtype", "float8_e4m3fn"), "bf16 cache alone"),
        (("deepseek-v3", "--kv-dtype", "fp4"), "accepted: auto, bfloat16, float16, float32, fp8"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
