"""Random model shapes, so that nothing is tuned for them: variants of V3, V2 and Qwen3 from a
seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from rorqual.config.hf import read_config
from rorqual.config.model import ModelConfig
from rorqual.planner.costs.weights import weights

# Parameters of a shape, in millions: the sizes are drawn evenly from these bands.
BANDS = ((20, 100), (100, 500), (500, 2000))
FAMILIES = ("v3", "v2", "qwen3")
MAX_DRAWS = 10_000  # one in about ten falls into the band that is wanted


@dataclass(frozen=True)
class Shape:
    family: str
    data: dict[str, Any]  # the config.json
    config: ModelConfig
    parameters: int

    @property
    def name(self) -> str:
        return f"{self.family}, {self.parameters / 1e6:,.0f} M"

    @property
    def sizes(self) -> str:
        """What sets it apart, in one line."""
        moe = self.config.moe
        return (
            f"hidden {self.config.hidden_size}, {self.config.num_layers} layers, "
            f"{self.config.attention.num_heads} heads, {moe.top_k} of {moe.num_experts} experts "
            f"of {moe.intermediate_size}, vocabulary {self.config.vocab_size}"
        )


def parameters(config: ModelConfig) -> int:
    head = config.vocab_size * config.hidden_size
    return sum(matrix.parameters for matrix in weights(config)) + head


def draw_shapes(seed: int, count: int) -> list[Shape]:
    """Cycles through bands and families, so that nine shapes cover all combinations."""
    dice = random.Random(seed)
    turn = dice.randrange(9)
    places = [divmod(turn + i, 3) for i in range(count)]
    return [_draw(dice, FAMILIES[(row + column) % 3], BANDS[column]) for row, column in places]


def _draw(dice: random.Random, family: str, band: tuple[int, int]) -> Shape:
    """A size even in the logarithm; the rest follows it within a tenth."""
    target = 1e6 * math.exp(dice.uniform(math.log(band[0]), math.log(band[1])))
    make = {"v3": _v3, "v2": _v2, "qwen3": _qwen3}[family]
    for _ in range(MAX_DRAWS):
        data = make(dice, target)
        config = read_config(data)
        size = parameters(config)
        if abs(size / target - 1) < 0.1 and band[0] <= size / 1e6 <= band[1]:
            return Shape(family, data, config, size)
    raise AssertionError(f"no shape of {family} has about {target:.0f} parameters")


def _common(dice: random.Random, target: float) -> dict[str, Any]:
    """Wider models for more parameters, as published ones are."""
    about = (target / 1e8) ** 0.35
    widths = [64 * i for i in range(3, 41) if 0.5 < 64 * i / (640 * about) < 1.8]
    hidden = dice.choice(widths)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": dice.randint(3, 24),
        "vocab_size": dice.choice([4096, 8192, 16384, 24000, 32768, 50304]),
        "intermediate_size": 32 * dice.randint(hidden // 24, hidden // 8),
        "moe_intermediate_size": 32 * dice.randint(2, max(3, hidden // 40)),
        "num_experts_per_tok": dice.choice([2, 4, 6, 8]),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _latent(dice: random.Random, target: float, common: dict[str, Any]) -> dict[str, Any]:
    # transformers needs a V2 hidden size that is a multiple of the heads
    fitting = [heads for heads in (4, 6, 8, 12, 16) if common["hidden_size"] % heads == 0]
    heads = dice.choice(fitting)
    return {
        **common,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": dice.choice([128, 192, 256, 384, 512]),
        "qk_nope_head_dim": dice.choice([48, 64, 96, 128]),
        "qk_rope_head_dim": dice.choice([32, 64]),
        "v_head_dim": dice.choice([48, 64, 96, 128]),
        "first_k_dense_replace": 1,
        "n_shared_experts": dice.choice([1, 2]),
        "routed_scaling_factor": dice.choice([1.0, 2.5]),
    }


def _v3(dice: random.Random, target: float) -> dict[str, Any]:
    groups = dice.choice([2, 4, 8])
    return {
        **_latent(dice, target, _common(dice, target)),
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": dice.choice([None, 128, 192, 384]),
        "n_routed_experts": groups * dice.choice([8, 12, 16]),
        "n_group": groups,
        "topk_group": max(groups // 2, 1),
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _v2(dice: random.Random, target: float) -> dict[str, Any]:
    return {
        **_latent(dice, target, _common(dice, target)),
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": dice.choice([None, 128, 256]),
        "n_routed_experts": dice.choice([16, 24, 32, 48, 64]),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    }


def _qwen3(dice: random.Random, target: float) -> dict[str, Any]:
    groups = dice.choice([1, 2, 4])
    return {
        **_common(dice, target),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_attention_heads": groups * dice.choice([2, 4, 8]),
        "num_key_value_heads": groups,
        "head_dim": dice.choice([64, 96, 128]),
        "num_experts": dice.choice([16, 32, 48, 64, 128]),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
