"""DeepSeek-V3.1 and Kimi-K2 as they are published, small: names, shapes that are their own, and
what their config.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.config.hf import read_config_file
from rorqual.models.hub import SHAPES
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.rounding import power_of_two, rounded
from tests.layers.weight_format.test_weight_formats import wide_rows
from tests.layers.weight_format.writers import SIZES, save_quantized
from tests.models.checkpoints import rewrite_config
from tests.models.driver import all_logits, load
from tests.text.test_tiktoken_file import vocabulary, write

BOUND = 1e-4
LENGTH = 12
# Kimi-K2: many experts, all in one group, and 64 heads
KIMI: dict[str, Any] = {
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-6,
}


def published(folder: Path, name: str, sizes: dict[str, Any]) -> None:
    """The saved config.json with the fields of the published one that are no sizes."""
    held = json.loads((folder / "config.json").read_text())
    known = json.loads((SHAPES / name / "config.json").read_text())
    small = {*sizes, "vocab_size", "quantization_config", "num_hidden_layers"}
    sized = {field for field in small if field in held}
    other = {"rope_scaling", "rope_theta", "max_position_embeddings", "bos_token_id"}
    mine = {field: known[field] for field in known if field not in sized | other}
    lost = {field: None for field in held if field not in known and field not in sized}
    kept = {"quantization_config": held["quantization_config"], "max_position_embeddings": 256}
    rope = {"rope_theta": held["rope_parameters"]["rope_theta"]}
    rewrite_config(folder, **{**lost, **mine, **kept, **rope, "torch_dtype": "float32"})


def tokens(vocab: int = 128) -> Tensor:
    return torch.randint(0, vocab, (2, LENGTH), generator=torch.Generator().manual_seed(7))


@pytest.mark.exhaustive
def test_kimi_k2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in int4 with groups of 32, everything else bf16."""
    sizes = {**SIZES, **KIMI}
    model = save_quantized(tmp_path, "int4-experts", **KIMI)
    with torch.no_grad():
        want = model(tokens()).logits
    published(tmp_path, "kimi-k2", sizes)
    config = read_config_file(tmp_path)
    assert (config.moe.num_experts, config.moe.n_group, config.attention.num_heads) == (384, 1, 64)
    assert config.quant.of("model.layers.1.mlp.experts.7.up_proj").block == (1, 32)
    assert config.quant.of("model.layers.1.mlp.shared_experts.up_proj").is_wide
    got = all_logits(load(tmp_path, CpuOps()), tokens(), [LENGTH - 3])
    assert (got - want).abs().max() < BOUND


def test_kimi_k2_speaks_through_its_own_tokenizer(tmp_path: Path) -> None:
    sizes = {"vocab_size": 656, "n_routed_experts": 8}
    save_quantized(tmp_path, "int4-experts", **sizes)
    write(tmp_path, vocabulary())
    llm = LLM(tmp_path, max_num_seqs=2, kv_cache_bytes=2**22)
    (out,) = llm.generate(["the cat sat"], SamplingParams(max_tokens=4, temperature=0))
    assert len(out.outputs[0].token_ids) == 4


def test_deepseek_v31(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales that are powers of two, of weights in the file and of rows here."""
    model = save_quantized(tmp_path, "fp8-ue8m0")
    with torch.no_grad():
        want = model(tokens()).logits
    loaded = load(tmp_path, CpuOps())
    assert loaded.config.quant.scheme.activation == "fp8_group_ue8m0"
    near = all_logits(loaded, tokens(), [LENGTH - 3])
    assert torch.cosine_similarity(near, want, dim=-1).median() > 0.99
    wide_rows(monkeypatch)
    exact = all_logits(loaded, tokens(), [LENGTH - 3])
    assert (exact - want).abs().max() < BOUND
    assert not torch.equal(near, exact)


def test_scales_are_the_next_power_of_two() -> None:
    given = torch.tensor([1.0, 1.5, 2.0, 3e-5, 0.0078125, 0.0079])
    assert power_of_two(given).tolist() == [1.0, 2.0, 2.0, 2.0**-15, 2.0**-7, 2.0**-6]
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    near = rounded(x, "fp8_group_ue8m0")
    assert ((near - x).abs() <= x.abs() / 16 + 1e-4).all()
    exact = torch.tensor([[448.0, 1.75, -0.875]])
    assert torch.equal(rounded(exact, "fp8_group_ue8m0"), exact)
    assert torch.equal(rounded(exact, "fp8_token"), exact)
