"""Attention of packed prompts on Hopper, in Gluon: the form of `prefill.py` for heads of 128 or
192 columns.

Two warpgroups have 64 rows of queries each and share the tiles of 128 keys that a third one's first
warp copies. The scores of the next tile are under way before the values of this one are added up,
so a tile's weights are computed beside products (the order of FlashAttention-3, arXiv 2407.08608).
Tiles come from the last to the first: those that need a mask are the first ones.

With grouped-query attention a block has 16 queries of eight heads, which share keys, where it can:
200 tokens of 32 heads are 52 blocks instead of 64, 16 tokens 4 instead of 32.

Blocks that do not fill the GPU's multiprocessors, all of a short chunk behind a long context or
those after the last full round, are split: each of several programs takes some of the tiles, and a
second kernel merges what they found.

Cycles of a tile on a multiprocessor that multiplies 64 x 64 x 16 in 32: 2 x 512 for scores of 128
columns, 2 x 768 of 192, and 2 x 512 for the values; 16,384 exponentials at 16 a cycle take 1,024
beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
from rorqual.ops.triton.runtime.launch import is_ahead, multiprocessors
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    next_stage,
    opaque_zero,
    thread_barrier,
)

ROWS = 128  # of a block
PACK = 8  # heads of a block, where they share keys
TOKENS = 128  # keys of a tile
PIECE = 64  # rows and columns of a bulk copy: a page of 64 tokens is two of them
STAGES = 2
MOST_SPLITS = 16
LEAST_TILES = 2  # of a part
# times of `division`, in tiles of 128 columns (1.5 us on an H200)
START = 4.0  # of a program, before its first tile and after its last one
MERGE = 2.5  # of the second kernel
MERGED = 0.05  # of the rows of a program, written and read
WORTH = 0.95  # a division must be so much faster than without parts
MERGED_ROWS = 4  # of a program
MERGES = (4, 8, MOST_SPLITS)  # parts that kernels merge at most
REGISTERS = (240, 24)  # of a thread that computes, of one that copies
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # rows that leave


@gluon.jit
def _span(requests, SO_FAR: gl.constexpr, SPLIT: gl.constexpr, PACK: gl.constexpr):
    """What this program computes: (request, first of PACK heads, first query of the request, its
    queries, its keys, what query 0 sees besides its own place's keys, the block of 128 / PACK
    queries, its tiles: the first and the one after the last; with SPLIT, where its result goes, -1
    if it has all tiles of the block)."""
    query_starts, kv_lens, firsts, places, heads, whole, splits = requests
    program = gl.program_id(0)
    part = program
    if SPLIT:
        part = gl.maximum(program - whole, -1)
        number = gl.minimum(program, whole) + gl.maximum(part, 0) // splits
        place = number % places
        head = number // places % heads * PACK
        request = number // (places * heads)
    else:
        place = program
        head = gl.program_id(1) * PACK
        request = gl.program_id(2)
    begin = gl.load(query_starts + request)
    queries = (gl.load(query_starts + request + 1) - begin).to(gl.int32)
    length = gl.load(kv_lens + request).to(gl.int32)
    shift = length - queries
    if SO_FAR:
        shift = gl.load(firsts + request).to(gl.int32)
    block = (queries * PACK + 127) // 128 - 1 - place
    low = 0
    high = gl.maximum(gl.minimum(shift + (block + 1) * (128 // PACK), length) + 127, 0) // 128
    if SPLIT:  # noqa: SIM102 - known to the compiler
        if part >= 0:
            each = (high + splits - 1) // splits
            low = part % splits * each
            high = gl.minimum(high, low + each)
    return request, head, begin, queries, length, shift, block, low, high, part


@gluon.jit
def _query_of(row, block, PACK: gl.constexpr):
    """The request's query of a row of a block, whose rows are PACK heads of 128 / PACK queries."""
    if PACK == 1:
        return block * 128 + row
    else:
        return block * (128 // PACK) + row % (128 // PACK)


@gluon.jit
def _store_rows(rows, first_row, target, queries, PACK: gl.constexpr):
    """rows [64, 128], of a block from first_row on, whose request has so many queries."""
    out, out_token, out_head, begin, head, block = target
    row = first_row + gl.arange(0, 64, gl.SliceLayout(1, COPY))
    column = gl.arange(0, 128, gl.SliceLayout(0, COPY))
    query = _query_of(row, block, PACK)
    token = begin.to(gl.int64) + query
    place = out + (token * out_token + (head + row // (128 // PACK)) * out_head)[:, None]
    gl.store(place + column[None, :], rows, mask=(query < queries)[:, None])


@gluon.jit
def _finish(place, acc, first_row, target, queries, PACK: gl.constexpr):
    """Store a block's sums, through `place`, the shared memory of its queries: whole rows leave
    together."""
    place.store(acc.to(gl.bfloat16))
    thread_barrier()
    row = first_row + opaque_zero()
    _store_rows(place.load(COPY), row, target, queries, PACK)


@gluon.jit
def _copy(
    given,
    SO_FAR: gl.constexpr,
    SPLIT: gl.constexpr,
    SHARE: gl.constexpr,
    PACK: gl.constexpr,
    WIDTH: gl.constexpr,
    TAIL: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
):
    """The warp that copies."""
    descriptors, tables, table_row, key_starts, steps, requests, queries, ring = given
    q_tma, k_tma, tail_tma, v_tma = descriptors
    q_head, k_head, tail_head, tail_first, v_head = steps
    queries_main, queries_tail, q_full = queries
    keys, tails, values, k_full, k_empty, v_full, v_empty = ring
    request, head, begin, _, length, _, block, start, high, _ = _span(requests, SO_FAR, SPLIT, PACK)
    if (block >= 0) & (high > start):
        group = head // SHARE
        mbarrier.expect(q_full.index(0), 128 * (WIDTH + TAIL) * 2)
        for half in gl.static_range(2):
            if PACK == 1:
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
                        q_tma,
                        [row, head * q_head + WIDTH],
                        q_full.index(0),
                        queries_tail.index(half),
                    )
            else:
                row = begin.to(gl.int32) + block * (128 // PACK)
                parts = queries_main.index(half)._reinterpret(
                    gl.bfloat16, [WIDTH // 64 * (PACK // 2), 128 // PACK, 64], SHARED
                )
                for i in gl.static_range(PACK // 2):
                    column = (head + half * (PACK // 2) + i) * q_head
                    for c in gl.static_range(WIDTH // 64):
                        tma.async_copy_global_to_shared(
                            q_tma,
                            [row, column + c * 64],
                            q_full.index(0),
                            parts.index(c * (PACK // 2) + i),
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
    ring,
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
    keys, tails, values, k_full, k_empty, v_full, v_empty = ring
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
    given,
    factor,
    SO_FAR: gl.constexpr,
    SPLIT: gl.constexpr,
    PACK: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    SHARED: gl.constexpr,
):
    """One of the two warpgroups that compute."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    requests, queries, ring, cleared, results = given
    queries_main, queries_tail, q_full = queries
    keys, tails, values, k_full, k_empty, v_full, _v_empty = ring
    out, out_token, out_head, totals, total_token, total_head, partial = results
    _, head, begin, count, length, shift, block, low, high, part = _span(
        requests, SO_FAR, SPLIT, PACK
    )
    target = (out, out_token, out_head, begin, head, block)
    first_row: gl.constexpr = WHO * 64
    if (block >= 0) & (high > low):
        first_query = _query_of(first_row, block, PACK)
        row_query = _query_of(first_row + gl.arange(0, 64, ROW), block, PACK)
        seen_until = gl.minimum(shift + row_query, length - 1)
        # tiles that every row sees in full
        plain = gl.minimum(gl.maximum(shift + first_query + 1, 0), length) // 128
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
                ring,
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
                ring,
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
        if SO_FAR:  # one head a block
            row_end = (block * 128 + first_row + opaque_zero()) + gl.arange(0, 64, ROW)
            token_end = begin.to(gl.int64) + row_end
            place_end = totals + token_end * total_token + head * total_head
            before = gl.load(place_end, mask=row_end < count, other=float("-inf"))
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
            gl.store(place_end, log, mask=row_end < count)
            column_end = opaque_zero() + gl.arange(0, 128, gl.SliceLayout(0, ACC))
            place_acc = (out + (token_end * out_token + head * out_head)[:, None]) + column_end[
                None, :
            ]
            there = (row_end < count)[:, None]
            found_before = gl.load(place_acc, mask=there, other=0.0)
            acc = acc * (weight_here * share)[:, None]
            acc = acc + found_before * (weight_before * share)[:, None]
            gl.store(place_acc, acc, mask=there)
        elif SPLIT:
            if part >= 0:
                row_part = (first_row + opaque_zero()) + gl.arange(0, 64, ROW)
                there_part = _query_of(row_part, block, PACK) < count
                log_part = gl.where(total > 0, peak + gl.log2(some), float("-inf"))
                gl.store(totals + (part * 128 + row_part), log_part, mask=there_part)
                column_part = opaque_zero() + gl.arange(0, 128, gl.SliceLayout(0, ACC))
                place_part = partial + part.to(gl.int64) * (128 * 128)
                place_part = (place_part + (row_part * 128)[:, None]) + column_part[None, :]
                gl.store(place_part, acc, mask=there_part[:, None])
            else:
                _finish(query, acc, first_row, target, count, PACK)
        else:
            _finish(query, acc, first_row, target, count, PACK)
    elif block >= 0:  # no tiles
        left = 0
        if SPLIT:  # noqa: SIM102 - known to the compiler
            if part >= 0:
                none = gl.full([64], float("-inf"), gl.float32, ROW)
                gl.store(totals + (part * 128 + first_row + gl.arange(0, 64, ROW)), none)
                left = count  # nothing more to do
        if not SO_FAR:
            zeros = gl.full([64, 128], 0.0, out.dtype.element_ty, COPY)
            _store_rows(zeros, first_row, target, count - left, PACK)


# how many requests and pages a step has must not compile the kernel anew
@gluon.jit(
    do_not_specialize=["table_row", "places", "heads", "whole", "splits"],
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
    partial,
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
    places,
    heads,
    whole,
    splits,
    SO_FAR: gl.constexpr,
    SPLIT: gl.constexpr,
    SHARE: gl.constexpr,
    PACK: gl.constexpr,
    WIDTH: gl.constexpr,
    TAIL: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    COMPUTER: gl.constexpr,
    COPIER: gl.constexpr,
):
    """Grid and arguments as of `prefill._prefill_kernel`; heads of WIDTH + TAIL columns, values of
    128. A head's TAIL columns begin at tail_head times the head's number + tail_first.

    PACK: heads of each block, which then has 128 / PACK queries.

    SPLIT: the grid has one dimension. Its first `whole` programs have as many blocks, in the order
    (request, PACK heads of PACK * heads, block of `places` from the last one); of each of the
    others `splits` programs have some of the tiles. What these find goes to partial [programs, 128,
    128] fp32, the log2 of their sums to totals [programs, 128] fp32; programs beyond the first
    `whole` ones."""
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
    descriptors = (q_tma, k_tma, tail_tma, v_tma)
    steps = (q_head, k_head, tail_head, tail_first, v_head)
    requests = (query_starts, kv_lens, firsts, places, heads, whole, splits)
    queries = (queries_main, queries_tail, q_full)
    ring = (keys, tails, values, k_full, k_empty, v_full, v_empty)
    results = (out, out_token, out_head, totals, total_token, total_head, partial)
    computed = (requests, queries, ring, cleared, results)
    copied = (descriptors, tables, table_row, key_starts, steps, requests, queries, ring)
    gl.warp_specialize(
        [
            (_attend, (computed, factor, SO_FAR, SPLIT, PACK, TAIL, STAGES, 0, SHARED)),
            (_attend, (computed, factor, SO_FAR, SPLIT, PACK, TAIL, STAGES, 1, SHARED)),
            (_copy, (copied, SO_FAR, SPLIT, SHARE, PACK, WIDTH, TAIL, PAGE, STAGES, SHARED)),
        ],
        [4, 1],
        [COMPUTER, COPIER],
    )


def _descriptor(rows: Tensor, box: int = PIECE) -> TensorDescriptor:
    """Of rows [N, G, D], heads side by side in one long row, gaps between them included; copies of
    `box` rows."""
    length = (rows.shape[1] - 1) * rows.stride(1) + rows.shape[2]
    return TensorDescriptor(
        rows, [rows.shape[0], length], [rows.stride(0), 1], [box, PIECE], bulk_layout(16)
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


@triton.jit(
    do_not_specialize=["places", "heads", "whole", "splits", "pack"],
    do_not_specialize_on_alignment=["query_starts"],
)
def _merge_kernel(
    partial,
    logs,
    query_starts,
    out,
    out_token,
    out_head,
    places,
    heads,
    whole,
    splits,
    pack,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Rows of split blocks, as `_prefill_sm90_kernel` found them: sums weighted by the powers of
    two of their `logs`. A row without keys is zero. Grid: (128 / BLOCK, split blocks)."""
    split_block = tl.program_id(1)
    number = whole + split_block
    place = number % places
    head = number // places % heads * pack
    request = number // (places * heads)
    begin = tl.load(query_starts + request)
    queries = (tl.load(query_starts + request + 1) - begin).to(tl.int32)
    block = (queries * pack + 127) // 128 - 1 - place
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    query = block * (128 // pack) + row % (128 // pack)
    there = (block >= 0) & (query < queries)
    columns = tl.arange(0, 128)
    split = tl.arange(0, SPLITS)
    at = ((split_block * splits + split) * 128)[None, :] + row[:, None]
    known = there[:, None] & (split < splits)[None, :]
    log = tl.load(logs + at, mask=known, other=float("-inf"))
    weights = tl.exp2(log - tl.maximum(tl.max(log, 1), -1e30)[:, None])
    total = tl.sum(weights, 1)
    weights = weights / tl.where(total > 0, total, 1.0)[:, None]
    values = tl.load(
        partial + at.to(tl.int64)[:, :, None] * 128 + columns[None, None, :],
        mask=(weights > 0)[:, :, None],  # a part without keys was not written
        other=0.0,
    )
    found = tl.sum(values * weights[:, :, None], 1)
    token = begin.to(tl.int64) + query
    target = out + (token * out_token + (head + row // (128 // pack)) * out_head)[:, None]
    tl.store(target + columns[None, :], found.to(out.dtype.element_ty), mask=there[:, None])


@dataclass(frozen=True)
class Division:
    """Blocks of how many heads; how many of them one program computes each; and how many programs
    share the keys of each of the others (1: there are no others)."""

    pack: int = 1
    whole: int = 0
    splits: int = 1

    def blocks(self, heads: int, queries: int, requests: int) -> int:
        """Of all requests, which have at most so many queries each."""
        return -(-queries * self.pack // ROWS) * (heads // self.pack) * requests

    def forms(self, blocks: int) -> list[Division]:
        """This one. For launches that only compile: one for each kernel, since which of them a step
        needs depends on all of its chunks; only the last block is split, for which there is always
        memory."""
        if not is_ahead():
            return [self]
        split = [Division(self.pack, blocks - 1, splits) for splits in MERGES]
        return [Division(self.pack), *split]

    def takes_few_queries(self, keys: int) -> bool:
        """Whether to take this kernel for few queries, for which `prefill.config_for` has one with
        blocks of 16 rows: where these heads share blocks, or many programs a block's keys. keys:
        of a request."""
        alone = self.splits > 1 and self.whole == 0
        return alone or (self.pack > 1 and keys > TOKENS)


def division(q: Tensor, groups: int, queries: int, requests: int, keys: int) -> Division:
    """The one that should take the least time. queries: at most of a request; keys: a bound for
    those of all requests together."""
    tokens, heads, width = q.shape
    sizes = (tokens, queries, requests, keys // requests)
    return _division(heads, groups, width, *sizes, multiprocessors(q.device))


@lru_cache(maxsize=4096)
def _division(
    heads: int,
    groups: int,
    width: int,
    tokens: int,
    queries: int,
    requests: int,
    keys: int,
    processors: int,
) -> Division:
    """tokens: of all requests together; keys: of one. Times are in tiles of 128 columns. Programs
    come in rounds, one on each multiprocessor."""
    pack = PACK if width == 128 and heads // groups % PACK == 0 else 1
    best = Division(pack)
    blocks = best.blocks(heads, queries, requests)
    whole = blocks // processors * processors
    if whole:
        # blocks of requests with fewer queries are empty: there may be nothing after `whole`
        filled_blocks = (tokens * pack // ROWS + requests) * (heads // pack)
        # little before the chunks: blocks of one tile and of many even out
        if filled_blocks <= whole or keys < 2 * queries:
            return best
    size = (width + 128) / 256
    tiles = triton.cdiv(keys, TOKENS)
    full_rounds = whole // processors * (tiles * size + START)
    least = WORTH * (full_rounds + (tiles * size + START if blocks > whole else 0))
    for splits in range(2, min(MOST_SPLITS, tiles // LEAST_TILES) + 1):
        programs = (blocks - whole) * splits
        if not 0 < programs <= processors:
            break
        last_round = triton.cdiv(tiles, splits) * size + START
        filled = splits * (blocks - whole) / blocks * (requests * queries * heads / ROWS)
        time = full_rounds + last_round + MERGE + MERGED * filled
        if time < least:
            best = Division(pack, whole, splits)
            least = time
    return best


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
    divided: Division = Division(),
) -> None:
    """As `prefill._launch`. factor: the softmax scale times log2(e). firsts and totals: of keys
    before these, as `prefill.SoFar`; their blocks are neither split nor of several heads. divided:
    as `division` finds, or any other."""
    assert firsts is None or divided == Division()
    pack = divided.pack
    places = -(-max_query_len * pack // ROWS)
    heads = q.shape[1] // pack
    split = divided.splits > 1
    partial = None
    grid: tuple[int, ...] = (places, heads, kv_lens.shape[0])
    if split:
        blocks = divided.blocks(q.shape[1], max_query_len, kv_lens.shape[0])
        programs = (blocks - divided.whole) * divided.splits
        totals = torch.empty(programs, ROWS, dtype=torch.float32, device=q.device)
        partial = torch.empty(programs, ROWS, 128, dtype=torch.float32, device=q.device)
        grid = (divided.whole + programs,)
    whole = _descriptor(k)
    parts = (places, heads, divided.whole, divided.splits)
    _prefill_sm90_kernel[grid](
        _descriptor(q, ROWS // pack if pack > 1 else PIECE),
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
        partial,
        factor,
        q.stride(1),
        k.stride(1),
        *((k.stride(1), 128) if k_rope is None else (0, 0)),
        v.stride(1),
        0 if tables is None else tables.stride(0),
        *((0, 0) if firsts is None or totals is None else totals.stride()),
        *out.stride()[:2],
        *parts,
        firsts is not None,
        split,
        q.shape[1] // k.shape[1],
        pack,
        128,
        q.shape[2] - 128,
        page,
        STAGES,
        *REGISTERS,
        num_warps=4,
        maxnreg=168,
    )
    if split:
        assert partial is not None
        assert totals is not None
        merge(partial, totals, query_starts, out, parts, pack)


def merged_parts(splits: int) -> int:
    """What the kernel that merges so many parts is compiled for."""
    return next(most for most in MERGES if splits <= most)


def merge(
    partial: Tensor,
    logs: Tensor,
    query_starts: Tensor,
    out: Tensor,
    parts: tuple[int, int, int, int],
    pack: int,
) -> None:
    """partial [P, 128, 128] fp32 with the log2 of their sums, logs [P, 128] fp32 (-inf: no keys),
    to the split blocks' rows of out [T, H, 128]. parts: (blocks of a request's PACK heads, H /
    PACK, blocks that are not split, programs of one that is)."""
    splits = parts[3]
    _merge_kernel[ROWS // MERGED_ROWS, partial.shape[0] // splits](
        partial,
        logs,
        query_starts,
        out,
        *out.stride()[:2],
        *parts,
        pack,
        MERGED_ROWS,
        merged_parts(splits),
        num_warps=4,
    )
