"""Simulated routing: uniform, or following the counts of a file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.config.model import MoEConfig
from rorqual.engine.balance.initial import with_rank_0_as
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError
from rorqual.layers.routing_simulator import SampledRouting, UniformRouting, sampled
from rorqual.parallel.eplb.placement import place, rank_loads
from rorqual.serve.config import ServeConfig

CPU = torch.device("cpu")
V3 = MoEConfig(256, 8, 2048, n_group=8, topk_group=4, method="noaux_tc")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "weights": "random",
    "num_layers": 3,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "page_size": 8,
    "threads": 1,
    "num_pages": 60,
    "enable_prefix_caching": False,
    "record_expert_load": True,
    "skip_tokenizer_init": True,
}
PROMPTS = [[5, 9, 11, 2], [7, 3, 1, 8], [20, 21, 22, 23], [40, 41, 42, 43]]


@pytest.mark.parametrize("moe", [V3, MoEConfig(16, 4, 32), MoEConfig(64, 6, 32)])
def test_uniform_routing(moe: MoEConfig) -> None:
    """Different experts for each token, of no more groups than the rules allow; all experts alike
    over many rows, and all ranks of experts soon."""
    routing = UniformRouting(moe, CPU)
    ids = torch.zeros(moe.num_experts, moe.top_k, dtype=torch.int64)
    found = routing(ids, 0)
    assert all(len(set(row)) == moe.top_k for row in found.tolist())
    assert (
        found.flatten().bincount(minlength=moe.num_experts).tolist()
        == [moe.top_k] * moe.num_experts
    )
    if moe.method != "greedy":
        groups = found // (moe.num_experts // moe.n_group)
        assert max(len(set(row)) for row in groups.tolist()) == moe.topk_group
    few = torch.cat([routing(ids[:2], rank) for rank in range(4)])
    assert torch.equal(few, found[:8]), "rows of several ranks follow one another"


def test_sampled_routing_follows_the_counts() -> None:
    counts = np.random.default_rng(0).lognormal(0, 1, 256)
    found = sampled(counts, 8, 4000, 1)
    assert all(len(set(row)) == 8 for row in found.tolist())
    often = np.bincount(found.ravel(), minlength=256) / 4000
    assert np.abs(often - 8 * counts / counts.sum()).max() < 0.03
    hot = counts.copy()
    hot[3] = counts.sum()  # half of all counts: every token has it, and none twice
    often = np.bincount(sampled(hot, 8, 500, 1).ravel(), minlength=256)
    assert often[3] == 500
    routing = SampledRouting(counts, 8, 0, CPU)
    none = torch.zeros(15, 8, dtype=torch.int64)
    assert torch.equal(routing(none[:5], 2), routing(none, 0)[10:])
    assert not torch.equal(routing(none + 1, 0), routing(none, 0)), "another step"


def test_the_rank_that_is_timed() -> None:
    loads = np.random.default_rng(1).lognormal(0, 1, (6, 32))
    placement = place(loads[::-1], 36, 4)
    times = rank_loads(placement, loads, 4)
    hottest = rank_loads(with_rank_0_as(placement, loads, 4, "hottest"), loads, 4)
    assert hottest[:, 0].tolist() == times.max(1).tolist()
    near = rank_loads(with_rank_0_as(placement, loads, 4, "mean"), loads, 4)[:, 0]
    assert (np.abs(near - times.mean(1)) <= np.abs(times.T - times.mean(1)).min(0) + 1e-9).all()
    assert (np.sort(hottest, 1) == np.sort(times, 1)).all()


def counted(**options: Any) -> np.ndarray:
    llm = LLM(**OPTIONS, **options)
    params = SamplingParams(temperature=0, max_tokens=55, ignore_eos=True)
    llm.generate(PROMPTS, params)
    found = np.array(llm.engine.expert_load())
    llm.engine.close()
    return found


def test_forced_balance(caplog: pytest.LogCaptureFixture) -> None:
    natural = counted()
    with caplog.at_level(logging.WARNING):
        forced = counted(expert_balance="forced")
    assert "tokens mean nothing" in caplog.text
    assert forced.sum() == natural.sum()
    assert forced.max() < 2 * forced.min()
    assert forced.max() / forced.min() < natural.max() / natural.min()


def test_one_rank_with_the_loads_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    counts = np.zeros((3, 16), int)
    counts[1:] = np.arange(1, 17)
    path.write_text(json.dumps({"logical_count": counts.tolist()}))
    alone: dict[str, Any] = {
        "dp": 2,
        "ep": 2,
        "single_rank_bench": True,
        "simulated_expert_load": str(path),
    }
    found = counted(**alone)
    share = found / found.sum(1, keepdims=True)
    assert np.abs(share - counts[1:] / counts[1:].sum(1, keepdims=True)).max() < 0.05
    llm = LLM(**OPTIONS, **alone)
    held = [list(layer.slots.physical_to_logical[:8]) for layer in llm.engine.model.moe_layers()]
    assert held == [list(range(8, 16))] * 2, "the second rank has the hotter half"
    planned = LLM(**OPTIONS, **alone, redundant_experts=2, init_expert_load=str(path))
    assert all(layer.slots.num_slots == 18 for layer in planned.engine.model.moe_layers())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"simulated_expert_load": "f"}, "goes with single_rank_bench alone"),
        ({"enable_eplb": True}, "enable_eplb needs ep of at least 2"),
        ({"enable_eplb": True, "dp": 2, "ep": 2, "eplb_decay": 2.0}, "eplb_decay=2.0 is out of"),
        ({"init_expert_load": "f"}, "init_expert_load='f' needs ep of at least 2"),
        ({"expert_balance": "perfect"}, "accepted: natural, forced"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig("m", **options)


def test_a_server_obeys_its_routers() -> None:
    with pytest.raises(ConfigError, match="expert_balance='forced' changes tokens"):
        ServeConfig(engine={"expert_balance": "forced"})
