"""Random weights: sane activations, routing spread as uniform routing predicts, the same bits
for a seed, bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.config.hf import read_config, read_config_file
from rorqual.engine.execution.worker import RESIDUAL_GAIN
from rorqual.layers.moe import MoE, run_stages
from rorqual.layers.parameter import Build
from rorqual.models.loader import fill_normal, random_weights
from rorqual.models.registry import make_model
from rorqual.ops import rng
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.deferred_sum import summed
from rorqual.parallel.exchange import SlotMap
from rorqual.planner.costs.costs import expected_experts
from tests.models.driver import Driver

pytestmark = pytest.mark.exhaustive(but_first=True)

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 256,
}
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
}


def folder_of(config: dict, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("config", [V3, QWEN], ids=["v3", "qwen"])
@pytest.mark.parametrize("tokens", [4, 8, 16, 32])
def test_experts_hit_as_uniform_routing_predicts(config: dict, tokens: int, tmp_path: Path):
    """Distinct experts a layer over prompts of random tokens: within 5 % of E (1 - (1 - k/E)^n)."""
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "record_expert_load": True,
        "max_num_seqs": 1,
        "dtype": "float32",
    }
    llm = LLM(folder_of(config, tmp_path), enable_prefix_caching=False, **options)
    layers = llm.engine.model.moe_layers()
    generator = torch.Generator().manual_seed(0)
    hit = []
    for _ in range(20):
        for layer in layers:
            layer.exchange.load.zero_()
        prompt = torch.randint(512, (tokens,), generator=generator).tolist()
        llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
        hit += [int((layer.exchange.load > 0).sum()) for layer in layers]
        assert all(int(layer.exchange.load.sum()) == tokens * layer.moe.top_k for layer in layers)
    moe = layers[0].moe
    assert sum(hit) / len(hit) == pytest.approx(
        expected_experts(moe.num_experts, moe.top_k, tokens), rel=0.05
    )


@pytest.mark.parametrize("config", [V3, QWEN], ids=["v3", "qwen"])
def test_activations_stay_sane(config: dict, tmp_path: Path):
    """Logits of a random model have a standard deviation near 1, and positions differ."""
    model_config = read_config_file(folder_of(config, tmp_path))
    build = Build(
        CpuOps(),
        torch.float32,
        torch.device("cpu"),
        residual_gain=RESIDUAL_GAIN * (2 * model_config.num_layers) ** -0.5,
    )
    model = make_model(model_config, build, 128)
    random_weights(model, 0)
    driver = Driver(model, 1, 64)
    logits = driver.logits(driver.step([torch.randint(512, (64,))], [0], decode=False))
    assert 0.5 < logits.std() < 2
    assert torch.corrcoef(logits)[0, 1:].abs().mean() < 0.3


def test_draw_is_normal_and_depends_on_name_and_seed():
    view = torch.empty(1000, 1000)
    fill_normal(view, "a", 0, 0.5)
    assert view.mean().abs() < 0.002
    assert view.std() == pytest.approx(0.5, rel=0.01)
    assert view.abs().max() < 0.5 * 3.5  # four uniform fields reach 3.46 deviations
    same, other, seeded = (torch.empty(1000, 1000) for _ in range(3))
    fill_normal(same, "a", 0, 0.5, draw=partial(rng.draw_normal, chunk=777))
    fill_normal(other, "b", 0, 0.5)
    fill_normal(seeded, "a", 1, 0.5)
    assert torch.equal(view, same)
    assert (
        torch.corrcoef(torch.stack([view.flatten(), other.flatten(), seeded.flatten()]))
        .tril(-1)
        .abs()
        .max()
        < 0.01
    )


def test_replicas_hold_their_experts_weights():
    """A slot map with replicas: every slot holds its logical expert, and the sum over experts
    does not change."""
    moe = read_config(V3).moe
    build = Build(CpuOps(), torch.float32, torch.device("cpu"))
    layers = [
        MoE(build, "mlp", 256, moe, slots)
        for slots in (None, SlotMap((*reversed(range(64)), 5, 9), 64))
    ]
    for layer in layers:
        for target in layer.targets():
            if not target.covers:
                fill_normal(
                    target.view, target.name, 0, target.std
                ) if target.std else target.view.zero_()
    assert torch.equal(
        layers[1].exchange.experts.gate_up.data[64], layers[0].exchange.experts.gate_up.data[5]
    )
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain, replicated = (summed(run_stages(layer.stages(), x)) for layer in layers)
    assert (plain - replicated).abs().max() < 1e-5


LOAD = """
import sys, torch
from pathlib import Path
from rorqual.config.hf import read_config_file
from rorqual.engine.execution.worker import RESIDUAL_GAIN
from rorqual.layers.parameter import Build
from rorqual.models.loader import load_weights
from rorqual.models.registry import make_model
from rorqual.ops.cpu.backend import CpuOps
from rorqual.engine.execution.worker import weight_bytes

def peak():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

model = make_model(read_config_file(sys.argv[1]), Build(CpuOps(), torch.bfloat16,
    torch.device("cpu")), 64)
before = peak()
load_weights(model, Path(sys.argv[1]))
print(before, peak(), weight_bytes(model))
"""


@pytest.mark.exhaustive
def test_loading_peaks_little_above_the_weights(tmp_path: Path):
    """One 0.9 GB file: resident memory grows by at most 1.15 times the weights' bytes, mapped
    file pages included."""
    from safetensors.torch import save_file

    config = {
        **QWEN,
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 4,
        "vocab_size": 4096,
    }
    folder = folder_of(config, tmp_path)
    model = make_model(
        read_config(config), Build(CpuOps(), torch.bfloat16, torch.device("cpu")), 64
    )
    tensors = {
        target.name: torch.full(target.shape, 0.01, dtype=torch.bfloat16)
        for target in model.targets()
        if not target.covers
    }
    save_file(tensors, folder / "model.safetensors")
    del model, tensors
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, check=True
    )
    before, after, weights = map(int, done.stdout.split())
    assert weights > 8e8
    assert after - before < 1.15 * weights


def test_a_router_kept_in_fp32_has_values_of_the_models_dtype():
    for dtype in (torch.bfloat16, torch.float32):
        model = make_model(read_config(V3), Build(CpuOps(), dtype, torch.device("cpu")), 64)
        random_weights(model, 0)
        gate = next(iter(model.moe_layers())).router.gate
        assert gate.dtype == torch.float32
        assert torch.equal(gate, gate.to(torch.bfloat16).float()) == (dtype == torch.bfloat16)
