"""Expert, fp8, routing, norm and cache kernels on a GPU, in the shapes of real models, against
fp64 and with poisoned outputs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual.bench.kernels import gemm_and_experts as bench
from rorqual.bench.kernels import moe as moe_bench
from rorqual.bench.kernels import quantized as quantized_bench
from rorqual.config.model import MoEConfig
from rorqual.ops import reference
from rorqual.ops.activation import Quantized, hidden_of
from rorqual.ops.reference import ExpertWeights, RouterWeights, Weight
from rorqual.ops.triton.backend import TritonOps
from rorqual.ops.triton.gemm import fp8_gemm, gemv
from rorqual.ops.triton.moe import grouped_gemm, topk
from rorqual.ops.triton.moe.column_pieces import experts_in_pieces
from rorqual.ops.triton.rowwise.quantize import quantize
from rorqual.ops.triton.runtime.launch import beside_nccl, is_hopper, tile_counter
from tests.gpu.choice import rarely

DEVICE = torch.device("cuda")
CASES = {
    case.name: case
    for case in (*bench.cases(), *moe_bench.cases(), *quantized_bench.cases())
    if not case.name.endswith("T16384")
}


def often() -> set[str]:
    """Of each kernel and format one case of few tokens, of some and of many, whatever the model."""
    found: dict[tuple[str, str, int], str] = {}
    for name, case in CASES.items():
        kernel, _, size = name.rpartition(" ")
        if "library" in kernel:
            continue
        plain = re.sub(r"Qwen3(-235B)?|V2-Lite|V3|K\d+|\d+(x\d+)?", "", kernel)
        tokens = int(size[1:])
        found.setdefault((plain, case.kind, 0 if tokens < 16 else 1 if tokens < 1024 else 2), name)
    return {*found.values()}


OFTEN = often()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


@pytest.mark.parametrize(
    "name", [*sorted(OFTEN), *rarely(*(name for name in CASES if name not in OFTEN))]
)
def test_against_fp64(name: str) -> None:
    case = CASES[name]
    setup = case.setup(DEVICE)
    with bench.poisoned():
        assert setup.error() < (1e-3 if case.kind in ("fp8", "int8") else 1e-4)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4"])
def test_every_plan_agrees(kind: str) -> None:
    """Skewed routing, experts on other ranks and each plan of the table: the same function."""
    shape = bench.ExpertShape(kind, 16, 1024, 512, 4)
    w = bench.expert_weights(shape, DEVICE)
    x = torch.randn(300, 1024, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.rand(300, 16, device=DEVICE).topk(4).indices
    ids[:, 0] = torch.where(ids[:, 1:].eq(5).any(1), -1, 5)
    ids[:, 3] = -1
    weights = torch.rand(300, 4, device=DEVICE)
    expected = reference.experts(x, ids, weights, w)
    for mean in (0.4, 1, 5, 15, 25, 40, 90, 150, 230, 1000):
        plan = grouped_gemm.plan_for(w.down, int(16 * mean))
        with bench.poisoned():
            got = grouped_gemm.grouped_experts(x, ids, weights, w, plan)
        assert bench.difference(got, expected) < (1e-3 if kind == "fp8" else 1e-4)


@pytest.mark.parametrize(
    ("kind", "rows", "stages"),
    [
        ("fp8", 128, 6),
        ("fp8", 128, 2),
        ("fp8", 192, 5),
        ("fp8", 256, 4),
        ("bf16", 128, 4),
        *rarely(("bf16", 128, 2), ("fp8", 192, 2)),
    ],
)
@pytest.mark.parametrize("tokens", [700, *rarely(60, 3000)])
def test_products_of_many_rows(kind: str, rows: int, stages: int, tokens: int) -> None:
    """Skewed routing, experts without rows, or on other ranks: as the reference, and the same in
    captured graphs whose kernels start early."""
    if not is_hopper(DEVICE):
        pytest.skip("needs compute capability 9")
    shape = bench.ExpertShape(kind, 16, 1024, 512, 4)
    w = bench.expert_weights(shape, DEVICE)
    x = torch.randn(tokens, 1024, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.rand(tokens, 12, device=DEVICE).topk(4).indices
    ids[:, 0] = torch.where(ids[:, 1:].eq(5).any(1), -1, 5)
    ids[:, 3] = -1
    weights = torch.rand(tokens, 4, device=DEVICE)
    plan = replace(grouped_gemm.plan_for(w.down, tokens * 3), rows=rows, tall=stages)
    torch.cuda.synchronize()
    with bench.poisoned():
        first = grouped_gemm.grouped_experts(x, ids, weights, w, plan)
    bound = 1e-3 if kind == "fp8" else 1e-4
    assert bench.difference(first, reference.experts(x, ids, weights, w)) < bound
    outs: list[torch.Tensor] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs += [grouped_gemm.grouped_experts(x, ids, weights, w, plan) for _ in range(4)]
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, first) for out in outs)
    assert not tile_counter(DEVICE).any(), "a counter of tiles was not reset"
    away = torch.full_like(ids, -1)
    base = torch.randn_like(x)
    assert torch.equal(grouped_gemm.grouped_experts(x, away, weights, w, plan, base=base), base)
    assert torch.equal(grouped_gemm.grouped_experts(x, ids, weights, w, plan), first)
    for rows_sent in [x, quantize(x)] if kind == "fp8" else [x]:
        given = (rows_sent, ids, weights, w, plan, torch.bfloat16)
        whole = grouped_gemm.grouped_experts(*given)
        with beside_nccl():
            pieces = list(experts_in_pieces(*given))
        assert torch.equal(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize("tokens", [1, 3, 40, 700, *rarely(12, 128, 3000)])
def test_scales_that_are_powers_of_two(tokens: int) -> None:
    """DeepSeek-V3.1's: every form of experts, products, dense layers and norms rounds rows so."""
    ops = TritonOps()
    plain = bench.expert_weights(bench.ExpertShape("fp8", 16, 1024, 512, 4), DEVICE)
    gate_up, down = (
        replace(weight, activation="fp8_group_ue8m0", scratch=None)
        for weight in (plain.gate_up, plain.down)
    )
    w = ExpertWeights(gate_up, down)
    x = torch.randn(tokens, 1024, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.rand(tokens, 16, device=DEVICE).topk(4).indices
    weights = torch.rand(tokens, 4, device=DEVICE)
    expected = reference.experts(x, ids, weights, w)
    other = reference.experts(x, ids, weights, plain)
    assert bench.difference(other, expected) > 1.2e-3
    with bench.poisoned():
        assert bench.difference(ops.experts(x, ids, weights, w), expected) < 6e-4
        data, scale = ops.quantize_for_experts(x, w)
        sent = ops.experts_fp8(data, scale, x.dtype, ids, weights, w)
        assert bench.difference(sent, expected) < 6e-4
        dense = ops.mlp(x, gate_up[0], down[0])
        assert bench.difference(dense, reference.mlp(x, gate_up[0], down[0])) < 6e-4
        product = ops.linear(x, gate_up[0])
        assert bench.difference(product, reference.linear(x, gate_up[0])) < 1e-5
        kept, _ = ops.add_norm(x, x, torch.rand_like(x[0]), 1e-6, gate_up.activation)
        product = ops.linear(kept, gate_up[0])
        assert bench.difference(product, reference.linear(hidden_of(kept), gate_up[0])) < 1e-5
    wanted = reference.quantize_activation(x, True)
    exact = ops.quantize_activation(x, True)
    for found in (quantize(x, True), Quantized(*exact), Quantized(data, scale)):
        assert torch.equal(found.scale, wanted[1])
        assert torch.equal(found.data.view(torch.uint8), wanted[0].view(torch.uint8))


def test_experts_in_fp32() -> None:
    gate_up = torch.randn(8, 192, 160, device=DEVICE) * 160**-0.5
    down = torch.randn(8, 160, 96, device=DEVICE) * 96**-0.5
    w = ExpertWeights(Weight(gate_up), Weight(down))
    wide = ExpertWeights(Weight(gate_up.double()), Weight(down.double()))
    for tokens in (1, 70):
        x = torch.randn(tokens, 160, device=DEVICE)
        weights = torch.rand(tokens, 3, device=DEVICE)
        ids = torch.rand(tokens, 8, device=DEVICE).topk(3).indices
        truth = reference.experts(x.double(), ids, weights, wide)
        torch.testing.assert_close(
            grouped_gemm.experts(x, ids, weights, w),
            truth.float(),
            rtol=1e-4,
            atol=1e-4,
        )


def test_split_products_repeat_bit_for_bit() -> None:
    weight = bench.random_weight("fp8", DEVICE, 2112, 7168)
    x = torch.randn(7, 7168, device=DEVICE, dtype=torch.bfloat16)
    first = fp8_gemm.linear(x, weight)
    assert all(torch.equal(fp8_gemm.linear(x, weight), first) for _ in range(50))


@pytest.mark.parametrize("model", moe_bench.ROUTERS)
def test_routers_repeat_bit_for_bit(model: str) -> None:
    """Each launch starts while the one before it ends, and both count in the same place."""
    moe = moe_bench.ROUTERS[model]
    tokens = 5
    gate = torch.randn(moe.num_experts, 2048, device=DEVICE) * 2048**-0.5
    bias = torch.randn(moe.num_experts, device=DEVICE) * 0.05 if moe.has_bias else None
    x = torch.randn(tokens, 2048, device=DEVICE, dtype=torch.bfloat16)
    ids, weights = topk.router(x, RouterWeights(gate, bias, moe))
    expected_ids, expected = reference.route((x.double() @ gate.double().t()).float(), bias, moe)
    zero = torch.zeros(tokens, moe.num_experts, device=DEVICE)
    torch.testing.assert_close(
        zero.scatter(1, ids, weights), zero.scatter(1, expected_ids, expected), rtol=1e-4, atol=1e-5
    )
    for _ in range(100):
        again = topk.router(x, RouterWeights(gate, bias, moe))
        assert torch.equal(again[0], ids)
        assert torch.equal(again[1], weights)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [3, 200, *rarely(8, 64)])
def test_layers_repeat_bit_for_bit(kind: str, tokens: int) -> None:
    """Pairs of an expert are counted in any order; no result may depend on it, and
    every count comes back to zero."""
    shape = bench.ExpertShape(kind, 66, 1024, 256, 8, 2)
    moe = MoEConfig(64, 6, 256)
    ops = TritonOps()
    w = bench.expert_weights(shape, DEVICE)
    x = torch.randn(tokens, 1024, device=DEVICE, dtype=torch.bfloat16)
    router = RouterWeights(torch.randn(64, 1024, device=DEVICE) / 32, None, moe, 2)
    first = ops.routed_experts(x, router, w)
    truth = reference.experts(x, *ops.router(x, router), w)
    assert bench.difference(first, truth) < (1e-3 if kind == "fp8" else 1e-4)
    for _ in range(100):
        assert torch.equal(ops.routed_experts(x, router, w), first)


@pytest.mark.parametrize("tokens", [1, 8, *rarely(2, 3, 5)])
def test_small_products(tokens: int) -> None:
    x = torch.randn(tokens, 2 * 1408, device=DEVICE, dtype=torch.bfloat16)[:, :1408]
    pair = bench.random_weight("bf16", DEVICE, 2 * 1001, 1408)
    bias = torch.randn(2002, device=DEVICE, dtype=torch.bfloat16)
    with bench.poisoned():
        y = gemv.linear(x, pair.data, bias)
        h = gemv.gate_up(x, pair.data)
    assert bench.difference(y, x.double() @ pair.data.double().t() + bias.double()) < 1e-5
    assert bench.difference(h, reference.swiglu(x.double() @ pair.data.double().t())) < 1e-4
