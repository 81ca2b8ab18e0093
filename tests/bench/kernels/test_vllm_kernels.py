"""What `bench kernels --peer` hands to vLLM's kernels: stand-ins with their signatures compute,
from just that, what our cases expect.

A GPU with vLLM is needed to know that the real kernels take it; the stand-ins say that data,
layouts and scales mean the same.
"""

from __future__ import annotations

import itertools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rorqual.bench.kernels import attention
from rorqual.bench.kernels import gemm_and_experts as experts
from rorqual.bench.kernels import vllm_kernels as peers
from rorqual.bench.kernels.attention import attend
from rorqual.bench.kernels.gemm_and_experts import ExpertShape
from rorqual.errors import ConfigError
from rorqual.ops import reference
from rorqual.ops.reference import ExpertWeights, Weight

pytestmark = pytest.mark.exhaustive

CPU = torch.device("cpu")


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, splits, *, softmax_scale, causal
):
    """q [B, 1, H, 576], k_cache [pages, 64, 1, 576]; (out [B, 1, H, 512], lse)."""
    assert (metadata, splits, causal, head_dim_v) == ("metadata", "splits", True, 512)
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    keys = [
        k_cache[row.long()].flatten(0, 1)[:n]
        for row, n in zip(block_table, cache_seqlens, strict=True)
    ]
    return torch.stack(
        [attend(q[i], k, k[..., :512], softmax_scale) for i, k in enumerate(keys)]
    ), None


def flash_attn_varlen_func(
    *,
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    fa_version,
    cu_seqlens_k=None,
    seqused_k=None,
    block_table=None,
    q_v=None,
):
    assert causal
    assert fa_version == 3
    assert cu_seqlens_q.dtype == torch.int32
    out = []
    for i, (first, last) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
        assert last - first <= max_seqlen_q
        if block_table is None:
            keys, values = (x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]] for x in (k, v))
        else:
            keys, values = (x[block_table[i].long()].flatten(0, 1)[: seqused_k[i]] for x in (k, v))
        assert keys.shape[0] <= max_seqlen_k
        query = q[first:last]
        if q_v is not None:
            query = torch.cat((q_v[first:last], query), -1)
            keys = torch.cat((values, keys), -1)
        out.append(attend(query, keys, values, softmax_scale))
    return torch.cat(out)


def fused_experts_impl(
    x,
    w1,
    w2,
    topk_weights,
    topk_ids,
    use_fp8_w8a8=False,
    w1_scale=None,
    w2_scale=None,
    block_shape=None,
):
    assert topk_ids.dtype == torch.int32
    assert (block_shape == [128, 128]) == use_fp8_w8a8
    w = ExpertWeights(Weight(w1, w1_scale), Weight(w2, w2_scale))
    return experts.expert_truth((x, topk_ids.long(), topk_weights), torch.arange(x.shape[0]), w)


def fp8_gemm_nt(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    out: Tensor,
    disable_ue8m0_cast: bool | None = None,
) -> None:
    assert a[1].stride(0) == 1
    assert a[1].stride(1) % 4 == 0 <= a[1].stride(1) - a[1].shape[0] < 4
    x = a[0].double() * a[1].double().repeat_interleave(128, 1)
    out.copy_(x @ reference.dequantize(Weight(*b), torch.float64).t())


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, dict[str, Any]] = {
        "vllm.v1.attention.ops.flashmla": {
            "flash_mla_with_kvcache": flash_mla_with_kvcache,
            "get_mla_metadata": lambda: ("metadata", "splits"),
        },
        "vllm.vllm_flash_attn": {"flash_attn_varlen_func": flash_attn_varlen_func},
        "vllm.model_executor.layers.fused_moe.fused_moe": {
            "fused_experts_impl": fused_experts_impl
        },
        "vllm.utils.deep_gemm": {"fp8_gemm_nt": fp8_gemm_nt},
    }
    for name, members in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
            if i > 1:
                monkeypatch.setattr(
                    sys.modules[".".join(parts[: i - 1])],
                    parts[i - 1],
                    sys.modules[path],
                    raising=False,
                )
        for member, value in members.items():
            setattr(sys.modules[name], member, value)


CASES = [
    attention.mla_case(2, 150, 16),
    attention.gqa_case(3, 130),
    attention.prefill_case(2, 20, 70, 8, 4, (64, 32), True),
    attention.prefill_case(2, 20, 70, 4, 4, (48, 32), False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kernel} {case.shape}")
def test_attention_peers_compute_our_case(
    case: attention.AttentionCase, vllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ROTATE", 3 * case.bytes)
    setup = case.setup(CPU)
    assert len(setup.calls) == 3
    assert setup.peers
    for make in setup.peers.values():
        call = make()
        assert setup.error(call(0)) < 1e-6
        assert setup.error(call(2)) > 0.1, "another data set"


@pytest.mark.parametrize(("kind", "hidden", "inner"), [("bf16", 64, 32), ("fp8", 256, 128)])
def test_expert_peers_compute_our_case(kind: str, hidden: int, inner: int, vllm: None) -> None:
    setup = experts.expert_setup(ExpertShape(kind, 8, hidden, inner, 2), 4, CPU)
    assert setup.judge is not None
    call = setup.peers["vLLM"]()
    assert setup.judge(call(0)) < 1e-9
    assert setup.judge(call(1)) > 1e-3


def test_product_peers_compute_our_case(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "ROTATE", 1)
    setup = experts.linear_setup(256, 384, 5, CPU)
    assert setup.judge is not None
    assert setup.judge(setup.peers["DeepGEMM"]()(1)) < 1e-4


def test_deep_gemm_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("deep_gemm")
    library.__spec__ = ModuleSpec("deep_gemm", None)
    asked: list[bool | None] = []

    def product(*given: Any, disable_ue8m0_cast: bool | None = None) -> None:
        asked.append(disable_ue8m0_cast)
        fp8_gemm_nt(*given)

    library.fp8_gemm_nt = product  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    peers.check_installed()
    setup = experts.linear_setup(256, 384, 5, CPU)
    assert setup.judge is not None
    assert setup.judge(setup.peers["DeepGEMM"]()(1)) < 1e-4
    assert asked == [True]


def test_the_fastest_peer_is_named_and_a_broken_one_is_told() -> None:
    def broken() -> peers.Call:
        raise RuntimeError("no such\nkernel")

    times = {"slow": (9.0, 0.1), "fast": (4.0, 0.2)}
    makers: dict[str, Any] = {"slow": lambda: "slow", "broken": broken, "fast": lambda: "fast"}
    found = peers.best(makers, lambda make: times[make()])  # type: ignore[index]
    assert found == {
        "peers": {"slow": 9.0, "broken": "RuntimeError: no such kernel", "fast": 4.0},
        "peer_errors": {"slow": 0.1, "fast": 0.2},
        "peer_us": 4.0,
        "peer_error": 0.2,
    }
    assert peers.best({"broken": broken}, lambda make: times[make()]) == {
        "peers": {"broken": "RuntimeError: no such kernel"},
        "peer_errors": {},
    }  # type: ignore[index]
    assert peers.best({}, lambda make: (1.0, None)) == {}


def test_without_peers_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither vllm nor deep_gemm is installed"):
        peers.check_installed()
