"""The cost arithmetic against published figures, against the model's own parameters, and against
counted operations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import rorqual
from rorqual.cache.pool import KVPool
from rorqual.cache.spec import MLA_FORMS, kv_spec
from rorqual.config.hf import read_config
from rorqual.config.model import ModelConfig
from rorqual.config.quant import QUANTIZATIONS, QuantConfig, WeightScheme
from rorqual.engine.execution.worker import weight_bytes as engine_bytes
from rorqual.errors import ConfigError
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.layers.mla import MLA
from rorqual.layers.parameter import Build
from rorqual.models.hub import BUNDLED
from rorqual.models.loader import random_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import AttentionMetadata, Ops, TokenPlaces
from rorqual.parallel.overlap import run_one
from rorqual.planner.costs import costs
from rorqual.planner.costs.costs import BatchShape, ByPart, Format
from rorqual.planner.costs.weights import attention_weights, weights

SHAPES = Path(rorqual.__file__).parent / "shapes"
NAMES = ("deepseek-v3", "deepseek-v2-lite", "qwen3-30b-a3b", "qwen3-235b-a22b")
SMALL_DEEPSEEK = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "vocab_size": 96,
    "quantization_config": None,
    "rope_scaling": None,
    "num_experts_per_tok": 4,
    "torch_dtype": "float32",
}
SMALL_QWEN = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "vocab_size": 96,
    "torch_dtype": "float32",
}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek-v3", {}),
    "no query latent": (
        "deepseek-v3",
        {
            "q_lora_rank": None,
            "attention_bias": True,
            "topk_method": "greedy",
            "n_shared_experts": 2,
        },
    ),
    "biased": ("deepseek-v3", {"attention_bias": True, "n_shared_experts": 0}),
    "tied": ("deepseek-v3", {"tie_word_embeddings": True}),
    "qwen": ("qwen3-30b-a3b", {}),
    "qwen, biased, tied": ("qwen3-30b-a3b", {"attention_bias": True, "tie_word_embeddings": True}),
}


def published(name: str, **changes: Any) -> ModelConfig:
    return read_config({**json.loads((SHAPES / name / "config.json").read_text()), **changes})


def small(case: str) -> ModelConfig:
    name, changes = SMALL[case]
    base: dict[str, Any] = SMALL_QWEN if name.startswith("qwen") else SMALL_DEEPSEEK
    return published(name, **{**base, **changes})


def meta_model(config: ModelConfig, form: str = "A_CC_ME") -> Transformer:
    build = Build(Ops(), getattr(torch, config.dtype), torch.device("meta"), config.quant)
    return make_model(config, build, 16, "CD" if form == "CD" else "CC", form)


def part_of(name: str) -> str:
    for key, part in {
        "embed_tokens": "embedding",
        "lm_head": "lm_head",
        "self_attn": "attention",
        ".mlp.gate.": "router",
    }.items():
        if key in name:
            return part
    if ".mlp." not in name:
        return "norms"
    return (
        "routed_experts"
        if ".experts." in name
        else "shared_experts"
        if "shared_experts" in name
        else "dense_ffn"
    )


def counted(model: Transformer) -> ByPart:
    sums: dict[str, int] = {}
    for target in model.targets():
        if not target.covers and not target.name.endswith("_scale_inv"):
            part = part_of(target.name)
            sums[part] = sums.get(part, 0) + target.view.numel()
    return ByPart(**sums)


# ---- published figures


def test_deepseek_v3() -> None:
    config = published("deepseek-v3")
    parts = costs.parameters(config)
    assert parts.total == 671_026_419_200
    assert round(costs.active_parameters(config) / 1e9, 1) == 37.6
    assert round(parts.routed_experts / 1e9, 1) == 653.9
    assert round(parts.shared_experts / 1e9, 2) == 2.55
    assert round(parts.attention / 1e9, 1) == 11.4
    backbone = (
        parts.total
        - parts.routed_experts
        - parts.shared_experts
        - parts.router
        - parts.embedding
        - parts.lm_head
    )
    assert round(backbone / 1e9, 2) == 12.60
    # The published checkpoint repeats the embedding and the head for its prediction module: 685 B
    # on the hub.
    assert round((parts.total_with_mtp + parts.embedding + parts.lm_head) / 1e9, 2) == 684.49


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("deepseek-v2-lite", 15.7, 2.7),
        ("qwen3-30b-a3b", 30.5, 3.4),
        ("qwen3-235b-a22b", 235.1, 22.2),
    ],
)
def test_published_totals(name: str, total: float, active: float) -> None:
    config = published(name)
    assert round(costs.parameters(config).total / 1e9, 1) == total
    assert round(costs.active_parameters(config) / 1e9, 1) == active


def test_mla_forms_at_v3_size() -> None:
    config = published("deepseek-v3")
    millions = {
        form: round(costs.attention_parameters(config, form) / 1e6, 1) for form in MLA_FORMS
    }
    assert millions == {
        "CD": 187.1,
        "CC": 187.1,
        "A_CC": 187.1,
        "A_CC_ME": 187.1,
        "AM_CC_ME": 598.1,
    }
    assert round(costs.parameters(config, "AM_CC_ME").attention / 1e9, 1) == 36.5
    flops = {
        form: round(costs.decode_flops_per_cached_token(config, form) / 1e6, 2)
        for form in MLA_FORMS
    }
    assert flops == {"CD": 0.08, "CC": 33.64, "A_CC": 0.28, "A_CC_ME": 0.28, "AM_CC_ME": 0.28}
    assert costs.kv_bytes_per_token(config) == 61 * 1152
    assert costs.kv_bytes_per_token(config, Format(form="CD")) == 61 * 81_920
    # 512 latent columns, 4 scales, 64 columns of rope in bf16
    for name in ("fp8", "fp8_e4m3", "float8_e4m3fn"):
        assert costs.kv_bytes_per_token(config, Format(kv_dtype=name)) == 61 * 656


def test_tokens_in_ten_gib() -> None:
    """The home-cluster document's 152,797 tokens divide by 1,152 bytes and 61 layers."""
    config = published("deepseek-v3")
    assert costs.kv_tokens(config, 10 * 2**30) == 152_797
    assert costs.kv_tokens(config, 10 * 2**30, page_size=64) == 152_797 // 64 * 64
    assert costs.kv_tokens(config, -1.0) == 0


# ---- against the model


@pytest.mark.parametrize("name", NAMES)
def test_parameters_equal_the_models(name: str) -> None:
    config = published(name)
    assert replace(costs.parameters(config), mtp=0) == counted(meta_model(config))


@pytest.mark.parametrize("case", SMALL)
def test_small_parameters_equal_the_models(case: str) -> None:
    config = small(case)
    assert replace(costs.parameters(config), mtp=0) == counted(meta_model(config))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", SMALL)
def test_bytes_equal_the_models(case: str, dtype: str) -> None:
    config = replace(small(case), dtype=dtype)
    model = meta_model(config)
    model.finalize()
    assert costs.weight_bytes(config).total == engine_bytes(model)


# Merged parts that do not end on a block of 128 rows.
UNALIGNED = {
    "num_hidden_layers": 5,
    "q_lora_rank": 1500,
    "moe_intermediate_size": 200,
    "intermediate_size": 1000,
}


@pytest.mark.parametrize("changes", [{}, UNALIGNED])
def test_fp8_bytes_equal_the_models(changes: dict[str, Any]) -> None:
    config = published("deepseek-v3", **changes)
    assert config.quant is not None
    config = replace(config, quant=QuantConfig(ignored=("lm_head",)))
    model = meta_model(config)
    model.finalize()
    assert costs.weight_bytes(config).total == engine_bytes(model)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 5}, UNALIGNED])
def test_fp8_checkpoint_bytes(changes: dict[str, Any]) -> None:
    """fp8 data and one fp32 scale a block for every matrix but the embedding, the head and the
    router's, which stay bf16."""
    config = published("deepseek-v3", **changes)
    expected = 0
    for target in meta_model(replace(config, quant=None)).targets():
        rows, columns = (*target.view.shape, 1)[:2]
        if target.covers:
            continue
        if target.name.endswith("e_score_correction_bias"):
            expected += 4 * rows
        elif columns == 1 or part_of(target.name) in ("embedding", "lm_head", "router"):
            expected += 2 * rows * columns
        else:
            expected += rows * columns + 4 * -(-rows // 128) * -(-columns // 128)
    assert costs.weight_bytes(config, "checkpoint").total == expected


def test_some_modules_stay_unconverted() -> None:
    plain = QuantConfig()
    mixed = QuantConfig(ignored=("model.layers.0", "shared_experts"))
    config = published("deepseek-v3", num_hidden_layers=5)
    model = meta_model(replace(config, quant=replace(mixed, ignored=(*mixed.ignored, "lm_head"))))
    model.finalize()
    assert costs.weight_bytes(replace(config, quant=mixed)).total == engine_bytes(model)
    assert (
        costs.weight_bytes(replace(config, quant=mixed)).total
        > costs.weight_bytes(replace(config, quant=plain)).total
    )


@pytest.mark.parametrize("case", ["deepseek", "no query latent", "biased"])
@pytest.mark.parametrize("form", MLA_FORMS)
def test_form_weights_equal_the_layers(case: str, form: str) -> None:
    config = small(case)
    model = meta_model(config, form)
    model.finalize()
    attention = model.layers[0].attention
    assert isinstance(attention, MLA)
    ours = sum(
        weight.parameters for weight in attention_weights(config, 0, form) if weight.columns > 1
    )
    assert ours == sum(weight.numel() for weight in attention.form_weights(form))


def test_materialized_products_are_held_beside_the_rest() -> None:
    config = published("deepseek-v3")
    extra = (
        costs.weight_bytes(config, fmt=Format(form="AM_CC_ME")).attention
        - costs.weight_bytes(config).attention
    )
    assert extra == 61 * 2 * (128 * (512 + 64) * 1536 + 7168 * 128 * 512)
    assert costs.weight_bytes(config, "checkpoint", Format(form="AM_CC_ME")) == costs.weight_bytes(
        config, "checkpoint"
    )


# ---- operations


def decode_step(config: ModelConfig, model: Transformer, context: int, form: str) -> ForwardBatch:
    page = 4
    pages = -(-context // page)
    pool = KVPool(kv_spec(config, page, config.dtype, form), pages + 1, torch.device("cpu"))
    table = torch.arange(1, pages + 1)[None]
    position = torch.tensor([context - 1])
    slots = table[0, position // page] * page + position % page
    segment = AttentionMetadata(table, torch.tensor([context]), (1,), (context,))
    return ForwardBatch(
        torch.tensor([5]),
        position,
        TokenPlaces(*model.rotary.rows(position), slots),
        torch.tensor([0]),
        pool,
        decode=segment,
    )


def counted_decode(config: ModelConfig, context: int, form: str) -> tuple[int, int]:
    """Counted operations of a whole decode step, and of its first layer's attention."""
    model = make_model(
        config,
        Build(Ops(), torch.float32, torch.device("cpu")),
        64,
        "CD" if form == "CD" else "CC",
        form,
    )
    random_weights(model, 0)
    with torch.inference_mode(), FlopCounterMode(display=False) as whole:
        model.logits(run_one(model.forward(decode_step(config, model, context, form))))
    with torch.inference_mode(), FlopCounterMode(display=False) as attention:
        model.layers[0].attention.forward(
            torch.randn(1, config.hidden_size), decode_step(config, model, context, form)
        )
    return whole.get_total_flops(), attention.get_total_flops()


def unused_query(config: ModelConfig, form: str) -> int:
    """The prologue makes per-head queries for every form; the materialized one makes its own."""
    if form != "AM_CC_ME":
        return 0
    mla = config.attention
    return 2 * mla.num_heads * mla.qk_dim * (mla.q_lora_rank or config.hidden_size)  # type: ignore[union-attr]


@pytest.mark.parametrize("case", ["deepseek", "no query latent"])
def test_decode_flops_equal_the_counted(case: str) -> None:
    config = small(case)
    context = 23
    attention: dict[str, int] = {}
    for form in MLA_FORMS:
        whole, attention[form] = counted_decode(config, context, form)
        ops = costs.step_ops(config, BatchShape.decode(1, context), Format(form=form))
        unused = unused_query(config, form)
        assert costs.total(ops).flops == whole - config.num_layers * unused
        first = costs.layer_ops(config, 0, BatchShape.decode(1, context), Format(form=form))
        assert (
            costs.total(op for op in first if op.part == "attention").flops
            == attention[form] - unused
        )
    assert attention["A_CC"] == attention["A_CC_ME"]
    assert len(set(attention.values())) == 4


@pytest.mark.parametrize("case", ["qwen", "qwen, biased, tied"])
def test_qwen_decode_flops_equal_the_counted(case: str) -> None:
    config = small(case)
    whole, _ = counted_decode(config, 23, "A_CC_ME")
    assert costs.decode_flops_per_token(config, 23) == whole


@pytest.mark.parametrize("form", MLA_FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_one_more_cached_token(name: str, form: str) -> None:
    config = published(name)
    fmt = Format(form=form)
    more = costs.decode_flops_per_token(config, 1001, fmt) - costs.decode_flops_per_token(
        config, 1000, fmt
    )
    assert more == config.num_layers * costs.decode_flops_per_cached_token(config, form)


def test_prefill_is_causal_and_chunks_add_up() -> None:
    assert BatchShape(1, 6).pairs == BatchShape(1, 4).pairs + BatchShape(1, 2, 4).pairs == 21
    assert BatchShape.decode(3, 10).pairs == BatchShape.decode(3, 10).entries == 30
    config = small("deepseek")
    attention = [
        op
        for op in costs.layer_ops(config, 0, BatchShape(1, 6), Format(form="CC"))
        if op.name == "attention"
    ]
    assert attention[0].flops == 21 * costs.attention_flops_per_pair(config, "CC")


def test_expected_experts() -> None:
    assert costs.expected_experts(256, 8, 1) == pytest.approx(8)
    assert costs.expected_experts(256, 8, 10_000) == pytest.approx(256)
    generator = torch.Generator().manual_seed(0)
    hits = [
        torch.rand(16, 256, generator=generator).topk(8).indices.unique().numel()
        for _ in range(200)
    ]
    assert sum(hits) / len(hits) == pytest.approx(costs.expected_experts(256, 8, 16), rel=0.01)


@pytest.mark.parametrize(
    ("name", "layers", "floors"),
    [
        ("qwen3-30b-a3b", 48, {1: 1.4, 8: 6.2, 64: 15.4, 256: 20.5}),
        ("deepseek-v2-lite", 27, {1: 1.1, 8: 4.2, 64: 7.7, 256: 9.2}),
        ("deepseek-v3", 8, {1: 1.5, 32: 9.6, 128: 14.3, 256: 14.8}),
    ],
)
def test_decode_floors(name: str, layers: int, floors: dict[int, float]) -> None:
    """Milliseconds at 1,100 tokens of context and 4.3 TB/s, worked out independently beside
    earlier measurements."""
    config = published(name, num_hidden_layers=layers)
    found = {
        batch: costs.decode_floor_seconds(config, batch, 1100, 4.3e12) * 1e3 for batch in floors
    }
    assert found == pytest.approx(floors, abs=0.06, rel=0.01)


def test_decode_bytes_add_up() -> None:
    config = published("deepseek-v3")
    one = costs.decode_bytes(config, 1, 1000)
    many = costs.decode_bytes(config, 100_000, 1000)
    held = costs.weight_bytes(config)
    assert many.experts == pytest.approx(held.routed_experts)
    assert one.experts == pytest.approx(held.routed_experts * 8 / 256)
    assert one.rest == held.total - held.routed_experts - held.embedding + config.hidden_size * 2
    assert one.cache == 1000 * 70_272
    assert costs.decode_floor_seconds(config, 1, 1000, 1e12) == pytest.approx(one.total / 1e12)
    assert costs.decode_floor_seconds(
        config, 1, 1000, 1e12, flops_rate=1.0
    ) == costs.decode_flops_per_token(config, 1000)


def test_unknown_place() -> None:
    with pytest.raises(ConfigError, match="accepted: memory, checkpoint"):
        costs.weight_bytes(published("deepseek-v2-lite"), "disk")


@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("case", ["deepseek", "no query latent", "qwen"])
def test_bytes_of_rounded_weights_equal_the_models(case: str, name: str) -> None:
    config = replace(small(case), quant=QUANTIZATIONS[name])
    model = meta_model(config)
    model.finalize()
    assert costs.weight_bytes(config).total == engine_bytes(model)


def test_kimi_k2_in_int4() -> None:
    """A trillion parameters, their experts in groups of 32: about 0.55 bytes each."""
    config = published("kimi-k2")
    assert round(costs.parameters(config).total / 1e12, 2) == 1.03
    assert round(costs.active_parameters(config) / 1e9, 1) == 32.9
    scheme = WeightScheme("int4", (1, 32), layout="packed")
    experts = QuantConfig(None, (), ((("mlp.experts",), scheme),))
    parts = costs.weight_bytes(replace(config, quant=experts))
    count = costs.parameters(config).routed_experts
    assert parts.routed_experts == count // 2 + 2 * count // 32
    assert parts.attention == costs.weight_bytes(replace(config, quant=None)).attention


def test_experts_have_the_format_that_a_checkpoint_gives_each() -> None:
    """As `rorqual quantize` names them: by expert, and the second product in smaller groups."""

    def group(size: int, *names: str) -> dict[str, Any]:
        targets = [rf"re:model\.layers\.\d+\.mlp\.experts\.\d+\.{name}$" for name in names]
        scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
        return {"weights": {**scheme, "group_size": size}, "targets": targets}

    data = json.loads((BUNDLED / "config.json").read_text())
    groups = {"group_0": group(32, "gate_proj", "up_proj"), "group_1": group(16, "down_proj")}
    data["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups,
    }  # fmt: skip
    config = read_config(data)
    routed = [one for one in weights(config) if one.part == "routed_experts"]
    assert {one.scheme.block[1] for one in routed} == {32, 16}
    parameters = sum(one.parameters for one in routed)
    for where in ("checkpoint", "memory"):
        held = sum(one.bytes("bfloat16", where) for one in routed)
        assert 4.5 / 8 * parameters < held < 5.1 / 8 * parameters, where
    dense = [one for one in weights(config) if one.part == "dense_ffn"]
    assert all(one.scheme.is_wide for one in dense)
