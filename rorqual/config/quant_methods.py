"""Read the quantization_config of a config.json, as each method's tools write it, into a
QuantConfig. No torch.

Unknown fields that may change the result are rejected by name, as in hf.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rorqual.config.quant import FP8_BLOCK, GROUPS, QuantConfig, WeightScheme
from rorqual.errors import ConfigError

NAME = "quantization_config"
Values = Mapping[str, Any]


class FieldReader(Protocol):
    """The interface of hf.py's reader of a config.json. ignored: fields that the user skips."""

    ignored: frozenset[str]

    def refuse_nested(
        self,
        name: str,
        values: Values,
        honoured: frozenset[str],
        off: Mapping[str, tuple[Any, ...]],
        owner: str,
    ) -> None: ...

    def strings(
        self, name: str, values: Values, field: str, patterns: bool = False
    ) -> list[str]: ...


def _fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


def read_quantization(reader: FieldReader, values: Values) -> QuantConfig | None:
    if not values:
        return None
    method = values.get("quant_method")
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ConfigError(
            f"{NAME} quant_method={method!r} is not supported; accepted: {', '.join(METHODS)}"
        )
    return read(reader, values)


def refused(field: str, value: Any, accepted: str) -> ConfigError:
    return ConfigError(f"{NAME}.{field}={value!r} is not supported; accepted: {accepted}")


# ---- fp8: DeepSeek's blocks, and one scale per matrix


MODULE_LISTS = ("modules_to_not_convert", "ignored_layers")
FP8 = _fields("quant_method fmt activation_scheme weight_block_size scale_fmt").union(MODULE_LISTS)
FP8_OFF: dict[str, tuple[Any, ...]] = {
    "dequantize": (False, None),
    "modules_to_convert": ([], None),
    "expert_dtype": ("fp8", None),
}
SCALE_FORMATS = {None: "fp8_group", "float": "fp8_group", "ue8m0": "fp8_group_ue8m0"}
FP8_TENSOR = WeightScheme("fp8", activation="fp8_token", layout="tensor")


def _ignored(reader: FieldReader, values: Values, patterns: bool = False) -> tuple[str, ...]:
    """The union of two lists: both names mean the same."""
    names = [
        item for field in MODULE_LISTS for item in reader.strings(NAME, values, field, patterns)
    ]
    return tuple(dict.fromkeys(names))


def _fp8(reader: FieldReader, values: Values) -> QuantConfig:
    method = values["quant_method"]
    fmt = values.get("fmt", "e4m3")
    if fmt != "e4m3":
        raise ConfigError(f"{NAME} quant_method={method!r} fmt={fmt!r}; accepted: e4m3")
    scheme = values.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        raise ConfigError(f"activation_scheme={scheme!r} is not supported; accepted: dynamic")
    block = values.get("weight_block_size")
    if block is not None and list(block) != [128, 128]:
        raise ConfigError(
            f"weight_block_size={block!r} is not supported; accepted: [128, 128], or none for one "
            "scale a matrix"
        )
    scales = None if f"{NAME}.scale_fmt" in reader.ignored else values.get("scale_fmt")
    reader.refuse_nested(NAME, values, FP8, FP8_OFF, f"quant_method {method}")
    if scales not in SCALE_FORMATS:
        raise refused("scale_fmt", scales, "float, ue8m0")
    if block is None:
        return QuantConfig(FP8_TENSOR, _ignored(reader, values))
    found = WeightScheme("fp8", (128, 128), activation=SCALE_FORMATS[scales], layout="scale_inv")
    return QuantConfig(found, _ignored(reader, values))


# ---- int8 in blocks


INT8_BLOCK = WeightScheme("int8", (128, 128), activation="int8_group", layout="scale_inv")


def _blockwise_int8(reader: FieldReader, values: Values) -> QuantConfig:
    block = values.get("weight_block_size")
    if block != [128, 128]:
        raise refused("weight_block_size", block, "[128, 128]")
    if values.get("activation_scheme", "dynamic") != "dynamic":
        raise refused("activation_scheme", values["activation_scheme"], "dynamic")
    honoured = _fields("quant_method activation_scheme weight_block_size").union(MODULE_LISTS)
    reader.refuse_nested(NAME, values, honoured, {}, "quant_method blockwise_int8")
    return QuantConfig(INT8_BLOCK, _ignored(reader, values))


# ---- w4afp8: experts in int4, everything else in fp8 blocks


W4AFP8_EXPERTS = WeightScheme("int4", (1, 128), activation="fp8_token", layout="signed")
EXPERTS = r"re:.*\.mlp\.experts\."


def _w4afp8(reader: FieldReader, values: Values) -> QuantConfig:
    for field, known in {"group_size": 128, "weight_block_size": [128, 128]}.items():
        if values.get(field, known) != known:
            raise refused(field, values[field], repr(known))
    honoured = _fields(
        "quant_method quant_algo group_size weight_block_size linear_activation_scheme "
        "moe_activation_scheme activation_scheme ignore"
    ).union(MODULE_LISTS)
    reader.refuse_nested(NAME, values, honoured, {}, "quant_method w4afp8")
    ignored = [*_ignored(reader, values, True), *reader.strings(NAME, values, "ignore", True)]
    return QuantConfig(FP8_BLOCK, tuple(ignored), (((EXPERTS,), W4AFP8_EXPERTS),))


# ---- GPTQ and AWQ


GPTQ_FIELDS = _fields(
    """quant_method bits group_size desc_act sym lm_head checkpoint_format dynamic
    modules_in_block_to_quantize pack_dtype"""
)
# settings of the quantization tool, without effect on loading
GPTQ_HISTORY = _fields(
    """damp_percent damp_auto_increment static_groups true_sequential dataset tokenizer model_name
    model_name_or_path model_file_base_name meta use_exllama use_cuda_fp16 model_seqlen
    block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id
    disable_exllama exllama_config max_input_length cache_block_outputs quant_method format
    quantizer is_marlin_format backend act_group_aware hyb_act"""
)
LAYOUTS = {"gptq": "gptq", "gptq_v2": "gptq_v2"}


def _group(values: Values) -> tuple[int, int]:
    size = values.get("group_size", 128)
    if size == -1:
        return (1, 0)
    if size not in GROUPS:
        raise refused("group_size", size, ", ".join(map(str, (*GROUPS, -1))))
    return (1, int(size))


def _four_bits(values: Values, field: str = "bits") -> None:
    if values.get(field, 4) != 4:
        raise refused(field, values[field], "4")


def _gptq(reader: FieldReader, values: Values) -> QuantConfig:
    _four_bits(values)
    layout = values.get("checkpoint_format", "gptq")
    if layout not in LAYOUTS:
        raise refused("checkpoint_format", layout, ", ".join(LAYOUTS))
    for field, off in {"lm_head": (False, None), "pack_dtype": ("int32", None)}.items():
        if values.get(field) not in off:
            raise refused(field, values[field], repr(off[0]))
    reader.refuse_nested(NAME, values, GPTQ_FIELDS | GPTQ_HISTORY, {}, "quant_method gptq")
    scheme = WeightScheme(
        "int4",
        _group(values),
        symmetric=bool(values.get("sym", True)),
        layout=LAYOUTS[layout],
        ordered=bool(values.get("desc_act", False)),
    )
    ignored = _left_by_gptq(values.get("dynamic") or {})
    inside = values.get("modules_in_block_to_quantize")
    if inside is None:
        return QuantConfig(scheme, ignored)
    names = tuple(str(name) for block in inside for name in _listed(block))
    return QuantConfig(None, ignored, ((names, scheme),))


def _listed(names: Any) -> list[Any]:
    return names if isinstance(names, list) else [names]


def _left_by_gptq(dynamic: Any) -> tuple[str, ...]:
    """The modules that `dynamic` leaves unquantized: `-:` and a pattern."""
    if not isinstance(dynamic, Mapping):
        raise refused("dynamic", dynamic, "an object of patterns")
    for name in dynamic:
        if not name.startswith("-:"):
            raise refused("dynamic", name, "patterns that begin with -:, for modules left wide")
    return tuple(_pattern(f"dynamic {name}", "re:" + name[2:]) for name in dynamic)


AWQ_FIELDS = _fields(
    """quant_method bits w_bit group_size q_group_size zero_point version backend
    modules_to_not_convert do_fuse fuse_max_seq_len exllama_config modules_to_fuse desc_act sym
    lm_head format pack_dtype meta checkpoint_format"""
)


def _awq(reader: FieldReader, values: Values) -> QuantConfig:
    _four_bits(values)
    _four_bits(values, "w_bit")
    version = values.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise refused("version", version, "gemm")
    reader.refuse_nested(NAME, values, AWQ_FIELDS, {}, "quant_method awq")
    if "group_size" not in values and "q_group_size" in values:
        values = {**values, "group_size": values["q_group_size"]}
    zero = bool(values.get("zero_point", True))
    scheme = WeightScheme("int4", _group(values), symmetric=not zero, layout="awq")
    return QuantConfig(scheme, tuple(reader.strings(NAME, values, "modules_to_not_convert")))


# ---- compressed-tensors


CT_FIELDS = _fields(
    """quant_method config_groups format ignore quantization_status global_compression_ratio
    version compression_config quantization_config transform_config sparsity_config
    kv_cache_scheme provider"""
)
ACTIVATION_KINDS = {
    ("float", "token"): "fp8_token",
    ("float", "group"): "fp8_group",
    ("int", "token"): "int8_token",
    ("int", "group"): "int8_group",
}
EIGHT = {
    "channel": ((1, 0), "channel"),
    "tensor": ((1, 0), "tensor"),
    "block": ((128, 128), "block"),
}


def _compressed(reader: FieldReader, values: Values) -> QuantConfig:
    reader.refuse_nested(NAME, values, CT_FIELDS, {}, "quant_method compressed-tensors")
    for field in ("transform_config", "sparsity_config", "kv_cache_scheme"):
        if values.get(field) and not _is_dense(values[field]):
            raise refused(field, values[field], "none")
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise refused("config_groups", groups, "an object of groups of layers")
    rules = []
    everything: WeightScheme | None = None
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise refused(f"config_groups.{name}", group, "an object")
        scheme = _group_scheme(name, group, values.get("format"))
        targets = reader.strings(f"{NAME}.config_groups.{name}", group, "targets", True)
        if "Linear" in targets:
            everything = everything or scheme
        named = tuple(item for item in targets if item != "Linear")
        if named:
            rules.append((named, scheme))
    ignored = tuple(reader.strings(NAME, values, "ignore", True))
    return QuantConfig(everything, ignored, tuple(rules))


def _is_dense(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("format") == "dense"


def _group_scheme(name: str, group: Values, overall: Any) -> WeightScheme:
    at = f"config_groups.{name}"
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise refused(f"{at}.weights", weights, "an object")
    if group.get("output_activations"):
        raise refused(f"{at}.output_activations", group["output_activations"], "none")
    activation = _activation(f"{at}.input_activations", group.get("input_activations"))
    kind = (weights.get("type", "int"), weights.get("num_bits"))
    form = group.get("format") or overall
    if weights.get("actorder") in ("group", True):
        raise refused(f"{at}.weights.actorder", weights["actorder"], "weight, static, none")
    if kind == ("int", 4):
        return _int4_scheme(at, weights, activation, form)
    if kind not in (("int", 8), ("float", 8)):
        raise refused(f"{at}.weights", dict(weights), "int of 4 or 8 bits, float of 8")
    return _eight_bit_scheme(at, weights, activation, form)


def _int4_scheme(at: str, weights: Values, activation: str, form: Any) -> WeightScheme:
    layouts = {"pack-quantized": "packed", "int-quantized": "unpacked"}
    if form not in layouts:
        raise refused(f"{at}.format", form, ", ".join(layouts))
    symmetric = bool(weights.get("symmetric", True))
    if not symmetric and form != "pack-quantized":
        raise refused(f"{at}.weights.symmetric", False, "true, or format pack-quantized")
    if weights.get("strategy") == "channel":
        block = (1, 0)
    else:
        size = weights.get("group_size")
        if not isinstance(size, int) or size < 8 or size % 8:
            raise refused(f"{at}.weights.group_size", size, "32, 64, 128 or another multiple of 8")
        block = (1, size)
    return WeightScheme("int4", block, symmetric, activation, layouts[form])


def _eight_bit_scheme(at: str, weights: Values, activation: str, form: Any) -> WeightScheme:
    kind = "fp8" if weights.get("type") == "float" else "int8"
    forms = ("float-quantized" if kind == "fp8" else "int-quantized", "naive-quantized")
    if form not in forms:
        raise refused(f"{at}.format", form, ", ".join(forms))
    if not weights.get("symmetric", True):
        raise refused(f"{at}.weights.symmetric", False, "true")
    strategy = weights.get("strategy") or "tensor"
    if strategy not in EIGHT:
        raise refused(f"{at}.weights.strategy", strategy, ", ".join(EIGHT))
    block, layout = EIGHT[strategy]
    given = weights.get("block_structure")
    if strategy == "block" and given != [128, 128]:
        raise refused(f"{at}.weights.block_structure", given, "[128, 128]")
    return WeightScheme(kind, block, True, activation, layout)


def _activation(at: str, given: Any) -> str:
    if not given:
        return "wide"
    if not isinstance(given, Mapping):
        raise refused(at, given, "an object or none")
    kind = (given.get("type", "int"), given.get("strategy") or "token")
    fits = given.get("num_bits") == 8 and given.get("symmetric", True)
    grouped = kind[1] != "group" or given.get("group_size") == 128
    if kind not in ACTIVATION_KINDS or not fits or not grouped:
        accepted = "8 symmetric bits a token or a group of 128"
        raise refused(at, dict(given), accepted)
    if given.get("dynamic") is not True:
        raise refused(f"{at}.dynamic", given.get("dynamic"), "true")
    return ACTIVATION_KINDS[kind]


def _pattern(field: str, name: str) -> str:
    try:
        re.compile(name.removeprefix("re:"))
    except re.error as error:
        raise refused(field, name, f"a regular expression ({error})") from None
    return name


METHODS: dict[str, Callable[[FieldReader, Values], QuantConfig]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "w4afp8": _w4afp8,
    "blockwise_int8": _blockwise_int8,
}
