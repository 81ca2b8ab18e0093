"""One rank of a layout without the others: it runs every layout to the end, holds its own shard,
and where nothing is cut it is the engine of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.config.model import MoEConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.engine.balance.initial import with_rank_0_as
from rorqual.engine.execution.worker import weight_bytes
from rorqual.errors import ConfigError
from rorqual.layers.routing_simulator import SampledRouting
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.parallel.exchange import ExpertStore, SlotMap
from rorqual.parallel.exchange_select import make_exchange
from rorqual.parallel.fake_axis import FakeAxis
from rorqual.parallel.mesh import Mesh
from rorqual.parallel.shard import Shard
from tests.models.checkpoints import rewrite_config, save

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "page_size": 8,
    "threads": 1,
    "weights": "random",
    "skip_tokenizer_init": True,
}
PROMPTS = [[5, 3 + i, 9, 11 + 2 * i] for i in range(5)]
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 4},
    {"tp": 4, "ep": 4, "num_speculative_tokens": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "dp": 2, "ep": 4, "exchange": "low_latency", "num_speculative_tokens": 1},
    {"tp": 2, "dp": 2, "ep": 2, "dense_tp": 1},
    {"dp": 4, "ep": 4, "exchange": "alltoall"},
    {"dp": 4, "embed_tp": 4, "head_tp": 4, "num_speculative_tokens": 2},
    {"dp": 2, "ep": 2, "exchange": "allgather_ep", "num_speculative_tokens": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("v3")
    save("v3", path)
    rewrite_config(path, num_nextn_predict_layers=1)
    return path


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    found = [tuple(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, params)]
    assert llm.engine.scheduler.usage().pages_used == 0
    return found


@pytest.mark.parametrize(
    "layout",
    LAYOUTS,
    ids=lambda layout: "-".join(f"{name}={value}" for name, value in layout.items()),
)
def test_every_layout_runs_to_the_end(folder: Path, layout: dict[str, Any]) -> None:
    lone = LLM(folder, **{**COMMON, **layout, "single_rank_bench": True})
    whole = LLM(
        folder, **{**COMMON, "num_speculative_tokens": layout.get("num_speculative_tokens", 0)}
    )
    assert not dist.is_initialized()
    assert (
        lone.engine.stats.all2all_backend
        == lone.engine.stats.allreduce_backend
        == "nowhere (one rank alone)"
    )
    assert weight_bytes(lone.engine.model) < weight_bytes(whole.engine.model)
    found = tokens(lone)
    assert [len(row) for row in found] == [9] * len(PROMPTS)
    assert found == tokens(lone), "the same again over a filled prefix cache"


def test_where_nothing_is_cut_it_is_the_engine_of_one_device(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    rewrite_config(tmp_path, first_k_dense_replace=3, num_nextn_predict_layers=0)
    assert tokens(LLM(tmp_path, **COMMON, dp=4, single_rank_bench=True)) == tokens(
        LLM(tmp_path, **COMMON)
    )


def test_copies_have_the_size_of_what_would_arrive() -> None:
    axis = FakeAxis("tp", Shard(1, 3))
    x = torch.arange(8.0).view(4, 2)
    assert axis.all_reduce(x) is x
    assert torch.equal(axis.all_gather(x), torch.cat([x] * 3))
    assert torch.equal(axis.all_gather(x, [2, 4, 5]), torch.cat((x[:2], x, x, x[:1])))
    assert torch.equal(axis.all_gather(x[:0], [1, 0, 2]), torch.zeros(3, 2))
    assert torch.equal(axis.reduce_scatter(x[:3]), x[1:2])
    assert torch.equal(axis.reduce_scatter(x, [1, 3, 0]), x[1:])
    columns = axis.all_gather_columns(x, [1, 2, 2])
    assert torch.equal(columns, torch.cat((x[:, :1], x, x), 1))
    assert columns.is_contiguous(), "kernels take rows that are"
    own = [1, 2, 1, 2, 1]  # what this rank sends itself, from all
    assert torch.equal(axis.all_to_all(x, [1, 2, 1], [2, 2, 1]), x[own])
    assert torch.equal(axis.start_all_to_all(x, [1, 2, 1], [2, 2, 1]).wait(), x[own])
    blocks = axis.all_to_all_fixed(x[:3])
    assert torch.equal(blocks, x[[1, 1, 1]])
    assert blocks.is_contiguous()
    assert torch.equal(axis.start_all_to_all_fixed(x[:3]).wait(), blocks)
    assert axis.traffic.total == 0


def pairs_here(exchange: str, rank: str) -> int:
    """(Token, expert) pairs that rank 0 of 4 computes in a step of 64 tokens a rank, with its
    experts swapped for those of the rank with twice the mean load, or with the mean."""
    sizes = ParallelConfig(dp=4, ep=4, exchange=exchange)
    moe = MoEConfig(16, 3, 8)
    mesh = Mesh.fake(sizes)
    counts = np.repeat([4, 8, 2, 2], 4)
    placed = with_rank_0_as(np.arange(16)[None], counts[None], 4, rank)[0]
    found = []

    def compute(x: Tensor, local_ids: Tensor, *_: Any) -> Tensor:
        assert x.shape[0] == local_ids.shape[0]
        assert local_ids.max() < 4
        found.append(int((local_ids >= 0).sum()))
        return x

    nothing = Weight(torch.empty(0))
    cpu = torch.device("cpu")
    slots = SlotMap(tuple(placed.tolist()), 16)
    store = ExpertStore(
        slots, ExpertWeights(nothing, nothing), compute, cpu, mesh.axes["ep"].shard, placed=True
    )
    made = make_exchange(sizes, moe, store)
    layout = mesh.layout([64] * 4, True, moe)
    ids = SampledRouting(counts, 3, 0, cpu)(torch.zeros(64, 3, dtype=torch.int64), 0)
    ticket = made.dispatch(torch.randn(64, 32), ids, torch.rand(64, 3), layout)
    if made.counts_first(layout):
        made.send(ticket)
    made.run_experts(ticket)
    assert made.combine(ticket).shape == (64, 32)
    return sum(found)


@pytest.mark.parametrize("exchange", ["allgather_ep", "alltoall", "low_latency"])
def test_a_rank_computes_its_share_of_the_expert_load(exchange: str) -> None:
    mean, hottest = pairs_here(exchange, "mean"), pairs_here(exchange, "hottest")
    assert mean == pytest.approx(64 * 3, rel=0.1)
    assert hottest == pytest.approx(2 * 64 * 3, rel=0.1)


@pytest.mark.parametrize(
    "changes", [{"weights": "checkpoint"}, {"pp": 2}, {"launcher": "torchrun"}]
)
def test_what_makes_no_sense_alone_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="single_rank_bench needs"):
        LLM(folder, **{**COMMON, "tp": 2, "single_rank_bench": True, **changes})
