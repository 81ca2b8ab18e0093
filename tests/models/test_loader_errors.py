"""Damaged and wrong checkpoints: each one clear sentence that names the tensor or the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rorqual.config.hf import read_config
from rorqual.errors import LoadError
from rorqual.layers.parameter import Build
from rorqual.models.loader import load_weights, random_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import Ops

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [0],
    "max_position_embeddings": 64,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 64,
}
EXPERTS = "model.layers.1.mlp.experts"


def model_of(fields: dict[str, Any] | None = None, **changes: Any) -> Transformer:
    config = read_config({**(fields or QWEN), **changes})
    return make_model(config, Build(Ops(), torch.float32, torch.device("cpu"), config.quant), 64)


def tensors_of(model: Transformer, split: bool = True) -> dict[str, Tensor]:
    """The checkpoint of a model with random weights; not `split` takes merged tensors where
    there are any."""
    random_weights(model, seed=1)
    targets = list(model.targets())
    covered = {name for target in targets for name in target.covers}
    if split:
        return {target.name: target.view.clone() for target in targets if not target.covers}
    return {target.name: target.view.clone() for target in targets if target.name not in covered}


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return tensors_of(model_of())


def save(folder: Path, tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    return folder / file


def index(folder: Path, places: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def refusal(folder: Path, model: Transformer | None = None) -> str:
    with pytest.raises(LoadError) as caught:
        load_weights(model or model_of(), folder)
    text = str(caught.value)
    assert "\n" not in text, "one sentence"
    return text


# ---- what loads


@pytest.mark.parametrize("fields", [QWEN, DEEPSEEK], ids=["qwen3", "deepseek"])
@pytest.mark.parametrize("split", [True, False])
def test_a_sound_checkpoint_loads_split_or_merged(
    tmp_path: Path, fields: dict[str, Any], split: bool
) -> None:
    wanted = tensors_of(model_of(fields))
    save(tmp_path, tensors_of(model_of(fields), split))
    model = model_of(fields)
    for target in model.targets():
        target.view.fill_(float("nan") if target.view.is_floating_point() else -1)
    load_weights(model, tmp_path)
    found = {target.name: target.view for target in model.targets() if not target.covers}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_several_files_without_an_index(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors)
    save(tmp_path, {name: tensors[name] for name in names[:9]}, "a.safetensors")
    save(tmp_path, {name: tensors[name] for name in names[9:]}, "b.safetensors")
    load_weights(model_of(), tmp_path)


def test_an_index_hides_other_files(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save(tmp_path, tensors, "part.safetensors")
    save(tmp_path, tensors, "copy.safetensors")
    index(tmp_path, dict.fromkeys(tensors, "part.safetensors"))
    load_weights(model_of(), tmp_path)


def test_what_is_left_out_by_design_is_no_surplus(tmp_path: Path) -> None:
    tensors = tensors_of(model_of(DEEPSEEK))
    # the multi-token prediction module
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(16, 32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    save(tmp_path, tensors)
    load_weights(model_of(DEEPSEEK), tmp_path)


def test_a_tied_head_may_be_there(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save(tmp_path, tensors)
    load_weights(model_of(tie_word_embeddings=True), tmp_path)


# ---- files


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -1000])
def test_a_truncated_file_is_named(tmp_path: Path, tensors: dict[str, Tensor], keep: int) -> None:
    path = save(tmp_path, tensors)
    path.write_bytes(path.read_bytes()[:keep])
    text = refusal(tmp_path)
    assert "model.safetensors" in text
    assert "damaged or truncated" in text


@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 64,
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 8) + b"not json",
        b"version https://git-lfs",
    ],
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "model.safetensors is damaged" in refusal(tmp_path)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} lacks any .safetensors file"


def test_a_file_the_index_names_must_be_there(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save(tmp_path, tensors, "model-00001-of-00002.safetensors")
    places = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    index(tmp_path, {**places, "lm_head.weight": "model-00002-of-00002.safetensors"})
    text = refusal(tmp_path)
    assert "model-00002-of-00002.safetensors" in text
    assert "00001" not in text


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": ["a"]}',
        '"text"',
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, tensors: dict[str, Tensor], text: str) -> None:
    save(tmp_path, tensors)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is not a valid index" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", ".hidden"]
)
def test_an_index_may_not_point_elsewhere(
    tmp_path: Path, tensors: dict[str, Tensor], name: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save(tmp_path, tensors)
    index(folder, dict.fromkeys(tensors, name))
    assert "outside its folder" in refusal(folder)


# ---- tensors


def test_a_wrong_shape_names_tensor_file_and_both_shapes(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    tensors["model.norm.weight"] = torch.ones(17)
    save(tmp_path, tensors)
    text = refusal(tmp_path)
    assert text == (
        "model.norm.weight in model.safetensors has shape [17], the configuration asks for [16]"
    )


def test_a_transposed_matrix_is_no_match(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].T
    save(tmp_path, tensors)
    assert (
        f"{name} in model.safetensors has shape [24, 16], the configuration asks for [16, 24]"
        in refusal(tmp_path)
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_a_wrong_dtype_is_named(
    tmp_path: Path, tensors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(dtype)
    save(tmp_path, tensors)
    text = refusal(tmp_path)
    assert "lm_head.weight in model.safetensors" in text
    assert str(dtype) in text
    assert "torch.float32" in text


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.norm.weight",
        f"{EXPERTS}.3.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]
    save(tmp_path, tensors)
    assert refusal(tmp_path) == f"the checkpoint lacks {name}"


def test_many_missing_tensors_are_counted(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    gone = sorted(name for name in tensors if ".experts." in name)
    save(tmp_path, {name: tensor for name, tensor in tensors.items() if name not in gone})
    assert refusal(tmp_path) == f"the checkpoint lacks {', '.join(gone[:5])} and 7 more"


def test_a_tensor_the_index_promises_must_be_in_the_file(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    save(tmp_path, {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    index(tmp_path, dict.fromkeys(tensors, "model.safetensors"))
    assert refusal(tmp_path) == "the checkpoint lacks lm_head.weight"


def test_surplus_tensors_are_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.sinks"] = torch.zeros(2)
    tensors[f"{EXPERTS}.4.up_proj.weight"] = torch.zeros(8, 16)
    save(tmp_path, tensors)
    text = refusal(tmp_path)
    assert "the checkpoint holds tensors the model does not use" in text
    assert "model.layers.0.self_attn.sinks" in text
    assert f"{EXPERTS}.4.up_proj.weight" in text


def test_an_unexpected_bias_is_surplus(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(16)
    save(tmp_path, tensors)
    assert "model.layers.1.self_attn.q_proj.bias" in refusal(tmp_path)


def test_scales_without_a_quantized_configuration_are_surplus(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    tensors["model.layers.1.self_attn.q_proj.weight_scale_inv"] = torch.ones(1, 1)
    save(tmp_path, tensors)
    assert "q_proj.weight_scale_inv" in refusal(tmp_path)


@pytest.mark.parametrize("merged_first", [True, False])
def test_merged_beside_split_is_a_duplicate(
    tmp_path: Path, tensors: dict[str, Tensor], merged_first: bool
) -> None:
    """gate_up_proj beside gate_proj and up_proj: which one counts cannot be known."""
    del tensors[f"{EXPERTS}.2.up_proj.weight"]
    merged = {f"{EXPERTS}.gate_up_proj": torch.zeros(4, 16, 16)}
    first, second = (merged, tensors) if merged_first else (tensors, merged)
    save(tmp_path, first, "a.safetensors")
    save(tmp_path, second, "b.safetensors")
    text = refusal(tmp_path)
    assert "a second time" in text
    assert "b.safetensors" in text
    assert EXPERTS in text


def test_the_same_tensor_in_two_files_is_a_duplicate(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    save(tmp_path, tensors, "a.safetensors")
    save(tmp_path, {"lm_head.weight": tensors["lm_head.weight"]}, "b.safetensors")
    assert refusal(tmp_path) == "lm_head.weight in b.safetensors fills lm_head.weight a second time"


def test_a_quantized_checkpoint_lacking_a_scale(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "head_dim": 128,
    }
    quant = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    model = model_of(**sizes, quantization_config=quant)
    tensors = tensors_of(model)
    scale = f"{EXPERTS}.1.down_proj.weight_scale_inv"
    del tensors[scale]
    save(tmp_path, tensors)
    assert (
        refusal(tmp_path, model_of(**sizes, quantization_config=quant))
        == f"the checkpoint lacks {scale}"
    )
