"""Attention of packed prompts on Hopper, in Gluon: the form of `prefill.py` for heads of 128 or
192 columns.

Two warpgroups have 64 rows of queries each and share the tiles of 128 keys that a third one's first
warp copies. The scores of the next tile are under way before the values of this one are added up,
so a tile's weights are computed beside products (the order of FlashAttention-3, arXiv 2407.08608).
Tiles come from the last to the first: those that need a mask are the first ones.

A short chunk behind a long context has fewer blocks than the GPU has multiprocessors. Its keys are
then split: each program takes some of the tiles, and a second kernel merges what they found.

Cycles of a tile on a multiprocessor that multiplies 64 x 64 x 16 in 32: 2 x 512 for scores of 128
columns, 2 x 768 of 192, and 2 x 512 for the values; 16,384 exponentials at 16 a cycle take 1,024
beside them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rorqual.ops.triton.attention.mla_decode_sm90 import _clear_end
from rorqual.ops.triton.runtime.launch import multiprocessors
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    next_stage,
    opaque_zero,
    thread_barrier,
)

ROWS = 128  # queries of a block
TOKENS = 128  # keys of a tile
PIECE = 64  # rows and columns of a bulk copy: a page of 64 tokens is two of them
STAGES = 2
MOST_SPLITS = 16
LEAST_TILES = 2  # of a part
MERGED_ROWS = 4  # of a program
FEWEST_MERGED = 4  # fewer parts have the kernel of so many: one variant less to compile
REGISTERS = (240, 24)  # of a thread that computes, of one that copies


@gluon.jit
def _span(query_starts, kv_lens, firsts, splits, SO_FAR: gl.constexpr, SPLIT: gl.constexpr):
    """(first query of the request, its queries, its keys, what query 0 sees besides its own
    place's keys, this program's block, its tiles: the first and the one after the last)."""
    request = gl.program_id(2)
    begin = gl.load(query_starts + request)
    queries = (gl.load(query_starts + request + 1) - begin).to(gl.int32)
    length = gl.load(kv_lens + request).to(gl.int32)
    shift = length - queries
    if SO_FAR:
        shift = gl.load(firsts + request).to(gl.int32)
    place = gl.program_id(0)
    low = 0
    if SPLIT:
        place = place // splits
    block = (queries + 127) // 128 - 1 - place
    high = gl.maximum(gl.minimum(shift + (block + 1) * 128, length) + 127, 0) // 128
    if SPLIT:
        each = (high + splits - 1) // splits
        low = (gl.program_id(0) - place * splits) * each
        high = gl.minimum(high, low + each)
    return begin, queries, length, shift, block, low, high


@gluon.jit
def _copy(
    q_tma,
    k_tma,
    tail_tma,
    v_tma,
    tables,
    query_starts,
    key_starts,
    kv_lens,
    firsts,
    queries_main,
    queries_tail,
    keys,
    tails,
    values,
    q_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    q_head,
    k_head,
    tail_head,
    tail_first,
    v_head,
    table_row,
    splits,
    SO_FAR: gl.constexpr,
    SPLIT: gl.constexpr,
    SHARE: gl.constexpr,
    WIDTH: gl.constexpr,
    TAIL: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
):
    begin, _, length, _, block, start, high = _span(
        query_starts, kv_lens, firsts, splits, SO_FAR, SPLIT
    )
    if (block >= 0) & (high > start):
        head = gl.program_id(1)
        request = gl.program_id(2)
        group = head // SHARE
        mbarrier.expect(q_full.index(0), 128 * (WIDTH + TAIL) * 2)
        for half in gl.static_range(2):
            row = begin.to(gl.int32) + block * 128 + half * 64
            parts = queries_main.index(half)._reinterpret(
                gl.bfloat16, [WIDTH // 64, 64, 64], SHARED
            )
            for c in gl.static_range(WIDTH // 64):
                tma.async_copy_global_to_shared(
                    q_tma, [row, head * q_head + c * 64], q_full.index(0), parts.index(c)
                )
            if TAIL > 0:
                tma.async_copy_global_to_shared(
                    q_tma, [row, head * q_head + WIDTH], q_full.index(0), queries_tail.index(half)
                )
        stage = 0
        phase = 1
        for i in range(high - start):
            first = (high - 1 - i) * 128
            if PAGE == 0:
                low = (gl.load(key_starts + request) + first).to(gl.int32)
                upper = low + 64
            else:
                table = tables + request.to(gl.int64) * table_row
                low = gl.load(table + first // PAGE).to(gl.int32) * PAGE + first % PAGE
                # past the end of a request's pages there may be anything
                second = gl.where(first + 64 < length, first + 64, first)
                upper = gl.load(table + second // PAGE).to(gl.int32) * PAGE + second % PAGE
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), 128 * (WIDTH + TAIL) * 2)
            k_parts = keys.index(stage)._reinterpret(gl.bfloat16, [WIDTH // 32, 64, 64], SHARED)
            for c in gl.static_range(WIDTH // 64):
                at = group * k_head + c * 64
                tma.async_copy_global_to_shared(
                    k_tma, [low, at], k_full.index(stage), k_parts.index(2 * c)
                )
                tma.async_copy_global_to_shared(
                    k_tma, [upper, at], k_full.index(stage), k_parts.index(2 * c + 1)
                )
            if TAIL > 0:
                behind = group * tail_head + tail_first
                halves = tails.index(stage)._reinterpret(gl.bfloat16, [2, 64, 64], SHARED)
                tma.async_copy_global_to_shared(
                    tail_tma, [low, behind], k_full.index(stage), halves.index(0)
                )
                tma.async_copy_global_to_shared(
                    tail_tma, [upper, behind], k_full.index(stage), halves.index(1)
                )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), 128 * 128 * 2)
            v_parts = values.index(stage)._reinterpret(gl.bfloat16, [4, 64, 64], SHARED)
            for c in gl.static_range(2):
                at = group * v_head + c * 64
                tma.async_copy_global_to_shared(
                    v_tma, [low, at], v_full.index(stage), v_parts.index(2 * c)
                )
                tma.async_copy_global_to_shared(
                    v_tma, [upper, at], v_full.index(stage), v_parts.index(2 * c + 1)
                )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _scores(query, query_tail, key, key_tail, TAIL: gl.constexpr, ACC: gl.constexpr):
    """Of 64 queries and 128 keys, under way."""
    scores = gl.full([64, 128], 0.0, gl.float32, ACC)
    scores = warpgroup_mma(query, key.permute((1, 0)), scores, use_acc=False, is_async=True)
    if TAIL > 0:
        scores = warpgroup_mma(query_tail, key_tail.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _masked(scores, seen_until, first, ACC: gl.constexpr):
    """seen_until [64]: the last key that a row sees; first: the tile's."""
    column = first + gl.arange(0, 128, gl.SliceLayout(0, ACC))
    return gl.where(column[None, :] <= seen_until[:, None], scores, float("-inf"))


@gluon.jit
def _weights(scores, peak, total, factor):
    """(weights in fp32, by how much what was found so far shrinks, the new peak and total)."""
    new_peak = gl.maximum(peak, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - new_peak[:, None])
    shrink = gl.exp2(peak - new_peak)
    return weights, shrink, new_peak, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _step(
    weights,
    acc,
    peak,
    total,
    query,
    query_tail,
    keys,
    tails,
    values,
    k_full,
    k_empty,
    v_full,
    v_empty,
    k_stage,
    k_phase,
    v_stage,
    v_phase,
    seen_until,
    first,
    factor,
    TAIL: gl.constexpr,
    MASK: gl.constexpr,
    STAGES: gl.constexpr,
    ACC: gl.constexpr,
):
    """Scores of the tile at `first`, beside the values of the tile before it."""
    mbarrier.wait(k_full.index(k_stage), k_phase)
    scores = _scores(query, query_tail, keys.index(k_stage), tails.index(k_stage), TAIL, ACC)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    acc = warpgroup_mma(weights, values.index(v_stage), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    if MASK:
        scores = _masked(scores, seen_until, first, ACC)
    found, shrink, peak, total = _weights(scores, peak, total, factor)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    acc = acc * shrink[:, None]
    weights = gl.convert_layout(found.to(gl.bfloat16), gl.DotOperandLayout(0, ACC, 2))
    k_stage, k_phase = next_stage(k_stage, k_phase, STAGES)
    v_stage, v_phase = next_stage(v_stage, v_phase, STAGES)
    return weights, acc, peak, total, k_stage, k_phase, v_stage, v_phase


@gluon.jit
def _attend(
    query_starts,
    kv_lens,
    firsts,
    totals,
    out,
    queries_main,
    queries_tail,
    keys,
    tails,
    values,
    q_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    cleared,
    factor,
    total_token,
    total_head,
    out_token,
    out_head,
    splits,
    total_split,
    out_split,
    SO_FAR: gl.constexpr,
    SPLIT: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    SHARED: gl.constexpr,
):
    """One of the two warpgroups that compute."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    begin, queries, length, shift, block, low, high = _span(
        query_starts, kv_lens, firsts, splits, SO_FAR, SPLIT
    )
    if (block >= 0) & (high > low):
        head = gl.program_id(1)
        first_row = block * 128 + WHO * 64
        row = first_row + gl.arange(0, 64, ROW)
        seen_until = gl.minimum(shift + row, length - 1)
        # tiles that every row sees in full
        plain = gl.minimum(gl.maximum(shift + first_row + 1, 0), length) // 128
        plain = gl.maximum(plain, low)
        peak = gl.full([64], -1e30, gl.float32, ROW)  # finite: a row that sees nothing makes no NaN
        total = gl.full([64], 0.0, gl.float32, ROW)
        acc = gl.full([64, 128], 0.0, gl.float32, ACC)
        query = queries_main.index(WHO)
        query_tail = queries_tail.index(WHO)
        tile = high - 1
        mbarrier.wait(q_full.index(0), 0)
        mbarrier.wait(k_full.index(0), 0)
        scores = _scores(query, query_tail, keys.index(0), tails.index(0), TAIL, ACC)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(0), count=1)
        scores = _masked(scores, seen_until, tile * 128, ACC)
        found, shrink, peak, total = _weights(scores, peak, total, factor)
        acc = acc * shrink[:, None]
        weights = gl.convert_layout(found.to(gl.bfloat16), gl.DotOperandLayout(0, ACC, 2))
        if high * 128 > length:
            # behind the end there may be what is not finite: a weight of zero does not cure it
            if WHO == 0:
                mbarrier.wait(v_full.index(0), 0)
                _clear_end(values.index(0), tile * 128, length, SHARED)
                fence_async_shared()
                mbarrier.arrive(cleared.index(0), count=1)
            else:
                mbarrier.wait(cleared.index(0), 0)
        k_stage = 1
        k_phase = 0
        v_stage = 0
        v_phase = 0
        while tile > plain:
            tile = tile - 1
            weights, acc, peak, total, k_stage, k_phase, v_stage, v_phase = _step(
                weights,
                acc,
                peak,
                total,
                query,
                query_tail,
                keys,
                tails,
                values,
                k_full,
                k_empty,
                v_full,
                v_empty,
                k_stage,
                k_phase,
                v_stage,
                v_phase,
                seen_until,
                tile * 128,
                factor,
                TAIL,
                True,
                STAGES,
                ACC,
            )
        while tile > low:
            tile = tile - 1
            weights, acc, peak, total, k_stage, k_phase, v_stage, v_phase = _step(
                weights,
                acc,
                peak,
                total,
                query,
                query_tail,
                keys,
                tails,
                values,
                k_full,
                k_empty,
                v_full,
                v_empty,
                k_stage,
                k_phase,
                v_stage,
                v_phase,
                seen_until,
                tile * 128,
                factor,
                TAIL,
                False,
                STAGES,
                ACC,
            )
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc = warpgroup_mma_wait(
            0, deps=[warpgroup_mma(weights, values.index(v_stage), acc, is_async=True)]
        )
        some = gl.where(total > 0, total, 1.0)
        acc = acc * (1.0 / some)[:, None]
        if SO_FAR:
            row_end = (first_row + opaque_zero()) + gl.arange(0, 64, ROW)
            token_end = begin.to(gl.int64) + row_end
            place_end = totals + token_end * total_token + head * total_head
            before = gl.load(place_end, mask=row_end < queries, other=float("-inf"))
            before = before * 1.4426950408889634
            here = gl.where(total > 0, peak + gl.log2(some), float("-inf"))
            # finite: a row that has seen nothing at all makes no NaN
            most = gl.maximum(gl.maximum(before, here), -1e30)
            weight_before = gl.exp2(before - most)
            weight_here = gl.exp2(here - most)
            both = weight_before + weight_here
            share = 1.0 / gl.where(both > 0, both, 1.0)
            log = gl.where(
                both > 0,
                (most + gl.log2(gl.where(both > 0, both, 1.0))) * 0.6931471805599453,
                float("-inf"),
            )
            gl.store(place_end, log, mask=row_end < queries)
            column_end = opaque_zero() + gl.arange(0, 128, gl.SliceLayout(0, ACC))
            place_acc = (out + (token_end * out_token + head * out_head)[:, None]) + column_end[
                None, :
            ]
            there = (row_end < queries)[:, None]
            found_before = gl.load(place_acc, mask=there, other=0.0)
            acc = acc * (weight_here * share)[:, None]
            acc = acc + found_before * (weight_before * share)[:, None]
            gl.store(place_acc, acc, mask=there)
        elif SPLIT:
            row_part = (first_row + opaque_zero()) + gl.arange(0, 64, ROW)
            token_part = begin.to(gl.int64) + row_part
            part = (gl.program_id(0) % splits).to(gl.int64)
            log_part = gl.where(total > 0, peak + gl.log2(some), float("-inf"))
            place_log = totals + part * total_split + token_part * total_token + head * total_head
            gl.store(place_log, log_part, mask=row_part < queries)
            column_part = opaque_zero() + gl.arange(0, 128, gl.SliceLayout(0, ACC))
            token_place = token_part * out_token + head * out_head
            place_part = (out + part * out_split + token_place[:, None]) + column_part[None, :]
            gl.store(place_part, acc, mask=(row_part < queries)[:, None])
        else:
            # through the queries' place: whole rows leave together
            query.store(acc.to(gl.bfloat16))
            thread_barrier()
            row_out = (first_row + opaque_zero()) + gl.arange(0, 64, gl.SliceLayout(1, COPY))
            column_out = gl.arange(0, 128, gl.SliceLayout(0, COPY))
            token_out = begin.to(gl.int64) + row_out
            place_out = out + (token_out * out_token + head * out_head)[:, None]
            gl.store(
                place_out + column_out[None, :], query.load(COPY), mask=(row_out < queries)[:, None]
            )
    elif block >= 0:
        if SPLIT:  # no tiles are left for this program
            row_left = block * 128 + WHO * 64 + gl.arange(0, 64, ROW)
            token_left = begin.to(gl.int64) + row_left
            part_left = (gl.program_id(0) % splits).to(gl.int64)
            head_left = gl.program_id(1) * total_head
            place_left = totals + part_left * total_split + token_left * total_token + head_left
            none = gl.full([64], float("-inf"), gl.float32, ROW)
            gl.store(place_left, none, mask=row_left < queries)
        elif not SO_FAR:  # no keys at all
            row_none = block * 128 + WHO * 64 + gl.arange(0, 64, gl.SliceLayout(1, COPY))
            column_none = gl.arange(0, 128, gl.SliceLayout(0, COPY))
            token_none = begin.to(gl.int64) + row_none
            place_none = out + (token_none * out_token + gl.program_id(1) * out_head)[:, None]
            gl.store(
                place_none + column_none[None, :],
                gl.full([64, 128], 0.0, out.dtype.element_ty, COPY),
                mask=(row_none < queries)[:, None],
            )


# how many requests and pages a step has must not compile the kernel anew
@gluon.jit(
    do_not_specialize=["table_row", "splits", "total_split", "out_split"],
    do_not_specialize_on_alignment=["tables", "query_starts", "key_starts", "kv_lens", "firsts"],
)
def _prefill_sm90_kernel(
    q_tma,
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
    q_head,
    k_head,
    tail_head,
    tail_first,
    v_head,
    table_row,
    total_token,
    total_head,
    out_token,
    out_head,
    splits,
    total_split,
    out_split,
    SO_FAR: gl.constexpr,
    SPLIT: gl.constexpr,
    SHARE: gl.constexpr,
    WIDTH: gl.constexpr,
    TAIL: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    COMPUTER: gl.constexpr,
    COPIER: gl.constexpr,
):
    """Grid and arguments as of `prefill._prefill_kernel`; heads of WIDTH + TAIL columns, values of
    128. A head's TAIL columns begin at tail_head times the head's number + tail_first.

    SPLIT: `splits` times as many programs, each with as many of a block's tiles. out [splits, T, H,
    128] fp32 and totals [splits, T, H] fp32 get their results, and the log2 of their sums."""
    SHARED: gl.constexpr = q_tma.layout
    queries_main = gl.allocate_shared_memory(gl.bfloat16, [2, 64, WIDTH], SHARED)
    queries_tail = gl.allocate_shared_memory(gl.bfloat16, [2, 64 if TAIL > 0 else 8, 64], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, WIDTH], SHARED)
    tails = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128 if TAIL > 0 else 8, 64], SHARED)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 128], SHARED)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(cleared.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    query_starts,
                    kv_lens,
                    firsts,
                    totals,
                    out,
                    queries_main,
                    queries_tail,
                    keys,
                    tails,
                    values,
                    q_full,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    cleared,
                    factor,
                    total_token,
                    total_head,
                    out_token,
                    out_head,
                    splits,
                    total_split,
                    out_split,
                    SO_FAR,
                    SPLIT,
                    TAIL,
                    STAGES,
                    0,
                    SHARED,
                ),
            ),
            (
                _attend,
                (
                    query_starts,
                    kv_lens,
                    firsts,
                    totals,
                    out,
                    queries_main,
                    queries_tail,
                    keys,
                    tails,
                    values,
                    q_full,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    cleared,
                    factor,
                    total_token,
                    total_head,
                    out_token,
                    out_head,
                    splits,
                    total_split,
                    out_split,
                    SO_FAR,
                    SPLIT,
                    TAIL,
                    STAGES,
                    1,
                    SHARED,
                ),
            ),
            (
                _copy,
                (
                    q_tma,
                    k_tma,
                    tail_tma,
                    v_tma,
                    tables,
                    query_starts,
                    key_starts,
                    kv_lens,
                    firsts,
                    queries_main,
                    queries_tail,
                    keys,
                    tails,
                    values,
                    q_full,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    q_head,
                    k_head,
                    tail_head,
                    tail_first,
                    v_head,
                    table_row,
                    splits,
                    SO_FAR,
                    SPLIT,
                    SHARE,
                    WIDTH,
                    TAIL,
                    PAGE,
                    STAGES,
                    SHARED,
                ),
            ),
        ],
        [4, 1],
        [COMPUTER, COPIER],
    )


def _descriptor(rows: Tensor) -> TensorDescriptor:
    """Of rows [N, G, D], heads side by side in one long row, gaps between them included."""
    length = (rows.shape[1] - 1) * rows.stride(1) + rows.shape[2]
    return TensorDescriptor(
        rows, [rows.shape[0], length], [rows.stride(0), 1], [PIECE, PIECE], bulk_layout(16)
    )


def supported(q: Tensor, k: Tensor, v: Tensor, page: int, k_rope: Tensor | None = None) -> bool:
    """bf16 heads of 128 or 192 columns and values of 128, in rows that bulk copies take, and
    pages of whole pieces (0: packed keys). k_rope [N, 64]: what k lacks of 192."""
    split = k_rope is None or (
        q.shape[2] == 192 and k_rope.dtype == torch.bfloat16 and _bulk(k_rope[:, None])
    )
    return (
        split
        and k.shape[2] + (0 if k_rope is None else k_rope.shape[1]) == q.shape[2]
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and q.shape[2] in (128, 192)
        and v.shape[2] == 128
        and page % PIECE == 0
        and all(_bulk(x) for x in (q, k, v))
    )


def _bulk(rows: Tensor) -> bool:
    """Bulk copies take rows and heads whose strides are multiples of 16 bytes."""
    steps = (rows.stride(0) * 2, rows.stride(1) * 2, rows.data_ptr())
    return rows.stride(2) == 1 and all(step % 16 == 0 for step in steps)


@triton.jit(do_not_specialize=["rows", "splits", "part_rows"])
def _merge_kernel(
    parts,
    logs,
    out,
    out_token,
    out_head,
    rows,
    splits,
    part_rows,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Rows (token, head) of 128 columns: sums weighted by the powers of two of their `logs`.
    part_rows: rows of a part. A row without keys is zero."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    columns = tl.arange(0, 128)
    split = tl.arange(0, SPLITS)
    place = split.to(tl.int64)[None, :] * part_rows + row[:, None]
    known = there[:, None] & (split < splits)[None, :]
    log = tl.load(logs + place, mask=known, other=float("-inf"))
    weights = tl.exp2(log - tl.maximum(tl.max(log, 1), -1e30)[:, None])
    total = tl.sum(weights, 1)
    weights = weights / tl.where(total > 0, total, 1.0)[:, None]
    values = tl.load(
        parts + place[:, :, None] * 128 + columns[None, None, :],
        mask=(weights > 0)[:, :, None],  # a part without keys was not written
        other=0.0,
    )
    found = tl.sum(values * weights[:, :, None], 1)
    token = (row // HEADS).to(tl.int64)
    target = out + token[:, None] * out_token + (row % HEADS)[:, None] * out_head
    tl.store(target + columns[None, :], found.to(out.dtype.element_ty), mask=there[:, None])


def splits_for(q: Tensor, queries: int, requests: int, keys: int) -> int:
    """Into how many parts to split the keys of each block. queries: of a request; keys: a bound for
    those of all requests together."""
    blocks = triton.cdiv(queries, ROWS) * q.shape[1] * requests
    each = multiprocessors(q.device) // blocks
    return max(1, min(each, MOST_SPLITS, keys // requests // (TOKENS * LEAST_TILES)))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page: int,
    tables: Tensor | None,
    query_starts: Tensor,
    key_starts: Tensor | None,
    kv_lens: Tensor,
    firsts: Tensor | None,
    totals: Tensor | None,
    max_query_len: int,
    factor: float,
    out: Tensor,
    k_rope: Tensor | None = None,
    splits: int = 1,
) -> None:
    """As `prefill._launch`. factor: the softmax scale times log2(e). firsts and totals: of keys
    before these, as `prefill.SoFar`. splits: into how many parts the keys are split."""
    heads = q.shape[1]
    blocks = -(-max_query_len // ROWS)
    whole = _descriptor(k)
    merged = out
    parts = (0, 0, 0)  # how many, and the strides between them
    if splits > 1:
        assert totals is None, "what was found so far is not split"
        totals = torch.empty(splits, *q.shape[:2], dtype=torch.float32, device=q.device)
        out = torch.empty(*totals.shape, v.shape[2], dtype=torch.float32, device=q.device)
        parts = (splits, totals.stride(0), out.stride(0))
    _prefill_sm90_kernel[blocks * splits, heads, kv_lens.shape[0]](
        _descriptor(q),
        whole,
        whole if k_rope is None else _descriptor(k_rope[:, None]),
        _descriptor(v),
        tables,
        query_starts,
        key_starts,
        kv_lens,
        firsts,
        totals,
        out,
        factor,
        q.stride(1),
        k.stride(1),
        *((k.stride(1), 128) if k_rope is None else (0, 0)),
        v.stride(1),
        0 if tables is None else tables.stride(0),
        *((0, 0) if totals is None else totals.stride()[-2:]),
        *out.stride()[-3:-1],
        *parts,
        firsts is not None,
        splits > 1,
        heads // k.shape[1],
        128,
        q.shape[2] - 128,
        page,
        STAGES,
        *REGISTERS,
        num_warps=4,
        maxnreg=168,
    )
    if splits > 1:
        assert totals is not None
        merge(out, totals, merged)


def merge(parts: Tensor, logs: Tensor, out: Tensor) -> None:
    """parts [splits, T, H, 128] fp32 with the log2 of their sums, logs [splits, T, H] fp32 (-inf:
    no keys), to out [T, H, 128]."""
    splits, tokens, heads = logs.shape
    rows = tokens * heads
    _merge_kernel[(triton.cdiv(rows, MERGED_ROWS),)](
        parts,
        logs,
        out,
        *out.stride()[:2],
        rows,
        splits,
        rows,
        heads,
        MERGED_ROWS,
        triton.next_power_of_2(max(splits, FEWEST_MERGED)),
        num_warps=4,
    )
