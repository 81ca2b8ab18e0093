"""Block-fp8 products in Gluon on a GPU: each form against fp64, poisoned outputs, and graphs of
dependent launches against one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual.bench.kernels import gemm_and_experts as bench
from rorqual.ops import reference
from rorqual.ops.triton.gemm import gemv, gemv_sm90
from rorqual.ops.triton.gemm.fp8_gemm import linear
from rorqual.ops.triton.gemm.linear_plan import LinearPlan, PersistentPlan, SlicedPlan, StreamKPlan
from rorqual.ops.triton.rowwise.norm import norm
from rorqual.ops.triton.rowwise.quantize import quantize
from rorqual.ops.triton.runtime.launch import is_hopper
from tests.gpu.choice import rarely

DEVICE = torch.device("cuda")
if not is_hopper(DEVICE):
    pytest.skip("needs compute capability 9", allow_module_level=True)
SHAPES = [(2112, 7168), (400, 640), (7168, 2048), (1536, 128)]
FEW = [
    StreamKPlan(8, 128, 8, 6, split=64),
    StreamKPlan(16, 64, 4, 9, split=4),
    StreamKPlan(32, 128, 8, 5, split=64, waves=2),
    StreamKPlan(64, 64, 4, 6, split=1, waves=2),
    StreamKPlan(64, 128, 8, 4, split=64),
    StreamKPlan(128, 128, 8, 6, split=2),
    StreamKPlan(128, 64, 4, 3, split=4, waves=2),
]
SOME = [
    SlicedPlan(m, slices, stages)
    for m, slices, stages in (
        (8, 3, 18),
        (16, 2, 18),
        (32, 2, 16),
        (64, 2, 10),
        (64, 3, 9),
        (128, 2, 6),
        (128, 3, 6),
    )
]
MANY = [
    PersistentPlan(m, stages) for m, stages in ((256, 4), (256, 2), (192, 4), (192, 3), (128, 6))
]


def check(plan: LinearPlan, rows: int, columns: int, tokens: int) -> None:
    torch.manual_seed(tokens)
    weight = bench.random_weight("fp8", DEVICE, rows, columns)
    x = torch.randn(tokens, columns, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.randn(rows, device=DEVICE, dtype=torch.bfloat16) if tokens % 2 else None
    torch.cuda.synchronize()  # a launch that starts early takes weights for something that is there
    truth = reference.rounded_to_fp8(x).double() @ reference.dequantize(
        weight, torch.float64
    ).t() + (0 if bias is None else bias.double())
    with bench.poisoned():
        first = linear(x, weight, bias, plan=plan)
    assert bench.difference(first, truth) < 1e-4
    packed = quantize(x)
    outs = list[Tensor]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs += [linear(packed, weight, bias, plan=plan) for _ in range(8)]
    for _ in range(5):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, first) for out in outs), (
            "a launch that starts early reads or writes too early"
        )


def each_once(plans: list[Any]) -> list[Any]:
    """(plan, shape): in a plain run each plan with one shape, and each shape with some plan."""
    found = []
    for number, plan in enumerate(plans):
        for index, shape in enumerate(SHAPES):
            often = index == number % len(SHAPES)
            found += [(plan, shape)] if often else rarely((plan, shape))
    return found


@pytest.mark.parametrize(("plan", "shape"), each_once(FEW), ids=str)
def test_few_tokens(plan: StreamKPlan, shape: tuple[int, int]) -> None:
    for tokens in (plan.m, plan.m - 1, max(1, plan.m // 2 - 3), plan.m + 1, 3 * plan.m + 1):
        check(plan, *shape, tokens)


@pytest.mark.parametrize(("plan", "shape"), each_once(SOME), ids=str)
def test_some_tokens(plan: SlicedPlan, shape: tuple[int, int]) -> None:
    for tokens in (plan.m, 129, 5, 500):
        check(plan, *shape, tokens)


@pytest.mark.parametrize(("plan", "shape"), each_once(MANY), ids=str)
def test_many_tokens(plan: PersistentPlan, shape: tuple[int, int]) -> None:
    for tokens in (plan.m, 129, 5, 4200, 700):
        check(plan, *shape, tokens)


@pytest.mark.parametrize(
    ("rows", "columns", "kind"),
    [
        (2048, 4096, torch.bfloat16),
        (3648, 2048, torch.float16),
        *rarely(
            (2048, 2048, torch.bfloat16), (72, 512, torch.bfloat16), (4104, 1024, torch.float16)
        ),
    ],
)
def test_one_token_whose_weights_come_first(rows: int, columns: int, kind: torch.dtype) -> None:
    """Alone, and in a graph whose kernels all start while the first one waits."""
    torch.manual_seed(rows)
    layers = 6
    weights = torch.randn(layers, rows, columns, device=DEVICE, dtype=kind)
    scale = torch.rand(columns, device=DEVICE, dtype=kind)
    bias = torch.randn(rows, device=DEVICE, dtype=kind)
    x = torch.randn(layers, 1, columns, device=DEVICE, dtype=kind)
    assert gemv_sm90.fits(x[0], weights[0])
    torch.cuda.synchronize()
    with bench.poisoned():
        y = gemv.linear(x[0], weights[0], bias)
    exact = x[0].double() @ weights[0].double().t() + bias.double()
    assert bench.difference(y, exact) < 1e-5

    def steps() -> list[Tensor]:
        return [
            gemv.linear(norm(x[layer], scale, 1e-6), weights[layer], bias)
            for layer in range(layers)
        ]

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = steps()
    for _ in range(20):
        x.normal_()
        graph.replay()
        for layer in range(layers):
            row = norm(x[layer], scale, 1e-6)
            torch.cuda.synchronize()
            assert torch.equal(found[layer], gemv.linear(row, weights[layer], bias))
