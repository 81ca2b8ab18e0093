"""MLA decode over an fp8 latent cache on Hopper, in Gluon.

Tokens are the rows of both products (wgmma multiplies 64 rows whatever there is) and query rows, a
request's heads x query tokens, are the columns; operands are made as sm90_fp8_operands.py says:

    scores [64 tokens, rows]       = keys [64, 512 + 64] x queries^T
    sums   [512 columns, rows]    += values^T [512, 64] x weights^T

Numbers. Queries are divided by a power of two for each row, so that fp16 takes the latent part
unrounded. The reference of a row's softmax is the greatest score + log2(largest scale of the
token), so that weight x scale stays below 2^14 in fp16 for all finite scales; what has a weight x
scale of less than 2^-38 of the greatest is lost. Rope keys and queries are multiplied in bf16, in
which they are kept.

Budget of one tile of 64 tokens, in clocks of a multiprocessor, for 16 rows in one warpgroup, of
which two or three share a multiprocessor and hide each other's waits:

    memory         64 x 656 bytes at 18.6 a clock                                        2260
    shared memory  tile written 328, read by threads 544, by wgmma 336, the rest 160;
                   no access has conflicts                                               1370
    tensor cores   68 products of 64 x 16 x 16 at about 16                               1090
    instructions   a warp's 920, one warp a scheduler and warpgroup                       920

So it is bound by memory, as long as two programs overlap: the chain of one program's tile is about
2200 clocks. 64 rows and more are mla_decode_sm90_8bit.py's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rorqual.ops.reference import latent_parts
from rorqual.ops.triton.attention.mla_decode_sm90 import span
from rorqual.ops.triton.attention.sm90_fp8_operands import (
    add_values,
    clear_end,
    key_layout,
    load_scales,
    put_queries,
    scale_layout,
    score,
)
from rorqual.ops.triton.attention.split_kv import LatentDecode
from rorqual.ops.triton.runtime.launch import dependent
from rorqual.ops.triton.runtime.sm90_pipeline import (
    let_next_start,
    opaque_zero,
    thread_barrier,
    wait_for_inputs,
)

TOKENS = 64
RANK = 512
ROPE = 64
GROUP = 128
LARGEST = 16384.0  # of weight x scale in fp16


@gluon.constexpr_function
def _columns(rows, parts):
    """Registers' bits of the columns that wgmma gives a thread, and warps' bits of a second
    warpgroup."""
    return [[0, 1], [0, 8], [0, 16]][: 2 + (rows // parts == 32)], [[0, rows // 2]] * (parts - 1)


@gluon.constexpr_function
def _folded_layout(rows, parts):
    """[32, rows]: as wgmma's [64, rows], with the two tokens in one that a thread has of 16."""
    registers, second = _columns(rows, parts)
    return gl.DistributedLinearLayout(
        registers,
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0], *second],
        [],
        [32, rows],
    )


@gluon.constexpr_function
def _peaks_layout(rows, parts):
    """[4, rows]: every thread has all four of its columns."""
    registers, second = _columns(rows, parts)
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(
        [*registers, [1, 0], [2, 0]], lanes, [[0, 0], [0, 0], *second], [], [4, rows]
    )


@gluon.jit
def _locate(
    tables, table_row, starts, request, begin, end, tile, PAGE: gl.constexpr, TOKENS: gl.constexpr
):
    """(whose tile it is, `request` or a later one, its first tile and the one after its last,
    the tile's page). Tiles are counted over all requests. These loads follow one another:
    whoever is about to fetch should have asked before."""
    while end <= tile:
        request = request + 1
        begin = end
        end = gl.load(starts + request + 1)
    page = gl.load(tables + request.to(gl.int64) * table_row + (tile - begin) * TOKENS // PAGE)
    return request, begin, end, page.to(gl.int32)


@gluon.jit
def _log2(x):
    """About: it serves as a reference, which need not be exact."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _greatest(scores, shared, PEAKS: gl.constexpr, ROW: gl.constexpr):
    """The maximum over tokens, scores [64, rows] to [rows]. Each warp leaves that of its 16
    tokens in shared [4, rows]."""
    shared.store(gl.max(gl.reshape(scores, [4, 16, scores.shape[1]]), 1))
    thread_barrier()
    return gl.convert_layout(gl.max(shared.load(PEAKS), 0), ROW, assert_trivial=True)


@gluon.jit
def _add_weights(total, p, shrink, FOLDED: gl.constexpr):
    """total [32, rows], p [64, rows]: each thread adds its tokens, of which two lie 8 apart;
    across threads nothing is added here."""
    ROWS: gl.constexpr = p.shape[1]
    folded = gl.reshape(gl.sum(gl.reshape(p, [4, 2, 8, ROWS]), 1), [32, ROWS])
    shrink = gl.convert_layout(shrink, gl.SliceLayout(0, FOLDED), assert_trivial=True)
    return total * shrink[None, :] + gl.convert_layout(folded, FOLDED, assert_trivial=True)


@gluon.jit
def _fetch(
    latent_tma,
    scale_tma,
    rope_tma,
    page,
    token,
    stage,
    latents,
    scales,
    ropes,
    ready,
    PAGE: gl.constexpr,
):
    """Start the copy of the tile that begins at a request's token, once all threads are done
    with what was in its place."""
    row = page * PAGE + token % PAGE
    barrier = ready.index(stage)
    mbarrier.expect(
        barrier, latents.shape[1] * (latents.shape[2] + scales.shape[2] * 4 + ropes.shape[2] * 2)
    )
    thread_barrier()
    tma.async_copy_global_to_shared(latent_tma, [row, 0], barrier, latents.index(stage))
    tma.async_copy_global_to_shared(scale_tma, [row, 0], barrier, scales.index(stage))
    tma.async_copy_global_to_shared(rope_tma, [row, 0], barrier, ropes.index(stage))


@gluon.jit(do_not_specialize=["requests", "min_tiles", "table_row"])
def _mla_hopper_fp8_kernel(
    q_latent,
    q_rope,
    latent_tma,
    scale_tma,
    rope_tma,
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
    table_row,
    out_token,
    out_head,
    requests,
    min_tiles,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    PAGE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    GROUP: gl.constexpr,
    LARGEST: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid (row blocks, workers). `factor` is the softmax scale times log2(e); starts, first,
    partial, lse as in split_kv.py. Warpgroups, of which there are one or two, share out the
    block's rows."""
    TOTAL: gl.constexpr = HEADS * QUERIES
    GROUPS: gl.constexpr = RANK // GROUP
    PARTS: gl.constexpr = WARPS // 4
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, PARTS], [16, ROWS // PARTS, 16])
    TOKEN: gl.constexpr = gl.SliceLayout(1, MMA)
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    KEYS: gl.constexpr = key_layout(TOKENS, GROUP, PARTS)
    SCALES: gl.constexpr = scale_layout(TOKENS, GROUPS, PARTS)
    FOLDED: gl.constexpr = _folded_layout(ROWS, PARTS)
    PEAKS: gl.constexpr = _peaks_layout(ROWS, PARTS)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    queries = gl.allocate_shared_memory(gl.float16, [GROUPS, ROWS, GROUP], WIDE)
    query_ropes = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], WIDE)
    weights = ()
    # each by itself: between stores to parts of one, Triton puts barriers
    for _ in gl.static_range(GROUPS):
        weights += (
            gl.allocate_shared_memory(
                gl.float16, [1, TOKENS, ROWS], gl.NVMMASharedLayout(2 * ROWS // PARTS, 16, rank=2)
            ),
        )  # type: ignore[assignment]
    units = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    peaks = gl.allocate_shared_memory(
        gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    latents = gl.allocate_shared_memory(gl.uint8, [STAGES, TOKENS, RANK], latent_tma.layout)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS, GROUPS], scale_tma.layout)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, ROPE], rope_tma.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()

    let_next_start(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    worker = gl.program_id(1)
    block = gl.program_id(0)
    earliest, last = span(starts, requests, min_tiles)
    tile = earliest
    if tile < last:
        request = gl.load(first + worker)
        # of the tile to be fetched next
        ahead = request
        page = 0
        ahead_begin = gl.load(starts + request)
        ahead_end = gl.load(starts + request + 1)
        for s in gl.static_range(STAGES):
            if tile + s < last:
                ahead, ahead_begin, ahead_end, page = _locate(
                    tables, table_row, starts, ahead, ahead_begin, ahead_end, tile + s, PAGE, TOKENS
                )
                token = (tile + s - ahead_begin) * TOKENS
                _fetch(
                    latent_tma,
                    scale_tma,
                    rope_tma,
                    page,
                    token,
                    s,
                    latents,
                    scales,
                    ropes,
                    ready,
                    PAGE,
                )
        while tile < last:
            while gl.load(starts + request + 1) <= tile:
                request = request + 1
            begin = gl.load(starts + request)
            end = gl.load(starts + request + 1)
            stop = gl.minimum(end, last)
            position = tile
            length = gl.load(kv_lens + request).to(gl.int32)
            copied = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
            put_queries(
                q_latent,
                q_rope,
                request.to(gl.int64) * QUERIES + copied // HEADS,
                copied % HEADS,
                copied < TOTAL,
                q_token,
                q_head,
                qr_token,
                qr_head,
                queries,
                query_ropes,
                units,
                COPY,
            )
            row = block * ROWS + gl.arange(0, ROWS, ROW)
            # finite: a row that sees nothing makes no NaN
            peak = gl.full([ROWS], -1e30, gl.float32, ROW)
            total = gl.full([TOKENS // 2, ROWS], 0.0, gl.float32, FOLDED)
            none = gl.full([GROUP // 2, ROWS], 0.0, gl.float32, MMA)
            sums = (none, none, none, none, none, none, none, none)
            while tile < stop:
                turn = tile - earliest
                stage = turn % STAGES
                if tile + STAGES < last:  # nothing waits for the page number here
                    ahead, ahead_begin, ahead_end, page = _locate(
                        tables,
                        table_row,
                        starts,
                        ahead,
                        ahead_begin,
                        ahead_end,
                        tile + STAGES,
                        PAGE,
                        TOKENS,
                    )
                mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
                at = (tile - begin) * TOKENS
                if at + TOKENS > length:
                    clear_end(
                        latents.index(stage),
                        scales.index(stage),
                        ropes.index(stage),
                        at,
                        length,
                        GROUPS,
                        COPY,
                        SCALES,
                    )
                scale = load_scales(scales.index(stage), SCALES, TOKEN)
                zero = opaque_zero()
                scores = score(
                    latents.index(stage),
                    ropes.index(stage),
                    scale,
                    queries,
                    query_ropes,
                    zero,
                    MMA,
                    KEYS,
                    AHEAD,
                )
                if at + TOKENS > length - QUERIES + 1:
                    scores = gl.where(
                        (at + gl.arange(0, TOKENS, TOKEN))[:, None]
                        <= (length - QUERIES + row // HEADS)[None, :],
                        scores,
                        float("-inf"),
                    )
                largest = gl.maximum(gl.maximum(scale[0], scale[1]), gl.maximum(scale[2], scale[3]))
                scores = scores * (units.load(ROW) * factor)[None, :]
                reference = scores + _log2(gl.maximum(largest, 1e-30))[:, None]
                new_peak = gl.maximum(peak, _greatest(reference, peaks, PEAKS, ROW))
                p = gl.exp2(scores - new_peak[None, :])
                shrink = gl.exp2(peak - new_peak)
                peak = new_peak
                total = _add_weights(total, p, shrink, FOLDED)
                for g in gl.static_range(GROUPS):
                    weights[g].index(0).store((p * (scale[g] * LARGEST)[:, None]).to(gl.float16))
                fence_async_shared()
                shrunk = ()
                for i in gl.static_range(2 * GROUPS):
                    shrunk += (sums[i] * shrink[None, :],)  # type: ignore[assignment]
                thread_barrier()
                sums = add_values(
                    latents.index(stage), weights, shrunk, zero, GROUP, WIDE, MMA, AHEAD
                )
                if tile + STAGES < last:
                    token = (tile + STAGES - ahead_begin) * TOKENS
                    _fetch(
                        latent_tma,
                        scale_tma,
                        rope_tma,
                        page,
                        token,
                        stage,
                        latents,
                        scales,
                        ropes,
                        ready,
                        PAGE,
                    )
                # not +=: tests run this on tensors, which that would change in place
                tile = tile + 1
            total = gl.convert_layout(gl.sum(total, 0), ROW)
            divisor = gl.where(total > 0, total * LARGEST, 1.0)
            column = 2 * gl.arange(0, GROUP // 2, TOKEN)
            ok = (row < TOTAL)[None, :]
            if (position == begin) & (stop == end):
                to = (request.to(gl.int64) * QUERIES + row // HEADS) * out_token + (
                    row % HEADS
                ) * out_head
                for i in gl.static_range(2 * GROUPS):
                    at_column = (column + (i // 2 * GROUP + i % 2))[:, None]
                    gl.store(
                        out + to[None, :] + at_column,
                        (sums[i] / divisor[None, :]).to(gl.bfloat16),
                        mask=ok,
                    )
            else:
                slot = (2 * worker + (position == begin).to(gl.int32)).to(gl.int64) * TOTAL + row
                found = gl.where(total > 0, peak + gl.log2(gl.maximum(total, 1e-37)), float("-inf"))
                gl.store(lse + slot, found, mask=row < TOTAL)
                for i in gl.static_range(2 * GROUPS):
                    at_column = (column + (i // 2 * GROUP + i % 2))[:, None]
                    gl.store(
                        partial + (slot * RANK)[None, :] + at_column,
                        sums[i] / divisor[None, :],
                        mask=ok,
                    )


def supported(q_latent: Tensor, cache: Tensor, rows: int, tokens: int, warps: int) -> bool:
    """bf16 queries of DeepSeek's widths, whole tiles in a page, and a schedule and configuration
    of this kernel's."""
    fits = (
        q_latent.dtype == torch.bfloat16
        and q_latent.shape[-1] == RANK
        and cache.dtype == torch.uint8
        and cache.shape[-1] == 656
    )
    whole = cache.shape[1] % TOKENS == 0 and cache.is_contiguous()
    return fits and whole and tokens == TOKENS and (rows, warps) in ((16, 4), (32, 4), (32, 8))


def groups_ahead(rows: int, warps: int, per_sm: int) -> int:
    """How many groups of columns may be multiplied while the next is being converted: as there
    are registers for their operands."""
    return int(4 * rows // warps == 16 and per_sm < 3)


def launch(work: LatentDecode, rows: int, warps: int, stages: int, per_sm: int) -> None:
    """As mla_decode.mla_decode, which puts partial results together afterwards. rows of a block,
    of which a warpgroup takes 16 or 32."""
    parts = latent_parts(work.cache.flatten(0, 1), RANK, work.q_latent.dtype)
    registers = {"maxnreg": 168} if per_sm == 3 else {}
    _mla_hopper_fp8_kernel[work.grid](
        work.q_latent,
        work.q_rope,
        *_tiles(*parts),
        *work.schedule,
        work.factor,
        *work.query_strides,
        work.tables.stride(0),
        *work.out.stride()[:2],
        work.requests,
        work.plan.min_tiles,
        work.heads,
        work.queries,
        work.cache.shape[1],
        rows,
        TOKENS,
        RANK,
        ROPE,
        GROUP,
        LARGEST,
        warps,
        stages,
        groups_ahead(rows, warps, per_sm),
        num_warps=warps,
        **registers,
        **dependent(work.out.device),
    )


def _tiles(latent: Tensor, scales: Tensor, rope: Tensor) -> list[TensorDescriptor]:
    """Of TOKENS entries, as bulk copies bring them."""
    layouts: list[Any] = [
        gl.NVMMASharedLayout(swizzle, bits, rank=2)
        for swizzle, bits in ((128, 8), (0, 32), (128, 16))
    ]
    parts = zip((latent.view(torch.uint8), scales, rope), layouts, strict=True)
    return [
        TensorDescriptor.from_tensor(part, [TOKENS, part.shape[1]], layout)
        for part, layout in parts
    ]
