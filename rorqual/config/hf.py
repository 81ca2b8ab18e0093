"""Read a Hugging Face `config.json` into a ModelConfig, validating everything once.

Accepts transformers 4 (`rope_scaling` + `rope_theta`, `torch_dtype`) and 5 (`rope_parameters`,
`dtype`). Rejects, by name, unsupported fields that change the result, and unknown fields unless the
caller lists them in `ignore_fields`. The same holds for fields of rope_scaling, rope_parameters and
quantization_config, whose names have a prefix: quantization_config.scale_fmt.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rorqual.config.model import (
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)
from rorqual.config.quant import QuantConfig
from rorqual.config.quant_methods import read_quantization
from rorqual.errors import ConfigError

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def _fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Fields without effect on inference results: bookkeeping, training, and generation defaults that
# are read elsewhere.
HARMLESS = _fields(
    """architectures model_type transformers_version auto_map _name_or_path name_or_path use_cache
    initializer_range attention_dropout pretraining_tp ep_size num_mtp_layers aux_loss_alpha
    seq_aux router_aux_loss_coef output_router_logits bos_token_id eos_token_id pad_token_id
    max_window_layers return_dict output_hidden_states output_attentions
    chunk_size_feed_forward problem_type id2label label2id is_encoder_decoder
    task_specific_params torchscript use_bfloat16 tokenizer_class prefix finetuning_task
    is_decoder add_cross_attention cross_attention_hidden_size decoder_start_token_id
    sep_token_id do_sample temperature top_k top_p max_length min_length num_beams
    repetition_penalty unsloth_fixed attn_implementation _attn_implementation
    _experts_implementation experts_implementation use_mtp"""
)

# Fields that change the result: (name, the values that mean "off").
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, 1, None),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "index_topk": (None, 0),
    "index_n_heads": (None, 0),
    "index_head_dim": (None, 0),
    "attention_sink": (None, False),
    "layer_types": (None,),
    "mlp_layer_types": (None,),
    "pruned_heads": (None, {}),
}


MODULE = re.compile(r"[\w.-]+")

# Fields of rope_scaling and rope_parameters, each with the value at which it changes nothing.
ROPE: dict[str, float | None] = {
    "rope_theta": None,
    "factor": 1,
    "original_max_position_embeddings": None,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0,
    "mscale_all_dim": 0,
    "attention_factor": 1,
}
SMALLEST = 5e-324  # any number above zero
ROPE_MINIMUM = {"rope_theta": SMALLEST, "factor": SMALLEST, "original_max_position_embeddings": 1}
ROPE_ALWAYS = _fields("rope_type type rope_theta partial_rotary_factor")
ROPE_KINDS = {
    "default": ROPE_ALWAYS,
    "linear": ROPE_ALWAYS | _fields("factor mscale_all_dim"),
    "yarn": ROPE_ALWAYS | {*ROPE, "truncate"},
}
ROPE_OFF: dict[str, tuple[Any, ...]] = {
    **{name: (value, None) for name, value in ROPE.items()},
    "truncate": (True, None),
}

COMMON = _fields(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps rope_theta
    rope_scaling rope_parameters torch_dtype dtype tie_word_embeddings attention_bias
    quantization_config moe_intermediate_size num_experts_per_tok norm_topk_prob
    sliding_window"""
)
DEEPSEEK = COMMON | _fields(
    """q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim
    n_routed_experts num_experts num_local_experts n_shared_experts n_group topk_group
    topk_method scoring_func routed_scaling_factor first_k_dense_replace moe_layer_freq
    num_nextn_predict_layers rope_interleave"""
)
QWEN = COMMON | _fields("num_experts num_local_experts decoder_sparse_step mlp_only_layers")


def read_config_file(
    folder: str | Path,
    ignore_fields: Iterable[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Read the config.json of a folder; `overrides` replace its fields."""
    path = Path(folder) / "config.json"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} holds no config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if overrides and isinstance(data, dict):
        data = {**data, **overrides}
    return read_config(data, ignore_fields)


def read_config(data: Mapping[str, Any], ignore_fields: Iterable[str] = ()) -> ModelConfig:
    """`data`: the object in a config.json. Raises ConfigError, naming the field, for invalid or
    unsupported values."""
    if not isinstance(data, Mapping):
        raise ConfigError("config.json must hold an object")
    family = _family(data)
    reader = _Reader(data, family, frozenset(ignore_fields))
    reader.refuse(QWEN if family == "qwen3_moe" else DEEPSEEK)
    return _read_qwen(reader) if family == "qwen3_moe" else _read_deepseek(reader)


def _family(data: Mapping[str, Any]) -> str:
    names = data.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and data.get("model_type") in ARCHITECTURES.values():
        return str(data["model_type"])
    given = ", ".join(map(str, names)) or data.get("model_type") or "none given"
    raise ConfigError(f"unknown architecture {given}; supported: {', '.join(ARCHITECTURES)}")


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


class _Reader:
    """Typed access to the fields of one config.json."""

    def __init__(self, data: Mapping[str, Any], family: str, ignored: frozenset[str]):
        self.data = data
        self.family = family
        self.ignored = ignored

    def refuse(self, honoured: frozenset[str]) -> None:
        for name, value in self.data.items():
            if name in self.ignored or name in honoured or name in HARMLESS:
                continue
            if name in UNSUPPORTED:
                if value not in UNSUPPORTED[name] and not self._harmless_list(name, value):
                    raise ConfigError(
                        f"config field {name}={value!r} changes the result and is not "
                        f"supported for {self.family}"
                    )
                continue
            raise ConfigError(
                f"config field {name}={value!r} is unknown for {self.family} and may "
                "change the result; "
                "ignore_config_fields takes fields to skip"
            )
        if self.get("hidden_act", "silu") != "silu":
            raise ConfigError(
                f"hidden_act={self.data['hidden_act']!r} is not supported; accepted: silu"
            )

    def _harmless_list(self, name: str, value: Any) -> bool:
        if name == "layer_types":
            return isinstance(value, list) and all(kind == "full_attention" for kind in value)
        # compared with moe_layers by the caller
        return name == "mlp_layer_types" and isinstance(value, list)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.data.get(name)
        return default if value is None else value

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        for name in names:
            value = self.data.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ConfigError(
                        f"config field {name}={value!r} must be an integer of at least {least}"
                    )
                return value
        if default is None:
            raise ConfigError(f"config field {names[0]} is missing")
        return default

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
        ):
            raise ConfigError(f"config field {name}={value!r} must be a finite number")
        return float(value)

    def one_of(self, name: str, default: str, accepted: tuple[str, ...]) -> str:
        value = self.get(name, default)
        if value not in accepted:
            raise ConfigError(
                f"config field {name}={value!r} is not supported; accepted: {', '.join(accepted)}"
            )
        return str(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"config field {name}={value!r} must be an object")
        return value

    def integers(self, name: str, single: bool = False) -> tuple[int, ...]:
        """A list of integers; with `single`, also a single one."""
        value = self.get(name, [])
        found = [value] if single and not isinstance(value, list) else value
        if not isinstance(found, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) for item in found
        ):
            raise ConfigError(
                f"config field {name}={value!r} must be "
                f"{'an integer or ' if single else ''}a list of integers"
            )
        return tuple(found)

    def refuse_nested(
        self,
        name: str,
        values: Mapping[str, Any],
        honoured: frozenset[str],
        off: Mapping[str, tuple[Any, ...]],
        owner: str,
    ) -> None:
        """`refuse` for the fields of a nested object. `off`: values without effect."""
        for field, value in values.items():
            full = f"{name}.{field}"
            if field in honoured or full in self.ignored or value in off.get(field, ()):
                continue
            accepted = repr(off[field][0]) if field in off else ", ".join(sorted(honoured))
            raise ConfigError(
                f"config field {full}={value!r} may change the result and is not supported for "
                f"{owner}; accepted: {accepted}; ignore_config_fields takes {full}"
            )

    def strings(
        self, name: str, values: Mapping[str, Any], field: str, patterns: bool = False
    ) -> list[str]:
        """A list of module names; with `patterns`, also `re:` and a regular expression."""
        found = values.get(field)
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise ConfigError(f"config field {name}.{field}={found!r} must be a list of names")
        for item in found:
            if patterns and item.startswith("re:") and _compiles(item[3:]):
                continue
            if not MODULE.fullmatch(item):
                accepted = "modules' names, no wildcards or patterns"
                full = f"{name}.{field}"
                raise ConfigError(f"config field {full} holds {item!r}; accepted: {accepted}")
        return found

    def rope_fields(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """(path, fields) of rope_scaling or rope_parameters. The fields may be repeated for each
        kind of layer, and must then be equal: all layers share one rotary embedding."""
        values = self.mapping(name)
        if not any(isinstance(value, Mapping) for value in values.values()):
            return name, values
        kind = "full_attention"
        for other, value in values.items():
            if value is not None and (kind not in values or value != values[kind]):
                raise ConfigError(
                    f"config field {name}.{other}={value!r} is not supported: all layers have one "
                    f"rotary embedding; accepted: {kind}, and other kinds that equal it"
                )
        return f"{name}.{kind}", values[kind]

    def rope(self, dim: int, interleaved: bool) -> RopeConfig:
        values: dict[str, Any] = {}
        places: dict[str, str] = {}
        objects = [self.rope_fields(name) for name in ("rope_scaling", "rope_parameters")]
        for name, fields in objects:
            for field, value in fields.items():
                key = "rope_type" if field == "type" else field
                if value is None:
                    continue
                if key in values and values[key] != value:
                    raise ConfigError(
                        f"config field {places[key]}={values[key]!r} contradicts "
                        f"{name}.{field}={value!r}; accepted: one of them, or the same value"
                    )
                values[key] = value
                places[key] = f"{name}.{field}"
        kind = values.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in ROPE_KINDS:
            accepted = ", ".join(ROPE_KINDS)
            raise ConfigError(f"rope type {kind!r} is not supported; accepted: {accepted}")
        for name, fields in objects:
            self.refuse_nested(name, fields, ROPE_KINDS[kind], ROPE_OFF, f"rope type {kind}")
        self._check_rope(values, places)
        theta = float(values.get("rope_theta") or self.number("rope_theta", 10000.0))
        base = RopeConfig(dim, theta, kind, interleaved)
        if kind == "default":
            return base
        return self._scaled_rope(base, values, places["rope_type"].rpartition(".")[0])

    def _check_rope(self, values: Mapping[str, Any], places: Mapping[str, str]) -> None:
        for name in ROPE:
            number = values.get(name)
            if number is None:
                continue
            known = isinstance(number, (int, float)) and not isinstance(number, bool)
            if not known or not ROPE_MINIMUM.get(name, 0) <= number < math.inf:
                raise ConfigError(f"rope field {places[name]}={number!r} must be a positive number")
        truncate = values.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ConfigError(f"rope field {places['truncate']}={truncate!r} must be true or false")
        if values.get("partial_rotary_factor", 1.0) != 1:
            raise ConfigError(
                f"partial_rotary_factor={values['partial_rotary_factor']!r} is not "
                "supported; accepted: 1.0"
            )

    def _scaled_rope(self, base: RopeConfig, values: Mapping[str, Any], place: str) -> RopeConfig:
        given = values.get("original_max_position_embeddings")
        factor = values.get("factor")
        if factor is None and (given is None or base.kind == "linear"):
            raise ConfigError(f"config field {place}.factor is missing for rope type {base.kind}")
        original = int(given or self.integer("max_position_embeddings"))
        factor = factor or self.integer("max_position_embeddings") / original
        factor_of_attention = values.get("attention_factor")
        return RopeConfig(
            base.dim,
            base.theta,
            base.kind,
            base.interleaved,
            factor=float(factor),
            original_max_position=original,
            beta_fast=float(values.get("beta_fast") or 32),
            beta_slow=float(values.get("beta_slow") or 1),
            mscale=float(values.get("mscale") or 0),
            mscale_all_dim=float(values.get("mscale_all_dim") or 0),
            attention_factor=None if factor_of_attention is None else float(factor_of_attention),
            truncate=values.get("truncate", True),
        )

    def quant(self) -> QuantConfig | None:
        return read_quantization(self, self.mapping("quantization_config"))

    def common(self, rope: RopeConfig) -> dict[str, Any]:
        dtype = str(self.get("dtype", self.get("torch_dtype", "bfloat16"))).removeprefix("torch.")
        if dtype not in ("bfloat16", "float16", "float32"):
            raise ConfigError(
                f"dtype={dtype!r} is not supported; accepted: bfloat16, float16, float32"
            )
        return {
            "architecture": next(
                name for name, family in ARCHITECTURES.items() if family == self.family
            ),
            "family": self.family,
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": self.integer("hidden_size"),
            "num_layers": self.integer("num_hidden_layers"),
            "norm_eps": self.number("rms_norm_eps", 1e-6),
            "max_position": rope.longest(self.integer("max_position_embeddings", default=4096)),
            "rope": rope,
            "dense_intermediate": self.integer("intermediate_size"),
            "tie_embeddings": bool(self.get("tie_word_embeddings", False)),
            "dtype": dtype,
            "quant": self.quant(),
            "bos_token_id": self.data.get("bos_token_id"),
            "eos_token_ids": self.integers("eos_token_id", single=True),
            "raw": dict(self.data),
        }


def _read_deepseek(reader: _Reader) -> ModelConfig:
    third = reader.family == "deepseek_v3"
    heads = reader.integer("num_attention_heads")
    if reader.integer("num_key_value_heads", default=heads) != heads:
        raise ConfigError(
            f"num_key_value_heads={reader.get('num_key_value_heads')} must equal "
            f"num_attention_heads={heads} for MLA"
        )
    # a missing q_lora_rank is the published default; an explicit null means a single q_proj
    q_lora = reader.data.get("q_lora_rank", 1536)
    attention = MLAConfig(
        num_heads=heads,
        q_lora_rank=None if q_lora is None else reader.integer("q_lora_rank", default=1536),
        kv_lora_rank=reader.integer("kv_lora_rank", default=512),
        nope_dim=reader.integer("qk_nope_head_dim", default=128),
        rope_dim=reader.integer("qk_rope_head_dim", default=64),
        v_dim=reader.integer("v_head_dim", default=128),
        bias=bool(reader.get("attention_bias", False)),
    )
    rope = reader.rope(attention.rope_dim, bool(reader.get("rope_interleave", True)))
    common = reader.common(rope)
    moe = _deepseek_moe(reader, third)
    layers = _deepseek_layers(reader, common["num_layers"], third)
    return ModelConfig(
        **common,
        attention=attention,
        moe=moe,
        moe_layers=layers,
        num_mtp_layers=reader.integer("num_nextn_predict_layers", default=0, least=0),
    )


def _deepseek_moe(reader: _Reader, third: bool) -> MoEConfig:
    norm = bool(reader.get("norm_topk_prob", third))
    scaling = reader.number("routed_scaling_factor", 2.5 if third else 1.0)
    method = reader.one_of(
        "topk_method",
        "noaux_tc" if third else "greedy",
        ("greedy", "group_limited_greedy", "noaux_tc"),
    )
    moe = MoEConfig(
        num_experts=reader.integer(
            "n_routed_experts", "num_experts", "num_local_experts", default=256 if third else 64
        ),
        top_k=reader.integer("num_experts_per_tok", default=8 if third else None),
        intermediate_size=reader.integer("moe_intermediate_size"),
        num_shared=reader.integer("n_shared_experts", default=0, least=0),
        scoring=reader.one_of(
            "scoring_func", "sigmoid" if third else "softmax", ("sigmoid", "softmax")
        ),
        method=method,
        n_group=reader.integer("n_group", default=8 if third else 1),
        topk_group=reader.integer("topk_group", default=4 if third else 1),
        norm_topk_prob=norm,
        # the published V2 code scales weights only if it does not normalize them
        scaling=1.0 if norm and not third else scaling,
    )
    _check_groups(moe)
    return moe


def _check_groups(moe: MoEConfig) -> None:
    grouped = moe.method != "greedy"
    if moe.top_k > moe.num_experts:
        raise ConfigError(f"num_experts_per_tok={moe.top_k} exceeds the {moe.num_experts} experts")
    if grouped and (moe.num_experts % moe.n_group or not 1 <= moe.topk_group <= moe.n_group):
        raise ConfigError(
            f"n_group={moe.n_group}, topk_group={moe.topk_group} do not divide "
            f"{moe.num_experts} experts"
        )
    if grouped and moe.topk_group * (moe.num_experts // moe.n_group) < moe.top_k:
        raise ConfigError(
            f"topk_group={moe.topk_group} groups hold fewer than "
            f"num_experts_per_tok={moe.top_k} experts"
        )
    if moe.method == "noaux_tc" and moe.num_experts // moe.n_group < 2:
        raise ConfigError(
            f"noaux_tc needs two experts a group; n_group={moe.n_group} of {moe.num_experts} "
            "experts leaves one"
        )


def _deepseek_layers(reader: _Reader, num_layers: int, third: bool) -> tuple[bool, ...]:
    first = reader.integer("first_k_dense_replace", default=3 if third else 0, least=0)
    frequency = reader.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        if len(frequency) != num_layers:
            raise ConfigError(
                f"moe_layer_freq lists {len(frequency)} layers, num_hidden_layers is {num_layers}"
            )
        layers = tuple(bool(flag) and i >= first for i, flag in enumerate(frequency))
    else:
        step = reader.integer("moe_layer_freq", default=1)
        layers = tuple(i >= first and i % step == 0 for i in range(num_layers))
    return _check_layer_types(reader, layers)


def _check_layer_types(reader: _Reader, layers: tuple[bool, ...]) -> tuple[bool, ...]:
    kinds = reader.data.get("mlp_layer_types")
    if isinstance(kinds, list) and [kind == "sparse" for kind in kinds] != list(layers):
        raise ConfigError("mlp_layer_types contradicts the fields that place the MoE layers")
    return layers


def _read_qwen(reader: _Reader) -> ModelConfig:
    heads = reader.integer("num_attention_heads")
    attention = GQAConfig(
        num_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", default=heads),
        head_dim=reader.integer("head_dim", default=reader.integer("hidden_size") // heads),
        bias=bool(reader.get("attention_bias", False)),
    )
    common = reader.common(reader.rope(attention.head_dim, interleaved=False))
    if heads % attention.num_kv_heads:
        raise ConfigError(
            f"num_attention_heads={heads} is no multiple of "
            f"num_key_value_heads={attention.num_kv_heads}"
        )
    moe = MoEConfig(
        num_experts=reader.integer("num_experts", "num_local_experts"),
        top_k=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        norm_topk_prob=bool(reader.get("norm_topk_prob", False)),
        router_fp32=False,
    )
    _check_groups(moe)
    step = reader.integer("decoder_sparse_step", default=1)
    dense = set(reader.integers("mlp_only_layers"))
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(common["num_layers"]))
    return ModelConfig(
        **common,
        attention=attention,
        moe=moe,
        moe_layers=_check_layer_types(reader, layers),
    )
