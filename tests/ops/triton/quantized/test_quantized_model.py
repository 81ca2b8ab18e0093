"""Whole tiny models with int4 weights: which matrices are laid out once a model is finalized, and
that its logits are those of the kernels that read weights as loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)
pytest.importorskip("safetensors")

from rorqual.ops.select import ops_for
from rorqual.ops.triton.backend import TritonOps
from rorqual.ops.triton.quantized.backend import QuantizedTritonOps
from tests.gpu.device_driver import all_logits, random_model
from tests.ops.triton.test_triton_backend import CUTS, DEEPSEEK, LENGTH, PAGE, QWEN

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT4 = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"all": {"targets": ["Linear"], "weights": WEIGHTS}},
        "ignore": ["lm_head"],
    },
}


def model(config: dict[str, Any], ops: TritonOps) -> Any:
    config = {**config, **INT4}
    return random_model(config, ops, "bfloat16", torch.device(DEVICE), ("CC", "A_CC_ME"))


@pytest.mark.exhaustive
def test_what_a_gpu_runs_lays_out_every_matrix() -> None:
    ops = ops_for("cuda")
    assert isinstance(ops, QuantizedTritonOps)
    dense, sparse = model({**DEEPSEEK, "q_lora_rank": 64, "v_head_dim": 32}, ops).layers
    for layer in (dense, sparse):
        held = layer.attention.weights
        assert held.down.turned
        assert held.q_b.turned
        assert layer.attention.out.weight.turned
        assert not held.kv_b.quantized
    assert dense.mlp.gate_up.weight.turned
    assert dense.mlp.down.weight.turned
    assert sparse.mlp.local_experts.weights.gate_up.turned
    assert sparse.mlp.local_experts.weights.down.turned


@pytest.mark.longest
@pytest.mark.exhaustive
def test_logits_are_those_of_the_kernels_that_read_weights_as_loaded() -> None:
    ids = torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    config = {**QWEN, "num_hidden_layers": 1, "head_dim": 32}
    new, old = (
        all_logits(model(config, ops), ids, CUTS, PAGE)
        for ops in (QuantizedTritonOps(), TritonOps())
    )
    # sums over a group may be added in another order
    torch.testing.assert_close(new, old, atol=0.05, rtol=0.05)
