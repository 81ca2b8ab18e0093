"""config.json to ModelConfig: published models, both spellings, and refusal by name of whatever
would be computed wrongly."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.config.hf import read_config, read_config_file
from rorqual.config.model import GQAConfig, MLAConfig, ModelConfig, RopeConfig
from rorqual.config.quant import FP8_BLOCK, QuantConfig
from rorqual.errors import ConfigError
from rorqual.layers.rotary import Rotary, inverse_frequencies
from rorqual.planner.costs.catalog import IDS, published

Fields = dict[str, Any]

YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}

# The published config.json of DeepSeek-V2-Lite, DeepSeek-V3 (R1 is the same) and Qwen3-30B-A3B.
V2_LITE: Fields = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3: Fields = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN3: Fields = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# What Qwen3's model card adds for sequences longer than 32,768.
CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
ALL = pytest.mark.parametrize("base", [V2_LITE, V3, QWEN3], ids=["v2-lite", "v3", "qwen3"])


def read(base: Fields, without: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    return read_config(
        {name: value for name, value in {**base, **changes}.items() if name not in without}
    )


# ---- published models


def test_deepseek_v2_lite() -> None:
    config = read(V2_LITE)
    assert config.family == "deepseek_v2"
    assert config.attention == MLAConfig(16, None, 512, 128, 64, 128)
    assert config.moe_layers == (False, *[True] * 26)
    moe = config.moe
    assert (moe.num_experts, moe.top_k, moe.num_shared, moe.intermediate_size) == (64, 6, 2, 1408)
    assert (moe.scoring, moe.method, moe.norm_topk_prob, moe.scaling, moe.has_bias) == (
        "softmax",
        "greedy",
        False,
        1.0,
        False,
    )
    assert (config.vocab_size, config.dense_intermediate, config.num_mtp_layers, config.quant) == (
        102400,
        10944,
        0,
        None,
    )
    assert config.rope.table_scale == pytest.approx(1.0)
    assert config.rope.softmax_scale == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2)


def test_deepseek_v3() -> None:
    config = read(V3)
    assert config.family == "deepseek_v3"
    assert config.attention == MLAConfig(128, 1536, 512, 128, 64, 128)
    assert config.is_mla
    assert isinstance(config.attention, MLAConfig)
    assert (config.attention.qk_dim, config.attention.latent_dim) == (192, 576)
    assert config.moe_layers == (*[False] * 3, *[True] * 58)
    moe = config.moe
    assert (moe.num_experts, moe.top_k, moe.num_shared, moe.intermediate_size) == (256, 8, 1, 2048)
    assert (moe.scoring, moe.method, moe.n_group, moe.topk_group) == ("sigmoid", "noaux_tc", 8, 4)
    assert (moe.norm_topk_prob, moe.scaling, moe.has_bias, moe.router_fp32) == (
        True,
        2.5,
        True,
        True,
    )
    assert config.quant == QuantConfig()
    assert (config.num_mtp_layers, config.eos_token_ids, config.bos_token_id) == (1, (1,), 0)
    assert config.rope == RopeConfig(64, 10000.0, "yarn", True, 40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert config.rope.softmax_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2)


def test_qwen3_30b_a3b() -> None:
    config = read(QWEN3)
    assert config.family == "qwen3_moe"
    assert config.attention == GQAConfig(32, 4, 128)
    assert not config.is_mla
    assert config.moe_layers == (True,) * 48
    moe = config.moe
    assert (moe.num_experts, moe.top_k, moe.num_shared, moe.intermediate_size) == (128, 8, 0, 768)
    assert (moe.scoring, moe.method, moe.norm_topk_prob, moe.router_fp32) == (
        "softmax",
        "greedy",
        True,
        False,
    )
    assert config.rope == RopeConfig(128, 1e6)
    assert (config.rope.table_scale, config.rope.softmax_scale) == (1.0, 1.0)
    assert (config.dtype, config.norm_eps, config.max_position, config.tie_embeddings) == (
        "bfloat16",
        1e-6,
        40960,
        False,
    )


@ALL
def test_the_text_of_the_file_is_kept(base: Fields, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(base))
    config = read_config_file(tmp_path)
    assert config == read(base)
    assert config.raw == base


@pytest.mark.parametrize("name", ["DeepseekV2Config", "DeepseekV3Config", "Qwen3MoeConfig"])
def test_what_transformers_writes_today_is_read(name: str) -> None:
    """Every field of a default configuration of the installed release is known."""
    transformers = pytest.importorskip("transformers")
    # DeepseekV2Config has no default for it
    theirs = getattr(transformers, name)(num_experts_per_tok=6)
    data = {**theirs.to_dict(), "architectures": [name.replace("Config", "ForCausalLM")]}
    config = read_config(data)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (
        theirs.hidden_size,
        theirs.num_hidden_layers,
        theirs.vocab_size,
    )
    assert config.moe.top_k == theirs.num_experts_per_tok
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]


# ---- both spellings


def modern(base: Fields) -> Fields:
    """The spelling of transformers 5."""
    data = {
        name: value
        for name, value in base.items()
        if name not in ("rope_scaling", "rope_theta", "torch_dtype")
    }
    scaling = dict(base["rope_scaling"] or {"type": "default"})
    scaling["rope_type"] = scaling.pop("type")
    return {
        **data,
        "rope_parameters": {**scaling, "rope_theta": base["rope_theta"]},
        "dtype": base["torch_dtype"],
    }


@ALL
def test_both_spellings_mean_the_same(base: Fields) -> None:
    assert read_config(modern(base)) == read(base)


@ALL
@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float32", "torch.float16", "bfloat16"])
def test_dtype(base: Fields, spelling: str, value: str) -> None:
    other = {"dtype": ("torch_dtype",), "torch_dtype": ()}[spelling]
    assert read(base, without=other, **{spelling: value}).dtype == value.removeprefix("torch.")


CLASSES = {
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
    "qwen3_moe": "Qwen3MoeConfig",
}


@ALL
@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": CARD}], ids=["published", "card"])
def test_what_transformers_makes_of_a_file_means_the_same(base: Fields, scaling: Fields) -> None:
    transformers = pytest.importorskip("transformers")
    data = {**base, **scaling}
    known = getattr(transformers, CLASSES[base["model_type"]])
    theirs = known(**copy.deepcopy(data)).to_dict()
    assert "rope_scaling" not in theirs
    assert read_config({**theirs, "architectures": base["architectures"]}) == read(data)


@ALL
def test_rope_parameters_by_kind_of_layer(base: Fields) -> None:
    flat = modern(base)
    layer = flat["rope_parameters"]

    def nested(**kinds: Any) -> ModelConfig:
        return read_config({**flat, "rope_parameters": kinds})

    assert nested(full_attention=layer) == read(base)
    assert nested(full_attention=layer, sliding_attention=None) == read(base)
    assert nested(full_attention=layer, sliding_attention=dict(layer)) == read(base)
    with pytest.raises(ConfigError, match=r"rope_parameters\.sliding_attention=.*one rotary"):
        nested(full_attention=layer, sliding_attention={**layer, "rope_theta": 5.0})
    with pytest.raises(ConfigError, match=r"rope_parameters\.sliding_attention=.*one rotary"):
        nested(sliding_attention=layer)
    with pytest.raises(ConfigError, match=r"rope_parameters\.rope_theta=5.0.*one rotary"):
        nested(full_attention=layer, rope_theta=5.0)
    with pytest.raises(ConfigError, match=r"rope_parameters\.full_attention\.sand=1"):
        nested(full_attention={**layer, "sand": 1})


def test_missing_dtype_is_bfloat16() -> None:
    assert read(QWEN3, without=("torch_dtype",)).dtype == "bfloat16"


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_kinds(key: str) -> None:
    linear = read(QWEN3, rope_scaling={key: "linear", "factor": 4.0}).rope
    assert (linear.kind, linear.factor, linear.theta) == ("linear", 4.0, 1e6)
    yarn = read(
        QWEN3, rope_scaling={key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    ).rope
    assert (yarn.kind, yarn.factor, yarn.original_max_position) == ("yarn", 4.0, 32768)
    assert yarn.table_scale == pytest.approx(0.1 * math.log(4) + 1)
    assert yarn.softmax_scale == 1.0
    given = read(QWEN3, rope_scaling={key: "yarn", "factor": 4.0, "attention_factor": 1.25}).rope
    assert given.table_scale == 1.25
    assert read(QWEN3, rope_scaling={key: "default"}).rope == read(QWEN3).rope


@pytest.mark.parametrize(
    ("base", "changes", "longest"),
    [
        (QWEN3, {}, 40960),
        (QWEN3, {"rope_scaling": CARD}, 131072),  # as the model card says, all else left alone
        (QWEN3, {"rope_scaling": {**CARD, "factor": 1.1}}, 40960),  # 36,044 by YaRN alone
        (QWEN3, {"rope_scaling": CARD, "max_position_embeddings": 131072}, 131072),
        (QWEN3, {"rope_scaling": CARD, "max_position_embeddings": 262144}, 262144),
        (QWEN3, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 40960),
        (V3, {}, 163840),
        (V2_LITE, {}, 163840),
        (V3, {"max_position_embeddings": 4096}, 163840),
    ],
)
def test_longest_sequence(base: Fields, changes: Fields, longest: int) -> None:
    assert read(base, **changes).max_position == longest


def test_yarn_tables_of_the_longest_sequence_equal_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

    config = read(QWEN3, rope_scaling=CARD)
    tables = Rotary(config.rope, config.max_position, torch.device("cpu"))
    assert tables.cos.shape == tables.sin.shape == (131072, 64)
    sizes = {name: QWEN3[name] for name in ("head_dim", "hidden_size", "max_position_embeddings")}
    theirs = Qwen3MoeRotaryEmbedding(
        Qwen3MoeConfig(**sizes, rope_parameters={**CARD, "rope_theta": QWEN3["rope_theta"]}),
    )
    assert torch.allclose(inverse_frequencies(config.rope), theirs.inv_freq, rtol=3e-7, atol=0)
    positions = torch.tensor([0, 1, 4095, 32767, 32768, 40959, 40960, 100_003, 131071])
    cos, sin = theirs(torch.empty(1), positions[None])
    # A frequency that differs in its last bit moves the angle at position p by p times as much.
    for got, want in zip(tables.rows(positions), (cos[0, :, :64], sin[0, :, :64]), strict=True):
        assert torch.allclose(got, want, atol=1e-3)
        assert torch.allclose(got[:3], want[:3], atol=1e-4)


def test_explicit_null_and_absence_differ_for_q_lora_rank() -> None:
    for without, value, rank in (((), None, None), (("q_lora_rank",), None, 1536), ((), 768, 768)):
        attention = read(V3, without=without, q_lora_rank=value).attention
        assert isinstance(attention, MLAConfig)
        assert attention.q_lora_rank == rank


def test_end_of_sequence_ids() -> None:
    assert read(QWEN3, eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    assert read(QWEN3, eos_token_id=None).eos_token_ids == ()
    assert read(QWEN3, eos_token_id=7).eos_token_ids == (7,)


def test_modules_left_unquantised() -> None:
    quant = {
        **V3["quantization_config"],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp"],
    }
    found = read(V3, quantization_config=quant).quant
    assert found is not None
    assert not found.covers("lm_head")
    assert not found.covers("model.layers.0.mlp.gate_proj")
    assert found.covers("model.layers.0.mlp2.gate_proj")
    assert found.covers("model.layers.10.mlp.gate_proj")


# As Qwen publishes its fp8 checkpoints.
QWEN_FP8: Fields = {
    **V3["quantization_config"],
    "modules_to_not_convert": [
        "lm_head",
        "model.layers.0.input_layernorm",
        "model.layers.0.mlp.gate",
        "model.layers.0.post_attention_layernorm",
    ],
}


def test_quantization_as_published() -> None:
    found = read(QWEN3, quantization_config=QWEN_FP8).quant
    assert found == QuantConfig(FP8_BLOCK, tuple(QWEN_FP8["modules_to_not_convert"]))
    assert found.covers("model.layers.0.mlp.gate_proj")
    assert not found.covers("model.layers.0.mlp.gate")
    twice = {**QWEN_FP8, "ignored_layers": ["lm_head", "model.embed_tokens"]}
    both = read(QWEN3, quantization_config=twice).quant
    assert both is not None
    assert both.ignored == (*QWEN_FP8["modules_to_not_convert"], "model.embed_tokens")


def test_what_transformers_writes_of_a_quantization_is_read() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict()
    assert read(V3, quantization_config=theirs).quant == QuantConfig(FP8_BLOCK, ("lm_head",))


@pytest.mark.parametrize("name", sorted({shape for shape, _ in IDS.values()}))
@pytest.mark.parametrize("quant", ["auto", "fp8", "none"])
def test_bundled_shapes_are_read(name: str, quant: str) -> None:
    assert published(name, quant).hidden_size


# ---- which layers are sparse


def test_placing_of_sparse_layers() -> None:
    assert read(V3, num_hidden_layers=6, first_k_dense_replace=1, moe_layer_freq=2).moe_layers == (
        False,
        False,
        True,
        False,
        True,
        False,
    )
    assert read(
        V3, num_hidden_layers=3, first_k_dense_replace=0, moe_layer_freq=[0, 1, 1]
    ).moe_layers == (False, True, True)
    assert read(QWEN3, num_hidden_layers=5, decoder_sparse_step=2).moe_layers == (
        False,
        True,
        False,
        True,
        False,
    )
    assert read(QWEN3, num_hidden_layers=4, mlp_only_layers=[0, 2]).moe_layers == (
        False,
        True,
        False,
        True,
    )
    kinds = ["dense", "sparse", "sparse"]
    assert read(
        V3, num_hidden_layers=3, first_k_dense_replace=1, mlp_layer_types=kinds
    ).moe_layers == (False, True, True)
    with pytest.raises(ConfigError, match="mlp_layer_types"):
        read(V3, num_hidden_layers=3, first_k_dense_replace=2, mlp_layer_types=kinds)
    with pytest.raises(ConfigError, match="moe_layer_freq"):
        read(V3, num_hidden_layers=3, moe_layer_freq=[1, 1])


# ---- refusals


@ALL
def test_an_unknown_field_is_refused_by_name_unless_it_is_to_be_ignored(base: Fields) -> None:
    data = {**base, "rope_of_sand": 3}
    with pytest.raises(ConfigError, match=r"rope_of_sand=3.*ignore_config_fields"):
        read_config(data)
    assert read_config(data, ["rope_of_sand"]) == read(base)


Nested = tuple[Fields, str, Fields, str]
V31 = {**V3["quantization_config"], "scale_fmt": "ue8m0"}
NESTED: list[Nested] = [
    # base, object, its fields, the field refused
    (V3, "quantization_config", {**V31, "dequantize": True}, "dequantize=True"),
    (V3, "quantization_config", {**QWEN_FP8, "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
    (V3, "quantization_config", {**QWEN_FP8, "modules_to_convert": ["a"]}, "modules_to_convert="),
    (V3, "quantization_config", {**QWEN_FP8, "sand": None}, "sand=None"),
    (QWEN3, "rope_scaling", {**CARD, "low_freq_factor": 1.0}, "low_freq_factor=1.0"),
    (QWEN3, "rope_scaling", {**CARD, "sand": None}, "sand=None"),
    (QWEN3, "rope_scaling", {"factor": 4.0}, "factor=4.0"),
    (QWEN3, "rope_scaling", {"type": "default", "mscale": 0.7}, "mscale=0.7"),
    (QWEN3, "rope_scaling", {"type": "linear", "factor": 4.0, "beta_fast": 16}, "beta_fast=16"),
    (QWEN3, "rope_parameters", {**CARD, "rope_theta": 1e6, "long_factor": [1.0]}, "long_factor="),
]


@pytest.mark.parametrize("case", NESTED, ids=[case[3] for case in NESTED])
def test_a_field_of_an_object_is_refused_by_name_unless_it_is_to_be_ignored(case: Nested) -> None:
    base, name, fields, named = case
    data = {**base, name: fields}
    field = f"{name}.{named.partition('=')[0]}"
    words = rf"{re.escape(f'{name}.{named}')}.*accepted: .*ignore_config_fields takes {field}"
    with pytest.raises(ConfigError, match=words):
        read_config(data)
    assert read_config(data, [field]).family == base["model_type"]


def test_scales_that_are_powers_of_two() -> None:
    """DeepSeek-V3.1's blocks: the rows of a product are scaled by powers of two as well."""
    found = read(V3, quantization_config=V31).quant
    assert found == QuantConfig(replace(FP8_BLOCK, activation="fp8_group_ue8m0"))


def test_an_ignored_scale_format_leaves_scales_as_they_are() -> None:
    data = {**V3, "quantization_config": V31}
    assert read_config(data, ["quantization_config.scale_fmt"]) == read(V3)


def test_fields_of_another_kind_that_hold_their_defaults_mean_nothing() -> None:
    spelt = {"type": "default", "factor": 1.0, "mscale": None, "beta_fast": 32, "truncate": True}
    assert read(QWEN3, rope_scaling=spelt).rope == read(QWEN3).rope


def test_two_spellings_that_contradict_each_other() -> None:
    default = {"rope_type": "default", "rope_theta": 1e6}
    named = r"rope_scaling\.rope_type='yarn' contradicts rope_parameters\.rope_type='default'"
    with pytest.raises(ConfigError, match=named):
        read(QWEN3, rope_scaling=CARD, rope_parameters=default)
    with pytest.raises(ConfigError, match=r"rope_type='default' contradicts .*\.type='yarn'"):
        read(QWEN3, rope_scaling={**CARD, "type": "yarn", "rope_type": "default"})
    same = read(QWEN3, rope_scaling=CARD, rope_parameters={**CARD, "rope_theta": 1e6})
    assert same == read(QWEN3, rope_scaling={**CARD, "type": "yarn"})
    assert read(QWEN3, rope_scaling={**CARD, "type": "yarn", "rope_type": None}) == same


UNSUPPORTED: list[tuple[str, Any]] = [
    ("use_sliding_window", True),
    ("mlp_bias", True),
    ("partial_rotary_factor", 0.5),
    ("attn_logit_softcapping", 30.0),
    ("final_logit_softcapping", 50.0),
    ("index_topk", 2048),
    ("attention_sink", True),
    ("layer_types", ["sliding_attention"]),
    ("hidden_act", "gelu"),
    ("dtype", "float8_e4m3fn"),
    ("dtype", "int8"),
]


@ALL
@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_an_unsupported_value_is_refused_by_name(base: Fields, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        read(base, **{name: value})


@ALL
def test_values_that_switch_a_feature_off_are_accepted(base: Fields) -> None:
    off = {
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "attn_logit_softcapping": None,
        "layer_types": ["full_attention"] * 3,
    }
    assert read(base, **off) == read(base)


WRONG: list[tuple[Fields, Fields, str]] = [
    (QWEN3, {"hidden_size": 0}, "hidden_size=0"),
    (QWEN3, {"hidden_size": "2048"}, "hidden_size='2048'"),
    (QWEN3, {"hidden_size": 2048.0}, "hidden_size"),
    (QWEN3, {"vocab_size": True}, "vocab_size"),
    (QWEN3, {"vocab_size": None}, "vocab_size is missing"),
    (QWEN3, {"num_hidden_layers": -1}, "num_hidden_layers"),
    (QWEN3, {"num_key_value_heads": 5}, "num_key_value_heads=5|no multiple"),
    (QWEN3, {"num_experts_per_tok": 129}, "num_experts_per_tok=129"),
    (QWEN3, {"rms_norm_eps": "tiny"}, "rms_norm_eps"),
    (QWEN3, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (QWEN3, {"rope_theta": "big"}, "rope_theta"),
    (QWEN3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    (QWEN3, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'llama3'"),
    (
        QWEN3,
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
            }
        },
        "partial_rotary_factor=0.5",
    ),
    (QWEN3, {"rope_scaling": "yarn"}, "rope_scaling"),
    (QWEN3, {"rope_scaling": {"type": "yarn", "factor": "four"}}, "factor"),
    (QWEN3, {"rope_scaling": {"type": "yarn", "factor": -4.0}}, "factor"),
    (QWEN3, {"rope_parameters": {"rope_type": "default", "rope_theta": "big"}}, "rope_theta"),
    (QWEN3, {"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "factor=nan"),
    (QWEN3, {"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
    (QWEN3, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (QWEN3, {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
    (QWEN3, {"rope_scaling": {"rope_type": ["yarn"]}}, r"\['yarn'\]"),
    (QWEN3, {"rope_scaling": {**CARD, "truncate": "no"}}, "truncate='no'"),
    (QWEN3, {"rope_scaling": {**CARD, "original_max_position_embeddings": 0.5}}, "=0.5"),
    (QWEN3, {"mlp_only_layers": 3}, "mlp_only_layers"),
    (QWEN3, {"eos_token_id": "end"}, "eos_token_id"),
    (QWEN3, {"quantization_config": "fp8"}, "quantization_config"),
    (V3, {"num_key_value_heads": 8}, "num_key_value_heads=8"),
    (V3, {"kv_lora_rank": 0}, "kv_lora_rank=0"),
    (V3, {"n_group": 7}, "n_group=7"),
    (V3, {"topk_group": 9}, "topk_group=9"),
    (V3, {"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok=33"),
    (V3, {"n_group": 256, "topk_group": 8}, "n_group=256"),
    (V3, {"scoring_func": "tanh"}, "scoring_func='tanh'"),
    (V3, {"topk_method": "random"}, "topk_method='random'"),
    (V3, {"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'.*awq"),
    (V3, {"quantization_config": {"quant_method": ["fp8"]}}, "quant_method"),
    (V3, {"quantization_config": {**V3["quantization_config"], "scale_fmt": "e5m0"}}, "'e5m0'"),
    (V3, {"quantization_config": {**V3["quantization_config"], "fmt": "e5m2"}}, "'e5m2'"),
    (
        V3,
        {"quantization_config": {**V3["quantization_config"], "weight_block_size": [64, 64]}},
        r"\[64, 64\]",
    ),
    (
        V3,
        {"quantization_config": {**V3["quantization_config"], "activation_scheme": "static"}},
        "'static'",
    ),
    (V3, {"quantization_config": {**QWEN_FP8, "modules_to_not_convert": "lm_head"}}, "='lm_head'"),
    (V3, {"quantization_config": {**QWEN_FP8, "modules_to_not_convert": [3]}}, r"=\[3\]"),
    (V3, {"quantization_config": {**QWEN_FP8, "ignored_layers": ["re:.*gate"]}}, "'re:"),
    (V2_LITE, {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
]


@pytest.mark.parametrize(
    ("base", "changes", "named"), WRONG, ids=[str(changes)[:60] for _, changes, _ in WRONG]
)
def test_a_wrong_value_is_refused_by_name(base: Fields, changes: Fields, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(base, **changes)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "moe_intermediate_size",
    ],
)
@ALL
def test_a_missing_size_is_named(base: Fields, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        read(base, without=(name,))


@pytest.mark.parametrize(
    ("names", "named"), [(["LlamaForCausalLM"], "LlamaForCausalLM"), ([], "llama"), (None, "llama")]
)
def test_an_unknown_architecture_is_named(names: Any, named: str) -> None:
    with pytest.raises(
        ConfigError, match=f"unknown architecture {named}; supported: DeepseekV2ForCausalLM"
    ):
        read(QWEN3, architectures=names, model_type="llama")


def test_the_model_type_serves_where_architectures_are_absent() -> None:
    assert read(QWEN3, without=("architectures",)) == read(QWEN3)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not valid JSON"),
        ("[1]", "an object"),
        ("\udcff", "not valid JSON"),
        (None, "no config.json"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str | None, named: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=named):
        read_config_file(tmp_path)
