"""Causal attention of packed prefill chunks: `Ops.dense_attention` and `Ops.attention` in a prefill
step.

Online softmax over key tiles (FlashAttention-2, arXiv 2307.08691). The mask is aligned to the
bottom right: query i of Q, with L keys, sees keys up to L - Q + i, so all see a cached prefix. A
head of 192 columns is two products, 128 + 64, as MLA's nope and rope; other sizes that are not a
power of two are padded with zeros when loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rorqual.ops.reference import EIGHT_BIT_NUMBERS, whole_keys
from rorqual.ops.triton.attention.gqa_decode import padded
from rorqual.ops.triton.attention.mla_decode import (
    LOG2E,
    _row,
    _slots,
    _softmax_step,
    _whole,
    widened,
)
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import is_hopper

TO_BASE_2 = tl.constexpr(LOG2E)


@dataclass(frozen=True)
class PrefillConfig:
    """Tiles of block_m queries by block_n keys. tma: bulk copies (packed keys, or pages of at least
    block_n). gluon: the kernel of prefill_sm90.py if it supports the call."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = True
    gluon: bool = False


@dataclass(frozen=True)
class SoFar:
    """Attention over earlier keys of the same requests, updated in place: out [T, H, Dv] fp32, and
    totals [T, H] fp32, the log-sum-exp of its scores (-inf without keys). Query i of a request sees
    the next keys up to firsts [R] + i."""

    out: Tensor
    totals: Tensor
    firsts: Tensor


def config_for(q: Tensor, groups: int, paged: bool, queries: int) -> PrefillConfig:
    """The configuration for this number of queries per request."""
    shape = {
        "heads": q.shape[1],
        "groups": groups,
        "width": q.shape[2],
        "paged": paged,
        "queries": queries,
        "hopper": is_hopper(q.device),
    }
    return tuning.config_for("prefill", PrefillConfig, q.device, dtype=str(q.dtype)[6:], **shape)


def takes_parts(
    q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, queries: int, requests: int, first: bool
) -> bool:
    """Whether `dense_prefill` reads keys in two parts directly, without concatenating them. first:
    there were no earlier keys."""
    if not is_hopper(q.device):
        return False
    from rorqual.ops.triton.attention import prefill_sm90

    wanted = config_for(q, k_nope.shape[1], False, queries).gluon
    if first and not wanted:
        keys = k_nope.shape[0]
        divided = prefill_sm90.division(q, k_nope.shape[1], queries, requests, keys)
        wanted = divided.takes_few_queries(keys // requests)
    return wanted and prefill_sm90.supported(q, k_nope, v, 0, k_rope)


def configs_for(qk_dim: int, dtype: torch.dtype, queries: int = 4096) -> list[PrefillConfig]:
    """Candidate configurations for the tune command, by head size and queries per request."""
    if dtype == torch.float32:
        return [PrefillConfig(16, 16, 4, 1, tma=False)]
    if queries <= 16:
        return [PrefillConfig(16, 64, 4, 3)]
    if qk_dim > 128:
        return [
            PrefillConfig(128, 64, 8, 3, gluon=True),
            PrefillConfig(128, 64, 8, 3),
            PrefillConfig(64, 64, 4, 2),
            PrefillConfig(128, 128, 8, 2),
            PrefillConfig(64, 64, 4, 3),
        ]
    return [
        PrefillConfig(64, 64, 4, 3, gluon=True),
        PrefillConfig(64, 64, 4, 3),
        PrefillConfig(64, 64, 4, 4),
        PrefillConfig(128, 128, 8, 2),
        PrefillConfig(64, 64, 4, 2),
        PrefillConfig(128, 64, 8, 3),
    ]


@triton.jit
def _scores(q, q_tail, k, k_tail, TAIL: tl.constexpr, PRECISION: tl.constexpr):
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if TAIL > 0:
        scores = tl.dot(q_tail, k_tail.T, scores, input_precision=PRECISION)
    return scores


# the number of requests and pages of a step must not trigger a recompilation
@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["tables", "query_starts", "key_starts", "kv_lens", "firsts"],
)
def _prefill_kernel(
    q,
    k,
    v,
    scales,
    k_tma,
    tail_tma,
    v_tma,
    tables,
    query_starts,
    key_starts,
    kv_lens,
    firsts,
    totals,
    out,
    factor,
    q_token,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scale_row,
    table_row,
    total_token,
    total_head,
    out_token,
    out_head,
    SO_FAR: tl.constexpr,
    SHARE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    V_SIZE: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Grid (query blocks, heads, requests), the longest blocks first. PAGE 0: keys are packed,
    request after request. A head's SIZE columns are WIDTH + TAIL, or fewer than WIDTH and no
    TAIL; its V_SIZE columns of values at most V_WIDTH.

    SO_FAR: the softmax goes on from `out`, fp32, and the log of its sum in `totals`; query i
    sees keys up to `firsts` + i. SCALED: keys and values are an 8-bit cache's."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    head = tl.program_id(1)
    request = tl.program_id(2)
    q_begin = tl.load(query_starts + request)
    queries = (tl.load(query_starts + request + 1) - q_begin).to(tl.int32)
    block = tl.cdiv(queries, BLOCK_M) - 1 - tl.program_id(0)
    if block < 0:
        return
    length = tl.load(kv_lens + request).to(tl.int32)
    k_begin = tl.load(key_starts + request) if PAGE == 0 else 0
    table = tables + request.to(tl.int64) * table_row if PAGE > 0 else tables
    group = head // SHARE
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < queries
    columns = tl.arange(0, WIDTH)
    tail_columns = WIDTH + tl.arange(0, max(TAIL, 1))
    v_columns = tl.arange(0, V_WIDTH)
    offsets = tl.arange(0, BLOCK_N)
    inside = (columns < SIZE)[None, :]
    v_inside = (v_columns < V_SIZE)[None, :]
    token = q_begin.to(tl.int64) + rows
    q_place = q + token[:, None] * q_token + head * q_head
    q_main = tl.load(q_place + columns[None, :], mask=row_ok[:, None] & inside, other=0.0)
    q_tail = (
        tl.load(q_place + tail_columns[None, :], mask=row_ok[:, None], other=0.0)
        if TAIL > 0
        else q_main
    )
    if SO_FAR:  # with the log of the sum as peak, the sum itself is 1
        total_place = totals + token * total_token + head * total_head
        before = tl.load(total_place, mask=row_ok, other=float("-inf")) * TO_BASE_2
        any_before = before > -1e30
        place = out + token[:, None] * out_token + head * out_head + v_columns[None, :]
        acc = tl.load(place, mask=row_ok[:, None] & v_inside, other=0.0)
        peak = tl.where(any_before, before, -1e30)
        total = tl.where(any_before, 1.0, 0.0)
        shift = tl.load(firsts + request).to(tl.int32)
    else:
        acc = tl.zeros((BLOCK_M, V_WIDTH), tl.float32)
        peak = tl.full((BLOCK_M,), -1e30, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        shift = length - queries
    # Key tiles that every row sees in full.
    plain = tl.minimum(tl.maximum(shift + block * BLOCK_M + 1, 0), length) // BLOCK_N
    high = tl.cdiv(tl.minimum(shift + (block + 1) * BLOCK_M, length), BLOCK_N)

    for j in tl.range(0, plain, num_stages=STAGES):
        if TMA and not SCALED:
            here = (k_begin + j * BLOCK_N if PAGE == 0 else _row(table, j * BLOCK_N, PAGE)).to(
                tl.int32
            )
            keys = k_tma.load([here, group * k_head])
            tail = tail_tma.load([here, group * k_head + WIDTH]) if TAIL > 0 else keys
            values = v_tma.load([here, group * v_head])
        else:
            n = j * BLOCK_N + offsets
            slots = tl.cast(k_begin, tl.int64) + n if PAGE == 0 else _slots(table, n, length, PAGE)
            k_rows = k + slots * k_row + group * k_head
            v_rows = v + slots * v_row + group * v_head
            keys = _whole(k_rows[:, None] + columns[None, :], inside, SIZE >= WIDTH)
            tail = tl.load(k_rows[:, None] + tail_columns[None, :]) if TAIL > 0 else keys
            values = _whole(v_rows[:, None] + v_columns[None, :], v_inside, V_SIZE == V_WIDTH)
        scores = _scores(
            q_main, q_tail, widened(keys, DTYPE), widened(tail, DTYPE), TAIL, PRECISION
        )
        if SCALED:
            scale_rows = scales + slots * scale_row + group * 2
            scores *= tl.load(scale_rows)[None, :]
        weights, shrink, peak, total = _softmax_step(scores, factor, peak, total)
        if SCALED:
            weights *= tl.load(scale_rows + 1)[None, :]
        acc *= shrink[:, None]
        acc = tl.dot(weights.to(DTYPE), widened(values, DTYPE), acc, input_precision=PRECISION)

    for j in tl.range(plain, high, num_stages=1):
        n = j * BLOCK_N + offsets
        ok = (n < length)[:, None]
        slots = tl.cast(k_begin, tl.int64) + n if PAGE == 0 else _slots(table, n, length, PAGE)
        k_rows = k + slots * k_row + group * k_head
        v_rows = v + slots * v_row + group * v_head
        keys = tl.load(k_rows[:, None] + columns[None, :], mask=ok & inside, other=0.0)
        tail = (
            tl.load(k_rows[:, None] + tail_columns[None, :], mask=ok, other=0.0)
            if TAIL > 0
            else keys
        )
        values = tl.load(v_rows[:, None] + v_columns[None, :], mask=ok & v_inside, other=0.0)
        scores = _scores(
            q_main, q_tail, widened(keys, DTYPE), widened(tail, DTYPE), TAIL, PRECISION
        )
        if SCALED:
            scale_rows = scales + slots * scale_row + group * 2
            scores *= tl.load(scale_rows, mask=n < length, other=0.0)[None, :]
        seen = n[None, :] <= tl.minimum(shift + rows, length - 1)[:, None]
        weights, shrink, peak, total = _softmax_step(
            tl.where(seen, scores, float("-inf")), factor, peak, total
        )
        if SCALED:
            weights *= tl.load(scale_rows + 1, mask=n < length, other=0.0)[None, :]
        acc *= shrink[:, None]
        acc = tl.dot(weights.to(DTYPE), widened(values, DTYPE), acc, input_precision=PRECISION)

    some = tl.where(total > 0, total, 1.0)
    acc = acc / some[:, None]
    place = out + token[:, None] * out_token + head * out_head + v_columns[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & v_inside)
    if SO_FAR:
        log = tl.where(total > 0, (peak + tl.log2(some)) / TO_BASE_2, float("-inf"))
        tl.store(totals + token * total_token + head * total_head, log, mask=row_ok)


def _parts(width: int) -> tuple[int, int]:
    """A head's columns as (power of two, rest): 192 is 128 + 64. If the rest is no power of two the
    head is padded."""
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    fits = main >= 16 and (rest == 0 or (rest >= 16 and rest & (rest - 1) == 0))
    return (main, rest) if fits else (padded(width), 0)


def _bulk(rows: Tensor) -> bool:
    """Bulk copies need row and head strides that are multiples of 16 bytes."""
    steps = (
        rows.stride(0) * rows.element_size(),
        rows.stride(1) * rows.element_size(),
        rows.data_ptr(),
    )
    return rows.stride(2) == 1 and all(step % 16 == 0 for step in steps)


def _descriptor(rows: Tensor, block_n: int, width: int) -> TensorDescriptor:
    """Of rows [N, G, D], heads side by side in one long row, gaps between them included."""
    length = (rows.shape[1] - 1) * rows.stride(1) + rows.shape[2]
    return TensorDescriptor(rows, [rows.shape[0], length], [rows.stride(0), 1], [block_n, width])


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page: int,
    tables: Tensor | None,
    query_starts: Tensor,
    key_starts: Tensor | None,
    kv_lens: Tensor,
    max_query_len: int,
    scale: float,
    out: Tensor | None,
    config: PrefillConfig | None,
    so_far: SoFar | None = None,
    k_rope: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """k [rows, G, D] and v [rows, G, Dv]: packed keys, or the slots of a paged plane."""
    tokens, heads, width = q.shape
    config = config or config_for(q, k.shape[1], tables is not None, max_query_len)
    main, tail = _parts(width)
    firsts = totals = None
    total_steps: tuple[int, ...] = (0, 0)
    if so_far is not None:
        out = so_far.out
        firsts = so_far.firsts
        totals = so_far.totals
        total_steps = totals.stride()
        assert out.dtype == totals.dtype == torch.float32
        assert out.stride(2) == 1
    if out is None:
        out = torch.empty(tokens, heads, v.shape[2], dtype=q.dtype, device=q.device)
    v_width = padded(v.shape[2])
    if is_hopper(q.device) and scales is None:
        from rorqual.ops.triton.attention import prefill_sm90

        divided = prefill_sm90.Division()
        forms = [divided]
        wanted = config.gluon
        if so_far is None:
            keys = k.shape[0] if tables is None else tables.numel() * page
            requests = kv_lens.shape[0]
            divided = prefill_sm90.division(q, k.shape[1], max_query_len, requests, keys)
            forms = divided.forms(divided.blocks(heads, max_query_len, requests))
            wanted = wanted or divided.takes_few_queries(keys // requests)
        if wanted and prefill_sm90.supported(q, k, v, page, k_rope):
            known = (tables, query_starts, key_starts, kv_lens, firsts, totals, max_query_len)
            for each in forms:
                prefill_sm90.launch(q, k, v, page, *known, scale * LOG2E, out, k_rope, each)
            return out
    if k_rope is not None:
        k = whole_keys(k, k_rope)
    exact = main + tail == width and v_width == v.shape[2]
    # 8-bit tiles are addressed by rows, whose scales are needed as well
    tma = (
        config.tma
        and scales is None
        and exact
        and _bulk(k)
        and _bulk(v)
        and page % config.block_n == 0
    )
    describe = [
        _descriptor(x, config.block_n, n) if tma and n else None
        for x, n in ((k, main), (k, tail), (v, v_width))
    ]
    grid = (triton.cdiv(max_query_len, config.block_m), heads, kv_lens.shape[0])
    _prefill_kernel[grid](
        q, k, v, scales, *describe, tables, query_starts, key_starts, kv_lens, firsts, totals, out,
        scale * LOG2E, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        0 if scales is None else scales.stride(0),
        0 if tables is None else tables.stride(0), *total_steps, out.stride(0), out.stride(1),
        so_far is not None, heads // k.shape[1], width, main, tail, v.shape[2], v_width, page,
        config.block_m, config.block_n, config.stages, tma,
        "ieee" if q.dtype == torch.float32 else "tf32", scales is not None, num_warps=config.warps,
    )  # fmt: skip
    return out


def dense_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    kv_lens: Tensor,
    max_query_len: int,
    scale: float,
    out: Tensor | None = None,
    config: PrefillConfig | None = None,
    so_far: SoFar | None = None,
    k_rope: Tensor | None = None,
) -> Tensor:
    """Attention over packed keys. q [T, H, D], k [N, G, D], v [N, G, Dv], bf16 or fp32, any row
    and head strides; query_starts [R + 1], key_starts [R] and kv_lens [R] int on the device:
    request i owns queries query_starts[i] to [i + 1] and keys from key_starts[i]. max_query_len
    is known on the host; a bound will do. Returns [T, H, Dv]. so_far: the keys are some of each
    request's, and its `out` is returned. k_rope [N, rope]: k's last columns, which all heads
    share, where k has only those before."""
    known = (query_starts, key_starts, kv_lens, max_query_len, scale)
    return _launch(q, k, v, 0, None, *known, out, config, so_far, k_rope)


def paged_prefill(
    q: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    max_query_len: int,
    scale: float,
    out: Tensor | None = None,
    config: PrefillConfig | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attention over cached keys. q [T, H, D]; planes [pages, page, G, D] and [.., Dv]; tables
    [R, columns] int, entries past a request's end are never used; query_starts [R + 1] and
    kv_lens [R] as in `dense_prefill`. scales [pages, page, G, 2] fp32: of an 8-bit cache
    (`reference.pack_heads`). Returns [T, H, Dv]."""
    if scales is not None:
        k_plane, v_plane = (x.view(EIGHT_BIT_NUMBERS[x.dtype]) for x in (k_plane, v_plane))
        scales = scales.flatten(0, 1)
    k = k_plane.flatten(0, 1)
    v = v_plane.flatten(0, 1)
    return _launch(
        q,
        k,
        v,
        k_plane.shape[1],
        tables,
        query_starts,
        None,
        kv_lens,
        max_query_len,
        scale,
        out,
        config,
        scales=scales,
    )
