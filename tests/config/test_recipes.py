"""Every recipe in configs/ is accepted, fits its model, and says how to use it; mistakes in a
recipe are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rorqual.cli.options import engine_options
from rorqual.config.hf import read_config_file
from rorqual.config.parallel import check_parallel
from rorqual.engine.config import EngineConfig, read_recipe
from rorqual.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
SHAPES = {
    "DeepSeek-R1": "deepseek-v3",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    None: None,
}


def test_there_are_recipes() -> None:
    assert len(RECIPES) > 4


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_model(path: Path) -> None:
    model, options = read_recipe(path)
    config = EngineConfig(model or "", **options)
    shape = SHAPES[model.split("/")[-1] if model else None]
    folder = ROOT / "rorqual" / "shapes" / shape if shape else ROOT / "rorqual" / "bundled"
    check_parallel(read_config_file(folder), config.parallel)
    assert f"--config configs/{path.name}" in path.read_text()


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tpp: 2", "'tpp' is not an engine option"),
        ("tp: 2\nep: 3", "ep=3 does not divide"),
        ("- tp", "no mapping"),
        ("tp: [", "cannot be read as YAML"),
        ("tp: " + 2000 * "[", "cannot be read as YAML: maximum recursion depth"),
        ("tp: 2001-99-99", "cannot be read as YAML: month must be in 1..12"),
        ("model: 5", "model=5"),
        ("next_n: 1\nnum_speculative_tokens: 1", "'next_n' and 'num_speculative_tokens' are two"),
        ("threads: 100000000", "--threads=100000000 is out of range; accepted: 1 to "),
        ("threads: 0", "threads=0 must be an integer of at least 1"),
        ("max_num_seqs: 2147483648", "--max-num-seqs=2147483648 is out of range; accepted: 1 to "),
        ("next_n: many", "num_speculative_tokens='many'"),
        ("num_speculative_tokens: many", "num_speculative_tokens='many'"),
        ("!!python/object/apply:os.getcwd []", "cannot be read as YAML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_recipe(recipe(tmp_path, text))


def test_there_may_be_as_many_threads_as_processors() -> None:
    for threads in (1, os.cpu_count() or 1, 4096):
        assert EngineConfig("", threads=threads).threads == threads


def test_what_goes_before_what(tmp_path: Path) -> None:
    path = recipe(tmp_path, "model: x\nnext_n: 2\ndtype: float32\nsimulated_acceptance: [0.5, 0.5]")
    model, options = engine_options(
        path,
        ["tp=2", "dtype=bfloat16"],
        {"max_num_seqs": 7, "threads": None, "exe_mode": "eager"},
        {"max_num_seqs": 8, "dtype": "auto", "page_size": 16},
    )
    assert model == "x"
    expected = {
        "num_speculative_tokens": 2,
        "dtype": "bfloat16",
        "simulated_acceptance": (0.5, 0.5),
        "tp": 2,
        "max_num_seqs": 7,
        "exe_mode": "eager",
        "page_size": 16,
    }
    assert options == expected


def test_a_flag_goes_before_a_recipe_even_with_the_default(tmp_path: Path) -> None:
    path = recipe(tmp_path, "next_n: 2")
    assert engine_options(path, None, {})[1] == {"num_speculative_tokens": 2}
    for last in (["next_n=0"], ["num_speculative_tokens=0"]):
        assert engine_options(path, last, {})[1] == {"num_speculative_tokens": 0}
    zero = engine_options(path, None, {"num_speculative_tokens": 0})[1]
    assert zero == {"num_speculative_tokens": 0}
