"""Kernels of experts, fp8 products, routing, norms and cache epilogues against the reference,
interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.config.model import MoEConfig
from rorqual.layers.moe import MoE
from rorqual.ops import reference
from rorqual.ops.activation import NormOutput, PendingNorm, Quantized, hidden_of
from rorqual.ops.deferred_sum import summed
from rorqual.ops.interface import GQAWeights, Ops, TokenPlaces
from rorqual.ops.reference import FP8, ExpertWeights, RouterWeights, Weight
from rorqual.ops.rounding import power_of_two
from rorqual.ops.triton.attention import rope_kv_write
from rorqual.ops.triton.backend import TritonOps, _router
from rorqual.ops.triton.gemm import fp8_gemm, gemv, per_head_gemm, skinny_gemm  # fmt: skip
from rorqual.ops.triton.gemm.linear_plan import LinearPlan, PersistentPlan, StreamKPlan, TilePlan
from rorqual.ops.triton.moe import (
    align,
    column_pieces,
    expert_rows,
    small_batch,
)
from rorqual.ops.triton.moe import (
    grouped_gemm as experts,
)
from rorqual.ops.triton.moe import router_gemm as gating
from rorqual.ops.triton.moe import topk as routing
from rorqual.ops.triton.rowwise import norm, quantize
from rorqual.parallel.mesh import SINGLE_LAYOUT
from tests.emulation.poison import poison

pytestmark = pytest.mark.exhaustive

KINDS = {
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "ue8m0": torch.bfloat16,  # fp8 whose scales are powers of two
    "fp32": torch.float32,
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh storage holds NaN or absurd integers: what a kernel fails to write shows."""
    poison(monkeypatch)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def weight(kind: str, *shape: int) -> Weight:
    data = random(*shape) * shape[-1] ** -0.5
    if kind not in ("fp8", "ue8m0"):
        return Weight(data.to(KINDS[kind]))
    scale = (
        torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), device=DEVICE) * 0.02
        + 0.01
    )
    if kind == "ue8m0":
        powers = power_of_two(scale)
        return Weight((data * 20).to(FP8), powers, activation="fp8_group_ue8m0")
    return Weight((data * 20).to(FP8), scale)


def expert_weights(
    kind: str, slots: int, hidden: int, inner: int, shared: int = 0
) -> ExpertWeights:
    return ExpertWeights(
        weight(kind, slots, 2 * inner, hidden), weight(kind, slots, hidden, inner), shared
    )


def difference(got: Tensor, expected: Tensor) -> float:
    """DeepGEMM's criterion: 1 - 2 sum(xy) / sum(x^2 + y^2), in fp64. NaN fails every comparison."""
    x = got.double()
    y = expected.double()
    return (1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item()


def draw(tokens: int, top_k: int, slots: int, absent: float = 0.2) -> tuple[Tensor, Tensor]:
    ids = torch.rand(tokens, slots).topk(top_k).indices
    ids[torch.rand(tokens, top_k) < absent] = -1
    return ids.to(DEVICE), torch.rand(tokens, top_k).to(DEVICE)


# with the other kind of scales of rows fp8's is 2e-3
LIMITS = {"bf16": 1e-4, "fp8": 1e-3, "ue8m0": 1e-3, "fp32": 1e-10}
SIZES = {"bf16": (72, 40, 8), "fp32": (48, 40, 5), "fp8": (256, 128, 6), "ue8m0": (256, 128, 6)}


def powers_of_two(scale: Tensor) -> bool:
    return bool((torch.frexp(scale)[0] == 0.5).all())


@pytest.mark.parametrize("kind", ["bf16", "fp32", "fp8", "ue8m0"])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (3, 3), (37, 3)])
def test_experts(kind: str, tokens: int, top_k: int) -> None:
    hidden, inner, slots = SIZES[kind]
    w = expert_weights(kind, slots, hidden, inner)
    x = random(tokens, hidden, dtype=KINDS[kind])
    (ids, weights) = draw(tokens, top_k, slots)
    expected = reference.experts(x, ids, weights, w)
    assert difference(experts.experts(x, ids, weights, w), expected) < LIMITS[kind]
    few = replace(w, local_fraction=1 / ids.numel())
    assert difference(experts.experts(x, ids.int(), weights, few), expected) < LIMITS[kind]
    base = random(tokens, hidden, dtype=KINDS[kind])
    assert (
        difference(experts.experts(x, ids, weights, w, base=base), expected + base) < LIMITS[kind]
    )


@pytest.mark.parametrize(
    ("kind", "tokens", "top_k", "shared"),
    [
        ("bf16", 1, 8, 1),
        ("fp8", 1, 8, 1),
        ("fp32", 9, 3, 2),
        ("fp8", 9, 3, 2),
        ("ue8m0", 9, 3, 2),
    ],
)
def test_fused_shared_experts(
    kind: str, tokens: int, top_k: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused with the routed experts, and as dense layers."""
    hidden = SIZES[kind][0]
    inner = SIZES[kind][1]
    slots = 9
    w = expert_weights(kind, slots + shared, hidden, inner, shared)
    ids, weights = reference.with_shared(*draw(tokens, top_k, slots, absent=0), slots, shared)
    x = random(tokens, hidden, dtype=KINDS[kind])
    expected = reference.experts(x, ids, weights, w)
    for most in (0, 1024):
        monkeypatch.setattr(experts, "FUSED_SHARED_TOKENS", dict.fromkeys(KINDS, most))
        assert difference(TritonOps().experts(x, ids, weights, w), expected) < LIMITS[kind]


def test_fused_shared_experts_do_not_change_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V2-Lite at 64 requests: six rows per routed expert, independent of the shared ones."""
    asked = []
    monkeypatch.setattr(
        experts.tuning,
        "config_for",
        lambda kernel, config, device, **shape: asked.append((kernel, shape)),
    )
    down = Weight(torch.empty(66, 16, 8, dtype=torch.bfloat16))
    assert experts.plan_for(down, 64 * 6, 2) == experts.plan_for(Weight(down.data[:64]), 64 * 6)
    assert asked[0] == asked[1]
    assert asked[0][1]["mean"] == 6


@pytest.mark.parametrize(
    ("top_k", "widths"),
    [(1, (1, 0)), (2, (2, 0)), (6, (8, 0)), (8, (8, 0)), (9, (8, 1)), (10, (8, 2)), (12, (16, 0))],
)
def test_widths_of_top_k(top_k: int, widths: tuple[int, int]) -> None:
    assert small_batch.split_picks(top_k) == widths


@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "ue8m0"])
def test_expert_tiles(kind: str, swap: bool) -> None:
    """Both sides of the tensor cores."""
    hidden, inner, slots = SIZES[kind]
    w = expert_weights(kind, slots, hidden, inner)
    x = random(19, hidden, dtype=KINDS[kind])
    (ids, weights) = draw(19, 2, slots)
    plan = experts.plan_for(w.down, 1)
    plan = replace(
        plan,
        rows=16,
        up=replace(plan.up, swap=swap),
        down=replace(plan.down, swap=swap),
    )
    got = experts.grouped_experts(x, ids, weights, w, plan)
    assert difference(got, reference.experts(x, ids, weights, w)) < LIMITS[kind]


@pytest.mark.longest
@pytest.mark.exhaustive
def test_direct_form_takes_any_number_of_pairs() -> None:
    for kind in ("bf16", "fp8", "ue8m0"):
        hidden, inner, slots = SIZES[kind]
        w = expert_weights(kind, slots, hidden, inner)
        x = random(5, hidden, dtype=KINDS[kind])
        (ids, weights) = draw(5, 3, slots)
        got = small_batch.direct_experts(x, ids, weights, w)
        base = random(5, hidden, dtype=KINDS[kind])
        expected = reference.experts(x, ids, weights, w)
        assert difference(got, expected) < LIMITS[kind]
        assert (
            difference(
                small_batch.direct_experts(x, ids, weights, w, base=base),
                expected + base,
            )
            < LIMITS[kind]
        )


@pytest.mark.parametrize("kind", ["bf16", "fp8", "ue8m0"])
@pytest.mark.parametrize("tokens", [2, 37])
def test_experts_of_rows_that_travelled_in_fp8(kind: str, tokens: int) -> None:
    """With fp8 weights the grouped form is that of the rows before they were quantized, bit for
    bit: nothing is rounded twice."""
    hidden, inner, slots = SIZES[kind]
    w = expert_weights(kind, slots, hidden, inner)
    x = random(tokens, hidden, dtype=torch.bfloat16)
    (ids, weights) = draw(tokens, 3, slots)
    data, scale = reference.quantize_activation(x, w.gate_up.ue8m0)
    got = TritonOps().experts_fp8(data, scale, torch.bfloat16, ids, weights, w)
    wide = reference.dequantize_activation(data, scale, torch.bfloat16)
    assert difference(got, reference.experts(wide, ids, weights, w)) < LIMITS[kind]
    if kind != "bf16" and ids.numel() > small_batch.DIRECT_PICKS["fp8"]:
        assert torch.equal(got, experts.experts(x, ids, weights, w))


@pytest.mark.parametrize(("kind", "quantized"), [("bf16", False), ("fp8", False), ("fp8", True)])
@pytest.mark.parametrize("tokens", [5, 37])
def test_results_in_pieces_of_columns(
    kind: str, quantized: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of whole results; the second product of a piece is launched when it is asked for."""
    hidden, inner, slots = 512, 128, 4
    w = expert_weights(kind, slots, hidden, inner)
    x = random(tokens, hidden, dtype=torch.bfloat16)
    (ids, weights) = draw(tokens, 2, slots)
    ids[0, 0] = -1
    rows = list(reference.quantize_activation(x)) if quantized else [x]
    plan = experts.plan_for(w.down, ids.numel())
    given = Quantized(*rows) if quantized else x
    whole = experts.grouped_experts(given, ids, weights, w, plan, torch.bfloat16)
    launched: list[str] = []
    for name in ("gate_up_product", "down_product"):
        monkeypatch.setattr(experts, name, noting(launched, name, getattr(experts, name)))
    ops = TritonOps()
    assert ops.experts_in_pieces(rows, x.dtype, ids, weights, w) is None, "no message is beside it"
    with ops.beside_messages():
        assert ops.experts_in_pieces(rows, x.dtype, ids, weights, w) is None, "too short"
        monkeypatch.setattr(column_pieces, "LEAST_BYTES", x.nbytes)
        pieces = ops.experts_in_pieces(rows, x.dtype, ids, weights, w)
        assert pieces is not None
        found = [next(pieces)]
        assert launched == ["gate_up_product", "down_product"]
        found += pieces
    assert launched == ["gate_up_product", "down_product", "down_product"]
    assert [piece.shape for piece in found] == [(tokens, hidden // 2)] * 2
    assert torch.equal(torch.cat(found, 1), whole)


def noting(calls: list[str], name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        calls.append(name)
        return work(*args)

    return noted


def test_all_experts_on_other_ranks() -> None:
    w = expert_weights("bf16", 4, 32, 32)
    for tokens in (2, 40):
        ids = torch.full((tokens, 3), -1, device=DEVICE)
        weights = torch.rand(tokens, 3, device=DEVICE)
        out = experts.experts(random(tokens, 32, dtype=torch.bfloat16), ids, weights, w)
        assert out.eq(0).all()


@pytest.mark.parametrize(
    "way",
    [("BUCKET_PICKS", "ONE_KERNEL_PICKS"), ("ONE_KERNEL_PICKS",), ()],
    ids=["buckets", "scan", "chunks"],
)
@pytest.mark.parametrize(
    ("tokens", "top_k", "slots", "rows"), [(1, 1, 3, 16), (300, 2, 5, 16), (90, 8, 33, 32)]
)
def test_sorting(
    way: tuple[str, ...],
    tokens: int,
    top_k: int,
    slots: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("BUCKET_PICKS", "ONE_KERNEL_PICKS"):
        monkeypatch.setattr(align, name, 8192 if name in way else 0)
    ids, _ = draw(tokens, min(top_k, slots), slots)
    # one slot far more often than the others
    ids[:, 0] = torch.where(torch.arange(tokens, device=DEVICE) % 3 == 0, 1, ids[:, 0])
    out = align.moe_align_block_size(ids, slots, rows)
    flat = ids.flatten().tolist()
    found = []
    assert int(out.count) <= out.limit
    taken = []
    for slot, start, stop, shift in out.blocks[:, : int(out.count)].t().tolist():
        members = out.order[start + shift : min(stop, start + rows) + shift].tolist()
        assert members
        assert all(flat[pick] == slot for pick in members)
        found += members
        taken += range(start, min(stop, start + rows))
    assert sorted(found) == [pick for pick, slot in enumerate(flat) if slot >= 0]
    assert taken == list(range(len(found))), "rows lie expert after expert"
    assert (out.places is None) == ("BUCKET_PICKS" in way)
    if out.places is not None:  # pairs keep their order: no shift
        rows_of = dict(zip(found, taken, strict=True))
        assert out.places.tolist() == [rows_of.get(pick, -1) for pick in range(len(flat))]


def test_sorting_leaves_its_counters_zero() -> None:
    ids, _ = draw(90, 4, 33)
    first, again = (align.moe_align_block_size(ids, 33, 16) for _ in range(2))
    assert align.zeroed_counters(ids.device, 65).eq(0).all()
    assert torch.equal(first.blocks[:, : int(first.count)], again.blocks[:, : int(again.count)])


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantize(dtype: torch.dtype, ue8m0: bool) -> None:
    x = random(5, 384, dtype=dtype) * torch.rand(5, 1, device=DEVICE) * 10
    x[1] = 0
    got = quantize.quantize(x, ue8m0)
    (data, scale) = reference.quantize_activation(x, ue8m0)
    assert torch.equal(got.scale, scale)
    assert torch.equal(got.data.float(), data.float())
    exact = quantize.quantize_exactly(x, ue8m0)
    assert torch.equal(exact[1], scale)
    assert torch.equal(exact[0].view(torch.uint8), data.view(torch.uint8))


def test_scales_beside_powers_of_two() -> None:
    """Peaks around 448 * 2^k, where the power of two changes, and the least ones."""
    exponents = torch.arange(-20, 100, device=DEVICE)
    edges = torch.ldexp(torch.full((120,), 448.0, device=DEVICE), exponents)
    wide = torch.tensor(torch.inf, device=DEVICE)
    peaks = torch.cat((edges, edges.nextafter(wide), edges.nextafter(-wide)))
    peaks = torch.cat((peaks, peaks.new_tensor([0.0, 1e-5, 1e-4, 1.5e-4, 1e38])))
    x = torch.rand(len(peaks), 128, device=DEVICE) * peaks[:, None]
    x[:, 77] = -peaks
    got = quantize.quantize(x, True)
    data, scale = reference.quantize_activation(x, True)
    assert torch.equal(got.scale, scale)
    assert torch.equal(got.data.view(torch.uint8), data.view(torch.uint8))
    assert powers_of_two(scale)


def test_rows_rounded_by_another_rule_are_rounded_again() -> None:
    x = random(4, 256, dtype=torch.bfloat16)
    kept, _ = norm.add_norm(x, None, random(256, dtype=x.dtype), 1e-6, "fp8_group")
    assert isinstance(kept, NormOutput)
    assert quantize.quantized(kept, False) is kept.quantized
    again = quantize.quantized(kept, True)
    assert torch.equal(again.scale, reference.quantize_activation(kept.hidden, True)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(200, 512), (128, 1280)])
@pytest.mark.parametrize("kind", ["fp8", "ue8m0"])
def test_linear(kind: str, dtype: torch.dtype, rows: int, columns: int) -> None:
    matrix = weight(kind, rows, columns)
    bias = random(rows, dtype=dtype)
    for tokens, size in zip((1, 20, 40, 70, 70), (1, 20, 40, 70, 5000), strict=True):
        plan = fp8_gemm.plan_for(matrix, size)
        x = random(tokens, columns, dtype=dtype)
        expected = reference.linear(x, matrix, bias)
        assert difference(fp8_gemm.linear(x, matrix, bias, plan=plan), expected) < 1e-5
        assert (
            difference(
                fp8_gemm.linear(
                    quantize.quantize(x, matrix.ue8m0),
                    matrix,
                    bias,
                    dtype,
                    replace(plan.portable(), waves=1),
                ),
                expected,
            )
            < 1e-5
        )
    assert fp8_gemm.linear(random(0, columns), matrix).shape == (0, rows)


ROUTERS = [
    MoEConfig(16, 4, 8, scoring="softmax", norm_topk_prob=True),
    MoEConfig(
        24,
        6,
        8,
        scoring="softmax",
        method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        scaling=16.0,
    ),
    MoEConfig(
        32,
        8,
        8,
        scoring="sigmoid",
        method="noaux_tc",
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        scaling=2.5,
    ),
]


@pytest.mark.parametrize("moe", ROUTERS, ids=lambda moe: moe.method)
def test_route(moe: MoEConfig) -> None:
    logits = random(13, moe.num_experts)
    bias = random(moe.num_experts) * 0.1 if moe.has_bias else None
    ids, weights = routing.route(logits, bias, moe)
    expected_ids, expected = reference.route(logits, bias, moe)
    dense = torch.zeros_like(logits).scatter_(1, ids, weights)
    torch.testing.assert_close(
        dense, torch.zeros_like(logits).scatter_(1, expected_ids, expected), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(routing.route(logits, bias, moe, torch.int32)[0], ids.int())


def gate_sums(x: Tensor, matrix: Tensor, plan: gating.GatePlan) -> Tensor:
    """fp64, cut as the kernel cuts columns, for 132 multiprocessors."""
    blocks = -(-x.shape[0] // min(plan.m, 1 << max(4, (x.shape[0] - 1).bit_length()))) * -(
        -matrix.shape[0] // plan.n
    )
    steps = -(-x.shape[1] // plan.k)
    width = plan.k << (-(-steps // min(plan.split, 132 // blocks)) - 1).bit_length()
    return torch.stack(
        [
            a.double() @ b.double().t()
            for a, b in zip(x.split(width, 1), matrix.split(width, 1), strict=True)
        ]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "split"), [(9, 24, 72, 4), (70, 40, 256, 3), (33, 32, 320, 1)]
)
def test_gate_product(
    tokens: int, experts: int, hidden: int, split: int, dtype: torch.dtype
) -> None:
    """As exact as fp32 for a gate of either type, each partial sum in its place."""
    x = random(tokens, hidden + 8, dtype=torch.bfloat16)[:, :hidden]
    matrix = (random(experts, hidden) * hidden**-0.5).to(dtype)
    assert gating.supported(x, matrix)
    plan = gating.GatePlan(32, 16, 32, split, 4, 2)
    got = gating.partial_logits(x, matrix, plan)
    want = gate_sums(x, matrix, plan)
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(
        gating.partial_logits(x, matrix).sum(0).double(), want.sum(0), rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("hidden", [160, 128])
def test_router_computes_the_norm_before_it(tokens: int, hidden: int) -> None:
    """For a token or two; the rows, the sum, the choice are those of a norm and a router apart."""
    moe = MoEConfig(12, 3, 32)
    router = RouterWeights(random(12, hidden).bfloat16(), None, moe)
    x, residual = (random(tokens, hidden, dtype=torch.bfloat16) for _ in range(2))
    weight = random(hidden, dtype=torch.bfloat16)
    ops = TritonOps()
    rows, total = ops.add_norm(x, residual, weight, 1e-6)
    ids, weights = ops.router(hidden_of(rows), router)
    pending, later = ops.add_norm_for_router(x, residual, weight, 1e-6)
    assert isinstance(pending, PendingNorm) == (tokens < 3)
    found = _router(pending, router)
    if isinstance(pending, PendingNorm):
        assert pending.done
    assert torch.equal(found[0], ids)
    assert torch.equal(found[1], weights)
    assert torch.equal(hidden_of(pending), hidden_of(rows))
    assert torch.equal(later, total)


def test_a_layer_leaves_a_pending_norm_to_its_router() -> None:
    """Reading the rows before the router launches the norm's kernel."""
    w = expert_weights("bf16", 8, 96, 32)
    router = RouterWeights(random(8, 96).bfloat16(), None, MoEConfig(8, 2, 32))
    x, residual = (random(1, 96, dtype=torch.bfloat16) for _ in range(2))
    ops = TritonOps()
    weight = random(96, dtype=torch.bfloat16)
    rows, _ = ops.add_norm(x, residual, weight, 1e-6)
    pending, _ = ops.add_norm_for_router(x, residual, weight, 1e-6)
    assert isinstance(pending, PendingNorm)

    def too_early(norm: PendingNorm) -> None:
        raise AssertionError("the norm was asked for before the router ran")

    pending.compute = too_early
    layer: Any = SimpleNamespace(
        ops=ops, router=router, shared=None, exchange=SimpleNamespace(experts=w)
    )
    found = MoE.forward(layer, pending, SINGLE_LAYOUT)
    assert torch.equal(summed(found), ops.routed_experts(rows, router, w))


def test_a_pending_norm_is_computed_at_its_first_use() -> None:
    x, residual = (random(2, 96, dtype=torch.bfloat16) for _ in range(2))
    weight = random(96, dtype=torch.bfloat16)
    ops = TritonOps()
    rows, total = ops.add_norm(x, residual, weight, 1e-6)
    pending, later = ops.add_norm_for_router(x, residual, weight, 1e-6)
    assert torch.equal(hidden_of(pending), hidden_of(rows))
    assert torch.equal(later, total)
    router = RouterWeights(random(8, 96).bfloat16(), None, MoEConfig(8, 2, 32))
    ids, weights = ops.router(hidden_of(rows), router)
    again = _router(pending, router)
    assert torch.equal(again[0], ids)
    assert torch.equal(again[1], weights)


def test_gate_products_keep_what_bf16_cannot_hold() -> None:
    """A gate whose second and third bf16 parts matter: 1 + 2^-9 + 2^-18 times 1, all of it found
    again."""
    matrix = torch.full((16, 64), 1 + 2.0**-9 + 2.0**-18, device=DEVICE)
    x = torch.ones(9, 64, dtype=torch.bfloat16, device=DEVICE)
    assert gating.partial_logits(x, matrix).sum(0).eq(64 * (1 + 2.0**-9 + 2.0**-18)).all()


EVERY = {torch.float32: 512, torch.bfloat16: 512}


@pytest.mark.parametrize(
    ("moe", "shared"),
    zip(ROUTERS, (0, 2, 1), strict=True),
    ids=lambda value: getattr(value, "method", value),
)
def test_router_of_a_batch(moe: MoEConfig, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By either product: the same choice, weights up to the order of sums; logits are rounded
    where the router is no fp32 one."""
    x = random(11, 160, dtype=torch.bfloat16)
    bias = random(moe.num_experts) * 0.1 if moe.has_bias else None
    for fp32 in (True, False):
        moe = replace(moe, router_fp32=fp32)
        gate = random(moe.num_experts, 160).mul(0.1).to(torch.float32 if fp32 else torch.bfloat16)
        monkeypatch.setattr(gating, "TOKENS", EVERY)
        ids, weights = TritonOps().router(x, RouterWeights(gate, bias, moe, shared))
        monkeypatch.setattr(gating, "TOKENS", {})
        expected_ids, expected = TritonOps().router(x, RouterWeights(gate, bias, moe, shared))
        same = (ids == expected_ids).all(1)
        # rounded logits tie, or fall to the other side
        assert same.all() if fp32 else same.float().mean() > 0.6
        torch.testing.assert_close(
            weights[same], expected[same], rtol=1e-5 if fp32 else 2e-2, atol=1e-6
        )
        assert fp32 or torch.equal(weights, weights.bfloat16().float())


@pytest.mark.parametrize("tokens", [3, 11])
def test_gates_that_bf16_holds(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept in bf16 and give the same bits as in fp32; any other stays as it is."""
    ops = TritonOps()
    moe = ROUTERS[0]
    exact = random(16, 160).bfloat16().float()
    x = random(tokens, 160, dtype=torch.bfloat16)
    narrow = ops.prepare_router_weight(exact, torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    in_bf16 = RouterWeights(narrow, None, moe)
    in_fp32 = RouterWeights(exact, None, moe)
    for most in (EVERY, {}):
        monkeypatch.setattr(gating, "TOKENS", most)
        assert all(map(torch.equal, ops.router(x, in_bf16), ops.router(x, in_fp32)))
    for gate, dtype in (
        (exact + 2.0**-20, torch.bfloat16),
        (exact, torch.float32),
        (exact, torch.float16),
        (exact.to("meta"), torch.bfloat16),
    ):
        assert ops.prepare_router_weight(gate, dtype) is gate
    ids, _ = Ops().router(x, in_bf16)
    want, _ = Ops().router(x, in_fp32)
    assert torch.equal(ids.sort(1).values, want.sort(1).values), "logits are fp32"


def same_sorting(found: align.ExpertBlocks, want: align.ExpertBlocks) -> bool:
    """Of whatever order inside an expert's rows."""

    def rows(out: align.ExpertBlocks) -> list[tuple[int, list[int]]]:
        return [
            (slot, sorted(out.order[start + shift : stop + shift].tolist()))
            for slot, start, stop, shift in out.blocks[:, : int(out.count)].t().tolist()
        ]

    alike = torch.equal(found.blocks[:3, : int(found.count)], want.blocks[:3, : int(want.count)])
    return (
        alike
        and (found.num_picks, found.rows) == (want.num_picks, want.rows)
        and sorted(rows(found)) == sorted(rows(want))
    )


@pytest.mark.parametrize("tokens", [5, 11])
@pytest.mark.parametrize(
    ("moe", "shared"),
    [(ROUTERS[0], 0), (ROUTERS[1], 2), (ROUTERS[2], 1)],
    ids=["softmax", "two", "one"],
)
def test_the_router_sorts_pairs(tokens: int, moe: MoEConfig, shared: int) -> None:
    """The kernel for few tokens and the choice behind a product; again and again, as the
    counters come back zero."""
    slots = moe.num_experts + shared
    hidden = 160
    gate = random(moe.num_experts, hidden).mul(0.1)
    bias = random(moe.num_experts) * 0.1 if moe.has_bias else None
    down = Weight(random(slots, hidden, 32, dtype=torch.bfloat16))
    for _ in range(2):
        x = random(tokens, hidden, dtype=torch.bfloat16)
        into = align.empty_blocks(
            tokens * (moe.top_k + shared), slots, 16, down.data.device, buckets=True
        )
        if tokens <= 8:
            ids, _ = routing.router(x, RouterWeights(gate, bias, moe, shared), into=into)
        else:
            logits = gating.partial_logits(x, gate)
            ids, _ = routing.route(logits, bias, moe, shared=shared, into=into)
        assert same_sorting(into, align.moe_align_block_size(ids, slots, 16))
    assert align.zeroed_counters(ids.device, 512).eq(0).all()


@pytest.mark.parametrize(
    ("kind", "tokens", "shared"), [("bf16", 1, 1), ("bf16", 6, 0), ("fp8", 5, 1), ("fp32", 9, 2)]
)
def test_router_and_experts_in_one(
    kind: str, tokens: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-identical to the router followed by the experts, for every way of sorting."""
    moe = replace(ROUTERS[0], top_k=3)
    (hidden, inner, _) = SIZES[kind]
    slots = moe.num_experts + shared
    w = expert_weights(kind, slots, hidden, inner, shared)
    x = random(tokens, hidden, dtype=KINDS[kind])
    base = random(tokens, hidden, dtype=KINDS[kind])
    router = RouterWeights(random(moe.num_experts, hidden) * 0.3, None, moe, shared)
    ops = TritonOps()
    made = []
    plain = experts.moe_align_block_size
    monkeypatch.setattr(
        experts, "moe_align_block_size", lambda *arguments: made.append(1) or plain(*arguments)
    )
    got = ops.routed_experts(x, router, w, base)
    assert not made
    monkeypatch.setattr(experts, "SORTS_WHILE_ROUTING", False)
    expected = ops.routed_experts(x, router, w, base)
    assert bool(made) == (tokens * moe.top_k > small_batch.DIRECT_PICKS[kind])
    assert torch.equal(got, expected)
    truth = reference.experts(x, *ops.router(x, router), w) + base
    assert difference(got, truth) < LIMITS[kind]


@pytest.mark.parametrize("shared", [1, 2])
def test_ids_of_fused_shared_experts(shared: int) -> None:
    """Last, and neither scaled nor normalized with the others nor rounded."""
    moe = ROUTERS[1]
    x = random(3, 72, dtype=torch.bfloat16)
    gate = random(moe.num_experts, 72) * 0.3
    for choose in (
        lambda n: routing.route(random(3, moe.num_experts), None, moe, shared=n),
        lambda n: routing.router(x, RouterWeights(gate, None, moe, n)),
    ):
        torch.manual_seed(1)
        ids, weights = choose(0)
        torch.manual_seed(1)
        more = choose(shared)
        assert all(
            map(torch.equal, more, reference.with_shared(ids, weights, moe.num_experts, shared))
        )


@pytest.mark.parametrize("groups", [4, 8])
def test_route_orders_numbers_of_either_sign(groups: int) -> None:
    """Biases that make most of what is compared negative; groups whose number is a power of two
    or not even even."""
    moe = replace(
        ROUTERS[2],
        num_experts=24 if groups == 4 else 32,
        n_group=3 if groups == 4 else 8,
        topk_group=2,
        top_k=4,
    )
    logits = random(9, moe.num_experts) * 3
    bias = random(moe.num_experts) * 2 - 1
    ids, weights = routing.route(logits, bias, moe)
    expected_ids, expected = reference.route(logits, bias, moe)
    zero = torch.zeros_like(logits)
    torch.testing.assert_close(
        zero.scatter(1, ids, weights), zero.scatter(1, expected_ids, expected), rtol=1e-5, atol=1e-6
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_route_of_nan_stays_among_the_experts() -> None:
    """So that no kernel reads beyond their weights; and what is wrong stays visible in the
    weights."""
    for moe in ROUTERS:
        ids, weights = routing.route(
            torch.full((2, moe.num_experts), float("nan"), device=DEVICE),
            None,
            replace(moe, method="greedy"),
        )
        assert ((ids >= 0) & (ids < moe.num_experts)).all()
        assert weights.isnan().all()


def test_route_breaks_ties_by_lowest_expert() -> None:
    ids, _ = routing.route(torch.zeros(2, 16, device=DEVICE), None, ROUTERS[0])
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    logits = torch.zeros(1, 32, device=DEVICE)
    logits[0, 9] = 1
    ids, _ = routing.route(logits, torch.zeros(32, device=DEVICE), ROUTERS[2])
    assert ids.tolist() == [[9, 0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("moe", ROUTERS, ids=lambda moe: moe.method)
def test_router(moe: MoEConfig, dtype: torch.dtype) -> None:
    """Gate product and choice in one kernel equal the product followed by the choice; the
    counters are zero again."""
    moe = replace(moe, router_fp32=dtype == torch.float32)
    x = random(3, 88, dtype=torch.bfloat16)[:, :72]
    gate = (random(moe.num_experts, 72) * 0.3).to(dtype)
    bias = random(moe.num_experts) * 0.1 if moe.has_bias else None
    logits = (x.double() @ gate.double().t()).to(dtype)
    expected_ids, expected = routing.route(logits, bias, moe, rounded=torch.bfloat16)
    for _ in range(2):
        ids, weights = routing.router(x, RouterWeights(gate, bias, moe), rounded=torch.bfloat16)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=1e-2, atol=1e-6)
    assert torch.equal(weights, weights.bfloat16().float())


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(("rows", "columns", "biased"), [(19, 72, True), (32, 256, False)])
def test_small_linear(tokens: int, rows: int, columns: int, biased: bool) -> None:
    """Also from rows that do not lie side by side."""
    x = random(tokens, columns + 8, dtype=torch.bfloat16)[:, :columns]
    matrix = weight("bf16", rows, columns).data
    bias = random(rows, dtype=torch.bfloat16) if biased else None
    expected = torch.nn.functional.linear(
        x.double(), matrix.double(), None if bias is None else bias.double()
    )
    plan = gemv.SmallPlan(4, 64, 4, 2)
    assert gemv.supported(x, matrix)
    for chosen in (None, plan):
        assert difference(gemv.linear(x, matrix, bias, chosen), expected) < 1e-5
    pair = weight("bf16", 2 * rows, columns)
    wanted = reference.swiglu(reference.linear(x, pair))
    for chosen in (None, plan):
        torch.testing.assert_close(gemv.gate_up(x, pair.data, chosen), wanted, rtol=3e-2, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize(
    ("rows", "columns", "biased", "dtype"),
    [(40, 72, True, torch.bfloat16), (64, 256, False, torch.float32)],
)
def test_skinny_linear(
    tokens: int, rows: int, columns: int, biased: bool, dtype: torch.dtype
) -> None:
    """Also from rows that do not lie side by side."""
    x = random(tokens, columns + 8, dtype=dtype)[:, :columns]
    matrix = random(rows, columns, dtype=dtype)
    bias = random(rows, dtype=dtype) if biased else None
    expected = torch.nn.functional.linear(
        x.double(), matrix.double(), None if bias is None else bias.double()
    )
    assert skinny_gemm.supported(x, matrix)
    for chosen in (None, skinny_gemm.SkinnyPlan(16, 64, 4, 2)):
        out = skinny_gemm.linear(x, matrix, bias, chosen)
        assert not out.isnan().any()
        assert difference(out, expected) < 1e-5


@pytest.mark.parametrize(
    ("tokens", "product"),
    [
        (1, per_head_gemm.heads_small),
        (8, per_head_gemm.heads_small),
        (1, per_head_gemm.heads_dot),
        (3, per_head_gemm.heads_dot),
        (16, per_head_gemm.heads_dot),
    ],
)
@pytest.mark.parametrize(("nope", "value", "rank"), [(24, 20, 48), (128, 128, 384)])
def test_absorb_products(
    tokens: int, product: Callable[[Tensor, Tensor], Tensor], nope: int, value: int, rank: int
) -> None:
    """Matrices as MLA has them, views of one weight: columns side by side going in, rows side by
    side coming out."""
    up = random(3, nope + value, rank, dtype=torch.bfloat16)
    q = random(tokens, 3, nope + 16, dtype=torch.bfloat16)[..., :nope]
    latent = random(tokens, 3, rank, dtype=torch.bfloat16)
    for x, matrices in ((q, up[:, :nope]), (latent, up[:, nope:].transpose(1, 2))):
        out = product(x, matrices)
        assert out.is_contiguous()
        assert not out.isnan().any()
        assert difference(out, torch.einsum("tha,hab->thb", x.double(), matrices.double())) < 1e-5


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_heads_quantized_where_they_are_made(tokens: int, ue8m0: bool) -> None:
    latent = random(tokens, 3, 256, dtype=torch.bfloat16)
    matrices = random(3, 256, 128, dtype=torch.bfloat16)
    out = per_head_gemm.joined_heads_dot(latent, matrices, ue8m0)
    assert torch.equal(out.hidden, per_head_gemm.heads_dot(latent, matrices).flatten(1))
    made = out.quantized
    behind = quantize.quantize(out.hidden, ue8m0)
    assert powers_of_two(made.scale) == ue8m0
    assert torch.equal(made.scale, behind.scale)
    assert torch.equal(made.data.float(), behind.data.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms(dtype: torch.dtype) -> None:
    x = random(5, 200, dtype=dtype)
    residual = random(5, 200, dtype=dtype)
    factor = random(200, dtype=dtype)
    # one step of bf16 where rsqrt differs in its last bit
    close = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-5}
    torch.testing.assert_close(norm.norm(x, factor, 1e-6), reference.norm(x, factor, 1e-6), **close)
    torch.testing.assert_close(
        norm.norm(x.view(5, 4, 50), factor[:50], 1e-6),
        reference.norm(x.view(5, 4, 50), factor[:50], 1e-6),
        **close,
    )
    expected, total = reference.add_norm(x, residual, factor, 1e-6)
    got, got_total = norm.add_norm(x, residual, factor, 1e-6)
    assert torch.equal(got_total, total)
    torch.testing.assert_close(got, expected, **close)
    for how, ue8m0 in (("fp8_group", False), ("fp8_group_ue8m0", True)):
        kept, _ = norm.add_norm(x, residual, factor, 1e-6, quantize_output=how)
        assert isinstance(kept, NormOutput)
        assert torch.equal(kept.hidden, got)
        packed = quantize.quantized(kept, ue8m0)
        assert packed is kept.quantized, "made once"
        data, scale = reference.quantize_activation(kept.hidden, ue8m0)
        assert torch.equal(packed.scale, scale)
        assert torch.equal(packed.data.float(), data.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swiglu(dtype: torch.dtype) -> None:
    x = random(5, 2 * 384, dtype=dtype)
    expected = reference.swiglu(x)
    torch.testing.assert_close(
        norm.swiglu(x), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    for ue8m0 in (False, True):
        packed = norm.swiglu_fp8(x, ue8m0)
        wide = reference.quantize_activation(expected, ue8m0)
        assert (
            difference(
                packed.data.float() * packed.scale.repeat_interleave(128, 1),
                reference.dequantize_activation(*wide, torch.float32),
            )
            < 1e-5
        )


def angles(tokens: int, half: int) -> tuple[Tensor, Tensor]:
    angle = random(tokens, half) * 3
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope(interleaved: bool) -> None:
    cos, sin = angles(5, 8)
    x = random(5, 3, 40, dtype=torch.bfloat16)
    part = x[..., 24:]
    before = x[..., :24].clone()
    expected = reference.rope(part, cos, sin, interleaved)
    torch.testing.assert_close(rope_kv_write.rope(part, cos, sin, interleaved), expected)
    rope_kv_write.rope(part, cos, sin, interleaved, out=part)
    torch.testing.assert_close(part, expected)
    assert torch.equal(x[..., :24], before)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latent_epilogue(interleaved: bool, dtype: torch.dtype) -> None:
    query = 200
    rank = 64
    rotary = 16
    slots = torch.tensor([7, 3, -1, 11], device=DEVICE)
    x = random(4, query + rank + rotary, dtype=dtype)
    cos_sin = angles(4, rotary // 2)
    q_weight = random(query, dtype=dtype)
    kv_weight = random(rank, dtype=dtype)
    plane = random(3, 4, rank + rotary, dtype=dtype)
    first, latent, key = x.split((query, rank, rotary), -1)
    entries = torch.cat(
        (
            reference.norm(latent, kv_weight, 1e-6),
            reference.rope(key[:, None], *cos_sin, interleaved)[:, 0],
        ),
        -1,
    )
    expected = plane.clone()
    reference.write_cache(expected, slots[slots >= 0], entries[slots >= 0])
    places = TokenPlaces(*cos_sin, slots)
    got = rope_kv_write.latent_epilogue(x, q_weight, kv_weight, places, plane, 1e-6, interleaved)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(
        plane, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    wanted = reference.norm(first, q_weight, 1e-6)
    torch.testing.assert_close(
        got, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    for how, ue8m0 in (("fp8_group", False), ("fp8_group_ue8m0", True)):
        packed = rope_kv_write.latent_epilogue(
            x, q_weight, kv_weight, places, plane, 1e-6, interleaved, quant=how
        )
        assert isinstance(packed, Quantized)
        data, scale = reference.quantize_activation(got, ue8m0)
        assert packed.ue8m0 == ue8m0
        assert torch.equal(packed.scale, scale)
        assert torch.equal(packed.data.float(), data.float())
    assert (
        rope_kv_write.latent_epilogue(x, None, kv_weight, places, plane, 1e-6, interleaved) is None
    )
    heads = 5
    width = query // 5
    before = first.clone()
    rope_kv_write.latent_epilogue(x, None, kv_weight, places, plane, 1e-6, interleaved, heads=heads)
    turned = first.unflatten(1, (heads, width))
    was = before.unflatten(1, (heads, width))
    torch.testing.assert_close(
        turned[..., -rotary:], reference.rope(was[..., -rotary:], *cos_sin, interleaved)
    )
    assert torch.equal(turned[..., :-rotary], was[..., :-rotary])
    torch.testing.assert_close(
        plane, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_epilogue(dtype: torch.dtype) -> None:
    heads = 4
    groups = 2
    size = 32
    slots = torch.tensor([7, 3, -1, 11], device=DEVICE)
    x = random(4, (heads + 2 * groups) * size, dtype=dtype)
    cos_sin = angles(4, size // 2)
    q_weight = random(size, dtype=dtype)
    k_weight = random(size, dtype=dtype)
    planes = [random(3, 4, groups, size, dtype=dtype) for _ in range(2)]
    q, k, v = x.view(4, -1, size).split((heads, groups, groups), 1)
    q = reference.rope(reference.norm(q, q_weight, 1e-6), *cos_sin, False)
    k = reference.rope(reference.norm(k, k_weight, 1e-6), *cos_sin, False)
    expected = [plane.clone() for plane in planes]
    for plane, values in zip(expected, (k, v), strict=True):
        reference.write_cache(plane, slots[slots >= 0], values[slots >= 0])
    got = rope_kv_write.heads_epilogue(
        x, GQAWeights(q_weight, k_weight, 1e-6), TokenPlaces(*cos_sin, slots), planes
    )
    close = {
        "rtol": 2e-2 if dtype == torch.bfloat16 else 1e-4,
        "atol": 2e-2 if dtype == torch.bfloat16 else 1e-5,
    }
    torch.testing.assert_close(got, q, **close)
    torch.testing.assert_close(planes[0], expected[0], **close)
    assert torch.equal(planes[1], expected[1])


@pytest.mark.parametrize("plan", [StreamKPlan(8, 64, 4, 4, split=64), PersistentPlan(128, 4)])
def test_plans_of_hopper_alone_run_elsewhere(plan: LinearPlan) -> None:
    x = random(20, 512, dtype=torch.bfloat16)
    w = weight("fp8", 192, 512)
    assert difference(fp8_gemm.linear(x, w, plan=plan), reference.linear(x, w)) < 1e-5


@pytest.mark.parametrize(("tokens", "rows", "biased"), [(70, 192, False), (20, 130, True)])
def test_linear_in_halves(tokens: int, rows: int, biased: bool) -> None:
    """Only GPUs with bulk copies choose this kernel: here it is launched by hand."""
    x = random(tokens, 256, dtype=torch.bfloat16)
    w = weight("fp8", rows, 256)
    bias = random(rows) if biased else None
    y = torch.empty(tokens, rows, dtype=torch.bfloat16, device=DEVICE)
    fp8_gemm._launch_halves(
        quantize.quantize(x), w, bias, y, TilePlan(64, 128, 4, 2, tma=True, halves=True)
    )
    assert difference(y, reference.linear(x, w, bias)) < 1e-5


@pytest.mark.parametrize("way", ["buckets", "scan", "chunks"])
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("inner", "top_k"), [(256, 2), pytest.param(2176, 1, marks=pytest.mark.longest)]
)
def test_rows_in_the_order_of_their_experts(
    way: str,
    quantized: bool,
    ue8m0: bool,
    inner: int,
    top_k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(align, "BUCKET_PICKS", 4096 if way == "buckets" else 0)
    monkeypatch.setattr(align, "ONE_KERNEL_PICKS", 0 if way == "chunks" else 8192)
    if way == "chunks":  # several tiles a program
        monkeypatch.setattr(expert_rows, "multiprocessors", lambda device: 0)
    tokens = 80 // top_k
    slots = 6
    ids = torch.stack([torch.randperm(slots)[:top_k] for _ in range(tokens)]).int().to(DEVICE)
    ids[3] = -1
    ids[7, -1] = -1
    blocks = align.moe_align_block_size(ids, slots, 128)
    x = random(tokens, 384, dtype=torch.bfloat16)
    given = quantize.quantize(x, ue8m0) if quantized else x
    found = expert_rows.in_order(given, blocks, top_k, ue8m0)
    expected = quantize.quantize(x, ue8m0)
    assert found.ue8m0 == ue8m0
    here = int((ids >= 0).sum())
    both = random(blocks.num_picks, 2 * inner, dtype=torch.bfloat16)
    joined = expert_rows.joined(both, blocks, ue8m0)
    truth = quantize.quantize(
        torch.nn.functional.silu(both[:, :inner].float()) * both[:, inner:].float(), ue8m0
    )
    seen = 0
    for block in range(int(blocks.count)):
        expert, start, end, shift = blocks.blocks[:, block].tolist()
        for row in range(start, min(end, start + 128)):
            pick = int(blocks.order[shift + row])
            assert ids.flatten()[pick] == expert
            assert torch.equal(
                found.data[row].view(torch.uint8), expected.data[pick // top_k].view(torch.uint8)
            )
            assert torch.equal(found.scale[row], expected.scale[pick // top_k])
            assert torch.equal(
                joined.data[row].view(torch.uint8), truth.data[row].view(torch.uint8)
            )
            torch.testing.assert_close(joined.scale[row], truth.scale[row])
            seen += 1
    assert seen == here
    for behind in (found, joined):
        assert (behind.data[here:].view(torch.uint8) == 127).all(), "unused rows"
        assert behind.scale[here:].isnan().all()
