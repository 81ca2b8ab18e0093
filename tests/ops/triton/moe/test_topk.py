"""Routing against a plain-Python reading of the formulas, for every combination of scores,
methods and normalization."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from rorqual.config.hf import read_config
from rorqual.config.model import MoEConfig
from rorqual.ops import reference
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import Ops
from rorqual.ops.reference import RouterWeights

EXPERTS = 24
TOP_K = 5
GROUPS = 6
TOP_GROUPS = 3
HIDDEN = 40
ON_CPU = pytest.mark.parametrize(
    "ops",
    [Ops(), CpuOps(native=False), CpuOps()],
    ids=["reference", "torch", "native"],
)
COMBINATIONS = list(
    product(("sigmoid", "softmax"), ("greedy", "group_limited_greedy", "noaux_tc"), (False, True))
)


def scores_of(logits: list[float], scoring: str) -> list[float]:
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-value)) for value in logits]
    total = sum(math.exp(value) for value in logits)
    return [math.exp(value) / total for value in logits]


def expected(logits: list[float], bias: list[float], moe: MoEConfig) -> dict[int, float]:
    scores = scores_of(logits, moe.scoring)
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    allowed = range(EXPERTS)
    if moe.method != "greedy":
        size = EXPERTS // moe.n_group
        groups = [choice[g * size : (g + 1) * size] for g in range(moe.n_group)]
        value = [
            sum(sorted(group)[-2:]) if moe.method == "noaux_tc" else max(group) for group in groups
        ]
        best = sorted(range(moe.n_group), key=lambda g: -value[g])[: moe.topk_group]
        allowed = [e for e in range(EXPERTS) if e // size in best]
    picked = sorted(allowed, key=lambda e: -choice[e])[: moe.top_k]
    total = sum(scores[e] for e in picked) if moe.norm_topk_prob else 1.0
    return {e: scores[e] / total * moe.scaling for e in picked}


@pytest.mark.parametrize(("scoring", "method", "norm"), COMBINATIONS)
@ON_CPU
def test_choice_and_weights(ops: Ops, scoring: str, method: str, norm: bool):
    moe = MoEConfig(EXPERTS, TOP_K, 8, 0, scoring, method, GROUPS, TOP_GROUPS, norm, scaling=1.7)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, HIDDEN, generator=generator)
    gate = torch.randn(EXPERTS, HIDDEN, generator=generator) * HIDDEN**-0.5
    # A bias that decides: it must move the choice and stay out of the weights.
    bias = 0.3 * torch.randn(EXPERTS, generator=generator) if moe.has_bias else None
    ids, weights = ops.router(x, RouterWeights(gate, bias, moe))
    logits = (x.double() @ gate.double().T).tolist()
    for row, chosen, given in zip(logits, ids.tolist(), weights.tolist(), strict=True):
        want = expected(row, bias.tolist() if bias is not None else [0.0] * EXPERTS, moe)
        assert set(chosen) == set(want)
        for expert, weight in zip(chosen, given, strict=True):
            assert weight == pytest.approx(want[expert], rel=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rows", [1, 512])
@ON_CPU
def test_logits_of_a_router_not_kept_in_fp32_are_rounded(ops: Ops, rows: int, norm: bool):
    """Rounding makes ties, and which of two experts with one logit is taken is the definition's to
    say. Inputs are multiples of powers of two: products and sums are exact in any order."""
    moe = MoEConfig(128, 8, 32, norm_topk_prob=norm, router_fp32=False)
    generator = torch.Generator().manual_seed(3)
    x = (torch.randint(-8, 9, (rows, 128), generator=generator) / 4).bfloat16()
    gate = (torch.randint(-16, 17, (128, 128), generator=generator) / 128).bfloat16()
    logits = (x.double() @ gate.double().T).bfloat16()
    best = logits.sort(-1, descending=True).values
    assert rows == 1 or bool((best[:, 7] == best[:, 8]).any())
    ids, weights = ops.router(x, RouterWeights(gate, None, moe))
    want_ids, want = reference.route(logits, None, moe)
    assert torch.equal(ids, want_ids)
    assert torch.allclose(weights, want, rtol=2**-7)


@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("fp32", [False, True])
def test_a_gate_of_another_type_than_the_hidden_states(types: tuple[str, str], fp32: bool):
    x_type, gate_type = (getattr(torch, name) for name in types)
    moe = MoEConfig(EXPERTS, TOP_K, 8, router_fp32=fp32)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(9, HIDDEN, generator=generator).to(x_type)
    gate = torch.randn(EXPERTS, HIDDEN, generator=generator).to(gate_type)
    ids, weights = CpuOps().router(x, RouterWeights(gate, None, moe))
    want_ids, want = Ops().router(x, RouterWeights(gate, None, moe))
    assert torch.equal(ids, want_ids)
    assert torch.allclose(weights, want, rtol=2**-7)


@pytest.mark.parametrize("method", ["group_limited_greedy", "noaux_tc"])
def test_ties_between_groups_and_experts_are_broken_alike(method: str):
    """A row of zeros scores all experts alike."""
    moe = MoEConfig(EXPERTS, TOP_K, 8, 0, "sigmoid", method, GROUPS, TOP_GROUPS)
    x = torch.zeros(2, HIDDEN)
    gate = torch.randn(EXPERTS, HIDDEN)
    bias = torch.zeros(EXPERTS)
    ids, _ = CpuOps().router(x, RouterWeights(gate, bias, moe))
    assert torch.equal(ids, Ops().router(x, RouterWeights(gate, bias, moe))[0])


def test_v2_scales_only_what_it_does_not_normalize():
    fields = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 16.0,
    }
    assert read_config(fields).moe.scaling == 16.0
    assert read_config({**fields, "norm_topk_prob": True}).moe.scaling == 1.0
