"""Shared experts that stand among the routed ones: the same weights, the same logits, and only
where a layer can have it so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual.config.hf import read_config, read_config_file
from rorqual.config.parallel import ParallelConfig
from rorqual.config.quant import FP8_BLOCK, QuantConfig
from rorqual.engine.execution.worker import weight_bytes
from rorqual.layers.moe import MoE, run_stages
from rorqual.layers.parameter import Build
from rorqual.models.loader import load_weights, random_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import Ops
from rorqual.ops.reference import Weight, dequantize
from rorqual.parallel.exchange import SlotMap
from rorqual.parallel.mesh import Mesh
from tests.models.checkpoints import VOCAB, merge, save, save_fp8, save_with_mtp
from tests.models.driver import all_logits, load
from tests.parallel.fake_axes import place

CPU = torch.device("cpu")


class Joining(Ops):
    fuses_shared_experts = True


class JoiningCpu(CpuOps):
    fuses_shared_experts = True


COMMON = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
}
V2_LITE = {
    **COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "q_lora_rank": None,
}
V3 = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "q_lora_rank": 128,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 1,
}
QUANT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
V3_FP8 = {**V3, "moe_intermediate_size": 128, "quantization_config": QUANT}
TWO_FP8 = {**V3_FP8, "n_shared_experts": 2}
SHAPES = {"v2-lite": V2_LITE, "v3": V3, "v3-fp8": V3_FP8, "two-fp8": TWO_FP8}


def random_model(fields: dict[str, Any], ops: Ops, mesh: Mesh | None = None) -> Transformer:
    config = read_config(fields)
    build = Build(
        ops, torch.float32, CPU, config.quant, residual_gain=0.3, mesh=mesh or Mesh.single()
    )
    model = make_model(config, build, 64, with_mtp=config.num_mtp_layers > 0)
    random_weights(model, 5)
    return model


def wide(weight: Weight) -> Tensor:
    return dequantize(weight, torch.float32)


def joined_mlp(moe: MoE) -> tuple[Tensor, Tensor]:
    """(gate and up, down) of the shared experts of a joined layer as one MLP."""
    first = moe.moe.num_experts
    size = len(moe.local_experts.columns)
    ups = [wide(moe.exchange.experts.gate_up[first + n]) for n in range(moe.fused_shared_experts)]
    downs = [wide(moe.exchange.experts.down[first + n]) for n in range(moe.fused_shared_experts)]
    return torch.cat([up[:size] for up in ups] + [up[size:] for up in ups]), torch.cat(downs, 1)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_random_weights_are_the_same_numbers(fields: dict[str, Any]) -> None:
    """Also those of prediction modules; nothing is held twice."""
    joined = random_model(fields, Joining())
    apart = random_model(fields, Ops())
    assert len(joined.moe_layers()) == 1 + fields.get("num_nextn_predict_layers", 0)
    for one, other in zip(joined.moe_layers(), apart.moe_layers(), strict=True):
        assert one.fused_shared_experts == fields["n_shared_experts"]
        assert one.shared is None
        assert other.shared is not None
        for found, want in zip(
            joined_mlp(one), (other.shared.gate_up.weight, other.shared.down.weight), strict=True
        ):
            assert torch.equal(found, wide(want))
        assert torch.equal(
            wide(one.exchange.experts.gate_up)[: one.moe.num_experts],
            wide(other.exchange.experts.gate_up),
        )
    assert weight_bytes(joined) == weight_bytes(apart)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tokens", [1, 9])
def test_layers_give_the_same_sums(fields: dict[str, Any], tokens: int) -> None:
    """In fp32 up to the order of sums, fp8 weights with their rounding of activations included."""
    x = torch.randn(tokens, fields["hidden_size"], generator=torch.Generator().manual_seed(tokens))
    one, other = (random_model(fields, ops).moe_layers()[0] for ops in (Joining(), Ops()))
    one.exchange.record_load = other.exchange.record_load = True
    torch.testing.assert_close(
        run_stages(one.stages(), x), run_stages(other.stages(), x), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(one.exchange.load, other.exchange.load), "shared experts are not counted"
    assert one.exchange.load.sum() == tokens * one.moe.top_k


@pytest.mark.parametrize("option", ["v3", "v3-two-shared", "v2-grouped"])
@pytest.mark.parametrize("merged", [False, True], ids=["parts", "merged"])
def test_checkpoints(option: str, merged: bool, tmp_path: Path) -> None:
    """Logits of transformers, from checkpoints with and without merged tensors."""
    reference = save(option, tmp_path)
    if merged:
        merge(tmp_path)
    tokens = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        want = reference(tokens).logits
    for ops in (Joining(), JoiningCpu(native=False), JoiningCpu()):
        model = load(tmp_path, ops)
        assert all(layer.fused_shared_experts for layer in model.moe_layers())
        assert (all_logits(model, tokens, [5, 6]) - want).abs().max() < 1e-4


@pytest.mark.parametrize("option", ["fp8", "fp8-aligned"])
def test_fp8_checkpoints(option: str, tmp_path: Path) -> None:
    """Experts of 136 columns keep one scale a row, those of 128 one a block."""
    save_fp8(option, tmp_path)
    tokens = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(7))
    joined, apart = (load(tmp_path, ops) for ops in (Joining(), Ops()))
    assert all(layer.fused_shared_experts == 1 for layer in joined.moe_layers())
    torch.testing.assert_close(
        all_logits(joined, tokens, [9]), all_logits(apart, tokens, [9]), rtol=1e-4, atol=1e-4
    )


def test_prediction_modules_of_a_checkpoint(tmp_path: Path) -> None:
    save_with_mtp(tmp_path)
    config = read_config_file(tmp_path)
    models = []
    for ops in (Joining(), Ops()):
        models.append(make_model(config, Build(ops, torch.float32, CPU), 64, with_mtp=True))
        load_weights(models[-1], tmp_path)
    one, other = (model.moe_layers()[-1] for model in models)
    assert other.shared is not None
    assert torch.equal(joined_mlp(one)[0], other.shared.gate_up.weight.data)


@pytest.mark.parametrize(
    "fields",
    [
        V2_LITE,
        {**TWO_FP8, "moe_intermediate_size": 256, "intermediate_size": 256, "v_head_dim": 128},
    ],
    ids=["fp32", "fp8"],
)
def test_columns_are_cut_with_those_of_routed_experts(fields: dict[str, Any]) -> None:
    """Two ranks of one tp group hold what one rank holds, each half of every expert."""
    whole = random_model(fields, Joining()).moe_layers()[0]
    size = whole.moe.intermediate_size // 2
    for rank in range(2):
        part = random_model(fields, Joining(), place(ParallelConfig(tp=2), rank)).moe_layers()[0]
        assert part.fused_shared_experts == 2
        columns = slice(rank * size, (rank + 1) * size)
        gate, up = wide(whole.exchange.experts.gate_up).chunk(2, 1)
        assert torch.equal(
            wide(part.exchange.experts.gate_up), torch.cat((gate[:, columns], up[:, columns]), 1)
        )
        assert torch.equal(
            wide(part.exchange.experts.down), wide(whole.exchange.experts.down)[:, :, columns]
        )


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2, "ep": 2}, {"dp": 2}, {"tp": 2, "dense_tp": 1}, {"tp": 2, "sequence_parallel": True}],
    ids=str,
)
def test_layers_whose_rows_travel_keep_them_apart(sizes: dict[str, Any]) -> None:
    assert (
        random_model(V2_LITE, Joining(), place(ParallelConfig(**sizes), 0))
        .moe_layers()[0]
        .fused_shared_experts
        == 0
    )


def test_other_layers_keep_them_apart() -> None:
    moe = read_config(TWO_FP8).moe
    plain = Build(Joining(), torch.float32, CPU)

    def joined(build: Build, slots: SlotMap | None = None, **changes: Any) -> int:
        return MoE(build, "mlp", 128, replace(moe, **changes), slots).fused_shared_experts

    def fp8(ignored: tuple[str, ...] = ()) -> Build:
        return Build(Joining(), torch.float32, CPU, QuantConfig(FP8_BLOCK, ignored))

    assert joined(plain) == joined(fp8()) == joined(plain, intermediate_size=72) == 2
    assert joined(Build(Ops(), torch.float32, CPU)) == 0
    assert joined(plain, num_shared=0) == 0
    assert joined(plain, SlotMap((*range(16), 3), 16)) == 0, "replicas are found by a table"
    assert joined(fp8(("mlp.shared_experts",))) == 0, "of another format"
    assert joined(fp8(), intermediate_size=72) == 0, (
        "the second one begins inside a block of scales"
    )
    assert joined(fp8(), intermediate_size=72, num_shared=1) == 1
