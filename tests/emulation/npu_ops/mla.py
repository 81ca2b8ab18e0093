"""The fused prologue of latent attention and the fused norm, rotation and cache write."""

from __future__ import annotations

import torch

from .core import (
    BF16,
    F16,
    F32,
    I8,
    I64,
    Checks,
    _Switches,
    exact_matmul,
    quantize_rows,
    quantize_static,
    rms_norm,
    rotate_interleaved,
)

Tensor = torch.Tensor


def write_pages(cache: Tensor, slots: Tensor, values: Tensor, nz: bool) -> None:
    """cache [blocks, block, 1, D], of which NZ lays a block out as [D/16 or D/32, block, 16/32]."""
    blocks, block, _, width = cache.shape
    kept = slots >= 0
    rows, slots = values[kept], slots[kept]
    if not nz:
        cache.view(blocks * block, width)[slots] = rows
        return
    lane = 32 if cache.dtype is I8 else 16
    paged = cache.view(blocks, width // lane, block, lane)
    paged[slots // block, :, slots % block] = rows.view(-1, width // lane, lane)


def _cache_checks(c: Checks, name: str, cache: Tensor, width: int, parameter: str) -> None:
    c.rank(name, cache, 4)
    c.contiguous(name, cache)
    c.need(cache.shape[2] == 1, name, "the axis of heads must be 1")
    c.need(cache.shape[3] == width, name, f"width {cache.shape[3]}, {parameter} has {width}")


def _slot_checks(c: Checks, name: str, slots: Tensor, cache: Tensor, lowest: int) -> None:
    c.dtype(name, slots, I64)
    c.ids(name, slots, lowest, cache.shape[0] * cache.shape[1])
    c.unique(name, slots[slots >= 0])


def _kv_rmsnorm_rope_cache(
    c: Checks,
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    c_kv_scale: Tensor | None,
    epsilon: float,
    cache_mode: str,
) -> tuple[Tensor, Tensor]:
    c.choice("cache_mode", cache_mode, "Norm", "PA", "PA_BNSD", "PA_NZ")
    c.rank("kv", kv, 4)
    c.dtype("kv", kv, BF16, F16)
    batch, heads, length, width = kv.shape
    c.need(heads == 1, "kv", f"axis N is {heads}, must be 1")
    c.rank("gamma", gamma, 1)
    c.same_dtype("gamma", gamma, kv)
    latent = gamma.shape[0]
    rope = width - latent
    c.width("gamma", latent, 512)
    c.width("kv", width, 576)
    for name, x in (("cos", cos), ("sin", sin)):
        c.rank(name, x, 4)
        c.same_dtype(name, x, kv)
        c.shape(name, x, batch, 1, length, rope)
    normed = rms_norm(kv[..., :latent], gamma, epsilon)[0]
    turned = rotate_interleaved(kv[..., latent:], cos, sin).to(kv.dtype)
    _cache_checks(c, "k_cache", k_cache, rope, "kv") if cache_mode != "Norm" else None
    c.same_dtype("k_cache", k_cache, kv)
    plain = normed.to(kv.dtype)
    stored = plain
    if c_kv_scale is not None:
        c.dtype("c_kv_scale", c_kv_scale, F32)
        c.shape("c_kv_scale", c_kv_scale, latent)
        c.dtype("ckv_cache", ckv_cache, I8)
        stored = quantize_static(normed, c_kv_scale)
    else:
        c.same_dtype("ckv_cache", ckv_cache, kv)
    if cache_mode == "Norm":
        c.shape("k_cache", k_cache, batch, 1, k_cache.shape[2], rope)
        c.shape("ckv_cache", ckv_cache, batch, 1, k_cache.shape[2], latent)
        c.dtype("index", index, I64)
        c.shape("index", index, batch, length)
        c.ids("index", index, 0, k_cache.shape[2])
        for b in range(batch):
            c.unique("index", index[b])
            k_cache[b, 0, index[b]] = turned[b, 0]
            ckv_cache[b, 0, index[b]] = stored[b, 0]
        return turned, plain
    _cache_checks(c, "ckv_cache", ckv_cache, latent, "gamma")
    c.need(k_cache.shape[:2] == ckv_cache.shape[:2], "ckv_cache", "other blocks than k_cache")
    c.shape("index", index, batch * length)
    _slot_checks(c, "index", index, k_cache, -1)
    nz = cache_mode == "PA_NZ"
    if nz:
        c.need(k_cache.shape[1] % 16 == 0, "k_cache", "NZ needs blocks of a multiple of 16")
    write_pages(k_cache, index, turned.reshape(-1, rope), nz)
    write_pages(ckv_cache, index, stored.reshape(-1, latent), nz)
    return turned, plain


def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    k_rope_scale: Tensor | None = None,
    c_kv_scale: Tensor | None = None,
    k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None,
    v: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """kv [B, 1, S, 576] (512 normed, then 64 turned), gamma (512,), cos and sin [B, 1, S, 64], one
    dtype; index int64: Norm [B, S], PA, PA_BNSD and PA_NZ (B * S,); caches [blocks, block, 1, 64]
    and [blocks, block, 1, 512]; c_kv_scale (512,) float32 with an int8 ckv_cache [hia].

    The scale multiplies [reading: quantisation scales of this family do]. -1 in index writes
    nothing [reading]. The caches change in place although the schema does not say so, and are
    returned; k_rope and c_kv are undefined without is_output_kv [hia].
    """
    c = Checks("npu_kv_rmsnorm_rope_cache")
    c.absent(k_rope_scale=k_rope_scale, k_rope_offset=k_rope_offset, c_kv_offset=c_kv_offset, v=v)
    turned, plain = _kv_rmsnorm_rope_cache(
        c, kv, gamma, cos, sin, index, k_cache, ckv_cache, c_kv_scale, epsilon, cache_mode
    )
    if not is_output_kv:
        turned, plain = torch.full_like(turned, 7777.0), torch.full_like(plain, 7777.0)
    return k_cache, ckv_cache, turned, plain


def npu_kv_rmsnorm_rope_cache_v2(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    k_rope_scale: Tensor | None = None,
    c_kv_scale: Tensor | None = None,
    k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None,
    v: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    k_cache_dtype: int | None = None,
    ckv_cache_dtype: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As npu_kv_rmsnorm_rope_cache, caches marked as changed in the schema: (k_rope, c_kv)."""
    c = Checks("npu_kv_rmsnorm_rope_cache_v2")
    c.absent(k_rope_scale=k_rope_scale, k_rope_offset=k_rope_offset, c_kv_offset=c_kv_offset, v=v)
    c.absent(k_cache_dtype=k_cache_dtype, ckv_cache_dtype=ckv_cache_dtype)
    turned, plain = _kv_rmsnorm_rope_cache(
        c, kv, gamma, cos, sin, index, k_cache, ckv_cache, c_kv_scale, epsilon, cache_mode
    )
    if not is_output_kv:
        turned, plain = torch.full_like(turned, 7777.0), torch.full_like(plain, 7777.0)
    return turned, plain


def _prolog_weights(c: Checks, w: dict[str, Tensor], int8: tuple[str, ...]) -> None:
    for name in ("weight_dq", "weight_uq_qr", "weight_dkv_kr"):
        c.rank(name, w[name], 2)
        c.dtype(name, w[name], *((I8,) if name in int8 else (BF16,)))
        c.nz(name, w[name])
    c.rank("weight_uk", w["weight_uk"], 3)
    c.dtype("weight_uk", w["weight_uk"], BF16)
    heads, nope, latent = w["weight_uk"].shape
    hidden, low = w["weight_dq"].shape
    rope = w["rope_cos"].shape[-1]
    c.choice("weight_uk", heads, 1, 2, 4, 8, 16, 32, 64, 128)
    c.width("weight_dq", hidden, 7168, 7680, 6144)
    c.width("weight_dq", low, 1536)
    c.width("weight_uk", nope, 128)
    c.width("weight_uk", latent, 512)
    c.width("rope_cos", rope, 64)
    c.need(w["token_x"].shape[-1] == hidden, "token_x", f"width is not {hidden}")
    c.shape("weight_uq_qr", w["weight_uq_qr"], low, heads * (nope + rope))
    c.shape("weight_dkv_kr", w["weight_dkv_kr"], hidden, latent + rope)
    for name, width in (("rmsnorm_gamma_cq", low), ("rmsnorm_gamma_ckv", latent)):
        c.dtype(name, w[name], BF16)
        c.shape(name, w[name], width)
    for name in ("rope_sin", "rope_cos"):
        c.dtype(name, w[name], BF16)
        c.shape(name, w[name], *w["token_x"].shape[:-1], rope)


def _scale(c: Checks, name: str, scale: Tensor | None, *shape: int) -> Tensor:
    c.need(scale is not None, name, "is missing for this quantisation mode")
    assert scale is not None
    c.dtype(name, scale, F32)
    c.shape(name, scale, *shape)
    return scale


def _prolog(
    c: Checks,
    w: dict[str, Tensor],
    slots: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    s: dict[str, Tensor | None],
    epsilons: tuple[float, float],
    cache_mode: str,
    weights: int,
    kv_quant: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    c.choice("cache_mode", cache_mode, "PA_BSND", "PA_NZ")
    all_int8 = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
    token_x = w["token_x"]
    c.rank("token_x", token_x, 2, 3)
    c.dtype("token_x", token_x, I8 if weights == 2 else BF16)
    _prolog_weights(c, w, {0: (), 1: ("weight_uq_qr",), 2: all_int8}[weights])
    heads, nope, latent = w["weight_uk"].shape
    rope = w["rope_cos"].shape[-1]
    low = w["weight_dq"].shape[1]
    lead = token_x.shape[:-1]
    rows = token_x.reshape(-1, token_x.shape[-1])
    _cache_checks(c, "kv_cache", kv_cache, latent, "weight_uk")
    _cache_checks(c, "kr_cache", kr_cache, rope, "rope_cos")
    c.need(kv_cache.shape[:2] == kr_cache.shape[:2], "kr_cache", "other blocks than kv_cache")
    c.choice("kv_cache", kv_cache.shape[1], 16, 128)
    c.dtype("kv_cache", kv_cache, I8 if kv_quant else BF16)
    c.dtype("kr_cache", kr_cache, BF16)
    c.shape("cache_index", slots, *lead)
    _slot_checks(c, "cache_index", slots, kv_cache, -1)
    working = F32 if _Switches.float32 and w["weight_uk"].dtype is F32 else BF16
    if weights == 2:
        x_scale = _scale(c, "dequant_scale_x", s["dequant_scale_x"], len(rows), 1)
        dq = _scale(c, "dequant_scale_w_dq", s["dequant_scale_w_dq"], 1, low)
        kv_scale = s["dequant_scale_w_dkv_kr"]
        dkv = _scale(c, "dequant_scale_w_dkv_kr", kv_scale, 1, latent + rope)
        down = exact_matmul(rows, w["weight_dq"]).float() * dq * x_scale
        both = exact_matmul(rows, w["weight_dkv_kr"]).float() * dkv * x_scale
    else:
        for name in ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_dkv_kr"):
            c.need(s[name] is None, name, "only with int8 token_x")
        down = rows.float() @ w["weight_dq"].float()
        both = rows.float() @ w["weight_dkv_kr"].float()
    normed = rms_norm(down, w["rmsnorm_gamma_cq"], epsilons[0])[0]
    if weights:
        name = "dequant_scale_w_uq_qr"
        up = _scale(c, name, s[name], 1, heads * (nope + rope))
        smooth = s["smooth_scales_cq"]
        if smooth is not None:
            normed = normed * _scale(c, "smooth_scales_cq", smooth, 1, low)
        values, scale = quantize_rows(normed)
        query = exact_matmul(values, w["weight_uq_qr"]).float() * up * scale.unsqueeze(-1)
    else:
        c.need(s["dequant_scale_w_uq_qr"] is None, "dequant_scale_w_uq_qr", "weights are bfloat16")
        c.need(s["smooth_scales_cq"] is None, "smooth_scales_cq", "weights are bfloat16")
        query = normed.to(working).float() @ w["weight_uq_qr"].float()
    query = query.view(-1, heads, nope + rope)
    cos, sin = w["rope_cos"].reshape(-1, rope), w["rope_sin"].reshape(-1, rope)
    turned = rotate_interleaved(query[..., nope:], cos.unsqueeze(1), sin.unsqueeze(1))
    q_nope = query[..., :nope].to(working).float()
    absorbed = torch.einsum("thd,hdl->thl", q_nope, w["weight_uk"].float())
    stored = rms_norm(both[:, :latent], w["rmsnorm_gamma_ckv"], epsilons[1])[0]
    k_rope = rotate_interleaved(both[:, latent:], cos, sin).to(kr_cache.dtype)
    q_scale = None
    if kv_quant:
        name = "quant_scale_ckv"
        ckv = s[name]
        c.need(ckv is not None and ckv.numel() in (1, latent), name, "must be (1,) or (1, Hckv)")
        assert ckv is not None
        c.dtype(name, ckv, F32)
        c.need(bool((ckv == ckv.flatten()[0]).all()), name, "per-tensor mode needs one value")
        kept = quantize_static(stored, ckv.reshape(-1))
        absorbed, q_scale = quantize_rows(absorbed)
    else:
        c.need(s["quant_scale_ckv"] is None, "quant_scale_ckv", "the cache is not quantised")
        kept = stored.to(kv_cache.dtype)
        absorbed = absorbed.to(working)
    flat = slots.flatten()
    write_pages(kv_cache, flat, kept, cache_mode == "PA_NZ")
    write_pages(kr_cache, flat, k_rope, cache_mode == "PA_NZ")
    shape = (*lead, heads)
    q_rope = turned.to(working).contiguous().view(*shape, rope)
    query = absorbed.contiguous().view(*shape, latent)
    return query, q_rope, None if q_scale is None else q_scale.unsqueeze(-1)


def npu_mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    *,
    cache_index: Tensor | None = None,
    dequant_scale_x: Tensor | None = None,
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq_qr: Tensor | None = None,
    dequant_scale_w_dkv_kr: Tensor | None = None,
    quant_scale_ckv: Tensor | None = None,
    quant_scale_ckr: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    actual_seq_len: Tensor | None = None,
    k_nope_clip_alpha: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    weight_quant_mode: int = 0,
    kv_cache_quant_mode: int = 0,
    query_quant_mode: int = 0,
    ckvkr_repo_mode: int = 0,
    quant_scale_repo_mode: int = 0,
    tile_size: int = 128,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    token_x_dtype: int | None = None,
    weight_dq_dtype: int | None = None,
    weight_uq_qr_dtype: int | None = None,
    weight_dkv_kr_dtype: int | None = None,
    kv_cache_dtype: int | None = None,
) -> tuple[Tensor, ...]:
    """token_x [T, He] or [B, S, He] bfloat16 or int8; weight_dq [He, Hcq], weight_uq_qr [Hcq,
    N*(D+Dr)] (a head's D, then its Dr), weight_dkv_kr [He, Hckv+Dr]: NZ; weight_uk [N, D, Hckv] ND;
    gammas, rope_sin, rope_cos bfloat16; caches [blocks, 16 or 128, 1, Hckv or Dr]; cache_index
    int64 in [0, blocks * block) of token_x's leading axes; He 7168, 7680 or 6144, Hcq 1536, N a
    power of two to 128, D 128, Hckv 512, Dr 64; weight_quant_mode 1: uq_qr int8, 2: all three and
    token_x int8; kv_cache_quant_mode 1 per tensor; query_quant_mode 1 per token and head [doc].

    Empty placeholders have shape (0,) from CANN 8.5 on [meta; the page says (1,)].
    quant_scale_ckv multiplies, and in per-tensor mode it is one value, as (1,) or repeated to
    (1, Hckv) [reading]. kv_cache_quant_mode 1 goes with weight_quant_mode 2 and query_quant_mode 1
    only [meta]; kr_cache stays bfloat16. Rotation as npu_interleave_rope, for q and k alike
    [reading]. The page's text for weight_quant_mode 2 names weight_uk among the quantised
    weights, its own table gives bfloat16: bfloat16 [reading]. -1 writes nothing [reading].
    """
    c = Checks("npu_mla_prolog_v3")
    c.absent(quant_scale_ckr=quant_scale_ckr, actual_seq_len=actual_seq_len)
    c.absent(k_nope_clip_alpha=k_nope_clip_alpha, token_x_dtype=token_x_dtype)
    c.absent(weight_dq_dtype=weight_dq_dtype, weight_uq_qr_dtype=weight_uq_qr_dtype)
    c.absent(weight_dkv_kr_dtype=weight_dkv_kr_dtype, kv_cache_dtype=kv_cache_dtype)
    c.choice("query_norm_flag", query_norm_flag, False)
    c.choice("weight_quant_mode", weight_quant_mode, 0, 1, 2)
    c.choice("kv_cache_quant_mode", kv_cache_quant_mode, 0, 1)
    c.choice("query_quant_mode", query_quant_mode, kv_cache_quant_mode)
    together = kv_cache_quant_mode == 0 or weight_quant_mode == 2
    c.need(together, "kv_cache_quant_mode", "1 needs weight_quant_mode 2")
    c.choice("ckvkr_repo_mode", ckvkr_repo_mode, 0)
    c.choice("quant_scale_repo_mode", quant_scale_repo_mode, 0)
    c.choice("qc_qr_scale", qc_qr_scale, 1.0)
    c.choice("kc_scale", kc_scale, 1.0)
    c.need(cache_index is not None, "cache_index", "is missing")
    assert cache_index is not None
    here = locals()
    scales = {name: here[name] for name in _SCALES}
    query, q_rope, q_scale = _prolog(
        c,
        {name: here[name] for name in _TENSORS},
        cache_index,
        kv_cache,
        kr_cache,
        scales,
        (rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv),
        cache_mode,
        weight_quant_mode,
        kv_cache_quant_mode == 1,
    )
    none = torch.empty(0)
    q_norm = torch.empty(0, dtype=weight_uq_qr.dtype)
    return query, q_rope, none if q_scale is None else q_scale.flatten(0, -3), q_norm, none.clone()


_TENSORS = (
    "token_x",
    "weight_dq",
    "weight_uq_qr",
    "weight_uk",
    "weight_dkv_kr",
    "rmsnorm_gamma_cq",
    "rmsnorm_gamma_ckv",
    "rope_sin",
    "rope_cos",
)
_SCALES = (
    "dequant_scale_x",
    "dequant_scale_w_dq",
    "dequant_scale_w_uq_qr",
    "dequant_scale_w_dkv_kr",
    "quant_scale_ckv",
    "smooth_scales_cq",
)


def npu_mla_prolog_v2(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    **options: object,
) -> tuple[Tensor, ...]:
    """As v3 without mode arguments: the modes follow from the dtypes of token_x, weight_uq_qr and
    kv_cache; returns (query, query_rope, kv_cache, kr_cache, dequant_scale_q_nope) [doc, meta].
    The caches change in place although the schema does not say so."""
    weights = 2 if token_x.dtype is I8 else 1 if weight_uq_qr.dtype is I8 else 0
    quantised = int(kv_cache.dtype is I8)
    found = npu_mla_prolog_v3(
        token_x,
        weight_dq,
        weight_uq_qr,
        weight_uk,
        weight_dkv_kr,
        rmsnorm_gamma_cq,
        rmsnorm_gamma_ckv,
        rope_sin,
        rope_cos,
        kv_cache,
        kr_cache,
        cache_index=cache_index,
        weight_quant_mode=weights,
        kv_cache_quant_mode=quantised,
        query_quant_mode=quantised,
        **options,  # type: ignore[arg-type]
    )
    scale = found[2] if quantised else torch.zeros(1)
    return found[0], found[1], kv_cache, kr_cache, scale
