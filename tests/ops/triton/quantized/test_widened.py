"""int4 weights made 16-bit ones, as the reference defines them, and products that use them;
interpreted where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.ops import reference
from rorqual.ops.reference import ExpertWeights
from rorqual.ops.triton.quantized import experts, linear, widened
from tests.ops.triton.quantized.cases import difference, prepared, prepared_experts, weight

CASES = [
    ((70, 256), {"group": 128}),
    ((3, 33, 128), {"group": 64, "zero": True}),
    ((40, 192), {"group": 32, "zero": True, "dtype": torch.float16}),
    ((5, 16, 512), {"group": 512}),  # one scale a row
]


@pytest.mark.parametrize(("shape", "more"), CASES)
def test_it_is_the_reference_to_the_last_bit(shape: tuple[int, ...], more: dict) -> None:
    torch.manual_seed(3)
    dtype = more.get("dtype", torch.bfloat16)
    plain = weight("int4", "wide", *shape, **more)
    made = prepared(plain, DEVICE)
    assert widened.takes(made, dtype)
    found = widened.widened(made, dtype)
    assert torch.equal(found.cpu(), reference.dequantize(plain, dtype))


def test_linear_uses_it() -> None:
    torch.manual_seed(4)
    plain = weight("int4", "wide", 96, 256, group=128)
    made = prepared(plain, DEVICE)
    x = torch.randn(21, 256, dtype=torch.bfloat16, device=DEVICE)
    bias = torch.randn(96, dtype=torch.bfloat16, device=DEVICE)
    plan = linear.QuantizedLinearPlan(16, widened=True)
    found = linear.linear(x, made, bias, plan)
    wide = reference.dequantize(plain, torch.bfloat16).to(DEVICE)
    assert torch.equal(found, torch.nn.functional.linear(x, wide, bias))


def test_experts_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    plain = ExpertWeights(
        weight("int4", "wide", 6, 128, 128, group=64), weight("int4", "wide", 6, 128, 64, group=64)
    )
    w = prepared_experts(plain, DEVICE)
    x = torch.randn(40, 128, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.rand(40, 6, device=DEVICE).topk(2).indices
    ids[3, 1] = -1
    weights = torch.rand(40, 2, device=DEVICE)
    used = experts.plan_for(w.down, 80)
    monkeypatch.setattr(experts, "plan_for", lambda *_: replace(used, widened=True))
    made: list[ExpertWeights] = []
    plainly = widened.wide_experts
    monkeypatch.setattr(
        widened, "wide_experts", lambda *given: made.append(plainly(*given)) or made[-1]
    )
    found = experts.experts(x, ids, weights, w)
    assert len(made) == 1
    expected = reference.experts(x.cpu(), ids.cpu(), weights.cpu(), plain)
    assert difference(found, expected) < 1e-4


def test_what_is_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are rounded to 8 bits, rows of fp32, weights that would fill the GPU."""
    assert not widened.takes(prepared(weight("int4", "int8_token", 64, 128), DEVICE), torch.float16)
    made = prepared(weight("int4", "wide", 64, 128, group=128), DEVICE)
    assert not widened.takes(made, torch.float32)
    monkeypatch.setattr(widened, "MOST_BYTES", 64 * 128 * 2 - 1)
    assert not widened.takes(made, torch.bfloat16)
