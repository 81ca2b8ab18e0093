"""What a token's experts gave, added up by itself or in the kernel of the norm behind it: the
same bits. Interpreted where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.config.model import MoEConfig
from rorqual.ops import reference
from rorqual.ops.activation import NormOutput
from rorqual.ops.deferred_sum import DeferredMoESum, summed
from rorqual.ops.interface import Ops
from rorqual.ops.reference import ExpertWeights, RouterWeights, Weight
from rorqual.ops.triton.backend import TritonOps
from rorqual.ops.triton.moe import combine, grouped_gemm
from rorqual.ops.triton.rowwise import norm
from rorqual.ops.triton.rowwise.quantize import quantize
from rorqual.ops.triton.runtime.launch import takes_fp8
from tests.gpu.device_driver import all_logits, random_model
from tests.ops.triton.test_triton_backend import DEEPSEEK, QWEN

pytestmark = pytest.mark.exhaustive

EPS = 1e-6
NAN = float("nan")


def made(
    tokens: int, hidden: int, top_k: int, dtype: torch.dtype, base: bool, absent: bool
) -> tuple[DeferredMoESum, Tensor, Tensor]:
    """(what experts gave, residual whose rows lie apart, weight of the norm); rows of
    experts on other ranks are NaN."""
    torch.manual_seed(tokens + hidden + top_k)
    y = torch.randn(tokens * top_k, hidden).to(dtype)
    ids = None
    if absent:
        ids = torch.where(torch.rand(tokens, top_k) < 0.3, -1, torch.arange(top_k))
        y[ids.flatten() < 0] = NAN
    beside = torch.randn(tokens, hidden).to(DEVICE, dtype) if base else None
    ids = None if ids is None else ids.to(DEVICE)
    gave = DeferredMoESum(
        y.to(DEVICE), ids, torch.rand(tokens, top_k).to(DEVICE), beside, combine.combine
    )
    return (
        gave,
        torch.randn(tokens, hidden + 16).to(DEVICE, dtype)[:, :hidden],
        (torch.rand(hidden) + 0.5).to(DEVICE, dtype),
    )


def exact(gave: DeferredMoESum) -> Tensor:
    """The sum in fp64."""
    part = gave.y.double().view(gave.tokens, -1, gave.y.shape[1]) * gave.weights.double()[..., None]
    total = part.nan_to_num().sum(1)
    return total if gave.base is None else total + gave.base


SHAPES = [(2048, 8), (7168, 9), (4096, 8), (2048, 13), (72, 3), (100, 1)]  # columns and top_k


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("absent", [False, True], ids=["all here", "some absent"])
@pytest.mark.parametrize("base", [False, True], ids=["", "base"])
@pytest.mark.parametrize(("hidden", "top_k"), SHAPES)
def test_the_joint_kernel_gives_the_bits_of_the_two(
    hidden: int, top_k: int, base: bool, absent: bool, dtype: torch.dtype
) -> None:
    for tokens in (2, 7, 64, 256, 3000) if DEVICE == "cuda" else (3,):
        gave, residual, weight = made(tokens, hidden, top_k, dtype, base, absent)
        total = gave.total()
        assert total.dtype == dtype
        step = 2**-7 if dtype == torch.bfloat16 else 2**-20
        assert ((total - exact(gave)).abs() <= step * exact(gave).abs() + 1e-5).all(), (
            "the sum itself"
        )
        normed, stream = norm.add_norm(total, residual, weight, EPS)
        got, got_stream = combine.combine_add_norm(gave, residual, weight, EPS)
        assert torch.equal(got_stream, stream)
        assert torch.equal(got, normed)
        if takes_fp8(residual.device):
            how = "fp8_group_ue8m0" if base else "fp8_group"
            both, _ = combine.combine_add_norm(gave, residual, weight, EPS, quantize_output=how)
            apart, _ = norm.add_norm(total, residual, weight, EPS, quantize_output=how)
            assert isinstance(both, NormOutput)
            assert isinstance(apart, NormOutput)
            found = both.hidden
            assert torch.equal(found, apart.hidden)
            # Squares may be added in another order than without fp8, and a norm is rounded before
            # its weight and after.
            assert (
                (found.float() - normed.float()).abs() <= 2 * step * normed.float().abs() + 1e-6
            ).all()
            # by the joint kernel, by one of its own
            beside = both.quantized
            behind = quantize(found, base)
            assert torch.equal(beside.data.view(torch.uint8), behind.data.view(torch.uint8))
            assert torch.equal(beside.scale, behind.scale)


def test_no_tokens() -> None:
    gave, residual, weight = made(0, 64, 2, torch.float32, True, False)
    assert [x.shape for x in combine.combine_add_norm(gave, residual, weight, EPS)] == [(0, 64)] * 2


def test_the_definition_is_a_norm_of_the_sum() -> None:
    gave, residual, weight = made(5, 64, 3, torch.float32, True, True)
    want = reference.add_norm(gave.total(), residual, weight, EPS)
    for got, expected in zip(Ops().sum_add_norm(gave, residual, weight, EPS), want, strict=True):
        assert torch.equal(got, expected)


def test_rows_in_registers() -> None:
    """All rows of a token of the real models at once; of wide fp32 rows as many as fit; none
    if not even one does."""
    assert [combine.rows_at_once(k, s, 2) for k, s in ((8, 2048), (9, 8192), (10, 4096))] == [
        8,
        9,
        10,
    ]
    assert combine.rows_at_once(9, 8192, 4) == 3
    assert combine.rows_at_once(8, 65536, 4) == 0


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_in_a_graph_behind_the_kernels_it_waits_for() -> None:
    """Both forms replayed: dependent launches start early, and must not read what is not there
    yet."""
    gave, residual, weight = made(64, 2048, 8, torch.bfloat16, True, False)
    fresh = [torch.randn_like(gave.y) for _ in range(5)]

    def chain(joint: bool) -> list[Tensor]:
        stream = residual
        out = []
        for part in fresh:
            made = norm.norm(part, weight, EPS)  # y, by a kernel that ends just before
            given = DeferredMoESum(made, None, gave.weights, gave.base, combine.combine)
            both = TritonOps().sum_add_norm if joint else Ops.sum_add_norm.__get__(TritonOps())
            normed, stream = both(given, stream, weight, EPS)
            out += [normed, stream]
        return out

    want = chain(False)
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(20):
        graph.replay()
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)


# ---- whole models


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of the joint kernel."""
    calls: list[int] = []
    plain = combine.combine_add_norm

    def counted(gave: DeferredMoESum, *rest: Any) -> tuple[Tensor, Tensor]:
        calls.append(gave.tokens)
        return plain(gave, *rest)

    monkeypatch.setattr(combine, "combine_add_norm", counted)
    return calls


SHORT = {"vocab_size": 32, "num_hidden_layers": 2}
SPARSE = {**DEEPSEEK, **SHORT, "hidden_size": 32, "q_lora_rank": None, "first_k_dense_replace": 0}
MODELS = {
    "beside": (SPARSE, "bfloat16", False),
    "joined": (SPARSE, "float32", True),
    "none": ({**QWEN, **SHORT}, "bfloat16", True),
}
# interpreted, each takes six seconds
MODELS = MODELS if DEVICE == "cuda" else {name: MODELS[name] for name in ("beside", "none")}


@pytest.mark.longest
@pytest.mark.parametrize(("config", "dtype", "joins"), MODELS.values(), ids=MODELS)
def test_models_give_the_same_bits(
    config: dict[str, Any],
    dtype: str,
    joins: bool,
    joined: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts, then decode steps of two requests; shared experts among the others, none, and
    beside them."""
    monkeypatch.setattr(grouped_gemm, "JOINS_SHARED", joins)
    monkeypatch.setattr(grouped_gemm, "DIRECT_PICKS", dict.fromkeys(grouped_gemm.DIRECT_PICKS, 2))
    ids = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(3))
    model = random_model(config, TritonOps(), dtype, torch.device(DEVICE))
    got = all_logits(model, ids, [5], 4)
    assert joined == [9, 9, 3, 3, 2, 2], "both layers: all rows are wanted, so none are picked"
    joined.clear()
    monkeypatch.setattr(combine, "NORM_SUMS_TOKENS", 0)
    want = all_logits(model, ids, [5], 4)
    assert joined == []
    assert torch.equal(got, want)


@pytest.mark.parametrize(("most", "kind"), [(4, DeferredMoESum), (3, Tensor)])
def test_steps_of_many_tokens_are_summed_at_once(
    most: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(combine, "NORM_SUMS_TOKENS", most)
    x = torch.randn(4, 64, device=DEVICE)
    router = RouterWeights(torch.randn(8, 64, device=DEVICE), None, MoEConfig(8, 2, 32))
    w = ExpertWeights(
        Weight(torch.randn(8, 64, 64, device=DEVICE)),
        Weight(torch.randn(8, 64, 32, device=DEVICE)),
    )
    found = TritonOps().experts_deferred(x, router, w)
    assert isinstance(found, kind)
    assert torch.equal(summed(found), TritonOps().routed_experts(x, router, w))


def test_direct_kernels_do_the_sum_themselves() -> None:
    x = torch.randn(1, 64, device=DEVICE)
    router = RouterWeights(torch.randn(8, 64, device=DEVICE), None, MoEConfig(8, 2, 32))
    w = ExpertWeights(
        Weight(torch.randn(8, 64, 64, device=DEVICE)),
        Weight(torch.randn(8, 64, 32, device=DEVICE)),
    )
    assert isinstance(TritonOps().experts_deferred(x, router, w), Tensor)


@pytest.mark.parametrize("sorts", [True, False])
def test_the_norm_does_the_sum_with_any_sort(sorts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if sorting is a separate kernel."""
    monkeypatch.setattr(grouped_gemm, "SORTS_WHILE_ROUTING", sorts)
    x = torch.randn(4, 64, device=DEVICE)
    router = RouterWeights(torch.randn(8, 64, device=DEVICE), None, MoEConfig(8, 2, 32))
    w = ExpertWeights(
        Weight(torch.randn(8, 64, 64, device=DEVICE)),
        Weight(torch.randn(8, 64, 32, device=DEVICE)),
    )
    found = TritonOps().experts_deferred(x, router, w)
    assert isinstance(found, DeferredMoESum)
    ids, chosen = TritonOps().router(x, router)
    want = reference.experts(x, ids, chosen, w)
    torch.testing.assert_close(found.total(), want, rtol=1e-4, atol=1e-3)
