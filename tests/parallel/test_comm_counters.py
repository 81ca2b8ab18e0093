"""Bytes: what the axes count is what messages.py says, for every kind of layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rorqual.config.hf import read_config_file
from rorqual.config.parallel import ParallelConfig
from rorqual.parallel.comm_counters import bytes_sent
from rorqual.parallel.comm_volume import step_messages
from tests.models.checkpoints import save
from tests.parallel.pool import RankPool

SHAPES = Path(__file__).parents[2] / "rorqual" / "shapes"
PROMPTS = [7, 5, 9, 6]
LENGTHS = [9, 9, 10, 8]
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 4, "dense_tp": 2, "embed_tp": 2, "head_tp": 4},
    {"tp": 2, "sequence_parallel": True},
    {"dp": 2},
    {"dp": 4, "ep": 4, "head_tp": 2},
    {"dp": 4, "dense_tp": 4, "embed_tp": 2, "head_tp": 4},
    {"tp": 2, "dp": 2, "ep": 2, "dense_tp": 4, "embed_tp": 4, "head_tp": 4},
    {"tp": 2, "dp": 2, "ep": 2, "dense_tp": 4, "sequence_parallel": True},
    {"tp": 4, "ep": 2, "dense_tp": 2, "exchange": "allgather_ep"},
    {"tp": 2, "dp": 2, "ep": 4, "exchange": "low_latency"},
    {"dp": 2, "ep": 2, "exchange": "low_latency", "fp8_dispatch": True},
    {"pp": 2, "dp": 2, "micro_batches": 2},
    {"pp": 2, "tp": 2, "micro_batches": 2, "sequence_parallel": True},
]


# Latents wider than hidden states, none of the query, and no latents at all.
OTHERS = [
    (option, {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True})
    for option in ("v3", "v3-no-q-lora", "qwen")
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of an option, made once."""

    @cache
    def make(option: str) -> Path:
        where = tmp_path_factory.mktemp(option)
        save(option, where)
        return where

    return make


def name_of(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else "-".join(f"{name}{size}" for name, size in value.items())
    )


@pytest.mark.parametrize(
    ("option", "sizes"),
    [*(("v3-narrow-latents", sizes) for sizes in LAYOUTS), *OTHERS],
    ids=name_of,
)
def test_counted_bytes_are_the_expected_ones(
    pool: RankPool, folder_of: Callable[[str], Path], option: str, sizes: dict[str, Any]
) -> None:
    world = ParallelConfig(**sizes).world
    results = pool.run(
        "count_bytes",
        world,
        sizes=sizes,
        folder=str(folder_of(option)),
        prompts=PROMPTS,
        lengths=LENGTHS,
    )
    for rank, found in enumerate(results):
        assert found["counted"] == found["expected"], rank
        total = sum(sum(calls.values()) for calls in found["counted"].values())
        assert found["carried"] == total, "what an imitated link would carry"
    assert any(found["counted"] for found in results)
    # the planner knows one rank's tokens, and those of all others together
    if sizes.get("dp", 1) <= 2 and sizes.get("pp", 1) == 1:
        assert results[0]["counted"] == results[0]["planned"]


@pytest.mark.parametrize("world", [2, 4])
def test_data_parallel_attention_and_dense_layers_call_nothing(
    pool: RankPool, folder_of: Callable[[str], Path], world: int
) -> None:
    """A model of dense layers alone: with attention and dense layers both data-parallel no rank
    makes a single collective call."""
    given = {"folder": str(folder_of("v3-all-dense")), "prompts": PROMPTS, "lengths": LENGTHS}
    for found in pool.run("count_bytes", world, sizes={"dp": world}, **given):
        nothing = {"counted": {}, "expected": {}, "planned": {}, "calls": 0, "carried": 0}
        assert found == nothing
    assert (
        pool.run("count_bytes", world, sizes={"dp": world, "dense_tp": world}, **given)[0]["calls"]
        > 0
    )


def test_sharded_attention_gathers_the_narrower_of_latents_and_hidden_states() -> None:
    """DeepSeek-V3's 1536 + 576 columns in place of 7168; V2-Lite has no query latent, Qwen3 no
    latents."""
    shapes = {"deepseek-v3": 2112, "deepseek-v2-lite": 2048, "qwen3-30b-a3b": 2048}
    for name, columns in shapes.items():
        config = read_config_file(SHAPES / name)
        sent = step_messages(
            config, ParallelConfig(tp=8, sequence_parallel=True), 0, [800], decode=False, logits=[0]
        )
        last = 7 * 100 * config.hidden_size * 2  # the norm behind the last layer
        assert sent["tp"]["all_gather"] == config.num_layers * 7 * 100 * columns * 2 + last, name


def test_shared_experts_take_the_rows_that_routed_experts_gathered() -> None:
    """Over 8 data-parallel ranks, then over pairs of ranks whose tokens are sharded: only the
    dense layers gather for themselves. An exchange that does not gather leaves the shared
    experts to do it."""
    config = read_config_file(SHAPES / "deepseek-v3")
    row = 7168 * 2
    dense = 3
    sparse = 58
    wide = step_messages(config, ParallelConfig(dp=8, ep=8, dense_tp=8), 0, [100] * 8, decode=True)
    assert wide["dense_dp"] == {
        "all_gather": dense * 7 * 100 * row,
        "reduce_scatter": dense * 7 * 100 * row,
    }
    pairs = ParallelConfig(tp=4, dp=2, ep=8, dense_tp=2)
    narrow = step_messages(config, pairs, 0, [100, 100], decode=True)
    assert narrow["dense"] == {"all_gather": dense * 25 * row, "reduce_scatter": dense * 25 * row}
    sent = step_messages(config, replace(pairs, exchange="low_latency"), 0, [100, 100], decode=True)
    assert sent["dense"]["all_gather"] == (dense + sparse) * 25 * row


def test_data_parallel_dense_layers_and_heads_move_nothing(
    folder_of: Callable[[str], Path],
) -> None:
    config = read_config_file(folder_of("v3"))
    assert set(step_messages(config, ParallelConfig(dp=4, ep=4), 1, [3, 2, 0, 1], decode=True)) == {
        "dp"
    }


def test_all_reduces_of_published_layouts() -> None:
    """DeepSeek-R1 on one node: two all-reduces a layer under tp, all-gather and reduce-scatter
    under data-parallel attention, the former of rows in fp8 with 56 scales."""
    config = read_config_file(SHAPES / "deepseek-v3")
    row = 7168 * 2
    fp8 = 7168 + 56 * 4
    tp = step_messages(config, ParallelConfig(tp=8), 0, [1], decode=True)
    # 2 a layer; the last norm takes the place of the first
    assert tp["tp"]["all_reduce"] == 122 * (2 * row * 7 // 8)
    dp = step_messages(config, ParallelConfig(dp=8, ep=8), 0, [128] * 8, decode=True)
    assert dp == {
        "dp": {"all_gather": 58 * 7 * 128 * (fp8 + 64), "reduce_scatter": 58 * 7 * 128 * row}
    }


def test_a_byte_count_by_hand() -> None:
    assert bytes_sent("all_reduce", 800, 4) == 1200
    assert bytes_sent("reduce_scatter", 800, 4) == bytes_sent("all_gather", 800, 4) == 600
    assert bytes_sent("all_to_all", 800, 4) == bytes_sent("send", 800, 2) == 800
