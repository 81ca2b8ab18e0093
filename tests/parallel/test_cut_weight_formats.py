"""Tiny checkpoints of every weight format over 2 and 4 gloo ranks: the logits of one process.

Products whose rows are rounded to eight bits are compared without that rounding: it makes steps of
what another order of a sum changes in the last bit, and a token's scale covers the columns that a
rank has. What is left is the weights, their names and their cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rorqual.config.hf import read_config_file
from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig, check_parallel
from rorqual.errors import ConfigError
from rorqual.ops.cpu.backend import CpuOps
from tests.layers.weight_format.wide_rows import wide_rows
from tests.layers.weight_format.writers import FORMATS, save_quantized
from tests.models.checkpoints import VOCAB
from tests.models.driver import all_logits, load
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.exhaustive(but_first=True)

BOUND = 1e-4
PROMPTS = [7, 5, 9, 6]
LENGTHS = [10, 9, 11, 8]
SIZES: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 4},
    {"tp": 2, "dp": 2, "ep": 4},
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 4},
    {"pp": 2},
]
# the cheapest that cuts columns inside a matrix and experts comes first
NAMES = ["w4a16-g32", *(name for name in FORMATS if name != "w4a16-g32")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """A checkpoint and what one process makes of it."""
    known: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            save_quantized(folder, name)
            ids = torch.randint(
                0, VOCAB, (len(PROMPTS), max(LENGTHS)), generator=torch.Generator().manual_seed(5)
            )
            model = load(folder, CpuOps())
            with pytest.MonkeyPatch.context() as patch:
                wide_rows(patch)
                logits = all_logits(model, ids, [max(LENGTHS)])
            save_file({"ids": ids, "logits": logits}, folder / "answers")
            known[name] = folder
        return known[name]

    return get


def refusal(config: ModelConfig, sizes: dict[str, Any]) -> str:
    """Why these sizes cannot be had: blocks are never cut."""
    try:
        check_parallel(config, ParallelConfig(**sizes))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_cut_over_ranks(pool: RankPool, saved, name: str, sizes: dict[str, Any]) -> None:
    folder = saved(name)
    config = read_config_file(folder)
    scheme = config.quant.of("model.layers.1.mlp.experts.0.down_proj", 128)
    refused = refusal(config, sizes)
    if refused:
        assert sizes.get("tp", 1) > 1
        assert "cuts" in refused
        assert "inside an" in refused
        return
    plain = scheme.activation == "wide"
    job = "compare" if plain else "compare_unrounded"
    world = sizes.get("tp", 1) * sizes.get("dp", 1) * sizes.get("pp", 1)
    results = pool.run(
        job,
        world,
        sizes=sizes,
        folder=str(folder),
        answers=str(folder / "answers"),
        prompts=PROMPTS,
        lengths=LENGTHS,
    )
    for rank, result in enumerate(results):
        assert result["worst"] < BOUND, (rank, result)
        assert result["differ"] == 0, (rank, result)
    positions = sum(result["positions"] for result in results)
    assert positions == sum(LENGTHS) * sizes.get("tp", 1)
