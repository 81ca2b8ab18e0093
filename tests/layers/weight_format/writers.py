"""Tiny checkpoints in every published format, written here number by number: what the tensors are
called, how they are packed, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.checkpoints import CLASSES, make_reference, quantize_block, rewrite_config

E4M3 = torch.float8_e4m3fn
# Every row and column count is a multiple of 128, so that every group divides it.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
QWEN_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "head_dim": 64,
}


@dataclass
class Stored:
    """A matrix as a file holds it, its tensors by what follows the module's name; and its
    values."""

    tensors: dict[str, Tensor]
    means: Tensor


Write = Callable[[Tensor], Stored]


def grouped(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(numbers 0 to 15 [rows, columns], scales, zero points [rows, groups], values)"""
    rows, columns = weight.shape
    parts = weight.float().view(rows, -1, group or columns)
    if symmetric:
        scale = (parts.abs().amax(-1) / 7.5).to(torch.float16).float()
        zero = torch.full_like(scale, 8)
    else:
        low = parts.amin(-1).clamp(max=0)
        scale = ((parts.amax(-1).clamp(min=0) - low) / 15).to(torch.float16).float()
        zero = (-low / scale).round().clamp(0, 15)
    numbers = (parts / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    values = (numbers - zero[..., None]) * scale[..., None]
    return numbers.view(rows, columns).int(), scale, zero.int(), values.view(rows, columns)


def words(numbers: Tensor, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers of the last axis an int32, number places[i] in bits 4 i to 4 i + 3."""
    parts = numbers.long().unflatten(-1, (-1, 8))
    total = sum(parts[..., place] << (4 * bit) for bit, place in enumerate(places))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def packed(weight: Tensor, group: int = 128, symmetric: bool = True) -> Stored:
    numbers, scale, zero, values = grouped(weight, group, symmetric)
    tensors = {
        "weight_packed": words(numbers),
        "weight_scale": scale.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zero.t()).t().contiguous()
    return Stored(tensors, values)


def unpacked(weight: Tensor, group: int) -> Stored:
    numbers, scale, _, values = grouped(weight, group, True)
    return Stored({"weight": (numbers - 8).to(torch.int8), "weight_scale": scale.half()}, values)


def signed(weight: Tensor) -> Stored:
    numbers, scale, _, _ = grouped(weight, 128, True)
    scale = scale.bfloat16()
    values = (numbers - 8) * scale.float().repeat_interleave(128, 1)
    nibbles = (numbers - 8) & 15
    data = (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).to(torch.uint8).view(torch.int8)
    return Stored({"weight": data, "weight_scale_inv": scale}, values)


def awq(weight: Tensor, group: int) -> Stored:
    numbers, scale, zero, values = grouped(weight, group, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(numbers.t(), order),
        "qzeros": words(zero.t(), order),
        "scales": scale.t().half().contiguous(),
    }
    return Stored(tensors, values)


def gptq(weight: Tensor, group: int, symmetric: bool = True, shuffled: bool = False) -> Stored:
    """`shuffled`: the groups were chosen over columns in another order."""
    columns = weight.shape[1]
    order = torch.arange(columns)
    if shuffled:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    numbers, scale, zero, values = grouped(weight[:, order], group, symmetric)
    back = order.argsort()
    tensors = {
        "qweight": words(numbers[:, back]).t().contiguous(),
        "qzeros": words((zero.t() - 1) & 15),
        "scales": scale.t().half().contiguous(),
        "g_idx": (back // (group or columns)).int(),
    }
    return Stored(tensors, values[:, back])


def by_row(weight: Tensor, kind: torch.dtype) -> Stored:
    most = 448 if kind == E4M3 else 127
    scale = (weight.abs().amax(1, keepdim=True) / most).bfloat16()
    steps = weight / scale.float()
    data = (steps if kind == E4M3 else steps.round()).clamp(-most, most).to(kind)
    return Stored({"weight": data, "weight_scale": scale}, data.float() * scale.float())


def by_matrix(weight: Tensor, dims: int = 1) -> Stored:
    scale = weight.abs().amax() / 448
    data = (weight / scale).to(E4M3)
    kept = scale.view(1) if dims else scale
    return Stored({"weight": data, "weight_scale": kept}, data.float() * scale)


def fp8_blocks(weight: Tensor, name: str = "weight_scale_inv") -> Stored:
    data, scale = quantize_block(weight)
    return Stored({"weight": data, name: scale}, data.float() * spread(scale, data))


def power_of_two_blocks(weight: Tensor, stored: torch.dtype = torch.float32) -> Stored:
    _, scale = quantize_block(weight)
    scale = torch.exp2(torch.log2(scale).ceil())
    data = (weight / spread(scale, weight)).to(E4M3)
    tensors = {"weight": data, "weight_scale_inv": scale.to(stored)}
    return Stored(tensors, data.float() * spread(scale, data))


def int8_blocks(weight: Tensor) -> Stored:
    _, scale = quantize_block(weight)
    scale = scale * (448 / 127)
    data = (weight / spread(scale, weight)).round().clamp(-127, 127).to(torch.int8)
    return Stored({"weight": data, "weight_scale_inv": scale}, data.float() * spread(scale, data))


def spread(scale: Tensor, like: Tensor) -> Tensor:
    wide = scale.repeat_interleave(128, 0)[: like.shape[0]]
    return wide.repeat_interleave(128, 1)[:, : like.shape[1]]


# ---- quantization_config


def compressed(form: str, weights: dict[str, Any], rows: dict[str, Any] | None = None) -> Any:
    inputs = rows and {"num_bits": 8, "symmetric": True, "dynamic": True, **rows}
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*\.mlp\.gate$"],
        "quantization_status": "compressed",
    }


def int4(group: int, symmetric: bool = True) -> dict[str, Any]:
    places = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": 4, "type": "int", "symmetric": symmetric, **places}


def eight(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, **more}


BLOCK = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
FP8_TOKEN = {"type": "float", "strategy": "token"}
INT8_TOKEN = {"type": "int", "strategy": "token"}
FP8_GROUP = {"type": "float", "strategy": "group", "group_size": 128}
EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    write: Write
    # of the experts, where theirs is another; leaves wide what is in neither
    experts: Write | None = None
    only_experts: bool = False


def _gptq(group: int = 128, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, **more}


FORMATS: dict[str, Format] = {
    "fp8-block": Format({"quant_method": "fp8", "fmt": "e4m3", **BLOCK}, fp8_blocks),
    "fp8-ue8m0": Format(
        {"quant_method": "fp8", "scale_fmt": "ue8m0", **BLOCK}, power_of_two_blocks
    ),
    "fp8-ue8m0-bytes": Format(
        {"quant_method": "fp8", "scale_fmt": "ue8m0", **BLOCK},
        partial(power_of_two_blocks, stored=torch.float8_e8m0fnu),
    ),
    "fp8-matrix": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, partial(by_matrix, dims=0)
    ),
    "fp8-channel": Format(
        compressed("float-quantized", eight("float", "channel"), FP8_TOKEN),
        partial(by_row, kind=E4M3),
    ),
    "fp8-tensor": Format(
        compressed("float-quantized", eight("float", "tensor"), FP8_TOKEN), by_matrix
    ),
    "fp8-ct-block": Format(
        compressed(
            "float-quantized", eight("float", "block", block_structure=[128, 128]), FP8_GROUP
        ),
        partial(fp8_blocks, name="weight_scale"),
    ),
    "int8-channel": Format(
        compressed("int-quantized", eight("int", "channel"), INT8_TOKEN),
        partial(by_row, kind=torch.int8),
    ),
    "int8-block": Format({"quant_method": "blockwise_int8", **BLOCK}, int8_blocks),
    **{
        f"w4a16-g{group}{'' if symmetric else '-asym'}": Format(
            compressed("pack-quantized", int4(group, symmetric)),
            partial(packed, group=group, symmetric=symmetric),
        )
        for group in (32, 64, 128, 0)
        for symmetric in (True, False)
    },
    "w4afp8-packed": Format(compressed("pack-quantized", int4(128), FP8_TOKEN), packed),
    "w4aint8": Format(
        compressed("int-quantized", int4(64), INT8_TOKEN), partial(unpacked, group=64)
    ),
    "w4afp8": Format({"quant_method": "w4afp8"}, fp8_blocks, signed),
    "gptq": Format(_gptq(), partial(gptq, group=128)),
    "gptq-g32-asym": Format(_gptq(32, sym=False), partial(gptq, group=32, symmetric=False)),
    "gptq-desc-act": Format(_gptq(32, desc_act=True), partial(gptq, group=32, shuffled=True)),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        partial(awq, group=64),
    ),
    # Kimi-K2's: experts alone, groups of 32
    "int4-experts": Format(
        {
            **compressed("pack-quantized", int4(32)),
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
        },
        partial(packed, group=32),
        only_experts=True,
    ),
}
LINEAR = ("_proj.weight", "kv_a_proj_with_mqa.weight")


def stored(form: Format, name: str, weight: Tensor) -> Stored | None:
    """The linear layer's tensors; None where it stays wide."""
    if not name.endswith(LINEAR):
        return None
    expert = EXPERTS in name
    if form.only_experts and not expert:
        return None
    return (form.experts if expert and form.experts else form.write)(weight)


def save_quantized(folder: Path, name: str, family: str = "v3", **sizes: Any) -> torch.nn.Module:
    """Write a tiny checkpoint; returns transformers' model of the values it holds, in fp32."""
    form = FORMATS[name]
    more = {**(QWEN_SIZES if family == "qwen" else SIZES), **sizes}
    make_reference(family, **more).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    for key, tensor in load_file(path).items():
        found = stored(form, key, tensor)
        means[key] = found.means.contiguous() if found else tensor
        own = found.tensors if found else {"weight": tensor}
        module = key.removesuffix(".weight")
        named = {key: tensor} if not found else {f"{module}.{k}": t for k, t in own.items()}
        tensors.update({k: t.contiguous() for k, t in named.items()})
    save_file(means, path, metadata={"format": "pt"})
    reference = CLASSES[family][1].from_pretrained(folder, dtype=torch.float32).eval()
    save_file(tensors, path, metadata={"format": "pt"})
    rewrite_config(folder, quantization_config=form.config)
    return reference
