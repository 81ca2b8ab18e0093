"""A GGUF file of an engine's random weights, written tensor by tensor.

Names and numbers of the model follow llama.cpp's `deepseek2` and `qwen3moe` (its `src/models` and
the tables of the gguf package); blocks are rounded by the gguf package. Matrices get the type that
is asked for, the head and the embeddings too; norms, routers and biases are fp32. The vocabulary
has a size and no texts.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rorqual.bench.llama_cpp.drawn_weights import DrawnWeights
from rorqual.config.model import GQAConfig, MLAConfig, ModelConfig
from rorqual.errors import ConfigError

# by the kind of the engine's own weights (None: bf16)
TYPES = {"int4": "Q4_0", "int8": "Q8_0", None: "BF16"}
BLOCK = 32  # columns of a block of Q4_0 and Q8_0
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")
KV_B = ".self_attn.kv_b_proj.weight"
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file: made of these tensors of the checkpoint, stacked where they are
    several, each after `change`. kind: a type of the gguf package."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str
    nbytes: int
    change: Change | None = None

    @property
    def is_embedding(self) -> bool:
        return self.name == "token_embd.weight"

    @property
    def is_routed(self) -> bool:
        return "_exps." in self.name


def gguf_package() -> Any:
    """Raises ConfigError where it is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "rorqual bench llama-cpp writes a GGUF file, and the package gguf is not installed: "
            "pip install 'rorqual[gguf]'"
        )
    return importlib.import_module("gguf")


def tensors_of(weights: DrawnWeights, kind: str) -> list[GgufTensor]:
    """Every tensor of the file, in order. Raises ConfigError where a matrix does not fit `kind`,
    or a tensor of the model has no place in such a file."""
    gguf = gguf_package()
    config = weights.config
    arch = gguf.MODEL_ARCH.DEEPSEEK2 if config.is_mla else gguf.MODEL_ARCH.QWEN3MOE
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    found = []
    for merged, sources in _merged(weights.shapes).items():
        found += list(_placed(merged, sources, weights, names, kind))
    return found


def _merged(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, ...]]:
    """Checkpoint names, those of the experts of a layer joined under one."""
    found: dict[str, tuple[str, ...]] = {}
    for name in shapes:
        match = EXPERT.fullmatch(name)
        key = f"{match[1]}.{match[3]}.weight" if match else name
        found[key] = (*found.get(key, ()), name)
    return found


def _placed(
    merged: str, sources: tuple[str, ...], weights: DrawnWeights, names: Any, kind: str
) -> Iterator[GgufTensor]:
    shape = weights.shapes[sources[0]]
    if merged.endswith(KV_B):
        yield from _latent_halves(merged, sources, weights.config, names, kind)
        return
    stacked = (len(sources), *shape) if EXPERT.fullmatch(sources[0]) else shape
    # the gguf package knows the router's bias under the name it has behind a module
    known = merged.replace("gate.e_score_correction_bias", "e_score_correction.bias")
    yield _tensor(known, merged, sources, stacked, names, kind, None)


def _latent_halves(
    merged: str, sources: tuple[str, ...], config: ModelConfig, names: Any, kind: str
) -> Iterator[GgufTensor]:
    """kv_b head by head: what makes keys, transposed, and what makes values."""
    mla = config.attention
    assert isinstance(mla, MLAConfig)
    heads, nope, value, latent = mla.num_heads, mla.nope_dim, mla.v_dim, mla.kv_lora_rank

    def keys(weight: Tensor) -> Tensor:
        return weight.view(heads, nope + value, latent)[:, :nope].transpose(1, 2).contiguous()

    def values(weight: Tensor) -> Tensor:
        return weight.view(heads, nope + value, latent)[:, nope:].contiguous()

    for half, shape, change in (
        ("k_b_proj", (heads, latent, nope), keys),
        ("v_b_proj", (heads, value, latent), values),
    ):
        name = merged.replace("kv_b_proj", half)
        yield _tensor(name, merged, sources, shape, names, kind, change)


def _tensor(
    known: str,
    source: str,
    sources: tuple[str, ...],
    shape: tuple[int, ...],
    names: Any,
    kind: str,
    change: Change | None,
) -> GgufTensor:
    name = names.get_name(known, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise ConfigError(f"{source} has no place in a GGUF file of this architecture")
    wide = len(shape) < 2 or "ffn_gate_inp" in name
    if not wide and kind.startswith("Q") and shape[-1] % BLOCK:
        raise ConfigError(
            f"{source} has rows of {shape[-1]}; {kind} takes multiples of {BLOCK} columns"
        )
    used = "F32" if wide else kind
    return GgufTensor(name, sources, shape, used, _bytes(shape, used), change)


def _bytes(shape: Sequence[int], kind: str) -> int:
    per_block = {"F32": 4 * BLOCK, "BF16": 2 * BLOCK, "Q8_0": BLOCK + 2, "Q4_0": BLOCK // 2 + 2}
    return math.prod(shape) * per_block[kind] // BLOCK


def write(path: Path, weights: DrawnWeights, kind: str, threads: int) -> list[GgufTensor]:
    """The file, and what is in it. No more than one tensor of it is in memory at a time."""
    gguf = gguf_package()
    tensors = tensors_of(weights, kind)
    writer = gguf.GGUFWriter(path, "deepseek2" if weights.config.is_mla else "qwen3moe")
    _describe(writer, gguf, weights.config, kind)
    for tensor in tensors:
        kept = gguf.GGMLQuantizationType[tensor.kind]
        shape, dtype = (tensor.shape, "float32")
        if tensor.kind != "F32":
            shape, dtype = gguf.quant_shape_to_byte_shape(tensor.shape, kept), "uint8"
        writer.add_tensor_info(tensor.name, shape, _numpy(dtype), tensor.nbytes, kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with ThreadPoolExecutor(threads) as pool:
        for tensor in tensors:
            writer.write_tensor_data(_data(gguf, tensor, weights, pool))
    writer.close()
    return tensors


def _numpy(name: str) -> Any:
    import numpy as np

    return np.dtype(name)


def _data(gguf: Any, tensor: GgufTensor, weights: DrawnWeights, pool: ThreadPoolExecutor) -> Any:
    """The bytes as stored in the file."""
    import numpy as np

    kind = gguf.GGMLQuantizationType[tensor.kind]

    def one(source: str) -> Any:
        drawn = weights.draw(source)
        changed = tensor.change(drawn) if tensor.change else drawn
        return gguf.quants.quantize(changed.float().numpy(), kind)

    if len(tensor.sources) > 1:
        return np.stack(list(pool.map(one, tensor.sources)))
    return one(tensor.sources[0])


# ---- what the file says of the model


def _describe(writer: Any, gguf: Any, config: ModelConfig, kind: str) -> None:
    writer.add_name("random weights")
    writer.add_context_length(config.rope.longest(config.max_position))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.dense_intermediate)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(_file_type(gguf, kind))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _describe_experts(writer, gguf, config)
    if isinstance(config.attention, MLAConfig):
        _describe_latent(writer, config.attention)
    else:
        _describe_grouped(writer, config.attention)
    _describe_rope(writer, gguf, config)


def _file_type(gguf: Any, kind: str) -> Any:
    return gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"]


def _describe_experts(writer: Any, gguf: Any, config: ModelConfig) -> None:
    moe = config.moe
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.top_k)
    writer.add_expert_feed_forward_length(moe.intermediate_size)
    if not config.is_mla:
        return
    writer.add_leading_dense_block_count(config.moe_layers.index(True))
    writer.add_expert_shared_count(moe.num_shared)
    writer.add_expert_weights_scale(moe.scaling)
    writer.add_expert_weights_norm(moe.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType[moe.scoring.upper()])
    if moe.n_group > 1:
        writer.add_expert_group_count(moe.n_group)
        writer.add_expert_group_used_count(moe.topk_group)


def _describe_latent(writer: Any, mla: MLAConfig) -> None:
    writer.add_head_count(mla.num_heads)
    writer.add_head_count_kv(1)
    # llama.cpp asks for it unless the layers are V2-Lite's 27; 0 is none
    writer.add_q_lora_rank(mla.q_lora_rank or 0)
    writer.add_kv_lora_rank(mla.kv_lora_rank)
    writer.add_key_length(mla.latent_dim)
    writer.add_value_length(mla.kv_lora_rank)
    writer.add_key_length_mla(mla.qk_dim)
    writer.add_value_length_mla(mla.v_dim)


def _describe_grouped(writer: Any, gqa: GQAConfig) -> None:
    writer.add_head_count(gqa.num_heads)
    writer.add_head_count_kv(gqa.num_kv_heads)
    writer.add_key_length(gqa.head_dim)
    writer.add_value_length(gqa.head_dim)


def _describe_rope(writer: Any, gguf: Any, config: ModelConfig) -> None:
    rope = config.rope
    writer.add_rope_dimension_count(rope.dim)
    writer.add_rope_freq_base(rope.theta)
    if rope.kind == "default":
        return
    if rope.kind != "yarn" or rope.mscale != rope.mscale_all_dim or not rope.mscale_all_dim:
        raise ConfigError(
            f"rope_scaling of kind {rope.kind} with mscale={rope.mscale} and mscale_all_dim="
            f"{rope.mscale_all_dim}; accepted: none, or yarn with both alike, as llama.cpp has it"
        )
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope.factor)
    writer.add_rope_scaling_orig_ctx_len(rope.original_max_position)
    writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast)
    writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow)
    # llama.cpp's deepseek2 expects a tenth of it
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope.mscale_all_dim)
