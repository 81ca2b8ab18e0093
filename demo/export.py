"""Write a trained demo model as a Hugging Face folder, laid out as the published DeepSeek-V3
checkpoint.

    python demo/export.py RUN/best.pt DATA/tokenizer FOLDER --check DATA

--check compares the written folder with transformers' implementation and shows what the model
writes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from train import Model, MoE, Shape, load_stream

SHARD_BYTES = 12_000_000
PROMPTS = [
    "It was a dark and stormy night, and",
    "The old gentleman looked at her for a moment and said,",
    "To create a new table in the database,",
    "Fellow citizens of the Senate:",
]


def load(checkpoint: Path) -> Model:
    """The trained model with its weights rounded to bf16; router biases stay fp32, as in the
    published checkpoint."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = Model(Shape(**state["shape"]))
    rounded = {
        k: v if k.endswith("mlp.bias") else v.to(torch.bfloat16).float()
        for k, v in state["model"].items()
    }
    model.load_state_dict(rounded)
    return model.eval()


def layer_names(state: dict[str, Tensor], at: str) -> dict[str, Tensor]:
    """One decoder layer, without its layer prefix; at is its prefix in our state."""
    names = {
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "mlp_norm.weight",
        "self_attn.q_a_proj.weight": "attention.q_a",
        "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
        "self_attn.q_b_proj.weight": "attention.q_b",
        "self_attn.kv_a_proj_with_mqa.weight": "attention.kv_a",
        "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
        "self_attn.kv_b_proj.weight": "attention.kv_b",
        "self_attn.o_proj.weight": "attention.out",
    }
    found = {name: state[f"{at}.{ours}"] for name, ours in names.items()}
    if f"{at}.mlp.router" in state:
        return found | expert_names(state, f"{at}.mlp")
    return found | {
        f"mlp.{part}_proj.weight": state[f"{at}.mlp.{part}"] for part in ("gate", "up", "down")
    }


def expert_names(state: dict[str, Tensor], at: str) -> dict[str, Tensor]:
    """The experts of one layer one by one; the last slice is the shared expert."""
    gate, up = state[f"{at}.gate_up"]
    down = state[f"{at}.down"]
    found = {
        "mlp.gate.weight": state[f"{at}.router"],
        "mlp.gate.e_score_correction_bias": state[f"{at}.bias"],
    }
    for e in range(len(down)):
        prefix = f"mlp.experts.{e}" if e < len(down) - 1 else "mlp.shared_experts"
        found[f"{prefix}.gate_proj.weight"] = gate[e]
        found[f"{prefix}.up_proj.weight"] = up[e]
        found[f"{prefix}.down_proj.weight"] = down[e]
    return found


def published(model: Model) -> dict[str, Tensor]:
    """Every stored tensor under its published name; the prediction layer shares the embedding
    and the head."""
    state = model.state_dict()
    layers = model.shape.layers
    found = {"model.embed_tokens.weight": state["embed"]}
    for i in range(layers):
        found |= {f"model.layers.{i}.{k}": v for k, v in layer_names(state, f"blocks.{i}").items()}
    found |= {"model.norm.weight": state["norm.weight"], "lm_head.weight": state["head"]}
    extra = {f"{part}.weight": state[f"predictor.{part}.weight"] for part in ("enorm", "hnorm")}
    extra |= {
        "eh_proj.weight": state["predictor.eh_proj"],
        "shared_head.norm.weight": state["predictor.norm.weight"],
    }
    extra |= layer_names(state, "predictor.block")
    found |= {f"model.layers.{layers}.{k}": v for k, v in extra.items()}
    return {
        k: v.contiguous() if k.endswith("bias") else v.to(torch.bfloat16).contiguous()
        for k, v in found.items()
    }


def config_of(s: Shape) -> dict[str, Any]:
    """The model's config.json, with the fields of the published one."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "ep_size": 1,
        "first_k_dense_replace": s.dense_layers,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.dense_width,
        "kv_lora_rank": s.kv_rank,
        "max_position_embeddings": s.positions,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": s.expert_width,
        "moe_layer_freq": 1,
        "n_group": s.groups,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": s.heads,
        "num_experts_per_tok": s.active,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.heads,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": s.q_rank,
        "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rope,
        "rms_norm_eps": s.eps,
        "rope_scaling": None,
        "rope_theta": s.theta,
        "routed_scaling_factor": s.route_scale,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": s.active_groups,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": s.value,
        "vocab_size": s.vocab,
    }


def shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors in files of limited size."""
    found: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > SHARD_BYTES:
            found.append({})
            size = 0
        found[-1][name] = tensor
        size += tensor.nbytes
    return found


def write_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    """The safetensors files and their index."""
    pieces = shards(tensors)
    places: dict[str, str] = {}
    for i, piece in enumerate(pieces):
        name = f"model-{i + 1:05}-of-{len(pieces):05}.safetensors"
        save_file(piece, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)
        places |= dict.fromkeys(piece, name)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": places,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n")


def export(model: Model, tokenizer: Path, folder: Path) -> None:
    """Write the whole folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    write_weights(published(model), folder)
    sampling: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    sampling |= {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
    (folder / "config.json").write_text(json.dumps(config_of(model.shape), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(sampling, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {size} bytes in {folder}")
    assert size < 20_000_000


@torch.no_grad()
def check(model: Model, folder: Path, data: Path) -> None:
    """Compare with transformers on held-out text and show what the exported folder writes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = load_stream(data / "heldout.npy.xz")[: 4 * 512].view(4, 512).long()
    worst = (model.logits(tokens) - theirs(tokens).logits).abs().max().item()
    print(f"largest difference of logits: {worst:.2e}")
    assert worst < 1e-3
    moe = [layer for layer in model.moe_layers() if isinstance(layer, MoE)]
    print("largest router bias:", max(layer.bias.abs().max().item() for layer in moe))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS:
        show(theirs, tokenizer, prompt)


def show(model: Any, tokenizer: Any, prompt: str) -> None:
    """Print a greedy and a sampled continuation."""
    torch.manual_seed(0)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    assert ids[0, 0] == 0
    for sample in (False, True):
        options = (
            {"temperature": 0.8, "top_p": 0.95} if sample else {"temperature": None, "top_p": None}
        )
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=sample, **options
        )
        print("----", "sampled" if sample else "greedy")
        print(tokenizer.decode(out[0], skip_special_tokens=True))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path, help="folder with the tokenizer's files")
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="DATA",
        help="compare with transformers on DATA's held-out text",
    )
    arguments = parser.parse_args()
    model = load(arguments.checkpoint)
    export(model, arguments.tokenizer, arguments.folder)
    if arguments.check:
        check(model, arguments.folder, arguments.check)


if __name__ == "__main__":
    main()
