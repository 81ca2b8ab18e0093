"""Paged MLA decode in the absorbed form over a latent cache (arXiv 2405.04434, section 2.1):
`Ops.latent_attention`.

One latent tile serves as keys and as values and is loaded once. Query tokens of a request and their
heads are one axis of rows, so speculative tokens share the pass over the cache. Two cache formats:

    bf16 (or fp32 for tests)  plane [pages, page, 512 + 64]
    fp8                       plane [pages, page, 656] uint8: 512 e4m3, 4 fp32 scales (one per
                              128 columns), 64 rope as the queries

With bf16 queries an fp8 latent is dequantized in fp16, times 16, and must stay below 4,094. A
normed latent is at most 22.6 (the root of 512) times its norm's weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rorqual.ops.reference import in_8_bits, latent_parts
from rorqual.ops.triton.attention.latent_fp8 import groups_of
from rorqual.ops.triton.attention.split_kv import (
    LatentDecode,
    SplitPlan,
    _chunk,
    combine,
    split_plan,
)
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import (
    INTERPRETED,
    dependent,
    is_hopper,
    multiprocessors,
    wait_for_inputs,
)
from rorqual.ops.triton.runtime.prefetch import fetch_rows_ahead

CACHES = {torch.uint8: "fp8", torch.int8: "int8"}  # as rules call them
LOG2E = 1.4426950408889634
ASSEMBLER = tl.constexpr(not INTERPRETED)


@dataclass(frozen=True)
class MlaDecodeConfig:
    """Tiles of block_h rows and block_n tokens. per_sm: programs per multiprocessor. min_tiles:
    least tiles per program. tma: bulk copies. gluon: the kernel of mla_decode_sm90.py,
    mla_decode_sm90_8bit.py or mla_decode_sm90_fp8.py, if it supports the call."""

    block_h: int
    block_n: int
    warps: int
    stages: int
    per_sm: int = 1
    min_tiles: int = 2
    tma: bool = True
    gluon: bool = False


def config_for(
    q: Tensor, rows: int, held: torch.dtype, requests: int, max_kv_len: int
) -> MlaDecodeConfig:
    """The configuration for `rows` = query tokens x heads of a request, and that many requests
    of that length; `held`: the cache's dtype. Rules that ship name "hopper" where theirs would not
    fit an older GPU."""
    cache = CACHES.get(held, "plain")
    shape = {
        "dtype": str(q.dtype)[6:],
        "cache": cache,
        "rows": rows,
        "requests": requests,
        "kv": max_kv_len,
    }
    return tuning.config_for(
        "mla_decode", MlaDecodeConfig, q.device, **shape, hopper=is_hopper(q.device)
    )


# What mla_decode_sm90_fp8.py takes; shared memory allows no more stages and programs. The last is
# mla_decode_sm90_8bit.py's.
_HOPPER_FP8 = [
    MlaDecodeConfig(16, 64, 4, 2, per_sm=2, gluon=True),
    MlaDecodeConfig(16, 64, 4, 1, per_sm=3, gluon=True),
    MlaDecodeConfig(16, 64, 4, 4, gluon=True),
    MlaDecodeConfig(32, 64, 8, 3, gluon=True),
    MlaDecodeConfig(32, 64, 8, 2, gluon=True),
    MlaDecodeConfig(32, 64, 4, 1, per_sm=2, gluon=True),
    MlaDecodeConfig(32, 64, 4, 3, gluon=True),
    MlaDecodeConfig(64, 64, 8, 2, gluon=True),
]


def configs_for(rows: int, dtype: torch.dtype, fp8_cache: bool = False) -> list[MlaDecodeConfig]:
    """Candidate configurations for the tune command; `rows` = query tokens x heads of a request."""
    if dtype == torch.float32:
        return [MlaDecodeConfig(16, 16, 4, 1, tma=False)]
    few = 16 if rows <= 16 else 32
    if fp8_cache:
        hopper = [
            c
            for c in _HOPPER_FP8
            if rows <= 4 * c.block_h and (c.block_h < 2 * rows or c.block_h == 16)
        ]
        hopper += [replace(c, min_tiles=1) for c in hopper[:1]]
        narrow = [
            MlaDecodeConfig(few, 64, 8, 2),
            MlaDecodeConfig(few, 64, 8, 3),
            MlaDecodeConfig(few, 64, 4, 2),
            MlaDecodeConfig(few, 64, 8, 2, tma=False),
            MlaDecodeConfig(few, 32, 4, 3, per_sm=2),
            MlaDecodeConfig(few, 32, 4, 4, per_sm=2),
            MlaDecodeConfig(few, 32, 4, 2, per_sm=3),
            MlaDecodeConfig(few, 32, 8, 4, per_sm=2),
            MlaDecodeConfig(few, 32, 2, 3, per_sm=3),
            MlaDecodeConfig(few, 32, 2, 4, per_sm=2),
            MlaDecodeConfig(few, 64, 4, 3),
            MlaDecodeConfig(few, 64, 2, 2),
        ]
        wide = [MlaDecodeConfig(64, 64, 8, 2, tma=False), MlaDecodeConfig(64, 64, 8, 2)]
        return hopper + (narrow + wide if rows <= 32 else wide)
    narrow = [
        MlaDecodeConfig(few, 64, 8, 5),
        MlaDecodeConfig(few, 64, 8, 2),
        MlaDecodeConfig(few, 32, 4, 3, per_sm=2),
        MlaDecodeConfig(few, 64, 8, 5, tma=False),
        MlaDecodeConfig(few, 64, 8, 5, min_tiles=1),
        MlaDecodeConfig(few, 64, 4, 5),
        MlaDecodeConfig(few, 64, 8, 3),
        MlaDecodeConfig(few, 64, 4, 3),
        MlaDecodeConfig(few, 32, 4, 5, per_sm=2),
        MlaDecodeConfig(few, 32, 4, 3, per_sm=3),
        MlaDecodeConfig(64, 64, 8, 2),
    ]
    wide = [
        MlaDecodeConfig(64, 64, 8, 2),
        MlaDecodeConfig(64, 64, 8, 2, tma=False),
        MlaDecodeConfig(64, 32, 8, 5),
        MlaDecodeConfig(64, 32, 8, 7),
        MlaDecodeConfig(64, 64, 8, 2, min_tiles=1),
        MlaDecodeConfig(64, 64, 8, 2, min_tiles=4),
        MlaDecodeConfig(64, 64, 8, 2, gluon=True),
        MlaDecodeConfig(64, 64, 8, 2, min_tiles=1, gluon=True),
    ]
    return narrow if rows <= 32 else wide


def _workers(
    config: MlaDecodeConfig, requests: int, max_kv_len: int, row_blocks: int, device: torch.device
) -> int:
    """Number of workers: as many as fill the GPU once, but none that would never have a tile."""
    tiles = requests * triton.cdiv(max(max_kv_len, 1), config.block_n)
    return max(
        1,
        min(
            multiprocessors(device) * config.per_sm // row_blocks,
            triton.cdiv(tiles, config.min_tiles),
        ),
    )


@triton.jit
def _slots(table, n, limit, PAGE: tl.constexpr):
    """Flat cache positions of tokens n; those at or past `limit` point at page 0 and must be
    masked."""
    page = tl.load(table + n // PAGE, mask=n < limit, other=0)
    return page.to(tl.int64) * PAGE + n % PAGE


@triton.jit
def _row(table, n, PAGE: tl.constexpr):
    """Flat cache position of token n; the page is read as one scalar, so the rest of n's tile
    must lie in the same page."""
    return tl.load(table + n // PAGE).to(tl.int64) * PAGE + n % PAGE


@triton.jit
def request_at(starts, kv_lens, request, requests):
    """(first tile, tile after the last, length) of a request; of the last one if there are no more.
    Bypasses L1, which may have the previous step's."""
    request = tl.minimum(request, requests - 1)
    begin = tl.load(starts + request, cache_modifier=".cg")
    end = tl.load(starts + request + 1, cache_modifier=".cg")
    return begin, end, tl.load(kv_lens + request, cache_modifier=".cg").to(tl.int32)


@triton.jit
def _whole(pointers, inside, WHOLE: tl.constexpr):
    """A tile, whose columns outside are zero unless all are inside."""
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def widened(x, DTYPE: tl.constexpr):
    """Cached numbers in the queries' dtype: e4m3 and int8 are exact in it."""
    if x.dtype == tl.int8:
        return x.to(tl.float32).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def _softmax_step(scores, factor, peak, total):
    """One tile of the online softmax in base 2: (weights, what earlier sums shrink by, peak,
    total). `factor` scales scores, > 0."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    return weights, shrink, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit
def _dequantize(
    packed,
    scales,
    DTYPE: tl.constexpr,
    GAIN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """GAIN times the values. In fp16 e4m3 is exact and one instruction converts two; in fp32
    nothing is rounded before the end.

    The conversion is written out because the compiler would make it twice, once for each product's
    layout, with byte loads for one of them; an instruction it does not know it leaves where it is,
    and both products read its result from shared memory.
    """
    WIDE: tl.constexpr = tl.float16 if tl.float16 == DTYPE else tl.float32
    if ASSEMBLER and tl.float16 == DTYPE and packed.dtype != tl.int8:
        wide = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
            "=r,=r,r",
            [packed],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        wide = packed.to(WIDE)
    blocks = (
        tl.reshape(wide, (BLOCK_N, GROUPS, RANK // GROUPS)) * (scales * GAIN).to(WIDE)[:, :, None]
    )
    return tl.reshape(blocks, (BLOCK_N, RANK)).to(DTYPE)


@triton.jit
def _store_part(partial, lse, slot, columns, acc, peak, total, row_ok, WIDTH: tl.constexpr):
    """An unfinished result, normalized, and its log2-sum-exp2, -inf where nothing was seen."""
    tl.store(
        lse + slot,
        tl.where(total > 0, peak + tl.log2(tl.maximum(total, 1e-37)), float("-inf")),
        mask=row_ok,
    )
    tl.store(partial + slot[:, None] * WIDTH + columns[None, :], acc, mask=row_ok[:, None])


@triton.jit(do_not_specialize=["requests", "min_tiles", "table_row"])
def _mla_decode_kernel(
    q_latent,
    q_rope,
    latent,
    rope,
    scales,
    latent_tma,
    rope_tma,
    scale_tma,
    tables,
    kv_lens,
    starts,
    first,
    out,
    partial,
    lse,
    factor,
    q_token,
    q_head,
    qr_token,
    qr_head,
    latent_row,
    rope_row,
    scale_row,
    table_row,
    out_token,
    out_head,
    requests,
    min_tiles,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (row blocks, workers). `factor` is the softmax scale times log2(e). GROUPS > 0 marks
    an 8-bit cache."""
    ROWS: tl.constexpr = HEADS * QUERIES
    KIND: tl.constexpr = q_latent.dtype.element_ty
    HALF: tl.constexpr = GROUPS > 0 and tl.bfloat16 == KIND
    DTYPE: tl.constexpr = tl.float16 if HALF else KIND
    GAIN: tl.constexpr = 16.0 if HALF else 1.0  # of keys, against queries divided by it
    worker = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    row_ok = rows < ROWS
    query = rows // HEADS
    head = rows % HEADS
    columns = tl.arange(0, RANK)
    rope_columns = tl.arange(0, ROPE)
    offsets = tl.arange(0, BLOCK_N)

    # The schedule is in L2: its kernel ends with `stored`, and lets no later one start before. L1
    # may have the previous step's.
    all_tiles = tl.load(starts + requests, cache_modifier=".cg")
    chunk = _chunk(all_tiles, tl.num_programs(1), min_tiles)
    position = worker * chunk
    last = tl.minimum(position + chunk, all_tiles)
    request = tl.load(first + worker, cache_modifier=".cg")
    begin, end, length = request_at(starts, kv_lens, request, requests)
    if DEPENDENT:  # noqa: SIM102 - known to the compiler
        if position < last:
            tile = position - begin
            table = tables + request.to(tl.int64) * table_row
            slots = _slots(table, tile * BLOCK_N + offsets, length, PAGE)
            row_bytes: tl.constexpr = RANK * latent.dtype.element_ty.primitive_bitwidth // 8
            rope_bytes: tl.constexpr = ROPE * rope.dtype.element_ty.primitive_bitwidth // 8
            fetch_rows_ahead(latent + slots * latent_row, row_bytes, DEPENDENT)
            fetch_rows_ahead(rope + slots * rope_row, rope_bytes, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    while position < last:
        stop = tl.minimum(end, last)
        if stop > position:
            table = tables + request.to(tl.int64) * table_row
            token = request.to(tl.int64) * QUERIES + query
            q_rows = q_latent + token * q_token + head * q_head
            q = tl.load(q_rows[:, None] + columns[None, :], mask=row_ok[:, None], other=0.0)
            q = (q.to(tl.float32) / GAIN).to(DTYPE)
            qr_rows = q_rope + token * qr_token + head * qr_head
            qr = tl.load(qr_rows[:, None] + rope_columns[None, :], mask=row_ok[:, None], other=0.0)
            acc = tl.zeros((BLOCK_H, RANK), tl.float32)
            # finite, so that a row that has seen no key yet gives no NaN
            peak = tl.full((BLOCK_H,), -1e30, tl.float32)
            total = tl.zeros((BLOCK_H,), tl.float32)
            low = position - begin
            high = stop - begin
            # tiles that every query token sees in full
            plain = tl.minimum(high, tl.maximum((length - QUERIES + 1) // BLOCK_N, low))

            for j in tl.range(low, plain, num_stages=STAGES):
                if TMA:
                    here = _row(table, j * BLOCK_N, PAGE).to(tl.int32)
                    k = latent_tma.load([here, 0])
                    kr = rope_tma.load([here, 0])
                    if GROUPS > 0:
                        k = _dequantize(
                            k, scale_tma.load([here, 0]), DTYPE, GAIN, BLOCK_N, RANK, GROUPS
                        )
                else:
                    if PAGE % BLOCK_N == 0:
                        slots = _row(table, j * BLOCK_N, PAGE) + offsets
                    else:
                        slots = _slots(table, j * BLOCK_N + offsets, length, PAGE)
                    k = tl.load(latent + slots[:, None] * latent_row + columns[None, :])
                    kr = tl.load(rope + slots[:, None] * rope_row + rope_columns[None, :])
                    if GROUPS > 0:
                        s8 = tl.load(
                            scales + slots[:, None] * scale_row + tl.arange(0, GROUPS)[None, :]
                        )
                        k = _dequantize(k, s8, DTYPE, GAIN, BLOCK_N, RANK, GROUPS)
                scores = tl.dot(q, k.T, input_precision=PRECISION)
                scores = tl.dot(qr, kr.T, scores, input_precision=PRECISION)
                weights, shrink, peak, total = _softmax_step(scores, factor, peak, total)
                acc = tl.dot(weights.to(DTYPE), k, acc * shrink[:, None], input_precision=PRECISION)

            for j in tl.range(plain, high, num_stages=1):
                n = j * BLOCK_N + offsets
                # values past the end may be NaN, which a weight of zero does not cancel
                ok = (n < length)[:, None]
                slots = _slots(table, n, length, PAGE)
                k = tl.load(
                    latent + slots[:, None] * latent_row + columns[None, :], mask=ok, other=0.0
                )
                kr = tl.load(
                    rope + slots[:, None] * rope_row + rope_columns[None, :], mask=ok, other=0.0
                )
                if GROUPS > 0:
                    s8 = tl.load(
                        scales + slots[:, None] * scale_row + tl.arange(0, GROUPS)[None, :],
                        mask=ok,
                        other=0.0,
                    )
                    k = _dequantize(k, s8, DTYPE, GAIN, BLOCK_N, RANK, GROUPS)
                scores = tl.dot(q, k.T, input_precision=PRECISION)
                scores = tl.dot(qr, kr.T, scores, input_precision=PRECISION)
                seen = n[None, :] <= (length - QUERIES + query)[:, None]
                weights, shrink, peak, total = _softmax_step(
                    tl.where(seen, scores, float("-inf")), factor, peak, total
                )
                acc = tl.dot(weights.to(DTYPE), k, acc * shrink[:, None], input_precision=PRECISION)

            acc = acc / tl.where(total > 0, total * GAIN, 1.0)[:, None]
            if (position == begin) & (stop == end):
                place = (
                    out + token[:, None] * out_token + head[:, None] * out_head + columns[None, :]
                )
                tl.store(place, acc.to(KIND), mask=row_ok[:, None])
            else:
                slot = (2 * worker + (position == begin).to(tl.int32)).to(tl.int64) * ROWS + rows
                _store_part(partial, lse, slot, columns, acc, peak, total, row_ok, RANK)
            position = stop
        request += 1
        begin, end, length = request_at(starts, kv_lens, request, requests)


def _descriptor(rows: Tensor, block_n: int) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [block_n, rows.shape[1]])


def mla_plan(
    kv_lens: Tensor, max_kv_len: int, queries: int, heads: int, rank: int, config: MlaDecodeConfig
) -> SplitPlan:
    """The schedule of one step, for all its layers. max_kv_len: any upper bound of kv_lens [R],
    known on the host."""
    row_blocks = triton.cdiv(queries * heads, config.block_h)
    workers = _workers(config, kv_lens.shape[0], max_kv_len, row_blocks, kv_lens.device)
    return split_plan(kv_lens, workers, config.block_n, config.min_tiles, queries * heads, rank)


def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tables: Tensor,
    kv_lens: Tensor,
    scale: float,
    max_kv_len: int,
    plan: SplitPlan | None = None,
    out: Tensor | None = None,
    config: MlaDecodeConfig | None = None,
) -> Tensor:
    """Latent attention of R requests with the same number of query tokens each (T / R, at most 4 in
    use), causal among them.

    q_latent [T, H, C], q_rope [T, H, rope] in bf16 or fp32, any token and head strides; cache
    [pages, page, C + rope] in the same dtype or rows of bytes (8 bits, latent_fp8.py); tables [R,
    columns] int, entries past a request's end are never used; kv_lens [R] int, cached tokens
    including this step's. Length 0 gives zeros. Returns [T, H, C] in the queries' dtype. Nothing is
    read back to the host. `plan` (from mla_plan, same config) saves making it anew in each layer.
    """
    tokens, heads, rank = q_latent.shape
    requests = kv_lens.shape[0]
    queries = tokens // requests
    config = config or config_for(q_latent, queries * heads, cache.dtype, requests, max_kv_len)
    plan = plan or mla_plan(kv_lens, max_kv_len, queries, heads, rank, config)
    out = (
        torch.empty(tokens, heads, rank, dtype=q_latent.dtype, device=q_latent.device)
        if out is None
        else out
    )
    grid = (triton.cdiv(queries * heads, config.block_h), plan.workers)
    work = LatentDecode(q_latent, q_rope, cache, tables, kv_lens, scale * LOG2E, plan, out, grid)
    if not (config.gluon and is_hopper(q_latent.device) and _launch_gluon(work, config)):
        _launch(work, config)
    combine(plan, out, requests)
    return out


def _launch_gluon(work: LatentDecode, config: MlaDecodeConfig) -> bool:
    """Whether a Hopper kernel was launched; False if none supports the call."""
    from rorqual.ops.triton.attention import (
        mla_decode_sm90,
        mla_decode_sm90_8bit,
        mla_decode_sm90_fp8,
    )

    tile = (config.block_h, config.block_n)
    if mla_decode_sm90.supported(work.q_latent, work.cache, *tile):
        mla_decode_sm90.launch(work)
        return True
    if mla_decode_sm90_8bit.supported(work.q_latent, work.cache, *tile):
        mla_decode_sm90_8bit.launch(work)
        return True
    if mla_decode_sm90_fp8.supported(work.q_latent, work.cache, *tile, config.warps):
        mla_decode_sm90_fp8.launch(work, config.block_h, config.warps, config.stages, config.per_sm)
        return True
    return False


def _launch(work: LatentDecode, config: MlaDecodeConfig) -> None:
    """The Triton kernel."""
    q_latent, cache = work.q_latent, work.cache
    rank = q_latent.shape[2]
    page = cache.shape[1]
    packed = in_8_bits(cache)
    rows = cache.flatten(0, 1)
    latent, scales, rope = (
        latent_parts(rows, rank, q_latent.dtype)
        if packed
        else (rows[:, :rank], None, rows[:, rank:])
    )
    tma = (
        config.tma
        and page % config.block_n == 0
        and cache.stride(1) * cache.element_size() % 16 == 0
    )
    # a bulk copy of scales takes 16 bytes, and what follows them begins on 16
    tma = tma and (not packed or rank % 512 == 0)
    describe = [
        _descriptor(x, config.block_n) if tma and x is not None else None
        for x in (latent, rope, scales)
    ]
    _mla_decode_kernel[work.grid](
        q_latent,
        work.q_rope,
        latent,
        rope,
        scales,
        *describe,
        *work.schedule,
        work.factor,
        *work.query_strides,
        latent.stride(0),
        rope.stride(0),
        0 if scales is None else scales.stride(0),
        work.tables.stride(0),
        *work.out.stride()[:2],
        work.requests,
        work.plan.min_tiles,
        work.heads,
        work.queries,
        rank,
        work.q_rope.shape[2],
        groups_of(rank) if packed else 0,
        page,
        config.block_h,
        config.block_n,
        config.stages,
        tma,
        "ieee" if q_latent.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        **dependent(q_latent.device),
    )
