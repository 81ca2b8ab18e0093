"""One rank's costs against models that are built as large as a rank's share, and messages
against counting by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import kv_spec
from rorqual.config.model import GQAConfig, ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.engine.execution.worker import weight_bytes as engine_bytes
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.layers.parameter import Build
from rorqual.models.loader import random_weights
from rorqual.models.registry import make_model
from rorqual.ops.interface import AttentionMetadata, Ops, TokenPlaces
from rorqual.parallel.overlap import run_one
from rorqual.planner.costs import costs
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, Format, GroupWork
from rorqual.planner.costs.messages import RankMessages
from rorqual.planner.costs.parallel_costs import rank_step
from rorqual.planner.costs.shards import (
    layer_kv_bytes,
    rank_kv_bytes_per_token,
    rank_weight_bytes,
    stage_layers,
)
from rorqual.planner.timing.roofline import activation_bytes
from tests.planner.costs.test_costs import decode_step, meta_model, small, unused_query

LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(tp=2),
    ParallelConfig(tp=2, pp=2),
    ParallelConfig(dp=4, ep=4),
    ParallelConfig(tp=4, dp=2, ep=8),
]


def share(config: ModelConfig, ranks: int) -> ModelConfig:
    """The model that a rank of tensor parallelism over `ranks` amounts to."""
    attention: Any = replace(config.attention, num_heads=config.attention.num_heads // ranks)
    if isinstance(attention, GQAConfig):
        attention = replace(attention, num_kv_heads=max(attention.num_kv_heads // ranks, 1))
    moe = replace(config.moe, intermediate_size=config.moe.intermediate_size // ranks)
    sizes = {
        "dense_intermediate": config.dense_intermediate // ranks,
        "vocab_size": config.vocab_size // ranks,
    }
    return replace(config, attention=attention, moe=moe, num_mtp_layers=0, **sizes)


@pytest.mark.parametrize("case", ["deepseek", "no query latent", "qwen"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_ranks_bytes_equal_its_share_of_the_model(case: str, ranks: int) -> None:
    config = replace(small(case), dtype="bfloat16")
    if config.attention.bias:
        # an output bias is on one rank or on all: not split
        config = replace(config, attention=replace(config.attention, bias=False))
    model = meta_model(share(config, ranks))
    model.finalize()
    assert rank_weight_bytes(config, ParallelConfig(tp=ranks)) == engine_bytes(model)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "qwen3-235b-a22b"])
def test_published_shards_equal_the_models(name: str) -> None:
    config = replace(published(name), quant=None)
    model = meta_model(share(config, 4))
    model.finalize()
    assert rank_weight_bytes(config, ParallelConfig(tp=4)) == engine_bytes(model)


def test_experts_of_all_ranks_are_all_experts() -> None:
    config = published("deepseek-v3")
    whole = costs.weight_bytes(config)
    routed = whole.routed_experts
    one, eight = (rank_weight_bytes(config, ParallelConfig(dp=ranks, ep=ranks)) for ranks in (1, 8))
    assert one == whole.total
    assert one - eight == pytest.approx(routed * 7 / 8)
    assert rank_weight_bytes(config, ParallelConfig(dp=8)) == pytest.approx(eight, rel=1e-3), (
        "columns or whole experts: the same bytes"
    )
    assert rank_weight_bytes(config, ParallelConfig(), mtp=True) - one == whole.mtp


@pytest.mark.parametrize("case", ["deepseek", "no query latent"])
@pytest.mark.parametrize("form", ["CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME"])
def test_a_ranks_flops_equal_the_counted(case: str, form: str) -> None:
    config = replace(small(case), num_mtp_layers=0)
    context = 23
    if config.attention.bias:
        config = replace(config, attention=replace(config.attention, bias=False))
    for ranks in (1, 2):
        own = share(config, ranks)
        model = make_model(
            own,
            Build(Ops(), torch.float32, torch.device("cpu")),
            64,
            "CD" if form == "CD" else "CC",
            form,
        )
        random_weights(model, 0)
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            model.logits(run_one(model.forward(decode_step(own, model, context, form))))
        step = rank_step(
            config,
            ParallelConfig(tp=ranks),
            GroupWork(BatchShape.decode(1, context)),
            Format(form=form),
        )
        assert step.total("flops") == counter.get_total_flops() - config.num_layers * unused_query(
            own, form
        )


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b"])
@pytest.mark.parametrize("form", ["CD", "CC", "A_CC_ME", "AM_CC_ME"])
@pytest.mark.parametrize("batch", [BatchShape.decode(5, 700), BatchShape.verify(3, 900, 2)])
def test_one_rank_is_the_whole(name: str, form: str, batch: BatchShape) -> None:
    config = published(name)
    fmt = Format(form=form)
    step = rank_step(config, ParallelConfig(), GroupWork(batch), fmt)
    whole = costs.total(costs.step_ops(config, batch, fmt))
    assert step.total("flops") == pytest.approx(whole.flops)
    assert step.total("weight_bytes") == pytest.approx(whole.weight_bytes, rel=1e-6)
    assert step.total("cache_bytes") == pytest.approx(whole.cache_bytes)
    assert not step.messages


def test_prompts_are_decompressed() -> None:
    config = published("deepseek-v3")
    step = rank_step(config, ParallelConfig(), GroupWork(None, (BatchShape(1, 512),)))
    whole = costs.step_ops(config, BatchShape(1, 512), Format(form="CC"))
    assert step.total("flops") == pytest.approx(costs.total(whole).flops)
    mixed = rank_step(
        config, ParallelConfig(), GroupWork(BatchShape.decode(4, 100), (BatchShape(1, 60),))
    )
    assert mixed.total("cache_bytes") == pytest.approx(
        (400 + 60) * costs.kv_bytes_per_token(config)
    )


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_no_work_is_lost_between_ranks(sizes: ParallelConfig) -> None:
    """All ranks of a stage together compute what one device would, but for what is on every
    rank."""
    config = published("deepseek-v3")
    tokens = 64
    work = GroupWork(BatchShape.decode(tokens // sizes.dp, 300))
    from rorqual.planner.costs.routing import Routing

    step = rank_step(config, sizes, work, routing=Routing(balance="perfect"))
    one = rank_step(config, ParallelConfig(), GroupWork(BatchShape.decode(tokens, 300)))
    dense, moe = stage_layers(config, sizes)
    for name in ("experts", "attention", "o_proj", "q_b_proj"):
        ours = sum(op.flops * op.layers for op in step.ops if op.name == name) * sizes.stage
        whole = sum(op.flops * op.layers for op in one.ops if op.name == name)
        layers = moe / 58 if name == "experts" else (dense + moe) / 61
        assert ours == pytest.approx(whole * layers), name


def test_the_cache_of_a_rank() -> None:
    v3 = published("deepseek-v3")
    qwen = published("qwen3-30b-a3b")
    assert rank_kv_bytes_per_token(v3, ParallelConfig(tp=8)) == costs.kv_bytes_per_token(v3), (
        "a latent has no heads to split"
    )
    assert layer_kv_bytes(v3, ParallelConfig(tp=8), Format(form="CD")) == 81_920 / 8
    assert rank_kv_bytes_per_token(qwen, ParallelConfig(tp=4)) == costs.kv_bytes_per_token(qwen) / 4
    assert (
        rank_kv_bytes_per_token(qwen, ParallelConfig(tp=8)) == costs.kv_bytes_per_token(qwen) / 4
    ), "at least one head"
    assert rank_kv_bytes_per_token(v3, ParallelConfig(), mtp=True) == 62 * 1152


def test_stages() -> None:
    """The first of four stages has 16 layers, three of them dense; the others have 15."""
    config = published("deepseek-v3")
    assert stage_layers(config, ParallelConfig()) == (3, 58)
    assert stage_layers(config, ParallelConfig(pp=4)) == (0, 15)
    assert sum(stage_layers(config, ParallelConfig(pp=61))) == 1


# ---- messages


def sent(
    config: ModelConfig, sizes: ParallelConfig, work: GroupWork
) -> dict[str, tuple[str, int, float, int]]:
    return {
        f"{m.name}/{m.layers}": (m.kind, m.ranks, m.bytes, m.layers)
        for m in rank_step(config, sizes, work).messages
    }


def test_tensor_parallel_messages() -> None:
    config = published("deepseek-v3")
    found = sent(config, ParallelConfig(tp=8), GroupWork(BatchShape.decode(64, 1000)))
    whole = 64 * 7168 * 2
    assert found["attention output/58"] == ("all_reduce", 8, whole, 58)
    assert found["attention output/3"] == ("all_reduce", 8, whole, 3)
    assert found["feed-forward output/60"] == ("all_reduce", 8, whole, 60)
    assert found["feed-forward output/1"] == ("all_reduce", 8, whole, 1), (
        "the last layer's, by the norm before the head"
    )
    assert found["embedding/1"][:3] == ("all_reduce", 8, whole)
    assert found["logits/1"][2] == 64 * 129280 * 4


@pytest.mark.parametrize(
    ("name", "share"), [("deepseek-v3", (1 + 2112 / 7168) / 4), ("deepseek-v2-lite", 1 / 2)]
)
def test_dense_data_parallelism_sends_less(name: str, share: float) -> None:
    """Of a dense layer: two all-reduces; a reduce-scatter and an all-gather, of latents where
    there are latents of queries; nothing."""
    config = published(name)
    work = GroupWork(BatchShape.decode(64, 1000))

    def dense(sizes: ParallelConfig) -> float:
        return sum(m.wire_bytes for m in RankMessages(config, sizes, work, 2).layer(sparse=False))

    assert dense(ParallelConfig(tp=8, dense_tp=1)) == pytest.approx(
        share * dense(ParallelConfig(tp=8))
    )
    assert dense(ParallelConfig(dp=8, dense_tp=1)) == 0


def test_sharded_tokens_are_projected_down_once() -> None:
    """Routers and projections to latents see a rank's share; heads, and the merged projection of
    a model without a query latent, every token of the group."""
    work = GroupWork(None, (BatchShape(1, 800),))
    sharded = ParallelConfig(tp=8, sequence_parallel=True)
    for name, sizes, rows in (
        ("deepseek-v3", sharded, 100),
        ("deepseek-v2-lite", sharded, 800),
        ("deepseek-v3", ParallelConfig(tp=8), 800),
    ):
        shapes = {
            op.name: op.shape for op in rank_step(published(name), sizes, work).ops if op.layers > 3
        }
        assert shapes["fused_qkv_a_proj_with_mqa"][0] == rows
        assert shapes["gate"][0] == (100 if sizes.sequence_parallel else 800)
        assert shapes["kv_b_proj"][0] == shapes["o_proj"][0] == 800


def test_expert_exchanges() -> None:
    """128 tokens a rank at EP8, top-8: all-gather, of rows in fp8, and reduce-scatter move as much
    as blocks of rows to every rank."""
    config = published("deepseek-v3")
    work = GroupWork(BatchShape.decode(128, 1000))
    gather = sent(config, ParallelConfig(dp=8, ep=8, exchange="allgather_ep"), work)
    routing = 8 * 8
    row = 7168 + 56 * 4 + routing
    assert gather["experts gather/58"] == ("all_gather", 8, 8 * 128 * row, 58)
    copies = sent(
        config, ParallelConfig(dp=8, ep=8, exchange="low_latency", fp8_dispatch=True), work
    )
    assert copies["dispatch/58"][2] == 128 * 7 * row
    assert copies["combine/58"][2] == 128 * 7 * 7168 * 2
    gathered = [
        m
        for m in rank_step(
            config, ParallelConfig(dp=8, ep=8, exchange="allgather_ep"), work
        ).messages
        if m.name == "experts output"
    ]
    assert gathered[0].wire_bytes == copies["combine/58"][2]


def test_a_pipeline_sends_hidden_states() -> None:
    found = sent(
        published("qwen3-30b-a3b"), ParallelConfig(tp=2, pp=2), GroupWork(BatchShape.decode(8, 100))
    )
    assert found["stage/1"][:3] == ("p2p", 2, 2 * 8 * 2048 * 2), (
        "hidden states and the residual stream, on every rank of tp"
    )


def test_drafts_add_a_layer_and_a_head_each() -> None:
    config = published("deepseek-v3")
    plain = rank_step(config, ParallelConfig(), GroupWork(BatchShape.verify(4, 500, 2)))
    drafted = rank_step(config, ParallelConfig(), GroupWork(BatchShape.verify(4, 500, 2), drafts=2))
    layers = [
        sum(op.layers for op in step.ops if op.name == "attention") for step in (plain, drafted)
    ]
    heads = [sum(op.name == "lm_head" for op in step.ops) for step in (plain, drafted)]
    assert (layers[1] - layers[0], heads[1] - heads[0]) == (2, 2)
    rows = [op.shape[0] for op in drafted.ops if op.name == "lm_head"]
    assert rows == [12, 4, 4], "every row is verified; a draft pass needs one row a request"


def test_activations_grow_with_tokens() -> None:
    config = published("deepseek-v3")
    few, many = (activation_bytes(config, ParallelConfig(tp=8), tokens) for tokens in (256, 8192))
    assert 0 < few < many < 20e9


def test_prompts_cost_what_the_model_counts() -> None:
    """All but attention's own products: the reference multiplies the whole square of a prompt,
    the costs its causal half."""
    config = replace(small("deepseek"), num_mtp_layers=0)
    tokens = 12
    page = 4
    model = make_model(
        config, Build(Ops(), torch.float32, torch.device("cpu")), 64, "CC", "A_CC_ME"
    )
    random_weights(model, 0)
    pool = KVPool(
        kv_spec(config, page, config.dtype, "CC"), tokens // page + 1, torch.device("cpu")
    )
    table = torch.arange(1, tokens // page + 1)[None]
    positions = torch.arange(tokens)
    slots = table[0, positions // page] * page + positions % page
    segment = AttentionMetadata(table, torch.tensor([tokens]), (tokens,), (tokens,))
    step = ForwardBatch(
        torch.arange(tokens),
        positions,
        TokenPlaces(*model.rotary.rows(positions), slots),
        torch.tensor([tokens - 1]),
        pool,
        prefill=segment,
    )
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model.logits(run_one(model.forward(step)))
    ours = rank_step(config, ParallelConfig(), GroupWork(None, (BatchShape(1, tokens),)))
    square = config.num_layers * costs.attention_flops_per_pair(config, "CC") * tokens * tokens
    attention = sum(op.flops * op.layers for op in ours.ops if op.name == "attention")
    assert ours.total("flops") - attention == counter.get_total_flops() - square
    assert attention == square * (tokens + 1) / 2 / tokens
