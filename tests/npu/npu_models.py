"""Models with the attention widths that an NPU's operators take, few layers and small experts:
random weights, the same on every platform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 4,
    "n_routed_experts": 16,
}
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
V3 = {
    **COMMON,
    **LATENT,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "q_lora_rank": 1536,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
V2 = {
    **COMMON,
    **LATENT,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 1024,
    "q_lora_rank": None,
    "num_hidden_layers": 3,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
V2_GROUPS = {
    **V2,
    "q_lora_rank": 256,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}
QWEN3 = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
}
MODELS = {"v3": V3, "v2": V2, "v2-groups": V2_GROUPS, "qwen3": QWEN3}


def write_model(folder: Path, name: str) -> Path:
    """A folder with a config.json; weights are drawn."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name]))
    return path
