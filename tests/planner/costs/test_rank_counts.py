"""What the planner says a rank holds and sends is what the engine's own rank of that layout
holds and is counted to send."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from rorqual.cache.spec import kv_spec
from rorqual.config.model import ModelConfig
from rorqual.config.parallel import EXCHANGES, ParallelConfig, check_parallel
from rorqual.engine.execution.worker import weight_bytes as engine_bytes
from rorqual.errors import ConfigError
from rorqual.layers.parameter import Build
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import Ops
from rorqual.parallel.comm_volume import step_messages
from rorqual.parallel.exchange import SlotMap
from rorqual.planner.costs import catalog
from rorqual.planner.costs.costs import BatchShape, Format, GroupWork
from rorqual.planner.costs.messages import CostedMessage
from rorqual.planner.costs.parallel_costs import rank_step
from rorqual.planner.costs.shards import (
    rank_kv_bytes_per_token,
    rank_weight_bytes,
    stage_kv_bytes_per_token,
    stage_weight_bytes,
)
from tests.parallel.fake_axes import place
from tests.planner.costs.test_costs import small

pytestmark = pytest.mark.exhaustive

# DeepSeek-V3 (fp8) and V2-Lite, Qwen3: their sizes, with fewer layers.
LAYERS = 7
MODELS = ("deepseek-v3", "deepseek-v2-lite", "qwen3-235b-a22b", "biased", "qwen, biased, tied")


@cache
def model_of(name: str) -> ModelConfig:
    if "-" not in name:
        return replace(small(name), dtype="bfloat16", num_mtp_layers=1 if name == "biased" else 0)
    config = catalog.published(name)
    return replace(config, num_layers=LAYERS, moe_layers=config.moe_layers[:LAYERS])


@cache
def accepted(name: str, every: int = 1) -> tuple[ParallelConfig, ...]:
    """Every `every`-th of the layouts of up to 16 ranks that this model can be cut into."""
    found = []
    ranges: dict[str, Any] = {
        "tp": (1, 2, 4, 8),
        "dp": (1, 2, 4, 8),
        "pp": (1, 2, 3),
        "ep": (1, 2, 4, 8, 16),
        "dense_tp": (1, 2, 8),
    }
    ranges |= {
        "vocabulary": (None, 1, 8),
        "exchange": EXCHANGES,
        "sequence_parallel": (False, True),
    }
    for values in product(*ranges.values()):
        case = dict(zip(ranges, values, strict=True))
        case["embed_tp"] = case["head_tp"] = case.pop("vocabulary")
        if case["tp"] * case["dp"] > 16 or (case["sequence_parallel"] and case["tp"] == 1):
            continue
        try:
            sizes = ParallelConfig(**case)
            check_parallel(model_of(name), sizes)
        except ConfigError:
            continue
        found.append(sizes)
    return tuple(found[::every])


def rank_of(
    config: ModelConfig,
    sizes: ParallelConfig,
    rank: int,
    forms: tuple[str, str] = ("CC", "A_CC_ME"),
    mtp: bool = False,
    slots: dict[int, SlotMap] | None = None,
) -> Transformer:
    build = Build(
        Ops(),
        getattr(torch, config.dtype),
        torch.device("meta"),
        config.quant,
        mesh=place(sizes, rank),
        slot_maps=slots or {},
    )
    model = make_model(config, build, 64, *forms, with_mtp=mtp)
    model.finalize()
    return model


# ---- memory


@pytest.mark.parametrize(
    ("name", "mtp"), [*((name, False) for name in MODELS), ("deepseek-v3", True), ("biased", True)]
)
def test_weights_of_every_rank(name: str, mtp: bool) -> None:
    """The first rank of each stage holds what the planner says; no rank of a stage holds more."""
    config = model_of(name)
    checked = set()
    for sizes in accepted(name, 41):
        shape = replace(sizes, exchange="auto", sequence_parallel=False)
        if shape in checked or len(checked) > 12:
            continue
        checked.add(shape)
        held = [
            engine_bytes(rank_of(config, sizes, stage * sizes.stage, mtp=mtp))
            for stage in range(sizes.pp)
        ]
        assert held == [
            stage_weight_bytes(config, sizes, stage, mtp=mtp) for stage in range(sizes.pp)
        ], sizes
        assert rank_weight_bytes(config, sizes, mtp=mtp) == max(held)
        last = engine_bytes(rank_of(config, sizes, sizes.world - 1, mtp=mtp))
        assert last <= held[-1], sizes
    assert len(checked) > 8


def test_weights_of_four_stages_of_the_whole_model() -> None:
    """DeepSeek-V3 on 32 devices: 16 layers with the dense ones first, then 15 each; the head makes
    the last stage the fullest."""
    config = catalog.published("deepseek-v3")
    sizes = ParallelConfig(tp=8, pp=4)
    held = [engine_bytes(rank_of(config, sizes, stage * sizes.stage)) for stage in range(4)]
    assert held == [stage_weight_bytes(config, sizes, stage) for stage in range(4)]
    assert rank_weight_bytes(config, sizes) == held[3] == max(held)


def test_second_copies_of_experts_are_weights_too() -> None:
    config = model_of("deepseek-v3")
    plain = ParallelConfig(dp=8, ep=8)
    sizes = replace(plain, redundant_experts=32)
    slots = {layer: SlotMap((*range(256), *range(32)), 256) for layer in range(config.num_layers)}
    held = engine_bytes(rank_of(config, sizes, 0, slots=slots))
    assert held == stage_weight_bytes(config, sizes, 0)
    assert held - engine_bytes(rank_of(config, plain, 0)) > 4 * 4 * 3 * 7168 * 2048


@pytest.mark.parametrize("form", ["CD", "AM_CC_ME"])
def test_weights_and_cache_of_other_forms(form: str) -> None:
    config = model_of("biased")
    sizes = ParallelConfig(tp=2, dp=2, ep=2, pp=2)
    fmt = Format(form=form)
    for stage in range(2):
        model = rank_of(
            config, sizes, stage * sizes.stage, ("CD" if form == "CD" else "CC", form), mtp=True
        )
        assert engine_bytes(model) == stage_weight_bytes(config, sizes, stage, fmt, mtp=True)
        assert stage_kv_bytes_per_token(config, sizes, stage, fmt, mtp=True) == cache_bytes(
            config, model, form
        )


def cache_bytes(config: ModelConfig, model: Transformer, form: str = "A_CC_ME") -> int:
    """Of one token, as the engine allocates it."""
    return (
        kv_spec(config, 1, config.dtype, form, len(model.mtp))
        .shard(model.mesh.sizes.tp, model.cache_layers)
        .bytes_per_token
    )


@pytest.mark.parametrize("name", MODELS)
def test_cache_of_every_rank(name: str) -> None:
    config = model_of(name)
    for sizes in {
        replace(sizes, exchange="auto", sequence_parallel=False) for sizes in accepted(name, 97)
    }:
        models = [rank_of(config, sizes, stage * sizes.stage) for stage in range(sizes.pp)]
        held = [cache_bytes(config, model) for model in models]
        assert held == [stage_kv_bytes_per_token(config, sizes, stage) for stage in range(sizes.pp)]
        assert rank_kv_bytes_per_token(config, sizes) == max(held)


# ---- bytes sent


def by_call(messages: tuple[CostedMessage, ...]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for message in messages:
        call = "send" if message.kind == "p2p" else message.kind
        found.setdefault(message.axis, Counter())[call] += message.wire_bytes * message.layers
    return found


WORKS = {
    "decode": GroupWork(BatchShape.decode(24, 100)),
    "uneven": GroupWork(BatchShape.decode(13, 100), stage_tokens=40),
    "prompts": GroupWork(None, (BatchShape(2, 700),)),
    "mixed": GroupWork(BatchShape.decode(5, 100), (BatchShape(1, 90),), stage_tokens=95),
}


@pytest.mark.parametrize("work", WORKS.values(), ids=list(WORKS))
@pytest.mark.parametrize("name", MODELS[:3])
def test_bytes_sent(name: str, work: GroupWork) -> None:
    """By axis and call. Of several stages the planner takes the fullest as if it had both ends;
    what all stages send is what one would."""
    config = model_of(name)
    for sizes in accepted(name, 7):
        tokens = (work.tokens, *work.others(sizes.dp))
        logits = [round(work.logit_rows / work.tokens * rows) for rows in tokens]
        given = {"tokens": tokens, "decode": not work.prefill, "logits": logits}
        planned = by_call(rank_step(config, sizes, work).messages)
        if sizes.pp == 1:
            assert planned == step_messages(config, sizes, 0, **given), sizes
            continue
        stages: dict[str, Counter[str]] = {}
        for stage in range(sizes.pp):
            for axis, calls in step_messages(config, sizes, stage * sizes.stage, **given).items():
                stages.setdefault(axis, Counter()).update(calls)
        sent = stages.pop("pp")["send"]
        assert stages == by_call(rank_step(config, replace(sizes, pp=1), work).messages), sizes
        assert sent == (sizes.pp - 1) * planned["pp"]["send"], sizes


def test_nothing_is_sent_where_attention_and_dense_layers_are_data_parallel() -> None:
    config = model_of("deepseek-v3")
    work = GroupWork(BatchShape.decode(24, 100))
    names = {
        message.name for message in rank_step(config, ParallelConfig(dp=8, ep=8), work).messages
    }
    assert names == {"experts gather", "experts output"}
    assert not rank_step(
        replace(config, moe_layers=(False,) * LAYERS), ParallelConfig(dp=8), work
    ).messages


def test_copies_per_expert_or_blocks() -> None:
    """A low-latency exchange of DeepEP's sends eight copies of a token wherever they go; this
    engine's one to each of the other ranks."""
    config = model_of("deepseek-v3")
    work = GroupWork(BatchShape.decode(100, 50))
    sizes = ParallelConfig(dp=16, ep=16, exchange="low_latency", fp8_dispatch=True)
    row = 7168 + 56 * 4
    routing = 8 * 8
    sparse = LAYERS - 3
    blocks, copies = (
        {m.name: m for m in rank_step(config, sizes, work, copies=copies).messages}
        for copies in (False, True)
    )
    assert blocks["dispatch"].bytes == 100 * 15 * (row + routing)
    assert copies["dispatch"].bytes == 100 * 8 * 15 / 16 * row
    assert copies["combine"].bytes == 100 * 8 * 15 / 16 * 7168 * 2
    assert blocks["combine"].layers == copies["combine"].layers == sparse
    assert blocks["dispatch"].wide == copies["dispatch"].wide == 1.0
