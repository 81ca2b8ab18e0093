"""Padding rows of a captured step choose no expert and read none, for every weight format and every
form of the experts' kernels; the other rows have the bits of a step without padding. Interpreted
where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.config.model import MoEConfig
from rorqual.ops.activation import PendingNorm, hidden_of
from rorqual.ops.deferred_sum import DeferredMoESum, summed
from rorqual.ops.interface import Ops
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import ExpertWeights, RouterWeights, Weight
from rorqual.ops.triton.backend import TritonOps, _router
from rorqual.ops.triton.moe import align, combine, grouped_gemm
from rorqual.ops.triton.moe import topk as routing
from rorqual.ops.triton.quantized import experts as quantized_experts
from rorqual.ops.triton.quantized.backend import QuantizedTritonOps
from rorqual.ops.triton.rowwise import norm
from tests.emulation.poison import poison
from tests.ops.triton.moe.test_triton_experts import SIZES, expert_weights, same_sorting
from tests.ops.triton.quantized import cases

pytestmark = pytest.mark.exhaustive

NAN = float("nan")
EXPERTS = 8
TOP_K = 3
MOE = MoEConfig(EXPERTS, TOP_K, 32, norm_topk_prob=True)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh storage holds NaN: results of experts that were not computed."""
    torch.manual_seed(11)
    poison(monkeypatch)


def padding(real: int, each: int = 1, first: int = 0) -> PaddedRows:
    return PaddedRows(torch.tensor([real], device=DEVICE), each, first)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@contextmanager
def reads_of(weight: Weight) -> Iterator[set[int]]:
    """The experts of a stack [experts, ...] that kernels load from, in the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    begin = weight.data.data_ptr()
    each = weight.data.stride(0) * weight.data.element_size()
    end = begin + weight.data.shape[0] * each
    found: set[int] = set()
    plain = InterpreterBuilder.create_masked_load

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        at = np.asarray(ptrs.data)[np.asarray(mask.data).astype(bool)].astype(np.int64)
        found.update(((at[(at >= begin) & (at < end)] - begin) // each).tolist())
        return plain(self, ptrs, mask, *rest)

    InterpreterBuilder.create_masked_load = load
    try:
        yield found
    finally:
        InterpreterBuilder.create_masked_load = plain


# ---- choices


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("tokens", [2, 5])
def test_padding_rows_choose_no_expert(tokens: int, shared: int) -> None:
    """One launch's arguments at every number of requests, as a replay has it: rows from number 1
    on, of requests of two rows each."""
    x = random(tokens, 96)
    w = RouterWeights(random(EXPERTS, 96), None, MOE, shared)
    ids, weights = TritonOps().router(x, w)
    assert ids.shape == (tokens, TOP_K + shared)
    padded = padding(0, each=2, first=1)
    for requests in range(5):
        padded.requests.fill_(requests)
        real = min(tokens, max(0, 2 * requests - 1))
        for ops in (TritonOps(), Ops()):
            got, scale = ops.router(x, w, padded)
            want, same = (ids, weights) if isinstance(ops, TritonOps) else ops.router(x, w)
            assert torch.equal(got[:real], want[:real])
            assert torch.equal(scale[:real], same[:real])
            assert (got[real:] == -1).all()
            assert (scale[real:] == 0).all()


@pytest.mark.parametrize("tokens", [2, 6])
def test_padding_rows_are_in_no_block(tokens: int) -> None:
    """Sorting in the router's kernel, as by a kernel of its own; no counter stays behind."""
    x = random(tokens, 96)
    w = RouterWeights(random(EXPERTS, 96), None, MOE, 1)
    slots = EXPERTS + 1
    for real in range(tokens, -1, -1):
        picks = tokens * (TOP_K + 1)
        into = align.empty_blocks(picks, slots, 16, torch.device(DEVICE), buckets=True)
        ids, _ = _router(x, w, into, padding(real))
        assert same_sorting(into, align.moe_align_block_size(ids, slots, 16))
        chosen = ids[:real].unique().tolist()
        count = int(into.count)
        assert into.blocks[0, :count].tolist() == chosen
    assert align.zeroed_counters(ids.device, 512).eq(0).all()


def test_the_norm_of_padding_rows_is_computed() -> None:
    """By the router's kernel: they go through attention like the others."""
    x, residual = random(2, 96), random(2, 96)
    scale = random(96)
    w = RouterWeights(random(EXPERTS, 96), None, MOE)
    rows, total = norm.add_norm(x, residual, scale, 1e-6)
    pending, later = TritonOps().add_norm_for_router(x, residual, scale, 1e-6)
    assert isinstance(pending, PendingNorm)
    ids, _ = _router(pending, w, padded=padding(1))
    assert ids[1].tolist() == [-1] * TOP_K
    assert torch.equal(ids[0], TritonOps().router(hidden_of(rows), w)[0][0])
    assert torch.equal(hidden_of(pending), hidden_of(rows))
    assert torch.equal(later, total)


# ---- sums


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("hidden", [256, 100])
def test_the_sum_of_a_padding_row(hidden: int, base: bool) -> None:
    """Only what is added to it, whatever lies where its experts' results would be."""
    tokens, real = 4, 3
    y = random(tokens * TOP_K, hidden)
    y[real * TOP_K :] = NAN
    beside = random(tokens, hidden) if base else None
    shares = torch.rand(tokens, TOP_K, device=DEVICE)
    shares[real:] = 0
    residual, weight = random(tokens, hidden), random(hidden)
    found = []
    for padded in (None, padding(real)):
        gave = DeferredMoESum(y, None, shares, beside, combine.combine, padded)
        out, total = combine.combine_add_norm(gave, residual, weight, 1e-6)
        found.append((gave.total(), hidden_of(out), total))
        if padded is not None:
            left = torch.zeros_like(residual[real:]) if beside is None else beside[real:]
            assert torch.equal(found[1][0][real:], left)
            want = norm.add_norm(gave.total(), residual, weight, 1e-6)
            assert torch.equal(hidden_of(out), hidden_of(want[0]))
            assert torch.equal(total, want[1])
    assert all(torch.equal(a[:real], b[:real]) for a, b in zip(*found, strict=True))
    assert not any(part.isnan().any() for part in found[1])


# ---- experts


def int4_apart(slots: int, hidden: int, inner: int, shared: int) -> ExpertWeights:
    """int4 with zero points as loaded, for the kernels beside those of ops/triton/quantized."""
    more: dict[str, Any] = {"group": 32, "zero": True}
    return ExpertWeights(
        cases.weight("int4", "wide", slots, 2 * inner, hidden, **more),
        cases.weight("int4", "wide", slots, hidden, inner, **more),
        shared,
    )


QUANTIZED = {
    "int8": ("int8", "int8_token", (160, 96), {}),
    "int8 blocks": ("int8", "int8_group", (256, 128), {"group": 128, "share": 128}),
    "int4 turned": ("int4", "wide", (256, 128), {"group": 128}),
    "int4 zero points": ("int4", "wide", (192, 64), {"group": 32, "zero": True}),
    "int4 fp8 rows": ("int4", "fp8_token", (128, 192), {"group": 64}),
    "fp8 rows": ("fp8", "fp8_token", (128, 96), {}),
}


def made(kind: str, slots: int, shared: int) -> tuple[TritonOps, ExpertWeights, int]:
    """(ops, weights, hidden)"""
    if kind in QUANTIZED:
        name, activation, (hidden, inner), more = QUANTIZED[kind]
        plain = ExpertWeights(
            cases.weight(name, activation, slots, 2 * inner, hidden, **more),
            cases.weight(name, activation, slots, hidden, inner, **more),
        )
        w = cases.prepared_experts(plain, DEVICE)
        w.num_fused_shared_experts = shared
        assert quantized_experts.supported(w)
        return QuantizedTritonOps(), w, hidden
    if kind == "int4":
        w = int4_apart(slots, 128, 64, shared)
        assert not quantized_experts.supported(w)
        return TritonOps(), w, 128
    hidden, inner, _ = SIZES[kind]
    return TritonOps(), expert_weights(kind, slots, hidden, inner, shared), hidden


FORMS = ("sorted by the router", "direct", "shared apart")
MORE_FORMS = ("sorted apart", "summed at once")
LONGEST = [("fp8", "direct"), ("int4", "direct"), ("int4 fp8 rows", "direct")]
KINDS = ("bf16", "fp32", "fp8", "int4", *QUANTIZED)
CASES = [
    *((kind, form) for kind in KINDS for form in FORMS if (kind, form) not in LONGEST),
    *(("bf16", form) for form in MORE_FORMS),
    *(pytest.param(*case, marks=pytest.mark.longest) for case in LONGEST),
]


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_experts_of_the_other_rows(kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rows of which four, then one, are not padding: their bits are those of all six computed,
    and weights of no other experts are read."""
    few = 1 << 20 if form == "direct" else 0
    monkeypatch.setattr(grouped_gemm, "DIRECT_PICKS", dict.fromkeys(grouped_gemm.DIRECT_PICKS, few))
    monkeypatch.setattr(quantized_experts, "DIRECT_PICKS", few)
    if form == "sorted apart":
        monkeypatch.setattr(grouped_gemm, "SORTS_WHILE_ROUTING", False)
    if form == "summed at once":
        monkeypatch.setattr(combine, "NORM_SUMS_TOKENS", 0)
    if form == "shared apart":
        for name in grouped_gemm.FUSED_SHARED_TOKENS:
            monkeypatch.setitem(grouped_gemm.FUSED_SHARED_TOKENS, name, 1)
    shared = 1
    tokens = 6
    ops, w, hidden = made(kind, EXPERTS + shared, shared)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    x, base = random(tokens, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype)
    router = RouterWeights(random(EXPERTS, hidden, dtype=dtype), None, MOE, shared)
    whole = summed(ops.experts_deferred(x, router, w, base))
    assert not whole.isnan().any()
    ids, _ = ops.router(x, router)
    padded = padding(0)
    for real in (4, 1):
        padded.requests.fill_(real)
        with reads_of(w.gate_up) as up, reads_of(w.down) as down:
            found = ops.experts_deferred(x, router, w, base, padded)
        got = summed(found)
        assert torch.equal(got[:real], whole[:real])
        if form == "shared apart":
            assert not got.isnan().any()
        else:
            assert torch.equal(got[real:], base[real:])
        if DEVICE == "cpu":
            # a dense layer has all rows
            apart = {EXPERTS} if form == "shared apart" else set()
            assert up - apart == down - apart == set(ids[:real].unique().tolist()) - apart
        again, _ = ops.add_norm(got, base, torch.ones_like(base[0]), 1e-6)
        if isinstance(found, DeferredMoESum):
            joint, _ = ops.sum_add_norm(found, base, torch.ones_like(base[0]), 1e-6)
            assert torch.equal(hidden_of(joint), hidden_of(again))


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_step_of_padding_alone(kind: str) -> None:
    """As while capturing, and on a data-parallel rank without requests."""
    for tokens in (1, 9):
        ops, w, hidden = made(kind, EXPERTS + 1, 1)
        x = random(tokens, hidden)
        router = RouterWeights(random(EXPERTS, hidden), None, MOE, 1)
        with reads_of(w.gate_up) as up, reads_of(w.down) as down:
            got = summed(ops.experts_deferred(x, router, w, None, padding(0)))
        assert not got.any()
        assert not up
        assert not down


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4 turned"])
def test_replays_of_a_graph(kind: str) -> None:
    """One graph at other numbers of requests."""
    for tokens in (2, 6):
        ops, w, hidden = made(kind, EXPERTS + 1, 1)
        x, base = random(tokens, hidden), random(tokens, hidden)
        router = RouterWeights(random(EXPERTS, hidden), None, MOE, 1)
        want = summed(ops.experts_deferred(x, router, w, base))
        padded = padding(0)
        summed(ops.experts_deferred(x, router, w, base, padded))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = summed(ops.experts_deferred(x, router, w, base, padded))
        for real in (tokens - 1, tokens, 0, 1):
            padded.requests.fill_(real)
            graph.replay()
            assert torch.equal(got[:real], want[:real])
            assert torch.equal(got[real:], base[real:])


def test_ids_without_an_expert_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer with a load recorder or a slot map gives its experts: no routers' blocks."""
    monkeypatch.setattr(grouped_gemm, "DIRECT_PICKS", dict.fromkeys(grouped_gemm.DIRECT_PICKS, 0))
    ops, w, hidden = made("bf16", EXPERTS, 0)
    x = random(6, hidden)
    router = RouterWeights(random(EXPERTS, hidden), None, MOE)
    want = ops.experts(x, *ops.router(x, router), w)
    got = ops.experts(x, *ops.router(x, router, padding(4)), w)
    assert torch.equal(got[:4], want[:4])
    assert not got[4:].any()


def test_steps_that_are_not_captured_have_no_count() -> None:
    """They compile kernels without the count, and load nothing more."""
    from rorqual.ops.triton.runtime import padding as arguments

    assert arguments.padding(None) == (None, None, None)
    padded = padding(3, 2, 1)
    assert arguments.padding(padded) == (padded.requests, 2, 1)
    logits = random(3, EXPERTS, dtype=torch.float32)
    ids, _ = routing.route(logits, None, MOE)
    assert (ids >= 0).all()
