"""Routing against a plain-Python reading of the formulas, for every combination of scores, methods and normalisation."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from rorqual.config import ModelConfig, MoEConfig
from rorqual.ops.cpu import CpuOps
from rorqual.ops.table import Ops

EXPERTS, TOP_K, GROUPS, TOP_GROUPS, HIDDEN = 24, 5, 6, 3, 40
COMBINATIONS = list(product(("sigmoid", "softmax"), ("greedy", "group_limited_greedy", "noaux_tc"), (False, True)))


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
        value = [sum(sorted(group)[-2:]) if moe.method == "noaux_tc" else max(group) for group in groups]
        best = sorted(range(moe.n_group), key=lambda g: -value[g])[: moe.topk_group]
        allowed = [e for e in range(EXPERTS) if e // size in best]
    picked = sorted(allowed, key=lambda e: -choice[e])[: moe.top_k]
    total = sum(scores[e] for e in picked) if moe.norm_topk_prob else 1.0
    return {e: scores[e] / total * moe.scaling for e in picked}


@pytest.mark.parametrize(("scoring", "method", "norm"), COMBINATIONS)
@pytest.mark.parametrize("ops", [Ops(), CpuOps(native=False), CpuOps()], ids=["reference", "torch", "native"])
def test_choice_and_weights(ops: Ops, scoring: str, method: str, norm: bool):
    moe = MoEConfig(EXPERTS, TOP_K, 8, 0, scoring, method, GROUPS, TOP_GROUPS, norm, scaling=1.7)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, HIDDEN, generator=generator)
    gate = torch.randn(EXPERTS, HIDDEN, generator=generator) * HIDDEN**-0.5
    # A bias that decides: it must move the choice and stay out of the weights.
    bias = 0.3 * torch.randn(EXPERTS, generator=generator) if moe.has_bias else None
    ids, weights = ops.router(x, gate, bias, moe)
    logits = (x.double() @ gate.double().T).tolist()
    for row, chosen, given in zip(logits, ids.tolist(), weights.tolist(), strict=True):
        want = expected(row, bias.tolist() if bias is not None else [0.0] * EXPERTS, moe)
        assert set(chosen) == set(want)
        for expert, weight in zip(chosen, given, strict=True):
            assert weight == pytest.approx(want[expert], rel=1e-5)


def test_v2_scales_only_what_it_does_not_normalise():
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
    assert ModelConfig.from_dict(fields).moe.scaling == 16.0
    assert ModelConfig.from_dict({**fields, "norm_topk_prob": True}).moe.scaling == 1.0
