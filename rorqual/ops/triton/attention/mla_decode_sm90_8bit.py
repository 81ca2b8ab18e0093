"""MLA decode for many rows of queries over an 8-bit latent cache on Hopper, in Gluon: one
warpgroup widens tiles to bf16, two multiply.

The first warpgroup scores a tile and adds up the left half of the latent's columns, the second the
right half. The third reads a tile's bytes to registers, and writes its bf16 entries to shared
memory once the place is free. Each number is the reference's, byte x scale in fp32 rounded to bf16,
so products are of what a bf16 cache would hold.

Shared memory holds two tiles of 64 KB, and the queries, for which there are no registers. So a tile
can be widened while the one before is scored, but not before the values of the one before that have
been added up. For that reason the first warpgroup adds a tile's values at once, before it scores
the next one, although tensor cores then stand still while it computes weights.

Cycles of one tile, on a multiprocessor that multiplies 64 x 64 x 16 in 32 and reads or writes 128
bytes of shared memory in one: products 2,176 as in mla_decode_sm90.py, weights about 750; to widen
32,768 numbers takes 3 instructions each, 770 issue slots of each scheduler. Measured about 4,900,
3,700 if nothing is widened: what is left is mostly the time in which the third warpgroup waits for
bytes from the second-level cache. It has no registers for more than one tile of them, and the
compiler makes it wait for all that are under way at each branch.
"""

from __future__ import annotations

from typing import Any

import torch
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

from rorqual.ops.reference import EIGHT_BIT_NUMBERS, latent_parts
from rorqual.ops.triton.attention.mla_decode_sm90 import (
    RANK,
    ROPE,
    ROWS,
    TOKENS,
    hide_unseen,
    owner_of,
    places_of,
    put_sums,
    rows_of,
    share_of,
    span,
    take_rows,
    weigh,
)
from rorqual.ops.triton.attention.sm90_fp8_operands import load_scales
from rorqual.ops.triton.attention.split_kv import LatentDecode
from rorqual.ops.triton.runtime.launch import dependent
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    let_next_start,
    next_stage,
    opaque_zero,
    thread_barrier,
    wait_for_inputs,
)

GROUP = 128  # columns that share a scale
STAGES = 2
ROW_BYTES = RANK + 4 * (RANK // GROUP) + 2 * ROPE
REGISTERS = (160, 128)  # of a thread that adds up, that widens; the first warpgroup's have 216


@gluon.jit
def _start_scores(queries, query_ropes, keys, key_ropes, SCORES: gl.constexpr):
    """Start the products of a tile's scores."""
    GROUPS: gl.constexpr = queries.shape[0]
    zero = opaque_zero()
    scores = gl.full([queries.shape[1], keys.shape[1]], 0.0, gl.float32, SCORES)
    for g in gl.static_range(GROUPS):
        columns = keys.index(g + zero).permute((1, 0))
        scores = warpgroup_mma(
            queries.index(g + zero), columns, scores, use_acc=g > 0, is_async=True
        )
    return warpgroup_mma(query_ropes, key_ropes.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _give(p, shrink, total, key_ropes, shrinks, totals, ready):
    """Weights in place of the tile's rope keys, which are no longer needed."""
    key_ropes.store(p.to(gl.bfloat16))
    shrinks.store(shrink)
    totals.store(total)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _score_and_add(
    given,
    factor,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """What the first warpgroup does; to the second it says `ready` of a tile's weights."""
    TOTAL: gl.constexpr = HEADS * QUERIES
    HALF: gl.constexpr = RANK // 2
    GROUPS: gl.constexpr = RANK // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    FOLDED: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, 4]
    )
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    schedule, asked, shared, kv_lens, lse, results = given
    starts, first, requests, min_tiles = schedule
    q_latent, q_token, q_head, q_rope, qr_token, qr_head, queries, query_ropes = asked
    latents, ropes, shrinks, totals, full, ready, empty = shared
    wait_for_inputs(DEPENDENT)
    block = gl.program_id(0)
    tile, last = span(starts, requests, min_tiles)
    if tile < last:
        request = gl.load(first + gl.program_id(1))
        stage = 0
        phase = 0
        while tile < last:
            request = owner_of(starts, request, tile)
            begin = gl.load(starts + request)
            stop = gl.minimum(gl.load(starts + request + 1), last)
            length = gl.load(kv_lens + request).to(gl.int32)
            row = rows_of(block, ROWS, gl.SliceLayout(1, COPY))
            there = row < TOTAL
            places = places_of(request, row, qr_token, qr_head, HEADS, QUERIES)
            query_ropes.store(take_rows(q_rope, places, 0, there, ROPE, COPY))
            places = places_of(request, row, q_token, q_head, HEADS, QUERIES)
            for g in gl.static_range(GROUPS):
                queries.index(g).store(take_rows(q_latent, places, g * GROUP, there, GROUP, COPY))
            fence_async_shared()
            thread_barrier()
            # finite: a row that sees nothing makes no NaN
            peak = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
            parts = gl.full([ROWS, 4], 0.0, gl.float32, FOLDED)  # of the sum of weights
            mbarrier.wait(full.index(stage), phase)
            keys = latents.index(stage)._reinterpret(gl.bfloat16, [GROUPS, TOKENS, GROUP], SHARED)
            scores = _start_scores(queries, query_ropes, keys, ropes.index(stage), SCORES)
            scores = warpgroup_mma_wait(0, deps=[scores])
            at = (tile - begin) * TOKENS
            if at + TOKENS > length - QUERIES + 1:
                scores = hide_unseen(scores, at, length, block, HEADS, QUERIES, SCORES)
            p, shrink, peak, parts = weigh(scores, factor, peak, parts, FOLDED)
            total = gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, SCORES))
            _give(
                p,
                shrink,
                total,
                ropes.index(stage),
                shrinks.index(stage),
                totals.index(stage),
                ready.index(stage),
            )
            acc = gl.full([ROWS, HALF], 0.0, gl.float32, SUMS)
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
            # not +=: tests run this on tensors, which that would change in place
            tile = tile + 1
            while tile < stop:
                values = latents.index(before)._reinterpret(gl.bfloat16, [2, TOKENS, HALF], SHARED)
                acc = warpgroup_mma(ropes.index(before), values.index(0), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                thread_barrier()
                mbarrier.arrive(empty.index(before), count=1)
                mbarrier.wait(full.index(stage), phase)
                keys = latents.index(stage)._reinterpret(
                    gl.bfloat16, [GROUPS, TOKENS, GROUP], SHARED
                )
                scores = _start_scores(queries, query_ropes, keys, ropes.index(stage), SCORES)
                scores = warpgroup_mma_wait(0, deps=[scores])
                at = (tile - begin) * TOKENS
                if at + TOKENS > length - QUERIES + 1:
                    scores = hide_unseen(scores, at, length, block, HEADS, QUERIES, SCORES)
                p, shrink, peak, parts = weigh(scores, factor, peak, parts, FOLDED)
                total = gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, SCORES))
                _give(
                    p,
                    shrink,
                    total,
                    ropes.index(stage),
                    shrinks.index(stage),
                    totals.index(stage),
                    ready.index(stage),
                )
                acc = acc * gl.convert_layout(shrink, ROW, assert_trivial=True)[:, None]
                before = stage
                stage, phase = next_stage(stage, phase, STAGES)
                tile = tile + 1
            values = latents.index(before)._reinterpret(gl.bfloat16, [2, TOKENS, HALF], SHARED)
            acc = warpgroup_mma_wait(
                0, deps=[warpgroup_mma(ropes.index(before), values.index(0), acc, is_async=True)]
            )
            thread_barrier()
            mbarrier.arrive(empty.index(before), count=1)
            whole, slot = share_of(starts, requests, min_tiles, request, stop)
            total = gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, SCORES))
            if not whole:
                found = gl.where(total > 0, peak + gl.log2(gl.maximum(total, 1e-37)), float("-inf"))
                found_row = rows_of(block, ROWS, gl.SliceLayout(1, SCORES))
                gl.store(lse + slot.to(gl.int64) * TOTAL + found_row, found, mask=found_row < TOTAL)
            total = gl.convert_layout(total, ROW, assert_trivial=True)
            put_sums(acc, total, schedule, results, request, stop, HEADS, QUERIES, 0, RANK, SUMS)


@gluon.jit
def _add_right(
    given,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    RANK: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """What the second warpgroup does."""
    HALF: gl.constexpr = RANK // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    schedule, shared, results = given
    starts, first, requests, min_tiles = schedule
    latents, ropes, shrinks, totals, _, ready, empty = shared
    wait_for_inputs(DEPENDENT)
    tile, last = span(starts, requests, min_tiles)
    if tile < last:
        request = gl.load(first + gl.program_id(1))
        stage = 0
        phase = 0
        while tile < last:
            request = owner_of(starts, request, tile)
            stop = gl.minimum(gl.load(starts + request + 1), last)
            acc = gl.full([ROWS, HALF], 0.0, gl.float32, SUMS)
            total = gl.full([ROWS], 0.0, gl.float32, ROW)
            while tile < stop:
                mbarrier.wait(ready.index(stage), phase)
                acc = acc * shrinks.index(stage).load(ROW)[:, None]
                total = totals.index(stage).load(ROW)
                values = latents.index(stage)._reinterpret(gl.bfloat16, [2, TOKENS, HALF], SHARED)
                acc = warpgroup_mma(ropes.index(stage), values.index(1), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                thread_barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = next_stage(stage, phase, STAGES)
                # not +=: tests run this on tensors, which that would change in place
                tile = tile + 1
            put_sums(acc, total, schedule, results, request, stop, HEADS, QUERIES, HALF, RANK, SUMS)


@gluon.jit
def _advance(starts, kv_lens, request, begin, end, length, tile):
    """(whose tile it is, `request` or a later one; its first tile, the one after its last, its
    length)."""
    while end <= tile:
        request = request + 1
        begin = end
        end = gl.load(starts + request + 1)
        length = gl.load(kv_lens + request).to(gl.int32)
    return request, begin, end, length


@gluon.jit
def _locate(
    tables,
    table_row,
    request,
    begin,
    length,
    tile,
    PAGE: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """(where a request's tile begins in the cache, how many tokens the request has from there
    on)."""
    token = (tile - begin) * TOKENS
    page = gl.load(tables + request.to(gl.int64) * table_row + token // PAGE)
    return page.to(gl.int64) * PAGE + token % PAGE, length - token


@gluon.jit
def _widen_e4m3(words, scale):
    """Four e4m3 in a word, times a scale, as two pairs of bf16, of two in a word each."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, first, second;
        .reg .b32 pair, x, y;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 pair, low;
        mov.b32 {first, second}, pair;
        cvt.f32.f16 x, first;
        cvt.f32.f16 y, second;
        mul.rn.f32 x, x, $3;
        mul.rn.f32 y, y, $3;
        cvt.rn.bf16x2.f32 $0, y, x;
        cvt.rn.f16x2.e4m3x2 pair, high;
        mov.b32 {first, second}, pair;
        cvt.f32.f16 x, first;
        cvt.f32.f16 y, second;
        mul.rn.f32 x, x, $3;
        mul.rn.f32 y, y, $3;
        cvt.rn.bf16x2.f32 $1, y, x;
    }""",
        "=r,=r,r,f",
        [words, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _widen_int8(words, scale):
    """As _widen_e4m3. A byte plus 128 becomes the end of 2^23 in fp32."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 bytes, moved, x, y;
        xor.b32 bytes, $2, 0x80808080;
        prmt.b32 moved, bytes, 0x4b000000, 0x7650;
        mov.b32 x, moved;
        prmt.b32 moved, bytes, 0x4b000000, 0x7651;
        mov.b32 y, moved;
        sub.rn.f32 x, x, 0f4B000080;
        sub.rn.f32 y, y, 0f4B000080;
        mul.rn.f32 x, x, $3;
        mul.rn.f32 y, y, $3;
        cvt.rn.bf16x2.f32 $0, y, x;
        prmt.b32 moved, bytes, 0x4b000000, 0x7652;
        mov.b32 x, moved;
        prmt.b32 moved, bytes, 0x4b000000, 0x7653;
        mov.b32 y, moved;
        sub.rn.f32 x, x, 0f4B000080;
        sub.rn.f32 y, y, 0f4B000080;
        mul.rn.f32 x, x, $3;
        mul.rn.f32 y, y, $3;
        cvt.rn.bf16x2.f32 $1, y, x;
    }""",
        "=r,=r,r,f",
        [words, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _read_group(
    words,
    origin,
    left,
    GROUP: gl.constexpr,
    FIRST: gl.constexpr,
    TOKENS: gl.constexpr,
    ROW_WORDS: gl.constexpr,
    WORDS: gl.constexpr,
):
    """Words of four bytes of a tile's group of columns, [tokens, GROUP / 4]. Past the request's
    last token this one again: what is there may be anything, and a weight of zero does not cure a
    NaN."""
    row = gl.minimum(gl.arange(0, TOKENS, gl.SliceLayout(1, WORDS)), left - 1)
    column = FIRST * GROUP // 4 + gl.arange(0, GROUP // 4, gl.SliceLayout(0, WORDS))
    return gl.load(words + origin * ROW_WORDS + (row * ROW_WORDS)[:, None] + column[None, :])


@gluon.jit
def _prefetch(address, SIZE: gl.constexpr):
    """SIZE bytes to the second-level cache; the first thread of a warpgroup asks for them."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred leader;
        .reg .b32 thread, size;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 leader, thread, 0;
        mov.b32 size, $2;
        @leader cp.async.bulk.prefetch.L2.global [$1], size;
        mov.u32 $0, 0;
    }""",
        "=r,l,r",
        [address.to(gl.int64), SIZE],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fetch(descriptor, origin, barrier, place, BYTES: gl.constexpr):
    """Start the copy of a part of a tile."""
    mbarrier.expect(barrier, BYTES)
    tma.async_copy_global_to_shared(descriptor, [origin.to(gl.int32), 0], barrier, place)


@gluon.jit
def _widen_tiles(
    given,
    PAGE: gl.constexpr,
    TOKENS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    GROUP: gl.constexpr,
    ROW_BYTES: gl.constexpr,
    STAGES: gl.constexpr,
    INT8: gl.constexpr,
    SHARED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """What the third warpgroup does. While it widens a tile, the next one's bytes come to the
    second-level cache."""
    GROUPS: gl.constexpr = RANK // GROUP
    ROW_WORDS: gl.constexpr = ROW_BYTES // 4
    # a thread reads 16 bytes at once; what a warp stores at once meets no bank twice
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [TOKENS, GROUP // 4],
    )
    ROW: gl.constexpr = gl.SliceLayout(1, WORDS)
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [TOKENS, GROUPS],
    )
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    schedule, cache, shared = given
    starts, first, requests, min_tiles = schedule
    words, scale_tma, rope_tma, tables, table_row, kv_lens, scales, scales_full = cache
    latents, ropes, _, _, full, _, empty = shared
    wait_for_inputs(DEPENDENT)
    tile, last = span(starts, requests, min_tiles)
    if tile < last:
        request = gl.load(first + gl.program_id(1))
        begin = gl.load(starts + request)
        end = gl.load(starts + request + 1)
        length = gl.load(kv_lens + request).to(gl.int32)
        request, begin, end, length = _advance(starts, kv_lens, request, begin, end, length, tile)
        origin, left = _locate(tables, table_row, request, begin, length, tile, PAGE, TOKENS)
        _fetch(scale_tma, origin, scales_full.index(0), scales.index(0), TOKENS * GROUPS * 4)
        # places of tiles that do not exist are the last one's
        there = gl.minimum(tile + 1, last - 1)
        request, begin, end, length = _advance(starts, kv_lens, request, begin, end, length, there)
        next_origin, next_left = _locate(
            tables, table_row, request, begin, length, there, PAGE, TOKENS
        )
        stage = 0
        phase = 0
        while tile < last:
            there = gl.minimum(tile + 2, last - 1)
            request, begin, end, length = _advance(
                starts, kv_lens, request, begin, end, length, there
            )
            ahead, ahead_left = _locate(
                tables, table_row, request, begin, length, there, PAGE, TOKENS
            )
            held = ()
            for g in gl.static_range(GROUPS):
                found = _read_group(words, origin, left, GROUP, g, TOKENS, ROW_WORDS, WORDS)
                held += (found,)  # type: ignore[assignment]
            mbarrier.wait(empty.index(stage), phase ^ 1)
            _fetch(rope_tma, origin, full.index(stage), ropes.index(stage), TOKENS * ROPE * 2)
            if tile + 1 < last:
                _fetch(
                    scale_tma,
                    next_origin,
                    scales_full.index(stage ^ 1),
                    scales.index(stage ^ 1),
                    TOKENS * GROUPS * 4,
                )
            mbarrier.wait(scales_full.index(stage), phase)
            scale = load_scales(scales.index(stage), SCALES, ROW)
            valid = gl.arange(0, TOKENS, ROW) < left
            pairs = latents.index(stage)._reinterpret(gl.int32, [GROUPS, TOKENS, GROUP // 2], PAIRS)
            for g in gl.static_range(GROUPS):
                by_row = gl.where(valid, scale[g], 0.0)[:, None]
                if INT8:
                    even, odd = _widen_int8(held[g], by_row)
                else:
                    even, odd = _widen_e4m3(held[g], by_row)
                pairs.index(g).store(gl.reshape(gl.join(even, odd), [TOKENS, GROUP // 2]))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(full.index(stage), count=1)
            _prefetch(words + ahead * ROW_WORDS, TOKENS * ROW_BYTES)
            origin = next_origin
            left = next_left
            next_origin = ahead
            next_left = ahead_left
            stage, phase = next_stage(stage, phase, STAGES)
            # not +=: tests run this on tensors, which that would change in place
            tile = tile + 1


@gluon.jit(do_not_specialize=["requests", "min_tiles", "table_row"])
def _mla_hopper_8bit_kernel(
    q_latent,
    q_rope,
    words,
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
    ROW_BYTES: gl.constexpr,
    STAGES: gl.constexpr,
    ADDS: gl.constexpr,
    WIDENS: gl.constexpr,
    INT8: gl.constexpr,
    SHARED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid (row blocks, workers). `factor` is the softmax scale times log2(e); words: the cache's
    rows of ROW_BYTES bytes; starts, first, partial, lse as in split_kv.py. ADDS, WIDENS: registers
    of a thread of the second and third warpgroup."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    GROUPS: gl.constexpr = RANK // GROUP
    queries = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, ROWS, GROUP], SHARED)
    query_ropes = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], SHARED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, RANK], SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, ROPE], SHARED)
    shrinks = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    totals = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS, GROUPS], scale_tma.layout)
    scales_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(scales_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    schedule = (starts, first, requests, min_tiles)
    asked = (q_latent, q_token, q_head, q_rope, qr_token, qr_head, queries, query_ropes)
    cache = (words, scale_tma, rope_tma, tables, table_row, kv_lens, scales, scales_full)
    shared = (latents, ropes, shrinks, totals, full, ready, empty)
    results = (out, out_token, out_head, partial)
    scored = (schedule, asked, shared, kv_lens, lse, results)
    added = (schedule, shared, results)
    gl.warp_specialize(
        [
            (
                _score_and_add,
                (
                    scored,
                    factor,
                    HEADS,
                    QUERIES,
                    ROWS,
                    TOKENS,
                    RANK,
                    ROPE,
                    GROUP,
                    STAGES,
                    SHARED,
                    DEPENDENT,
                ),
            ),
            (
                _add_right,
                (added, HEADS, QUERIES, ROWS, TOKENS, RANK, STAGES, SHARED, DEPENDENT),
            ),
            (
                _widen_tiles,
                (
                    (schedule, cache, shared),
                    PAGE,
                    TOKENS,
                    RANK,
                    ROPE,
                    GROUP,
                    ROW_BYTES,
                    STAGES,
                    INT8,
                    SHARED,
                    DEPENDENT,
                ),
            ),
        ],
        [4, 4],
        [ADDS, WIDENS],
    )


def supported(q_latent: Tensor, cache: Tensor, rows: int, tokens: int) -> bool:
    """bf16 queries of DeepSeek's widths, an 8-bit cache, whole tiles in a page, and a schedule of
    this kernel's tiles."""
    fits = (
        q_latent.dtype == torch.bfloat16
        and q_latent.shape[-1] == RANK
        and cache.dtype in EIGHT_BIT_NUMBERS
        and cache.shape[-1] == ROW_BYTES
    )
    whole = cache.shape[1] % TOKENS == 0 and cache.is_contiguous()
    return fits and whole and (rows, tokens) == (ROWS, TOKENS)


def launch(work: LatentDecode) -> None:
    """As mla_decode.mla_decode, which puts partial results together afterwards."""
    rows = work.cache.flatten(0, 1)
    _, scales, rope = latent_parts(rows, RANK, work.q_latent.dtype)
    plain: Any = gl.NVMMASharedLayout(0, 32, rank=2)
    layout = bulk_layout(16)
    _mla_hopper_8bit_kernel[work.grid](
        work.q_latent,
        work.q_rope,
        rows.view(torch.int32),
        TensorDescriptor.from_tensor(scales, [TOKENS, RANK // GROUP], plain),
        TensorDescriptor.from_tensor(rope, [TOKENS, ROPE], layout),
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
        ROWS,
        TOKENS,
        RANK,
        ROPE,
        GROUP,
        ROW_BYTES,
        STAGES,
        *REGISTERS,
        work.cache.dtype == torch.int8,
        layout,
        num_warps=4,
        maxnreg=168,
        **dependent(work.out.device),
    )
