"""The emulation's kernels beside torch_npu's Meta kernels, plain float64 formulas, wrong calls."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch

pytest.importorskip("torch_npu")

import torch.multiprocessing as mp

from tests.emulation import npu_ops
from tests.emulation.npu_ops import NpuOpError, core

npu_ops.install()

BF16 = torch.bfloat16
OPS = torch.ops.npu


def bf(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(BF16)


def ints(*shape: int) -> torch.Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int8)


def agree(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel's shapes are the Meta kernel's, and its schema's marks hold."""
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.default, args, kwargs, test_utils=utils)
    return op(*args, **kwargs)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-2) -> None:
    limit = tolerance * max(float(wanted.abs().max()), 1e-6)
    assert float((found.double() - wanted.double()).abs().max()) <= limit


def wrong(op: Any, parameter: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(NpuOpError, match=parameter):
        op(*args, **kwargs)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def norm64(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma.double()


def test_norms_and_swiglu() -> None:
    x, other, gamma = bf(3, 7168), bf(3, 7168), bf(7168)
    close(agree(OPS.npu_rms_norm, x, gamma, 1e-6)[0], norm64(x, gamma, 1e-6))
    y, _, total = agree(OPS.npu_add_rms_norm, x, other, gamma, 1e-6)
    close(y, norm64(x.double() + other.double(), gamma, 1e-6))
    close(total, x.double() + other.double())
    wrong(OPS.npu_rms_norm, "gamma", x, gamma[:-1])
    wrong(OPS.npu_rms_norm, "input", x.to(torch.int32), gamma)
    wrong(OPS.npu_add_rms_norm, "x2", x, other[:2], gamma)
    wrong(OPS.npu_add_rms_norm, "x2", x, other.half(), gamma)
    a, b = x.double().chunk(2, -1)
    close(agree(OPS.npu_swiglu, x), a * a.sigmoid() * b)
    wrong(OPS.npu_swiglu, "input", bf(3, 7))
    wrong(OPS.npu_swiglu, "dim", x, 2)


def halves(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def table(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.cat((angle, angle), -1)
    return both.cos().to(BF16), both.sin().to(BF16)


def test_rotations() -> None:
    angle = torch.rand(5, 1, 32, dtype=torch.float64)
    cos, sin = table(angle)
    q, k = bf(5, 8, 64), bf(5, 1, 64)
    turned = agree(OPS.npu_apply_rotary_pos_emb, q, k, cos, sin, "TND")
    close(turned[0], halves(q, angle))
    close(turned[1], halves(k, angle))
    wrong(OPS.npu_apply_rotary_pos_emb, "layout", q, k, cos, sin, "BSH")
    wrong(OPS.npu_apply_rotary_pos_emb, "rotary_mode", q, k, cos, sin, "TND", "interleave")
    four = (q.unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0))
    close(agree(OPS.npu_rotary_mul, *four)[0], halves(q, angle))
    wrong(OPS.npu_rotary_mul, "rotary_mode", *four, "other")
    wrong(OPS.npu_rotary_mul, "input", q, cos, sin)
    x = bf(1, 8, 5, 64)
    rows = [t.view(1, 1, 5, 64) for t in (cos, sin)]
    sorted_ = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    close(agree(OPS.npu_interleave_rope, x, *rows), halves(sorted_, angle.view(1, 1, 5, 32)))
    wrong(OPS.npu_interleave_rope, "x", x[..., :32].contiguous(), *rows)
    wrong(OPS.npu_interleave_rope, "x", x.float(), *rows)


def test_quantised_products() -> None:
    x = bf(4, 7168)
    values, scale = agree(OPS.npu_dynamic_quant, x)
    close(values.double() * scale.double().unsqueeze(1), x, 5e-3)
    wrong(OPS.npu_dynamic_quant, "input", x.float())
    wrong(OPS.npu_dynamic_quant, "smooth_scales", x, smooth_scales=bf(7))
    w, channel = ints(7168, 64), torch.rand(64)
    whole = values.double() @ w.double()
    options: dict[str, Any] = {"pertoken_scale": scale, "output_dtype": BF16}
    out = agree(OPS.npu_quant_matmul, values, w, channel, **options)
    close(out, whole * scale.double().unsqueeze(1) * channel.double())
    exact = OPS.npu_quant_matmul(values, w, channel, output_dtype=torch.int32)
    assert torch.equal(exact.double(), whole)
    wrong(OPS.npu_quant_matmul, "x1", x, w, channel, **options)
    wrong(OPS.npu_quant_matmul, "x2", values, w[:-1], channel, **options)
    wrong(OPS.npu_quant_matmul, "scale", values, w, channel[:-1], **options)
    both = {"weight_scale": channel.view(1, 64), "activation_scale": scale, "quant_mode": 1}
    back, found = agree(OPS.npu_dequant_swiglu_quant, exact, activate_left=True, **both)
    a, b = (whole * scale.double().unsqueeze(1) * channel.double()).chunk(2, -1)
    close(back.double() * found.double().unsqueeze(1), a * a.sigmoid() * b, 1e-2)
    wrong(OPS.npu_dequant_swiglu_quant, "weight_scale", exact, quant_mode=1)
    wrong(OPS.npu_dequant_swiglu_quant, "quant_mode", exact, weight_scale=both["weight_scale"])


def test_int4_products_and_batches() -> None:
    raw = torch.randint(-8, 8, (256, 64), dtype=torch.int32)
    packed = OPS.npu_convert_weight_to_int4pack(raw)
    assert torch.equal(core.unpack_int4(packed).to(torch.int32), raw)
    wrong(OPS.npu_convert_weight_to_int4pack, "weight", raw + 8)
    x, scales, offset = bf(3, 256), bf(4, 64), bf(4, 64)
    plain = (
        raw.double() + offset.double().repeat_interleave(64, 0)
    ) * scales.double().repeat_interleave(64, 0)
    out = agree(OPS.npu_weight_quant_batchmatmul, x, packed, scales, offset, None, None, None, 64)
    close(out, x.double() @ plain)
    wrong(OPS.npu_weight_quant_batchmatmul, "antiquant_scale", x, packed, scales)
    wrong(OPS.npu_weight_quant_batchmatmul, "weight", x[:, 1:], packed, scales)
    grouped = OPS.npu_grouped_matmul(
        [x],
        [packed.unsqueeze(0)],
        antiquant_scale=[scales.unsqueeze(0)],
        antiquant_offset=[offset.unsqueeze(0)],
        group_list=torch.tensor([3]),
        group_type=0,
        group_list_type=1,
        split_item=2,
    )[0]
    close(grouped, x.double() @ plain)
    q, w = bf(5, 4, 128), bf(4, 128, 512)
    turns = {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}
    product = agree(OPS.npu_transpose_batchmatmul, q, w, **turns)
    close(product, torch.einsum("tnd,ndl->tnl", q.double(), w.double()))
    wrong(OPS.npu_transpose_batchmatmul, "weight", q, w[:, 1:], **turns)
    wrong(OPS.npu_transpose_batchmatmul, "input", q.float().int(), w, **turns)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_grouped_matmul(kind: int) -> None:
    counts = torch.tensor([2, 0, 3])
    lists = [counts.cumsum(0), counts, torch.tensor([[0, 2], [2, 3], [0, 0]])]
    x, w = bf(7, 2048), bf(3, 2048, 64)
    owner = torch.tensor([0, 0, 2, 2, 2])
    same = {"group_type": 0, "split_item": 2, "group_list_type": kind}
    good: dict[str, Any] = same | {"group_list": lists[kind]}
    out = agree(OPS.npu_grouped_matmul, [x], [w], **good)[0]
    close(out[:5], torch.einsum("mk,mkn->mn", x[:5].double(), w.double()[owner]))
    q, qw = ints(7, 2048), ints(3, 2048, 64)
    whole = torch.einsum("mk,mkn->mn", q[:5].double(), qw.double()[owner])
    exact = agree(OPS.npu_grouped_matmul, [q], [qw], **good, output_dtype=torch.int32)[0]
    assert torch.equal(exact[:5].double(), whole)
    scale, token = bf(3, 64).abs(), torch.rand(7)
    scaled = good | {"scale": [scale], "per_token_scale": [token], "output_dtype": BF16}
    found = agree(OPS.npu_grouped_matmul, [q], [qw], **scaled)[0]
    close(found[:5], whole * scale.double()[owner] * token[:5].double().unsqueeze(1))
    wrong(OPS.npu_grouped_matmul, "weight", [x], [w[:, 1:]], **good)
    wrong(OPS.npu_grouped_matmul, "group_list", [x[:4]], [w], **good)
    wrong(OPS.npu_grouped_matmul, "group_type", [x], [w], group_list=counts, split_item=2)


@pytest.mark.parametrize("mode", [0, 1])
def test_gating(mode: int) -> None:
    x, bias = torch.randn(6, 256), torch.rand(256)
    groups = {"k_group": 4, "group_count": 8, "group_select_mode": mode}
    options: dict[str, Any] = groups | {"bias": bias, "norm_type": 1}
    weight, ids, full = agree(
        OPS.npu_moe_gating_top_k, x, 8, **options, out_flag=True, routed_scaling_factor=2.5
    )
    scores = x.double().sigmoid()
    for t in range(6):
        choice = (scores[t] + bias.double()).view(8, 32)
        rank = choice.topk(mode + 1, -1).values.sum(-1)
        kept = set(rank.topk(4).indices.tolist())
        wanted = (scores[t] + bias.double()).argsort(descending=True).tolist()
        wanted = [e for e in wanted if e // 32 in kept][:8]
        assert ids[t].tolist() == wanted
        picked = scores[t][wanted]
        close(weight[t], picked / picked.sum() * 2.5, 1e-5)
    close(full, scores, 1e-5)
    wrong(OPS.npu_moe_gating_top_k, "bias", x, 8, bias=bias[1:])
    wrong(OPS.npu_moe_gating_top_k, "k", x, 129, **options)
    wrong(OPS.npu_moe_gating_top_k, "group_count", x, 8, group_count=7)


def expert_step(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> Any:
    out = torch.einsum("th,tkhn->tkn", x.double(), w.double()[ids.long()])
    return (out * weight.double().unsqueeze(-1)).sum(1)


def test_routing_of_both_versions() -> None:
    x, w = bf(5, 256), bf(16, 256, 256, scale=0.1)
    weight, ids, row_idx = agree(OPS.npu_moe_gating_top_k_softmax, bf(5, 16), None, 4)
    wanted = expert_step(x, weight, ids, w)
    expanded, slots, experts = OPS.npu_moe_init_routing(x, row_idx, ids, 5)
    ends = agree(OPS.npu_moe_compute_expert_tokens, experts, 16)
    same = {"group_type": 0, "split_item": 2}
    y = OPS.npu_grouped_matmul([expanded], [w], group_list=ends.long(), **same)[0]
    out = agree(OPS.npu_moe_finalize_routing, y, None, None, None, weight, slots, ids, 0)
    close(out, wanted, 2e-2)
    options: dict[str, Any] = {"expert_num": 16, "expert_tokens_num_flag": True}
    options |= {"expert_tokens_num_type": 1, "active_num": 20}
    total = torch.zeros(5, 256)
    for start in (0, 8):
        part = options | {"active_expert_range": [start, start + 8]}
        found = agree(OPS.npu_moe_init_routing_v2, x, ids, **part)
        pairs = OPS.npu_moe_init_routing_v2(x, ids, **(part | {"expert_tokens_num_type": 2}))[2]
        assert int(pairs[:, 1].sum()) == int(found[2].sum())
        local = w[start : start + 8]
        y = OPS.npu_grouped_matmul(
            [found[0]], [local], group_list=found[2], group_list_type=1, **same
        )[0]
        args = (y, None, None, None, weight, found[1], ids, 2)
        total += OPS.npu_moe_finalize_routing(*args).float()
    close(total, wanted, 2e-2)
    wrong(OPS.npu_moe_init_routing_v2, "active_expert_range", x, ids, **options)
    whole = options | {"active_expert_range": [0, 16]}
    wrong(OPS.npu_moe_init_routing_v2, "expert_idx", x, ids.long(), **whole)
    wrong(OPS.npu_moe_init_routing_v2, "expert_idx", x, ids + 16, **whole)
    wrong(OPS.npu_moe_init_routing, "row_idx", x, row_idx.view(4, 5).t().reshape(5, 4), ids, 5)
    wrong(OPS.npu_moe_compute_expert_tokens, "sorted", experts.flip(0), 16)
    wrong(OPS.npu_moe_finalize_routing, "scales", y, None, None, None, weight.float(), slots, ids)


def test_re_routing() -> None:
    counts = torch.tensor([[1, 2], [0, 2]])
    tokens = bf(5, 64)
    moved, _, index, total = agree(OPS.npu_moe_re_routing, tokens, counts)
    assert index.tolist() == [0, 1, 2, 3, 4]
    assert total.tolist() == [1, 4]
    assert torch.equal(moved, tokens)
    wrong(OPS.npu_moe_re_routing, "expert_token_num_per_rank", tokens[1:], counts)
    wrong(OPS.npu_moe_re_routing, "idx_type", tokens, counts, idx_type=1)


def attend64(q: Any, k: Any, v: Any, scale: float, causal: bool) -> torch.Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1).double(), v.repeat_interleave(repeat, 1).double()
    scores = torch.einsum("snd,lnd->nsl", q.double(), k) * scale
    if causal:
        hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
        scores = scores.masked_fill(hidden.triu(k.shape[0] - q.shape[0] + 1), float("-inf"))
    return torch.einsum("nsl,lnd->snd", scores.softmax(-1), v)


MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def test_attention_of_prefill() -> None:
    q, k, v = bf(9, 8, 128), bf(9, 2, 128), bf(9, 2, 128)
    same: dict[str, Any] = {"num_query_heads": 8, "num_key_value_heads": 2, "softmax_scale": 0.1}
    same |= {"input_layout": "TND", "sparse_mode": 3}
    good = same | {"atten_mask": MASK, "actual_seq_qlen": [4, 9], "actual_seq_kvlen": [4, 9]}
    out = agree(OPS.npu_fused_infer_attention_score_v2, q, k, v, **good)[0]
    for a, b in ((0, 4), (4, 9)):
        close(out[a:b], attend64(q[a:b], k[a:b], v[a:b], 0.1, True))
    tensors = good | {n: torch.tensor(good[n]) for n in ("actual_seq_qlen", "actual_seq_kvlen")}
    other = torch.ops.air.npu_fused_infer_attention_score_v2(q, k, v, **tensors)[0]
    assert torch.equal(other, out)
    score = OPS.npu_fused_infer_attention_score_v2
    wrong(score, "actual_seq_qlen", q, k, v, **(good | {"actual_seq_qlen": [4, 5]}))
    wrong(score, "atten_mask", q, k, v, **(good | {"atten_mask": MASK.t().contiguous()}))
    wrong(score, "atten_mask", q, k, v, **(good | {"atten_mask": None}))
    wrong(score, "num_key_value_heads", q, k, v, **(good | {"num_key_value_heads": 0}))
    wrong(score, "key", q, k.transpose(0, 1), v, **good)


def latent_case(nz: bool) -> tuple[Any, ...]:
    c, r = bf(4, 128, 1, 512), bf(4, 128, 1, 64)
    kept = {"num_query_heads": 16, "num_key_value_heads": 1, "softmax_scale": 0.05}
    kept |= {"block_size": 128, "input_layout": "TND_NTD", "sparse_mode": 3, "atten_mask": MASK}
    kept |= {"actual_seq_qlen": [2, 4], "actual_seq_kvlen": [130, 7]}
    kept |= {"block_table": torch.tensor([[2, 0], [3, 0]], dtype=torch.int32)}
    pages = [c.view(4, 1, 128, 512), r.view(4, 1, 128, 64)]
    if nz:
        pages = [p.unflatten(-1, (-1, 16)).permute(0, 1, 3, 2, 4).contiguous() for p in pages]
    return c.flatten(0, 2), r.flatten(0, 2), pages, kept


@pytest.mark.parametrize("nz", [False, True])
def test_latent_attention_over_pages(nz: bool) -> None:
    c, r, (pages, ropes), options = latent_case(nz)
    q, q_rope = bf(4, 16, 512), bf(4, 16, 64)
    score = OPS.npu_fused_infer_attention_score_v2
    rope: dict[str, Any] = {"query_rope": q_rope, "key_rope": ropes}
    out = score(q, pages, pages, **rope, **options)[0]
    assert tuple(out.shape) == (16, 4, 512)
    at = torch.cat((torch.arange(256, 384), torch.arange(0, 2)))
    for rows, slots in ((slice(0, 2), at), (slice(2, 4), torch.arange(384, 391))):
        key = torch.cat((c[slots], r[slots]), -1).unsqueeze(1)
        query = torch.cat((q[rows], q_rope[rows]), -1)
        wanted = attend64(query, key, c[slots].unsqueeze(1), 0.05, True)
        close(out.transpose(0, 1)[rows], wanted)
    wrong(score, "key_rope", q, pages, pages, query_rope=q_rope, **options)
    table_ = {"block_table": options["block_table"].long()}
    wrong(score, "block_table", q, pages, pages, **rope, **(options | table_))
    wrong(score, "kvlen", q, pages, pages, **rope, **(options | {"actual_seq_kvlen": [257, 7]}))
    wrong(
        score,
        "sparse_mode",
        q,
        pages,
        pages,
        **rope,
        **(options | {"sparse_mode": 0, "atten_mask": None}),
    )


@pytest.mark.parametrize("quantised", [False, True])
def test_prolog_and_int8_attention(quantised: bool) -> None:
    heads, t = 2, 3
    gammas = (bf(1536), bf(512))
    angle = torch.rand(t, 32, dtype=torch.float64)
    cos, sin = table(angle)
    make = ints if quantised else bf
    plain = [make(7168, 1536), make(1536, heads * 192), make(7168, 576)]
    dq, uq, dkv = (OPS.npu_format_cast(w, 29) for w in plain)
    uk = bf(heads, 128, 512, scale=0.05)
    x = make(t, 7168)
    cache = torch.zeros(2, 128, 1, 512, dtype=torch.int8 if quantised else BF16)
    ropes = torch.zeros(2, 128, 1, 64, dtype=BF16)
    slots = torch.tensor([5, 200, 17])
    options: dict[str, Any] = {"cache_index": slots, "cache_mode": "PA_NZ"}
    names = ("dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")
    sizes = [torch.rand(1, w.shape[1]) * 1e-3 + 1e-3 for w in plain]
    one = torch.rand(t, 1) * 1e-2 + 1e-2
    if quantised:
        modes = ("kv_cache_quant_mode", "query_quant_mode")
        options |= dict(zip(names, sizes, strict=True)) | dict.fromkeys(modes, 1)
        options |= {"dequant_scale_x": one, "weight_quant_mode": 2}
        options |= {"quant_scale_ckv": torch.full((1,), 30.0)}
    args = (x, dq, uq, uk, dkv, *gammas, sin, cos, cache, ropes)
    query, q_rope, q_scale, _, _ = OPS.npu_mla_prolog_v3(*args, **options)
    wide = [w.double() for w in plain]
    hidden = x.double()
    if quantised:
        wide = [w * s.double() for w, s in zip(wide, sizes, strict=True)]
        hidden = hidden * one.double()
    q = (norm64(hidden @ wide[0], gammas[0], 1e-5) @ wide[1]).view(t, heads, 192)
    absorbed = torch.einsum("thd,hdl->thl", q[..., :128], uk.double())
    found = query.double() * q_scale.double() if quantised else query
    close(found, absorbed, 3e-2)
    pairs = torch.cat((q[..., 128::2], q[..., 129::2]), -1)
    close(q_rope, halves(pairs, angle.unsqueeze(1)), 3e-2)
    kept = norm64((hidden @ wide[2])[:, :512], gammas[1], 1e-5)
    lane = 32 if quantised else 16
    stored = cache.view(2, 512 // lane, 128, lane).permute(0, 2, 1, 3).reshape(256, 512)[slots]
    close(
        stored.double() / (30.0 if quantised else 1.0),
        kept.clamp(-4.2, 4.2) if quantised else kept,
        2e-2,
    )
    wrong(OPS.npu_mla_prolog_v3, "weight_dq", x, dq.clone(), *args[2:], **options)
    wrong(OPS.npu_mla_prolog_v3, "cache_index", *args, **(options | {"cache_index": slots + 256}))
    wrong(OPS.npu_mla_prolog_v3, "cache_mode", *args, **(options | {"cache_mode": "PA"}))
    if not quantised:
        return
    pages = cache.view(2, 1, 16, 128, 32)
    kr = ropes.view(2, 1, 4, 128, 16)
    table_ = torch.tensor([[0], [1], [0]], dtype=torch.int32)
    rules: dict[str, Any] = {"num_query_heads": heads, "num_key_value_heads": 1}
    rules |= {"query_rope": q_rope, "key_rope": kr, "block_table": table_, "block_size": 128}
    rules |= {"actual_seq_qlen": [1, 2, 3], "actual_seq_kvlen": [6, 73, 18]}
    rules |= {"input_layout": "TND_NTD", "query_quant_mode": 3, "dequant_scale_query": q_scale}
    per = {n: torch.full((1,), 1 / 30.0) for n in ("dequant_scale_key", "dequant_scale_value")}
    out = OPS.npu_fused_infer_attention_score_v2(query, pages, pages, **rules, **per)[0]
    flat = cache.view(2, 16, 128, 32).permute(0, 2, 1, 3).reshape(256, 1, 512).double() / 30
    turned = ropes.view(2, 4, 128, 16).permute(0, 2, 1, 3).reshape(256, 1, 64).double()
    key = torch.cat((flat, turned), -1)[128:201]
    whole = torch.cat((found[1:2], q_rope[1:2].double()), -1)
    close(out[:, 1:2].transpose(0, 1), attend64(whole, key, flat[128:201], 1.0, False), 2e-2)
    wrong(OPS.npu_fused_infer_attention_score_v2, "dequant_scale", query, pages, pages, **rules)


@pytest.mark.parametrize("mode", ["PA_BNSD", "PA_NZ"])
def test_norm_rotation_and_cache(mode: str) -> None:
    kv, gamma = bf(4, 1, 1, 576), bf(512)
    angle = torch.rand(4, 1, 1, 32, dtype=torch.float64)
    cos, sin = table(angle)
    k, c = torch.zeros(2, 16, 1, 64, dtype=BF16), torch.zeros(2, 16, 1, 512, dtype=BF16)
    slots = torch.tensor([3, 31, 0, -1])
    options: dict[str, Any] = {"cache_mode": mode, "is_output_kv": True, "epsilon": 1e-6}
    op = OPS.npu_kv_rmsnorm_rope_cache_v2
    rope, latent = agree(op, kv, gamma, cos, sin, slots, k, c, **options)
    close(latent, norm64(kv[..., :512], gamma, 1e-6))
    close(rope, halves(torch.cat((kv[..., 512::2], kv[..., 513::2]), -1), angle))
    page = c.view(2, 32, 16, 16).permute(0, 2, 1, 3) if mode == "PA_NZ" else c
    assert torch.equal(page.reshape(32, 512)[slots[:3]], latent[:3].reshape(3, 512))
    wrong(op, "index", kv, gamma, cos, sin, slots.int(), k, c, **options)
    wrong(op, "index", kv, gamma, cos, sin, slots + 1, k, c, **options)
    wrong(op, "k_cache", kv, gamma, cos, sin, slots, c, k, **options)


def test_scatter_and_prefetch() -> None:
    cache, rows = bf(8, 1, 512), bf(2, 1, 512)
    OPS.npu_scatter_nd_update_(cache, torch.tensor([[7], [1]]), rows)
    assert torch.equal(cache[[7, 1]], rows)
    wrong(OPS.npu_scatter_nd_update_, "indices", cache, torch.tensor([[8], [1]]), rows)
    wrong(OPS.npu_scatter_nd_update_, "indices", cache, torch.tensor([[1], [1]]), rows)
    wrong(OPS.npu_prefetch, "max_size", cache, None, 0)


def test_float32_stands_for_bfloat16_only_inside() -> None:
    x = torch.randn(2, 3, 2048)
    wrong(OPS.npu_dynamic_quant, "input", x)
    with npu_ops.float32_stands_for_bfloat16():
        assert OPS.npu_dynamic_quant(x)[0].dtype is torch.int8
    wrong(OPS.npu_dynamic_quant, "input", x)


def exchange_case(rank: int, world: int, quant: int) -> None:
    torch.manual_seed(rank)
    x = bf(3 - rank % 2, 1024)
    rows = len(x)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(rows)]).int()
    weight = torch.rand(rows, 2)
    factors = torch.arange(1, 9).double()
    active = torch.tensor([True] * (rows - 1) + [False])
    same: dict[str, Any] = {"x_active_mask": active, "global_bs": 3 * world}
    head = ("moe", world, rank, 8)
    out, scale, info, counts, ends, _, _ = OPS.npu_moe_distribute_dispatch_v2(
        x, ids, *head, quant_mode=quant, **same
    )
    used = int(counts.sum())
    owner = torch.arange(8 // world).repeat_interleave(counts) + rank * (8 // world)
    y = out.double() * scale.double().unsqueeze(1) if quant else out.double()
    y[:used] *= factors[owner].unsqueeze(1)
    shared = bf(rows, 1024)
    back = OPS.npu_moe_distribute_combine_v2(
        y.to(BF16), ids, info, ends, weight, *head, shared_expert_x=shared, **same
    )
    wanted = x.double() * (weight.double() * factors[ids.long() - 0]).sum(1, keepdim=True)
    wanted[~active] = 0
    close(back, wanted + shared.double(), 2e-2)


def exchange_worker(rank: int, world: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    npu_ops.register_group("moe", torch.distributed.group.WORLD)
    for quant in (0, 2):
        exchange_case(rank, world, quant)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_exchange_between_processes(world: int) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(exchange_worker, args=(world, port), nprocs=world)


def test_exchange_alone() -> None:
    npu_ops.register_group("moe", None)
    for quant in (0, 2):
        exchange_case(0, 1, quant)
    x, ids = bf(2, 1024), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    agree(OPS.npu_moe_distribute_dispatch_v2, x, ids, "moe", 1, 0, 8, quant_mode=2)
    agree(OPS.npu_moe_distribute_dispatch_v2, x, ids, "moe", 1, 0, 8)
    dispatch = OPS.npu_moe_distribute_dispatch_v2
    wrong(dispatch, "expert_ids", x, ids + 5, "moe", 1, 0, 8)
    wrong(dispatch, "group_ep", x, ids, "other", 2, 0, 8)
    mask = torch.tensor([False, True])
    wrong(dispatch, "x_active_mask", x, ids, "moe", 1, 0, 8, x_active_mask=mask)
