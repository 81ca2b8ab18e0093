"""Tiny random checkpoints saved by transformers, one for each architecture and each option that
changes the mathematics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB = 128
DEEPSEEK = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
}
GROUPS = {"n_group": 4, "topk_group": 2}
V3 = {**DEEPSEEK, **GROUPS, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
V2 = {
    **DEEPSEEK,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
QWEN = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
}


def yarn(**values: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        **values,
    }


MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}

# name: (family, overrides)
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("v3", {}),
    "v3-no-q-lora": ("v3", {"q_lora_rank": None}),
    # together with the rope key narrower than hidden states
    "v3-narrow-latents": ("v3", {"q_lora_rank": 20, "kv_lora_rank": 24}),
    "v3-yarn-mscales": ("v3", {"rope_parameters": yarn(**MSCALES)}),
    "v3-yarn-plain": ("v3", {"rope_parameters": yarn()}),
    "v3-yarn-equal-mscales": ("v3", {"rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0)}),
    "v3-half-rope": ("v3", {"rope_interleave": False}),
    "v3-bias": ("v3", {"attention_bias": True}),
    "v3-unnormalised": ("v3", {"norm_topk_prob": False}),
    "v3-one-group": ("v3", {"n_group": 1, "topk_group": 1}),
    "v3-tied": ("v3", {"tie_word_embeddings": True}),
    "v3-all-sparse": ("v3", {"first_k_dense_replace": 0}),
    "v3-all-dense": ("v3", {"first_k_dense_replace": 3}),
    # a GPU's kernels take it in fp8
    "v3-wide-latent": (
        "v3",
        {"first_k_dense_replace": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 16},
    ),
    "v3-two-shared": ("v3", {"n_shared_experts": 2}),
    "v3-theta": ("v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "v2": ("v2", {}),
    "v2-no-q-lora": ("v2", {"q_lora_rank": None}),
    "v2-grouped": ("v2", {"topk_method": "group_limited_greedy", **GROUPS}),
    "v2-yarn": ("v2", {"rope_parameters": yarn(mscale=0.707, mscale_all_dim=0.707)}),
    "v2-bias": ("v2", {"attention_bias": True}),
    "qwen": ("qwen", {}),
    "qwen-unnormalised": ("qwen", {"norm_topk_prob": False}),
    "qwen-mlp-only": ("qwen", {"mlp_only_layers": [1]}),
    "qwen-sparse-step": ("qwen", {"decoder_sparse_step": 2}),
    "qwen-tied": ("qwen", {"tie_word_embeddings": True}),
    "qwen-bias": ("qwen", {"attention_bias": True}),
    "qwen-yarn": ("qwen", {"rope_parameters": yarn()}),
    "qwen-linear-rope": (
        "qwen",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
}
# Larger than a block in some directions and ragged in others; "aligned" has merged parts that end
# on a block's edge.
WIDE = {
    "hidden_size": 192,
    "intermediate_size": 160,
    "moe_intermediate_size": 136,
    "num_hidden_layers": 2,
}
OPTIONS_FP8: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("v3", WIDE),
    "fp8-aligned": (
        "v3",
        {
            **WIDE,
            "hidden_size": 256,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "q_lora_rank": 128,
        },
    ),
    "fp8-qwen": ("qwen", {**WIDE, "head_dim": 72}),
}
CLASSES = {
    "v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, V3),
    "v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM, V2),
    "qwen": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, QWEN),
}


def make_reference(option: str, seed: int = 0, **more: Any) -> torch.nn.Module:
    """A transformers model in fp32 whose every parameter is random, biases and norms included."""
    family, changes = {**OPTIONS, **OPTIONS_FP8}[option]
    changes = {**changes, **more}
    config_class, model_class, base = CLASSES[family]
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config_class(**{**base, **changes})).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(
                noise * tensor.shape[-1] ** -0.5
                if tensor.dim() > 1
                else 0.1 * noise + ("norm" in name)
            )
    return model


def save(option: str, folder: Path, **options: Any) -> torch.nn.Module:
    """Write a checkpoint folder; returns the reference model."""
    model = make_reference(option)
    model.save_pretrained(folder, **options)
    return model


def rewrite_config(folder: Path, **changes: Any) -> None:
    """Change fields of a saved config.json; None removes one."""
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in data.items() if value is not None}))


FP8_MODULES = ("_proj.weight", "kv_a_proj_with_mqa.weight")


def quantize_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 data and fp32 scales [ceil(rows/128), ceil(columns/128)] of one matrix."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, -1, 128)
    scale = blocks.abs().amax((1, 3)).clamp(1e-8) / 448
    data = (
        (blocks / scale[:, None, :, None]).view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn)
    )
    return data.contiguous(), scale


def dequantize_block(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.repeat_interleave(128, 0)[: data.shape[0]].repeat_interleave(128, 1)[
        :, : data.shape[1]
    ]
    return data.float() * wide


def save_fp8(option: str, folder: Path) -> torch.nn.Module:
    """Write an fp8 checkpoint as DeepSeek publishes them; returns the reference with the
    dequantized weights."""
    save(option, folder)
    path = folder / "model.safetensors"
    tensors = {}
    dequantized = {}
    for name, tensor in load_file(path).items():
        tensors[name] = dequantized[name] = tensor
        if name.endswith(FP8_MODULES):
            tensors[name], tensors[name + "_scale_inv"] = quantize_block(tensor)
            dequantized[name] = dequantize_block(tensors[name], tensors[name + "_scale_inv"])
    save_file(dequantized, path, metadata={"format": "pt"})
    reference = (
        CLASSES[OPTIONS_FP8[option][0]][1].from_pretrained(folder, dtype=torch.float32).eval()
    )
    save_file(tensors, path, metadata={"format": "pt"})
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    rewrite_config(folder, quantization_config=quantization)
    return reference


def merge(folder: Path) -> None:
    """Rewrite a checkpoint with merged tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    groups = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
    for prefix in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):
        count = len(
            [
                name
                for name in tensors
                if name.startswith(prefix + ".experts.") and name.endswith("down_proj.weight")
            ]
        )
        parts = ("gate_proj", "up_proj", "down_proj")
        experts = [
            {part: tensors.pop(f"{prefix}.experts.{e}.{part}.weight") for part in parts}
            for e in range(count)
        ]
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack(
            [torch.cat((e["gate_proj"], e["up_proj"])) for e in experts]
        )
        tensors[f"{prefix}.experts.down_proj"] = torch.stack([e["down_proj"] for e in experts])
    for merged, parts in groups.items():
        for first in [name for name in tensors if name.endswith(f".{parts[0]}.weight")]:
            module = first.removesuffix(f".{parts[0]}.weight")
            if all(f"{module}.{part}.weight" in tensors for part in parts):
                tensors[f"{module}.{merged}.weight"] = torch.cat(
                    [tensors.pop(f"{module}.{part}.weight") for part in parts]
                )
    save_file(tensors, path, metadata={"format": "pt"})


MODULE_NORMS = ("enorm", "hnorm", "shared_head.norm")


def save_with_mtp(
    folder: Path, modules: int = 1, vocab: int = VOCAB, agreement: float = 0.0, seed: int = 0
) -> None:
    """A tiny DeepSeek-V3 with prediction modules, named as DeepSeek publishes them, their copies of
    embedding and head included.

    `agreement` 0: everything is random, and a draft is right by chance alone. Above 0: the layers
    of main model and modules add little to the embedding, and modules pass the embedding on, so
    that drafts are right the more often the larger it is, and never always.
    """
    reference = make_reference("v3", seed, vocab_size=vocab)
    reference.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(seed + 1)
    depth = reference.config.num_hidden_layers
    for index in range(depth, depth + modules):
        tensors.update(_module(tensors, depth - 1, index, generator))
    if agreement:
        for name in [n for n in tensors if n.endswith(("o_proj.weight", "down_proj.weight"))]:
            tensors[name] = tensors[name] * (0.05 / agreement)
        for index in range(depth, depth + modules):
            merge = tensors[f"model.layers.{index}.eh_proj.weight"]
            merge[:, : merge.shape[0]] = torch.eye(merge.shape[0])
            merge[:, merge.shape[0] :] *= 0.1
            tensors[f"model.layers.{index}.shared_head.norm.weight"] = tensors[
                "model.norm.weight"
            ].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    rewrite_config(folder, num_nextn_predict_layers=modules)


def _module(
    tensors: dict[str, torch.Tensor], last: int, index: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Module `index`: a layer of its own shaped like the main model's last, merge and norms, and
    copies that must not be loaded."""
    prefix = f"model.layers.{index}."
    source = f"model.layers.{last}."
    hidden = tensors["model.norm.weight"].shape[0]
    shapes = {
        name.removeprefix(source): tensor.shape
        for name, tensor in tensors.items()
        if name.startswith(source)
    }
    shapes |= {
        "eh_proj.weight": (hidden, 2 * hidden),
        **{f"{name}.weight": (hidden,) for name in MODULE_NORMS},
    }
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        made[prefix + name] = (
            noise * shape[-1] ** -0.5 if len(shape) > 1 else 0.1 * noise + ("norm" in name)
        )
    made[prefix + "embed_tokens.weight"] = torch.full_like(
        tensors["model.embed_tokens.weight"], float("nan")
    )
    made[prefix + "shared_head.head.weight"] = torch.full_like(
        tensors["lm_head.weight"], float("nan")
    )
    return made
