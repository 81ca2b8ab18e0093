"""Experts with int8, int4 and e4m3 weights against the reference, interpreted where there is no
GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.config.model import MoEConfig
from rorqual.ops import reference
from rorqual.ops.deferred_sum import summed
from rorqual.ops.reference import ExpertWeights, RouterWeights
from rorqual.ops.triton.quantized import experts
from rorqual.ops.triton.quantized.backend import QuantizedTritonOps
from tests.emulation.poison import poison
from tests.ops.triton.quantized.cases import difference, prepared_experts, weight

pytestmark = pytest.mark.exhaustive(but_first=True)

# a row that is rounded to 8 bits between the products may be rounded the other way
LIMIT = 2e-4
CASES = [
    ("int8", "int8_token", (160, 96), {}),
    ("int4", "wide", (256, 128), {"group": 128}),
    ("int4", "fp8_token", (128, 192), {"group": 64}),
    ("int4", "int8_token", (256, 128), {"group": 128}),
    ("int4", "wide", (192, 64), {"group": 32, "zero": True}),
    ("int8", "int8_group", (256, 128), {"group": 128, "share": 128}),
    ("fp8", "fp8_token", (128, 96), {}),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def draw(tokens: int, top_k: int, slots: int) -> tuple[Tensor, Tensor]:
    """No token is routed to slot 1, and a fifth of the experts are on other ranks."""
    scores = torch.rand(tokens, slots)
    scores[:, 1] = -1
    ids = scores.topk(top_k).indices
    ids[torch.rand(tokens, top_k) < 0.2] = -1
    ids[0, 0] = 2
    return ids, torch.rand(tokens, top_k)


def stacks(kind: str, activation: str, sizes: tuple[int, int], more: dict) -> ExpertWeights:
    hidden, inner = sizes
    return ExpertWeights(
        weight(kind, activation, 6, 2 * inner, hidden, **more),
        weight(kind, activation, 6, hidden, inner, **more),
    )


@pytest.mark.parametrize(("kind", "activation", "sizes", "more"), CASES)
def test_experts(kind: str, activation: str, sizes: tuple[int, int], more: dict) -> None:
    """Every pick by itself and sorted into blocks, with picks elsewhere, an expert nobody picks,
    and a base."""
    w = stacks(kind, activation, sizes, more)
    made = prepared_experts(w, DEVICE)
    assert experts.supported(made)
    for tokens in (2, 19):
        x = torch.randn(tokens, sizes[0]).bfloat16()
        ids, weights = draw(tokens, 3, 6)
        base = torch.randn(tokens, sizes[0]).bfloat16()
        expected = reference.experts(x, ids, weights, w).float() + base.float()
        given = [part.to(DEVICE) for part in (x, ids, weights)]
        got = QuantizedTritonOps().experts(*given, made, base.to(DEVICE))
        assert difference(got, expected) < LIMIT


def test_both_forms_give_the_same() -> None:
    w = prepared_experts(stacks("int4", "wide", (128, 64), {"group": 64}), DEVICE)
    x = torch.randn(4, 128).bfloat16().to(DEVICE)
    ids, weights = (part.to(DEVICE) for part in draw(4, 3, 6))
    plan = experts.plan_for(w.down, 1)
    blocks = experts.sorted_picks(ids, w, plan)
    outs = [
        experts.combine(experts.products(x, w, plan, given, ids), ids, weights)
        for given in (None, blocks)
    ]
    assert torch.equal(*outs)


def test_router_and_shared_experts() -> None:
    """The sum deferred to the norm, with pairs sorted by the router's kernel; shared experts among
    the routed ones or, for many tokens, as layers of their own."""
    moe = MoEConfig(4, 2, 64)
    w = stacks("int4", "wide", (128, 64), {"group": 64})
    made = prepared_experts(w, DEVICE)
    w.num_fused_shared_experts = made.num_fused_shared_experts = 2
    ops = QuantizedTritonOps()
    gate = torch.randn(4, 128) / 12
    for tokens in (3, 30):
        x = torch.randn(tokens, 128).bfloat16()
        router = RouterWeights(gate, None, moe, 2)
        there = RouterWeights(gate.to(DEVICE), None, moe, 2)
        found = summed(ops.experts_deferred(x.to(DEVICE), there, made))
        ids, weights = reference.with_shared(
            *reference.route(x.float() @ gate.t(), None, moe), 4, 2
        )
        assert router.num_fused_shared_experts == 2
        assert difference(found, reference.experts(x, ids, weights, w)) < LIMIT


def test_experts_are_turned_together_or_not_at_all() -> None:
    ops = QuantizedTritonOps()
    both = stacks("int4", "wide", (128, 64), {"group": 32})
    ops.prepare_experts(both, "layer")
    assert both.gate_up.turned
    assert both.down.turned
    one = stacks("int4", "wide", (128, 96), {"group": 32})
    plain = one.gate_up.data.clone()
    ops.prepare_experts(one, "layer")
    assert not (one.gate_up.turned)
    assert not (one.down.turned)
    assert torch.equal(one.gate_up.data, plain)
    x = torch.randn(3, 128).bfloat16()
    ids, weights = draw(3, 2, 6)
    expected = reference.experts(x, ids, weights, one)
    if DEVICE == "cpu":
        assert difference(ops.experts(x, ids, weights, one), expected) < LIMIT
