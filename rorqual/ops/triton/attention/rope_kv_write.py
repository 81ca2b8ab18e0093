"""Everything between projections and attention in one kernel per model family: norms, rotary
embedding, the write to the cache.

Rotation keeps the layout, as rorqual.ops.reference.rope does: pairs are (2i, 2i + 1) when
interleaved, else (i, i + D/2). A negative slot is not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.activation import Quantized
from rorqual.ops.interface import GQAWeights, TokenPlaces
from rorqual.ops.reference import EIGHT_BIT_NUMBERS
from rorqual.ops.triton.attention.latent_fp8 import scale_of, steps_of, store_row
from rorqual.ops.triton.rowwise.norm import normed
from rorqual.ops.triton.rowwise.quantize import room_for, store_fp8
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs
from rorqual.ops.triton.runtime.prefetch import fetch_row_ahead

# For more tokens than FEW_TOKENS, rope rotates up to ROTATED elements per program, ROTATED_BY_WARP
# per warp.
FEW_TOKENS = 256
ROTATED = 8192
ROTATED_BY_WARP = 1024


@triton.jit
def _pair(offsets, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(the other member of each offset's pair, the pair's index, its sign in the rotation)."""
    if INTERLEAVED:
        return offsets ^ 1, offsets // 2, tl.where(offsets % 2 == 0, -1.0, 1.0)
    else:
        half: tl.constexpr = SIZE // 2
        return (offsets + half) % SIZE, offsets % half, tl.where(offsets < half, -1.0, 1.0)


@triton.jit
def _fetch_places_ahead(cos, sin, slot, HALF: tl.constexpr, DEPENDENT: tl.constexpr):
    """A token's angles and its slot."""
    fetch_row_ahead(cos, HALF, HALF, DEPENDENT)
    fetch_row_ahead(sin, HALF, HALF, DEPENDENT)
    fetch_row_ahead(slot, 1, 1, DEPENDENT)


@triton.jit
def _rotated(x, partner, cos, sin, sign):
    return x * cos + sign * (partner * sin)


@triton.jit
def _rotate_heads(source, target, cos, sin, present, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Heads of one token, from pointers to their first columns to others, which may be the same."""
    offsets = tl.arange(0, SIZE)
    partner, pair, sign = _pair(offsets, SIZE, INTERLEAVED)
    here = present[:, None]
    value = tl.load(source[:, None] + offsets[None, :], mask=here, other=0.0).to(tl.float32)
    other = tl.load(source[:, None] + partner[None, :], mask=here, other=0.0).to(tl.float32)
    c = tl.load(cos + pair)
    s = tl.load(sin + pair)
    y = _rotated(value, other, c[None, :], s[None, :], sign[None, :])
    tl.debug_barrier()
    tl.store(target[:, None] + offsets[None, :], y.to(target.dtype.element_ty), mask=here)


@triton.jit
def _rope_kernel(
    x,
    out,
    cos,
    sin,
    heads,
    x_token,
    x_head,
    o_token,
    o_head,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """HEADS heads of a token a program. Each element is read with its partner before anything is
    stored, so x may be out."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    angle = token * (SIZE // 2)
    source = x + token * x_token + head * x_head
    target = out + token * o_token + head * o_head
    _rotate_heads(source, target, cos + angle, sin + angle, head < heads, SIZE, INTERLEAVED)


@triton.jit
def _rope_pairs_kernel(
    x,
    out,
    cos,
    sin,
    heads,
    x_token,
    x_head,
    o_token,
    o_head,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """_rope_kernel for many tokens: both members of a pair are a thread's own, which reads them
    once. Which product is rounded is said here; there the compiler decides, and alike."""
    wait_for_inputs(DEPENDENT)
    HALF: tl.constexpr = SIZE // 2
    parts = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * HEADS + tl.arange(0, HEADS)
    here = (head < heads)[:, None]
    source = (x + token * x_token + head * x_head)[:, None]
    target = (out + token * o_token + head * o_head)[:, None]
    pair = tl.arange(0, HALF)
    c = tl.load(cos + token * HALF + pair)[None, :]
    s = tl.load(sin + token * HALF + pair)[None, :]
    if INTERLEAVED:
        columns = tl.arange(0, SIZE)[None, :]
        whole = tl.load(source + columns, mask=here, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(whole, (HEADS, HALF, 2)))
    else:
        columns = pair[None, :]
        first = tl.load(source + columns, mask=here, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + columns, mask=here, other=0.0).to(tl.float32)
    c = tl.broadcast_to(c, (HEADS, HALF))
    s = tl.broadcast_to(s, (HEADS, HALF))
    turned = tl.fma(first, c, (second * s) * -1.0).to(out.dtype.element_ty)
    other = tl.fma(second, c, first * s).to(out.dtype.element_ty)
    if INTERLEAVED:
        both = tl.reshape(tl.join(turned, other), (HEADS, SIZE))
        tl.store(target + columns, both, mask=here)
    else:
        tl.store(target + columns, turned, mask=here)
        tl.store(target + HALF + columns, other, mask=here)


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor | None = None
) -> Tensor:
    """x [T, heads, D] with D a power of two, cos and sin [T, D/2] fp32 contiguous; `out` may be
    x itself: rotated in place."""
    tokens, heads, size = x.shape
    assert x.stride(2) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert size == next_power(size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    group = min(8, next_power(heads))
    if tokens > FEW_TOKENS:
        group = min(max(1, ROTATED // size), next_power(heads))
        _rope_pairs_kernel[tokens * triton.cdiv(heads, group),](
            x, out, cos, sin, heads, *x.stride()[:2], *out.stride()[:2], group, size, interleaved,
            num_warps=max(1, group * size // ROTATED_BY_WARP), **dependent(x.device))  # fmt: skip
    elif tokens:
        _rope_kernel[tokens, triton.cdiv(heads, group)](
            x, out, cos, sin, heads, *x.stride()[:2], *out.stride()[:2], group, size, interleaved,
            num_warps=2, **dependent(x.device))  # fmt: skip
    return out


@triton.jit
def _store_entry(
    base,
    weight,
    cos,
    sin,
    target,
    write,
    eps,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """[norm(latent) | rotated key] of one token, from base [RANK + ROPE] to target, where a
    cache of bytes is an 8-bit one."""
    dtype: tl.constexpr = base.dtype.element_ty
    offsets = tl.arange(0, RANK)
    rotary = tl.arange(0, ROPE)
    latent = normed(
        tl.load(base + offsets).to(tl.float32), tl.load(weight + offsets), RANK, eps, dtype
    )
    partner, pair, sign = _pair(rotary, ROPE, INTERLEAVED)
    value = tl.load(base + RANK + rotary).to(tl.float32)
    other = tl.load(base + RANK + partner).to(tl.float32)
    key = _rotated(value, other, tl.load(cos + pair), tl.load(sin + pair), sign).to(dtype)
    if target.dtype.element_ty == tl.uint8 or target.dtype.element_ty == tl.int8:
        store_row(latent.to(tl.float32), key, target, write, RANK, ROPE)
    else:
        tl.store(target + offsets, latent.to(target.dtype.element_ty), mask=write & (offsets >= 0))
        tl.store(
            target + RANK + rotary, key.to(target.dtype.element_ty), mask=write & (rotary >= 0)
        )


@triton.jit
def _normed_query(base, weight, offsets, inside, eps, QUERY: tl.constexpr, dtype: tl.constexpr):
    values = tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)
    return normed(values, tl.load(weight + offsets, mask=inside, other=0.0), QUERY, eps, dtype)


@triton.jit(do_not_specialize=["scale_block"])
def _latent_kernel(
    x,
    q_weight,
    kv_weight,
    cos,
    sin,
    slots,
    plane,
    q,
    q_data,
    q_scale,
    x_row,
    slot_row,
    eps,
    scale_row,
    scale_block,
    QUERY: tl.constexpr,
    QUERY_PAD: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    QUANT: tl.constexpr,
    UE8M0: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token, 0): the cache entry; (token, 1), if there is one: the norm of the query's
    latent, or without a latent (token, 1 ..): BLOCK of the HEADS queries each, whose last ROPE
    columns turn in place."""
    token = tl.program_id(0).to(tl.int64)
    base = x + token * x_row
    angle = token * (ROPE // 2)
    if tl.program_id(1) == 0:
        fetch_row_ahead(kv_weight, RANK, RANK, DEPENDENT)
        _fetch_places_ahead(cos + angle, sin + angle, slots + token, ROPE // 2, DEPENDENT)
    elif NORM:
        fetch_row_ahead(q_weight, QUERY, QUERY, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + token).to(tl.int64)
        _store_entry(
            base + QUERY,
            kv_weight,
            cos + angle,
            sin + angle,
            plane + slot * slot_row,
            slot >= 0,
            eps,
            RANK,
            ROPE,
            INTERLEAVED,
        )
    elif NORM:
        offsets = tl.arange(0, QUERY_PAD)
        inside = offsets < QUERY
        y = _normed_query(base, q_weight, offsets, inside, eps, QUERY, x.dtype.element_ty)
        if QUANT:
            wide = y.to(tl.float32)
            store_fp8(
                wide, q_data, q_scale, token, 0, QUERY, QUERY, scale_row, scale_block, QUERY_PAD,
                UE8M0,
            )  # fmt: skip
        else:
            tl.store(q + token * QUERY + offsets, y, mask=inside)
    elif HEADS > 0:
        head = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
        width = QUERY // HEADS
        place = base + head * width + (width - ROPE)
        _rotate_heads(place, place, cos + angle, sin + angle, head < HEADS, ROPE, INTERLEAVED)


def latent_epilogue(
    x: Tensor,
    q_weight: Tensor | None,
    kv_weight: Tensor,
    places: TokenPlaces,
    plane: Tensor,
    eps: float,
    interleaved: bool,
    quant: str | None = None,
    heads: int = 0,
) -> Tensor | Quantized | None:
    """After the joint projection of MLA: x [T, query | rank | rope] holds the query (or its
    latent), the kv latent and the rope key.

    Writes [norm(latent) | rope(key)] to plane [pages, page, rank + rope], or to an 8-bit
    one (latent_fp8.py). With q_weight [query] returns norm(query latent) [T, query], quantized if
    `quant` says how (Quantized.room); without it None: the query needs no norm, and the last rope
    columns of each of its `heads` are rotated where they are. rank and rope must be powers of two.
    """
    tokens = x.shape[0]
    rank = kv_weight.shape[0]
    rotary = 2 * places.cos.shape[1]
    query = x.shape[1] - rank - rotary
    assert x.stride(1) == 1
    assert plane.stride(-1) == 1
    assert plane.stride(0) == plane.shape[1] * plane.stride(1)
    normed = q_weight is not None
    packed = Quantized.room(x[:, :query], quant) if normed else None
    normal = x.new_empty(tokens, query) if normed and not quant else None
    data, scale, strides = room_for(packed)
    if tokens:
        block = min(8, next_power(heads))
        _latent_kernel[tokens, 2 if normed else 1 + triton.cdiv(heads, block)](
            x,
            q_weight,
            kv_weight,
            places.cos,
            places.sin,
            places.slots,
            plane,
            normal,
            data,
            scale,
            x.stride(0),
            plane.stride(1),
            eps,
            *strides,
            query,
            max(128, next_power(query)),
            rank,
            rotary,
            interleaved,
            normed,
            quant is not None,
            packed is not None and packed.ue8m0,
            0 if normed else heads,
            block,
            num_warps=4,
            **dependent(x.device),
        )
    return packed if packed is not None else normal


@triton.jit
def _normed_pairs(base, w1, w2, cos, sin, present, eps, HALF: tl.constexpr, dtype: tl.constexpr):
    """Heads at base [n], normed and rotated: first and second halves, [n, HALF] each. w1, w2: the
    halves of the norm's weights."""
    columns = tl.arange(0, HALF)
    place = base[:, None] + columns[None, :]
    first = tl.load(place, mask=present[:, None], other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=present[:, None], other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[
        :, None
    ]
    w1 = w1.to(tl.float32)[None, :]
    w2 = w2.to(tl.float32)[None, :]
    first = ((first * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    c = tl.load(cos + columns)[None, :]
    s = tl.load(sin + columns)[None, :]
    return (first * c - second * s).to(dtype), (second * c + first * s).to(dtype)


@triton.jit
def _store_pairs(target, first, second, present, HALF: tl.constexpr):
    place = target[:, None] + tl.arange(0, HALF)[None, :]
    tl.store(place, first.to(target.dtype.element_ty), mask=present[:, None])
    tl.store(place + HALF, second.to(target.dtype.element_ty), mask=present[:, None])


@triton.jit
def _store_8_bits(target, scale, first, second, present, HALF: tl.constexpr):
    """Halves of heads [n, HALF] quantized to the target's format, and one scale per head."""
    INT8: tl.constexpr = target.dtype.element_ty == tl.int8
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    scales = scale_of(most, INT8)
    place = target[:, None] + tl.arange(0, HALF)[None, :]
    tl.store(place, steps_of(first, scales, INT8), mask=present[:, None])
    tl.store(place + HALF, steps_of(second, scales, INT8), mask=present[:, None])
    tl.store(scale, scales, mask=present)


@triton.jit
def _heads_kernel(
    x,
    q_weight,
    k_weight,
    cos,
    sin,
    slots,
    k_plane,
    v_plane,
    scales,
    q,
    x_row,
    k_slot,
    k_head,
    v_slot,
    v_head,
    eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token, part): BLOCK query heads, or in the last part all keys and values of the
    token. SCALED: to an 8-bit cache."""
    HALF: tl.constexpr = SIZE // 2
    dtype: tl.constexpr = x.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = x + token * x_row
    cos = cos + token * HALF
    sin = sin + token * HALF
    weight = k_weight if part == tl.num_programs(1) - 1 else q_weight
    # loaded before the wait: no kernel of a step writes weights
    w1 = tl.load(weight + tl.arange(0, HALF))
    w2 = tl.load(weight + HALF + tl.arange(0, HALF))
    _fetch_places_ahead(cos, sin, slots + token, HALF, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    if part < tl.num_programs(1) - 1:
        head = part * BLOCK + tl.arange(0, BLOCK)
        q1, q2 = _normed_pairs(row + head * SIZE, w1, w2, cos, sin, head < HEADS, eps, HALF, dtype)
        _store_pairs(q + (token * HEADS + head) * SIZE, q1, q2, head < HEADS, HALF)
    else:
        group = tl.arange(0, GROUP_PAD)
        slot = tl.load(slots + token).to(tl.int64)
        present = (group < GROUPS) & (slot >= 0)
        keys = row + HEADS * SIZE + group * SIZE
        k1, k2 = _normed_pairs(keys, w1, w2, cos, sin, present, eps, HALF, dtype)
        k_place = k_plane + slot * k_slot + group * k_head
        values = (keys + GROUPS * SIZE)[:, None] + tl.arange(0, HALF)[None, :]
        v1 = tl.load(values, mask=present[:, None], other=0.0)
        v2 = tl.load(values + HALF, mask=present[:, None], other=0.0)
        v_place = v_plane + slot * v_slot + group * v_head
        if SCALED:
            scale = scales + (slot * GROUPS + group) * 2
            _store_8_bits(k_place, scale, k1, k2, present, HALF)
            _store_8_bits(v_place, scale + 1, v1, v2, present, HALF)
        else:
            _store_pairs(k_place, k1, k2, present, HALF)
            _store_pairs(v_place, v1, v2, present, HALF)


def heads_epilogue(
    x: Tensor, w: GQAWeights, places: TokenPlaces, planes: tuple[Tensor, ...]
) -> Tensor:
    """After Qwen3's joint projection: x [T, (H + 2 G) D] holds queries, keys and values, head after
    head.

    Norms queries and keys by head (weights [D]), rotates them (half-split pairs; cos and sin [T,
    D/2] fp32), writes keys and values to planes [pages, page, G, D] at their slots, and returns the
    queries [T, H, D]. D must be a power of two. With a third plane, scales [pages, page, G, 2], the
    cache is an 8-bit one.
    """
    size = w.q_norm.shape[0]
    scales = planes[2] if len(planes) > 2 else None
    planes = planes[:2]
    if scales is not None:
        assert scales.is_contiguous()
        planes = tuple(plane.view(EIGHT_BIT_NUMBERS[plane.dtype]) for plane in planes)
    k_plane, v_plane = planes
    groups = k_plane.shape[2]
    tokens = x.shape[0]
    heads = x.shape[1] // size - 2 * groups
    assert x.stride(1) == 1
    assert size == next_power(size)
    assert places.cos.is_contiguous()
    assert places.sin.is_contiguous()
    for plane in planes:
        assert plane.stride(-1) == 1
        assert plane.stride(0) == plane.shape[1] * plane.stride(1)
    q = torch.empty(tokens, heads, size, dtype=x.dtype, device=x.device)
    # few tokens: more programs, many: longer ones
    block = min(next_power(heads), 8 if tokens <= 64 else 32)
    if tokens:
        _heads_kernel[tokens, triton.cdiv(heads, block) + 1](
            x,
            w.q_norm,
            w.k_norm,
            places.cos,
            places.sin,
            places.slots,
            k_plane,
            v_plane,
            scales,
            q,
            x.stride(0),
            *k_plane.stride()[1:3],
            *v_plane.stride()[1:3],
            w.eps,
            heads,
            groups,
            size,
            block,
            next_power(groups),
            scales is not None,
            num_warps=4,
            **dependent(x.device),
        )
    return q
