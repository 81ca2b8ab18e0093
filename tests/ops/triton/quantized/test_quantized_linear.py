"""Products of int8, int4 and e4m3 weights against the reference, interpreted where there is no
GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.ops import reference
from rorqual.ops.reference import Weight
from rorqual.ops.triton.quantized import int4_order, operands, rows
from rorqual.ops.triton.quantized.backend import QuantizedTritonOps
from rorqual.ops.triton.quantized.linear import QuantizedLinearPlan, linear
from tests.emulation.poison import poison
from tests.ops.triton.quantized.cases import difference, prepared, weight

pytestmark = pytest.mark.exhaustive(but_first=True)

# Rows rounded to 8 bits are the reference's to the byte, and so are the sums of whole numbers; what
# is left is the last rounding to bf16. Weights of W4A16 are rounded to bf16 once more there.
LIMITS = {"wide": 1e-4, "int8": 1e-6, "fp8": 1e-5}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh storage holds NaN: what a kernel fails to write shows."""
    poison(monkeypatch)


@pytest.mark.parametrize("activation", ["wide", "int8_token", "fp8_token"])
@pytest.mark.parametrize("chunk", [128, 64])
def test_the_order_in_memory_loses_nothing(activation: str, chunk: int) -> None:
    data = torch.randint(0, 256, (3, 5, 128), dtype=torch.uint8)
    turned = int4_order.turned(data, chunk, activation)
    assert not torch.equal(turned, data)
    assert torch.equal(int4_order.turned_back(turned, chunk, activation), data)


def test_int4_stays_in_its_storage_and_the_reference_may_not_read_it() -> None:
    plain = weight("int4", "wide", 2, 8, 256, group=128)
    made = prepared(plain, "cpu")
    before = made.data.data_ptr()
    assert made.turned
    assert made[1].turned
    assert made[1].part(0, 4).turned
    assert made.data.data_ptr() == before
    assert torch.equal(int4_order.plain(made).data, plain.data)
    with pytest.raises(AssertionError, match="laid this weight out"):
        reference.dequantize(made[0], torch.float32)


@pytest.mark.parametrize("kind", rows.ROUNDED)
@pytest.mark.parametrize("columns", [200, 1408])
def test_rows_are_rounded_as_the_reference_does(kind: str, columns: int) -> None:
    x = torch.randn(5, 2 * columns).bfloat16()
    x[2] = 0
    for gated in (False, True):
        given = x if gated else x[:, :columns]
        made = rows.rounded_rows(given.to(DEVICE), kind, gated)
        scale = made.scale.repeat_interleave(128, 1)[:, :columns] if made.group else made.scale
        wanted = reference.rounded(reference.swiglu(given) if gated else given, kind)
        got = (made.data.float() * scale).cpu()
        # silu's exponential may differ in its last bit
        share = (got != wanted).float().mean()
        assert share < (0.02 if gated else 1e-9)
        torch.testing.assert_close(got, wanted, atol=0.2 if gated else 0.0, rtol=0.0)


CASES = [
    ("int8", "int8_token", (70, 352), {}),
    ("int4", "wide", (70, 512), {"group": 128}),
    ("int4", "fp8_token", (70, 512), {"group": 128}),
    ("int4", "int8_token", (70, 256), {"group": 128}),
    ("int4", "wide", (70, 256), {"group": 64, "zero": True}),
    ("int4", "wide", (40, 192), {"group": 32, "zero": True}),
    ("int4", "wide", (40, 192), {}),
    ("int4", "wide", (40, 256), {"dtype": torch.float16, "group": 128}),
    ("int4", "int8_token", (40, 256), {}),
    ("int4", "int8_group", (40, 256), {"group": 32}),
    ("int4", "fp8_token", (40, 192), {"group": 64}),
    ("int4", "fp8_group", (40, 256), {"group": 256}),
    ("int8", "int8_group", (200, 320), {"group": 128, "share": 128}),
    ("int8", "int8_group", (70, 256), {"group": 128}),
    ("fp8", "fp8_token", (70, 256), {}),
    ("fp8", "fp8_group", (70, 256), {}),
    ("fp8", "fp8_group", (200, 320), {"group": 128, "share": 128}),
]


@pytest.mark.parametrize(("kind", "activation", "shape", "more"), CASES)
def test_linear(kind: str, activation: str, shape: tuple[int, int], more: dict) -> None:
    """Rows that fill no tile, one token and several, a bias, unequal shares of the columns, and
    counters left zero."""
    plain = weight(kind, activation, *shape, **more)
    made = prepared(plain, DEVICE)
    assert operands.supported(made)
    dtype = more.get("dtype", torch.bfloat16)
    limit = LIMITS[activation.split("_")[0]]
    ops = QuantizedTritonOps()
    for tokens, plan in ((1, None), (19, QuantizedLinearPlan(16, 32, 4, 2, 3))):
        x = torch.randn(tokens, shape[1] + 8)[:, : shape[1]].to(dtype)
        bias = torch.randn(shape[0]).to(dtype)
        expected = reference.linear(x, plain, bias)
        x, bias = x.to(DEVICE), bias.to(DEVICE)
        for _ in range(2):
            got = linear(x, made, bias, plan) if plan else ops.linear(x, made, bias)
            assert difference(got, expected) < limit


def test_no_tokens() -> None:
    made = prepared(weight("int8", "int8_token", 8, 64), DEVICE)
    assert linear(torch.zeros(0, 64, device=DEVICE).bfloat16(), made).shape == (0, 8)


@pytest.mark.parametrize(
    ("kind", "activation"), [("int8", "int8_token"), ("int4", "wide"), ("int4", "fp8_token")]
)
def test_mlp(kind: str, activation: str) -> None:
    """Also where only one of the two is taken, and slices of a stack."""
    group = {"group": 64} if kind == "int4" else {}
    up = weight(kind, activation, 2, 256, 128, **group)
    down = weight(kind, activation, 2, 60, 128, **group)
    x = torch.randn(5, 128).bfloat16()
    ops = QuantizedTritonOps()
    expected = reference.mlp(x, up[1], down[1].part(0, 40))
    pair = prepared(up, DEVICE)[1], prepared(down, DEVICE)[1].part(0, 40)
    assert difference(ops.mlp(x.to(DEVICE), *pair), expected) < 2e-4
    narrow = weight(kind, activation, 40, 128, **({"group": 16} if kind == "int4" else {}))
    narrow = replace(narrow, activation=activation if kind == "int4" else "fp8_token")
    second = prepared(narrow, DEVICE)
    assert not operands.supported(second)
    expected = reference.mlp(x, up[1], narrow)
    assert difference(ops.mlp(x.to(DEVICE), pair[0], second), expected) < 2e-4


def test_what_the_kernels_do_not_take() -> None:
    good = weight("int4", "wide", 8, 128, group=64)
    assert operands.takes_int4(good)
    order = torch.zeros(128, dtype=torch.int32)
    for other in (
        replace(good, group_index=order),
        weight("int4", "wide", 8, 128, group=64, dtype=torch.float32),
        weight("int4", "int8_token", 8, 128, group=64, zero=True),
        weight("int4", "wide", 8, 96, group=96),
        weight("int4", "wide", 8, 128, group=16),
        weight("int4", "fp8_group_ue8m0", 8, 128, group=64),
    ):
        assert not operands.takes_int4(other)
        assert not operands.supported(prepared(other, DEVICE))
    for other in (
        weight("int8", "int8_token", 8, 40),
        weight("int8", "fp8_token", 8, 64),
        weight("fp8", "fp8_group", 128, 128, group=128, share=128),
        Weight(torch.zeros(8, 64)),
    ):
        assert not operands.supported(other)
