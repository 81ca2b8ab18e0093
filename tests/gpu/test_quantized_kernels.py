"""Products and experts of int8, int4 and e4m3 weights on a GPU: every format, plan and number of
tokens against the reference with poisoned outputs, and graphs of dependent launches against one
call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual.bench.kernels import gemm_and_experts as bench
from rorqual.bench.kernels import quantized as cases
from rorqual.bench.kernels.quantized import QuantizedFormat
from rorqual.ops import reference
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.quantized import experts, int4_grouped_sm90, int4_order
from rorqual.ops.triton.quantized.backend import QuantizedTritonOps
from rorqual.ops.triton.quantized.experts import QuantizedExpertsPlan, QuantizedTile
from rorqual.ops.triton.quantized.linear import QuantizedLinearPlan, linear
from rorqual.ops.triton.quantized.rows import ROUNDED, rounded_rows
from rorqual.ops.triton.runtime.launch import is_hopper, takes_fp8
from tests.gpu.choice import rarely

DEVICE = torch.device("cuda")
FORMATS = [form for form in cases.FORMATS if takes_fp8(DEVICE) or "fp8" not in form.activation]
LIMIT = 1e-3  # rows between two products may be rounded the other way


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(13)


def replayed(call: Callable[[], Tensor], first: Tensor) -> None:
    """Four launches in a graph, of which each starts while the one before it ends."""
    outs: list[Tensor] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs += [call() for _ in range(4)]
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, first) for out in outs)


@pytest.mark.parametrize("kind", [kind for kind in ROUNDED if takes_fp8(DEVICE) or "int8" in kind])
def test_rows_are_rounded_to_the_byte(kind: str) -> None:
    for tokens, columns in ((1, 2048), (77, 1408), (9, 7168)):
        x = torch.randn(tokens, columns, device=DEVICE, dtype=torch.bfloat16)
        made = rounded_rows(x, kind)
        scale = made.scale.repeat_interleave(128, 1)[:, :columns] if made.group else made.scale
        assert torch.equal(made.data.float() * scale, reference.rounded(x, kind))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("tokens", [1, 40, 700, *rarely(7, 16, 129, 256, 4100)])
def test_linear(form: QuantizedFormat, tokens: int) -> None:
    weight = cases.random_weight(form, DEVICE, 1000, 1408)
    plain = replace(weight, data=weight.data.clone())
    QuantizedTritonOps().prepare_weight(weight, "test")
    x = torch.randn(tokens, 1408, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.randn(1000, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with bench.poisoned():
        first = linear(x, weight, bias)
    assert bench.difference(first, reference.linear(x, plain, bias)) < 1e-4
    replayed(lambda: linear(x, weight, bias), first)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_plan_of_a_product(form: QuantizedFormat) -> None:
    weight = cases.random_weight(form, DEVICE, 500, 2048)
    plain = replace(weight, data=weight.data.clone())
    QuantizedTritonOps().prepare_weight(weight, "test")
    x = torch.randn(150, 2048, device=DEVICE, dtype=torch.bfloat16)
    expected = reference.linear(x, plain)
    for m, n, warps, stages, split in (
        (16, 64, 4, 5, 8), (32, 64, 4, 4, 3), (64, 64, 4, 4, 2), (64, 128, 8, 3, 1),
        (128, 128, 8, 3, 2),
    ):  # fmt: skip
        plan = QuantizedLinearPlan(m, n, warps, stages, split)
        with bench.poisoned():
            got = linear(x, weight, None, plan)
        assert bench.difference(got, expected) < 1e-4, plan


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("tokens", [1, 2, 64, 500, *rarely(5, 17, 256)])
def test_experts(form: QuantizedFormat, tokens: int) -> None:
    """Skewed routing, experts without rows, experts on other ranks."""
    w = reference.ExpertWeights(
        cases.random_weight(form, DEVICE, 16, 2 * 512, 1024),
        cases.random_weight(form, DEVICE, 16, 1024, 512),
    )
    QuantizedTritonOps().prepare_experts(w, "test")
    plain = reference.ExpertWeights(int4_order.plain(w.gate_up), int4_order.plain(w.down))
    x = torch.randn(tokens, 1024, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.rand(tokens, 12, device=DEVICE).topk(4).indices
    ids[:, 0] = torch.where(ids[:, 1:].eq(5).any(1), -1, 5)
    ids[:, 3] = -1
    weights = torch.rand(tokens, 4, device=DEVICE)
    torch.cuda.synchronize()
    with bench.poisoned():
        first = experts.experts(x, ids, weights, w)
    assert bench.difference(first, reference.experts(x, ids, weights, plain)) < LIMIT
    replayed(lambda: experts.experts(x, ids, weights, w), first)


@pytest.mark.skipif(not takes_fp8(DEVICE), reason="no e4m3 products")
@pytest.mark.parametrize("tokens", [1, 2, 40, *rarely(8, 300)])
def test_fp8_with_blocks(tokens: int) -> None:
    """A single token is rounded by the product. The last matrix has half a block of columns."""
    ops = QuantizedTritonOps()
    form = cases.FP8_BLOCKS
    x = torch.randn(tokens, 1408, device=DEVICE, dtype=torch.bfloat16)
    weight = cases.random_weight(form, DEVICE, 1000, 1408)
    narrow = cases.random_weight(form, DEVICE, 1000, 1344)
    gate_up = cases.random_weight(form, DEVICE, 2 * 1344, 1408)
    w = ExpertWeights(
        cases.random_weight(form, DEVICE, 8, 2 * 512, 1408),
        cases.random_weight(form, DEVICE, 8, 1408, 512),
    )
    ids = torch.rand(tokens, 8, device=DEVICE).topk(4).indices
    ids[:, 2] = -1
    weights = torch.rand(tokens, 4, device=DEVICE)
    bias = torch.randn(1000, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for call, expected in (
        (lambda: ops.linear(x, weight, bias), reference.linear(x, weight, bias)),
        (lambda: ops.mlp(x, gate_up, narrow), reference.mlp(x, gate_up, narrow)),
        (lambda: ops.experts(x, ids, weights, w), reference.experts(x, ids, weights, w)),
    ):
        with bench.poisoned():
            first = call()
        assert bench.difference(first, expected) < LIMIT
        replayed(call, first)


@pytest.mark.skipif(not is_hopper(DEVICE), reason="a kernel of Hopper")
@pytest.mark.parametrize("rows", int4_grouped_sm90.ROWS_TAKEN)
@pytest.mark.parametrize(
    ("group", "hidden", "inner", "dtype"),
    [
        (128, 1024, 768, torch.bfloat16),
        (128, 640, 1408, torch.bfloat16),
        (64, 512, 384, torch.bfloat16),
        (128, 512, 384, torch.float16),
    ],
)
def test_every_block_of_sorted_int4_rows(
    rows: int, group: int, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    """Experts without rows, with one, and with more than a block; experts on other ranks."""

    def weight(*shape: int) -> Weight:
        scale = (torch.rand(*shape[:-1], shape[-1] // group, device=DEVICE) + 0.5) / 20
        data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), device=DEVICE)
        scale = (scale * shape[-1] ** -0.5).to(dtype)
        return Weight(data.to(torch.uint8), scale, (1, group), activation="wide")

    slots = 6
    w = ExpertWeights(weight(slots, 2 * inner, hidden), weight(slots, hidden, inner))
    QuantizedTritonOps().prepare_experts(w, "test")
    assert int4_grouped_sm90.takes_experts(w.down)
    plain = ExpertWeights(int4_order.plain(w.gate_up), int4_order.plain(w.down))
    tile = QuantizedTile(grouped=True)
    plan = QuantizedExpertsPlan(rows, tile, tile)
    for tokens in (2, 300):
        x = torch.randn(tokens, hidden, device=DEVICE, dtype=dtype)
        ids = torch.where(torch.rand(tokens, 2, device=DEVICE) < 0.1, -1, 4)
        ids[:, 1] = torch.randint(0, 4, (tokens,), device=DEVICE)
        ids[0] = torch.tensor([5, -1])
        weights = torch.rand(tokens, 2, device=DEVICE)

        def layer(x: Tensor = x, ids: Tensor = ids, weights: Tensor = weights) -> Tensor:
            blocks = experts.sorted_picks(ids, w, plan)
            return experts.combine(experts.products(x, w, plan, blocks, ids), ids, weights)

        torch.cuda.synchronize()
        with bench.poisoned():
            first = layer()
        assert bench.difference(first, reference.experts(x, ids, weights, plain)) < 1e-4
        replayed(layer, first)
