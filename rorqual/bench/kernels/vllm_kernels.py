"""vLLM's kernels on the data of our own cases: FlashMLA, FlashAttention 3, its Triton experts,
DeepGEMM. For `bench kernels --peer`; vllm_int4.py has those of 4-bit weights.

Written for vLLM 0.25.1, whose wheel contains all four. Each function takes one case's data and
returns a call by the number of the data set; its result is checked like ours. The engine uses
nothing from here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rorqual.errors import ConfigError
from rorqual.ops import reference
from rorqual.ops.reference import ExpertWeights, Weight

Call = Callable[[int], Tensor]


def check_installed() -> None:
    """Raises ConfigError where there is nothing to compare with."""
    if not any(importlib.util.find_spec(name) for name in ("vllm", "deep_gemm")):
        raise ConfigError(
            "--peer runs vLLM's kernels beside ours, or DeepGEMM's alone, and neither vllm "
            "nor deep_gemm is installed; for 4-bit weights a folder vllm/ on PYTHONPATH with the "
            "_C_stable_libtorch and _moe_C_stable_libtorch files of vLLM's wheel is enough"
        )


def best(
    makers: Mapping[str, Callable[[], Call]],
    measure: Callable[[Callable[[], Call]], tuple[float, float | None]],
) -> dict[str, Any]:
    """What a row says of its peers, each judged by `measure` as (us, error): peers, {name: us,
    or why it did not run}; peer_errors, {name: error}; and of the fastest peer, peer_us and
    peer_error. gpu_lost: a peer left the GPU unusable for this process. Nothing where a case has no
    peers."""
    found: dict[str, float | str] = {}
    errors: dict[str, float | None] = {}
    row: dict[str, Any] = {}
    for name, make in makers.items():
        try:
            found[name], errors[name] = measure(make)
        except Exception as problem:  # any error of the other library; ours must still be told
            found[name] = " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
            if "CUDA error" in str(problem) and not gpu_answers():
                row["gpu_lost"] = True
                break
    times = {name: us for name, us in found.items() if isinstance(us, float)}
    if found:
        row |= {"peers": found, "peer_errors": errors}
    if times:
        fastest = min(times, key=lambda name: times[name])
        row |= {"peer_us": times[fastest], "peer_error": errors[fastest]}
    return row


def gpu_answers() -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


# ---- attention: one query token a request in decode, all requests alike


def flash_mla(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, tables: Tensor, kv_lens: Tensor, scale: float
) -> Call:
    """q_latent [copies, B, H, 512], q_rope [copies, B, H, 64], cache [pages, 64, 576], tables
    [copies, B, columns] int32; [B, H, 512]."""
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    q = torch.cat((q_latent, q_rope), -1)[:, :, None]
    paged = cache[:, :, None]
    lens = kv_lens.int()
    metadata, splits = get_mla_metadata()

    def call(i: int) -> Tensor:
        out, _ = flash_mla_with_kvcache(
            q[i], paged, tables[i], lens, 512, metadata, splits, softmax_scale=scale, causal=True
        )
        return out[:, 0]

    return call


def fa3_mla(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, tables: Tensor, kv_lens: Tensor, scale: float
) -> Call:
    """The same with FlashAttention 3, which takes latent and rope parts separately."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    longest = int(kv_lens.max())
    lens = kv_lens.int()
    paged = cache[:, :, None]
    starts = torch.arange(q_latent.shape[1] + 1, dtype=torch.int32, device=cache.device)

    def call(i: int) -> Tensor:
        return flash_attn_varlen_func(
            q=q_rope[i],
            k=paged[..., 512:],
            v=paged[..., :512],
            q_v=q_latent[i],
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=longest,
            seqused_k=lens,
            block_table=tables[i],
            softmax_scale=scale,
            causal=True,
            fa_version=3,
        )

    return call


def fa3_paged(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, kv_lens: Tensor, queries: int, scale: float
) -> Call:
    """q [copies, B * queries, H, D], k and v [pages, 64, groups, D]: decode, or chunks of
    prompts over their prefix."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    longest = int(kv_lens.max())
    lens = kv_lens.int()
    starts = torch.arange(kv_lens.shape[0] + 1, dtype=torch.int32, device=k.device) * queries

    def call(i: int) -> Tensor:
        return flash_attn_varlen_func(
            q=q[i],
            k=k,
            v=v,
            max_seqlen_q=queries,
            cu_seqlens_q=starts,
            max_seqlen_k=longest,
            seqused_k=lens,
            block_table=tables[i],
            softmax_scale=scale,
            causal=True,
            fa_version=3,
        )

    return call


def fa3_dense(q: Tensor, k: Tensor, v: Tensor, requests: int, scale: float) -> Call:
    """q [copies, requests * chunk, H, D], k [copies, requests * length, groups, D], v likewise:
    bottom-right causal."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    chunk = q.shape[1] // requests
    length = k.shape[1] // requests
    order = torch.arange(requests + 1, dtype=torch.int32, device=k.device)

    def call(i: int) -> Tensor:
        return flash_attn_varlen_func(
            q=q[i],
            k=k[i],
            v=v[i],
            max_seqlen_q=chunk,
            cu_seqlens_q=order * chunk,
            max_seqlen_k=length,
            cu_seqlens_k=order * length,
            softmax_scale=scale,
            causal=True,
            fa_version=3,
        )

    return call


# ---- experts and products


def fused_experts(draws: list[tuple[Tensor, Tensor, Tensor]], w: ExpertWeights) -> Call:
    """draws: (x [T, hidden], ids [T, K], weights [T, K] fp32) by number; every id names an
    expert of this stack."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts_impl

    options: dict[str, Any] = {}
    if w.gate_up.quantized:
        options = {
            "use_fp8_w8a8": True,
            "w1_scale": w.gate_up.scale,
            "w2_scale": w.down.scale,
            "block_shape": [128, 128],
        }
    picked = [(x, weights, ids.int()) for x, ids, weights in draws]

    def call(i: int) -> Tensor:
        x, weights, ids = picked[i]
        return fused_experts_impl(x, w.gate_up.data, w.down.data, weights, ids, **options)

    return call


def deep_gemm(x: Tensor, weights: list[Weight]) -> Call:
    """x [T, columns] bf16, quantized outside the call as ours is; weights [rows, columns] fp8
    with scales of 128 x 128. DeepGEMM by itself, or the one in vLLM's wheel."""
    if importlib.util.find_spec("deep_gemm") is not None:
        from deep_gemm import fp8_gemm_nt

        product = partial(fp8_gemm_nt, disable_ue8m0_cast=True)
    else:
        from vllm.utils.deep_gemm import fp8_gemm_nt

        product = fp8_gemm_nt
    data, scale = reference.quantize_activation(x)
    packed = data, _by_columns(scale)
    out = torch.empty(x.shape[0], weights[0].data.shape[0], dtype=torch.bfloat16, device=x.device)

    def call(i: int) -> Tensor:
        product(packed, (weights[i].data, weights[i].scale), out)
        return out

    return call


def _by_columns(scale: Tensor) -> Tensor:
    """[T, blocks] fp32 in the layout for bulk copies: column-major, with 16-byte aligned
    columns."""
    tokens, blocks = scale.shape
    out = torch.empty_strided(
        (tokens, blocks), (1, -(-tokens // 4) * 4), dtype=scale.dtype, device=scale.device
    )
    return out.copy_(scale)
