"""Whole tiny models through TritonOps, in Triton's interpreter where there is no GPU, equal the
reference backend."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)
pytest.importorskip("safetensors")

from rorqual.ops.activation import Quantized
from rorqual.ops.interface import Ops
from rorqual.ops.triton.backend import TritonOps
from rorqual.ops.triton.moe import combine
from rorqual.ops.triton.rowwise import embedding, norm, quantize
from tests.gpu.device_driver import all_logits, random_model, with_ops

pytestmark = pytest.mark.exhaustive

LENGTH = 11
PAGE = 4
CUTS = [5, 8]
BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "norm_topk_prob": True,
}
DEEPSEEK = {
    **BASE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
QWEN = {
    **BASE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_key_value_heads": 1,
    "head_dim": 24,
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
WIDE = {
    **DEEPSEEK,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "quantization_config": FP8,
}


def both(
    config: dict[str, Any],
    dtype: str = "float32",
    forms: tuple[str, str] = ("CC", "A_CC_ME"),
    queries: int = 1,
    kv_dtype: str = "auto",
):
    """(logits by the kernels, logits by the reference), [2, LENGTH, vocabulary]."""
    ids = torch.randint(
        0, config["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(3)
    )
    model = random_model(config, TritonOps(), dtype, torch.device(DEVICE), forms)
    got = all_logits(model, ids, CUTS, PAGE, queries, kv_dtype)
    return got, all_logits(with_ops(model, Ops()), ids, CUTS, PAGE, queries, kv_dtype)


@pytest.mark.parametrize("columns", [64, 100, 4100])
def test_rows_of_a_table_in_host_memory(columns: int) -> None:
    table = torch.randn(50, columns, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0, 49, 7, 7], device=DEVICE)
    host = table.pin_memory() if DEVICE == "cuda" else table
    assert torch.equal(embedding.rows(ids, host).cpu(), table[ids.cpu()])


ONE = {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    "config",
    [
        DEEPSEEK,
        pytest.param({**DEEPSEEK, **ONE, "q_lora_rank": None}, marks=pytest.mark.longest),
        pytest.param({**QWEN, **ONE}, marks=pytest.mark.longest),
        {**QWEN, **ONE, "head_dim": 32},
    ],
    ids=["deepseek", "no-q-lora", "qwen-24", "qwen-32"],
)
def test_tiny_models_in_fp32(config: dict[str, Any]) -> None:
    got, want = both(config)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "forms", [("CD", "CD"), ("A_CC_ME", "AM_CC_ME"), ("A_CC", "CC")], ids="-".join
)
def test_other_forms_and_three_queries_a_step(forms: tuple[str, str]) -> None:
    got, want = both({**DEEPSEEK, **ONE}, forms=forms, queries=3)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


SMALL = {**DEEPSEEK, **ONE, "vocab_size": 32, "hidden_size": 32}


@pytest.mark.parametrize(
    ("forms", "queries"), [(("CC", "A_CC_ME"), 3), (("A_CC", "AM_CC_ME"), 1)], ids=str
)
def test_fp8_latent_cache(forms: tuple[str, str], queries: int) -> None:
    """Written by the prologue, read by the decode kernel or gathered; the reference quantizes
    alike."""
    got, want = both(SMALL, forms=forms, queries=queries, kv_dtype="fp8")
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    ids = torch.randint(0, 32, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    plain = all_logits(
        random_model(SMALL, Ops(), "float32", torch.device(DEVICE), forms), ids, CUTS, PAGE
    )
    assert (got - plain).abs().max() > 1e-3, "nothing was quantized"


def test_fp8_latent_cache_of_odd_sizes_falls_back() -> None:
    got, want = both({**SMALL, "kv_lora_rank": 36}, kv_dtype="fp8")
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_cache_decompressed_by_stretches(
    monkeypatch: pytest.MonkeyPatch,
    kv_dtype: str,
) -> None:
    """In prompts and in steps of three queries: as all at once, which no other step of the same
    kernels was."""
    ids = torch.randint(0, 32, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    given = (SMALL, TritonOps(), "float32", torch.device(DEVICE), ("CC", "CC"))
    found = []
    for tokens in (PAGE, 100):
        monkeypatch.setattr("rorqual.layers.mla.stretch_tokens", lambda *_, tokens=tokens: tokens)
        found.append(all_logits(random_model(*given), ids, CUTS, PAGE, 3, kv_dtype))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert not torch.equal(*found), "nothing was cut"


@pytest.mark.longest
def test_fp8_weights() -> None:
    """The same rounding of the activations, so only the order of sums differs."""
    got, want = both({**WIDE, **ONE, "first_k_dense_replace": 0})
    assert torch.cosine_similarity(got, want, dim=-1).median() > 0.999


@pytest.mark.longest
def test_what_norms_quantize_on_the_way_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**WIDE, **ONE, "first_k_dense_replace": 0}
    model = random_model(config, TritonOps(), "float32", torch.device(DEVICE), ("CC", "A_CC_ME"))
    ids = torch.arange(22).view(2, 11)
    beside = all_logits(model, ids, CUTS, PAGE)
    dropped: list[torch.Size] = []

    def without(hidden: torch.Tensor, made: Quantized | None) -> torch.Tensor:
        if made is not None:
            dropped.append(made.shape)
        return hidden

    for kernels in (norm, combine):
        monkeypatch.setattr(kernels, "output_of", without)
    assert torch.equal(all_logits(model, ids, CUTS, PAGE), beside)
    steps = 2 + LENGTH - CUTS[1]
    assert len(dropped) == 2 * steps, "before attention and before experts"


@pytest.mark.longest
def test_rows_in_fp8_reach_every_product() -> None:
    """Of a norm's two forms the products read the fp8 one: no other kernel quantizes them."""
    config = {**WIDE, **ONE, "hidden_size": 256, "first_k_dense_replace": 0}
    model = random_model(config, TritonOps(), "float32", torch.device(DEVICE), ("CC", "A_CC_ME"))
    ids = torch.arange(22).view(2, 11)
    with mock.patch.object(quantize, "quantize", wraps=quantize.quantize) as again:
        all_logits(model, ids, CUTS, PAGE)
    hidden = model.config.hidden_size
    assert not [call for call in again.call_args_list if call.args[0].shape[1] == hidden]


def test_misaligned_fp8_blocks_fall_back() -> None:
    got, want = both(
        {**WIDE, "moe_intermediate_size": 72, "q_lora_rank": 80, **ONE, "first_k_dense_replace": 0}
    )
    assert torch.cosine_similarity(got, want, dim=-1).median() > 0.999
