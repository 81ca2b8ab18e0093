"""MLA decode for many rows of queries on Hopper, in Gluon: one warpgroup scores, two add up.

The first warpgroup keeps most of its 64 rows of queries in registers, so its products read half the
shared memory, and what queries took there is a third tile's. It scores a tile, turns the scores
into weights and stores them in place of the tile's rope keys, which are no longer needed; the other
two multiply them with half of the latent's columns each. One of those two also fetches, since it
has time.

Left to themselves, both products of neighbouring tiles would run side by side and the tensor cores
stand still while the first warpgroup computes weights. So it says when values may be added up: once
three quarters of the next tile's scores are done. They then take about until that tile's weights
are there. (Later would be better but for the rope keys, whose place is the one that weights leave
free.)

Cycles of one tile, on a multiprocessor that multiplies 64 x 64 x 16 in 32 and reads 128 bytes of
shared memory in one: queries and keys 36 steps of 32, weights and values 1024, together 2,176;
measured about 3,000, of which weights are 750. Its 72 KB come from the second level cache at 24
bytes a cycle.
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

from rorqual.ops.triton.attention.split_kv import LatentDecode
from rorqual.ops.triton.runtime.launch import dependent
from rorqual.ops.triton.runtime.sm90_pipeline import (
    let_next_start,
    next_stage,
    opaque_zero,
    thread_barrier,
    wait_for_inputs,
)

ROWS = 64
TOKENS = 64
RANK = 512
ROPE = 64
STAGES = 3
REGISTERS = 160  # of a thread that adds up; one that scores has 504 - 2 x 160


@gluon.jit
def span(starts, requests, min_tiles):
    """(first tile of this worker, the one after its last): as split_kv.py shares them out."""
    all_tiles = gl.load(starts + requests)
    workers = gl.num_programs(1)
    chunk = gl.maximum((all_tiles + workers - 1) // workers, min_tiles)
    tile = gl.program_id(1) * chunk
    return tile, gl.minimum(tile + chunk, all_tiles)


@gluon.jit
def owner_of(starts, request, tile):
    """Whose tile it is, `request` or a later one. Tiles are counted over all requests."""
    while gl.load(starts + request + 1) <= tile:
        request = request + 1
    return request


@gluon.jit
def share_of(starts, requests, min_tiles, request, stop):
    """(whether this worker, which stops there, has had all of a request's tiles; else the place
    of its partial result)."""
    # here, not with the worker before
    begins = gl.load(starts + request) >= span(starts, requests, min_tiles)[0]
    return begins & (stop == gl.load(starts + request + 1)), 2 * gl.program_id(1) + begins.to(
        gl.int32
    )


@gluon.jit
def locate(tables, table_row, starts, request, tile, PAGE: gl.constexpr, TOKENS: gl.constexpr):
    """(whose tile it is, `request` or a later one; where it begins in the cache)."""
    request = owner_of(starts, request, tile)
    token = (tile - gl.load(starts + request)) * TOKENS
    page = gl.load(tables + request.to(gl.int64) * table_row + token // PAGE).to(gl.int32)
    return request, page * PAGE + token % PAGE


@gluon.jit
def _fetch(descriptor, at, barrier, place):
    mbarrier.expect(barrier, place.shape[0] * place.shape[1] * 2)
    tma.async_copy_global_to_shared(descriptor, [at, 0], barrier, place)


@gluon.jit
def _clear_end(tile, first, length, SHARED: gl.constexpr):
    """Zero the rows of a tile past the request's end, which may hold anything: a weight of zero
    does not cure what is not finite. By pieces of 8 rows and 64 columns, which take few
    registers."""
    PIECE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    PIECES: gl.constexpr = tile.shape[0] // 8
    pieces = tile._reinterpret(gl.bfloat16, [PIECES * tile.shape[1] // 64, 8, 64], SHARED)
    i = gl.maximum(length - first, 0) // 8
    while i < PIECES * tile.shape[1] // 64:
        begin = first + i % PIECES * 8
        if begin + 8 > length:
            piece = pieces.index(i)
            token = begin + opaque_zero() + gl.arange(0, 8, gl.SliceLayout(1, PIECE))
            piece.store(gl.where((token < length)[:, None], piece.load(PIECE), 0.0))
        i = i + 1


@gluon.jit
def rows_of(block, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Which rows of a request a block has. Not computed before a loop and kept in registers."""
    return (block * ROWS + opaque_zero()) + gl.arange(0, ROWS, LAYOUT)


@gluon.jit
def places_of(request, row, by_token, by_head, HEADS: gl.constexpr, QUERIES: gl.constexpr):
    return (request.to(gl.int64) * QUERIES + row // HEADS) * by_token + row % HEADS * by_head


@gluon.jit
def take_rows(queries, places, first, there, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns of queries, [rows, COLUMNS]."""
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return gl.load(queries + places[:, None] + column[None, :], mask=there[:, None], other=0.0)


@gluon.jit
def columns_of(first, TOKENS: gl.constexpr, SCORES: gl.constexpr):
    """first, first + 1, ... as columns of scores; made of two sums, of which a thread need keep
    neither."""
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0], [4, 0]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0]],
        [],
        [TOKENS // 8, 8],
    )
    within = gl.arange(0, 8, gl.SliceLayout(0, PAIRS)) + (first + opaque_zero())
    column = within[None, :] + 8 * gl.arange(0, TOKENS // 8, gl.SliceLayout(1, PAIRS))[:, None]
    return gl.convert_layout(
        gl.reshape(column, [TOKENS]), gl.SliceLayout(0, SCORES), assert_trivial=True
    )


@gluon.jit
def _wait_for_most_scores():
    """Until two groups of products are under way, a quarter of a tile's scores. Gluon's own wait
    would hand back sums, which go on here."""
    gl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 2; // dummy $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fold(p, FOLDED: gl.constexpr):
    """p [rows, tokens] to [rows, 4]: each thread adds up what it has of a row."""
    pairs = gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]), 2)
    return gl.convert_layout(
        gl.sum(gl.reshape(pairs, [p.shape[0], p.shape[1] // 8, 4]), 1), FOLDED, assert_trivial=True
    )


@gluon.jit
def hide_unseen(
    scores, at, length, block, HEADS: gl.constexpr, QUERIES: gl.constexpr, SCORES: gl.constexpr
):
    """Scores of a tile that begins at token `at` of a request, minus infinity where a row's query
    token comes before the tile's."""
    row = rows_of(block, scores.shape[0], gl.SliceLayout(1, SCORES))
    seen_until = length - QUERIES + row // HEADS  # the last that a row may see
    seen = columns_of(at, scores.shape[1], SCORES)[None, :] <= seen_until[:, None]
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def weigh(scores, factor, peak, parts, FOLDED: gl.constexpr):
    """(weights of a tile, by what earlier sums shrink, the rows' new greatest score, the parts of
    the sum of weights)."""
    new_peak = gl.maximum(peak, gl.max(scores, 1) * factor)
    p = gl.exp2(scores * factor - new_peak[:, None])
    shrink = gl.exp2(peak - new_peak)
    by_row = gl.convert_layout(shrink, gl.SliceLayout(1, FOLDED), assert_trivial=True)
    return p, shrink, new_peak, parts * by_row[:, None] + _fold(p, FOLDED)


@gluon.jit
def _score(
    given,
    factor,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    RANK: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """What the first warpgroup does; to the others it says `ready` of a tile's weights, `go`
    when they may use them.

    Registers are what is short here: 7 of 8 parts of the latent queries take 112 of 184, and
    what can be loaded again while products are under way is not kept."""
    TOTAL: gl.constexpr = HEADS * QUERIES
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    QUERY: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    FOLDED: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, 4]
    )
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    schedule, queries, shared, kv_lens, lse = given
    starts, first, requests, min_tiles = schedule
    q_latent, q_token, q_head, q_rope, qr_token, qr_head, query_ends, query_ropes = queries
    latents, ropes, shrinks, totals, full, rope_full, ready, go, _ = shared
    wait_for_inputs(DEPENDENT)
    block = gl.program_id(0)
    tile, last = span(starts, requests, min_tiles)
    if tile < last:
        request = gl.load(first + gl.program_id(1))
        stage = 0
        phase = 0
        turn = 0
        while tile < last:
            request = owner_of(starts, request, tile)
            stop = gl.minimum(gl.load(starts + request + 1), last)
            row = rows_of(block, ROWS, gl.SliceLayout(1, COPY))
            places = places_of(request, row, q_token, q_head, HEADS, QUERIES)
            latent_ends = take_rows(q_latent, places, RANK - 64, row < TOTAL, 64, COPY)
            places = places_of(request, row, qr_token, qr_head, HEADS, QUERIES)
            rope_parts = take_rows(q_rope, places, 0, row < TOTAL, 64, COPY)
            row_held = rows_of(block, ROWS, gl.SliceLayout(1, QUERY))
            places_held = places_of(request, row_held, q_token, q_head, HEADS, QUERIES)
            there = row_held < TOTAL
            half = take_rows(q_latent, places_held, 0, there, RANK // 2, QUERY)
            quarter = take_rows(q_latent, places_held, RANK // 2, there, RANK // 4, QUERY)
            eighth = take_rows(q_latent, places_held, RANK // 4 * 3, there, RANK // 8, QUERY)
            query_ends.store(latent_ends)  # once all loads are under way
            query_ropes.store(rope_parts)
            fence_async_shared()
            # finite: a row that sees nothing makes no NaN
            peak = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
            parts = gl.full([ROWS, 4], 0.0, gl.float32, FOLDED)  # of the sum of weights
            before = -1  # the place of the request's tile before this one
            thread_barrier()
            while tile < stop:
                keys = latents.index(stage)
                key_ropes = ropes.index(turn % 2)
                halves = keys._reinterpret(gl.bfloat16, [2, TOKENS, RANK // 2], SHARED)
                quarters = keys._reinterpret(gl.bfloat16, [4, TOKENS, RANK // 4], SHARED)
                eighths = keys._reinterpret(gl.bfloat16, [8, TOKENS, RANK // 8], SHARED)
                mbarrier.wait(full.index(stage), phase)
                scores = gl.full([ROWS, TOKENS], 0.0, gl.float32, SCORES)
                scores = warpgroup_mma(
                    half, halves.index(0).permute((1, 0)), scores, use_acc=False, is_async=True
                )
                scores = warpgroup_mma(
                    quarter, quarters.index(2).permute((1, 0)), scores, is_async=True
                )
                scores = warpgroup_mma(
                    eighth, eighths.index(6).permute((1, 0)), scores, is_async=True
                )
                scores = warpgroup_mma(
                    query_ends, eighths.index(7).permute((1, 0)), scores, is_async=True
                )
                if before >= 0:
                    _wait_for_most_scores()
                    mbarrier.arrive(go.index(before), count=1)
                before = stage
                mbarrier.wait(rope_full.index(turn % 2), (turn // 2) % 2)
                scores = warpgroup_mma(
                    query_ropes, key_ropes.permute((1, 0)), scores, is_async=True
                )
                at = (tile - gl.load(starts + request)) * TOKENS
                length = gl.load(kv_lens + request).to(gl.int32)
                scores = warpgroup_mma_wait(0, deps=[scores])
                if at + TOKENS > length - QUERIES + 1:
                    if at + TOKENS > length:  # what is not finite there shows in its scores
                        strange = (scores - scores != 0.0) & (
                            columns_of(at, TOKENS, SCORES) >= length
                        )[None, :]
                        if gl.max(gl.max(strange.to(gl.int32), 1), 0) != 0:
                            _clear_end(keys, at, length, SHARED)
                    scores = hide_unseen(scores, at, length, block, HEADS, QUERIES, SCORES)
                p, shrink, peak, parts = weigh(scores, factor, peak, parts, FOLDED)
                key_ropes.store(p.to(gl.bfloat16))
                shrinks.index(stage).store(shrink)
                fence_async_shared()
                thread_barrier()
                mbarrier.arrive(ready.index(stage), count=1)
                stage, phase = next_stage(stage, phase, STAGES)
                turn = turn + 1
                # not +=: tests run this on tensors, which that would change in place
                tile = tile + 1
            total = gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, SCORES))
            totals.index(before).store(total)
            thread_barrier()
            mbarrier.arrive(go.index(before), count=1)
            whole, slot = share_of(starts, requests, min_tiles, request, stop)
            if not whole:
                found = gl.where(total > 0, peak + gl.log2(gl.maximum(total, 1e-37)), float("-inf"))
                found_row = rows_of(block, ROWS, gl.SliceLayout(1, SCORES))
                gl.store(lse + slot.to(gl.int64) * TOTAL + found_row, found, mask=found_row < TOTAL)


@gluon.jit
def put_sums(
    acc,
    total,
    schedule,
    results,
    request,
    stop,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    FIRST: gl.constexpr,
    RANK: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Divide the sums of a request's values, columns FIRST and following, by the sum of weights
    `total` of each row, and store them; as a partial result where other workers have the rest."""
    TOTAL: gl.constexpr = HEADS * QUERIES
    starts, _, requests, min_tiles = schedule
    out, out_token, out_head, partial = results
    acc = acc * (1.0 / gl.where(total > 0, total, 1.0))[:, None]
    row = rows_of(gl.program_id(0), acc.shape[0], gl.SliceLayout(1, SUMS))
    column = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, SUMS))
    there = (row < TOTAL)[:, None]
    whole, slot = share_of(starts, requests, min_tiles, request, stop)
    if whole:
        places = places_of(request, row, out_token, out_head, HEADS, QUERIES)
        gl.store(out + places[:, None] + column[None, :], acc.to(gl.bfloat16), mask=there)
    else:
        at_row = slot.to(gl.int64) * TOTAL + row
        gl.store(partial + at_row[:, None] * RANK + column[None, :], acc, mask=there)


@gluon.jit
def add_up(
    given,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    PAGE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    RANK: gl.constexpr,
    STAGES: gl.constexpr,
    WHO: gl.constexpr,
    SHARED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Columns WHO RANK / 2 and following of the sums. The first of the two fetches, since it has
    time."""
    HALF: gl.constexpr = RANK // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    schedule, cache, shared, results = given
    starts, first, requests, min_tiles = schedule
    latents, ropes, shrinks, totals, full, rope_full, ready, go, empty = shared
    wait_for_inputs(DEPENDENT)
    tile, last = span(starts, requests, min_tiles)
    if tile < last:
        request = gl.load(first + gl.program_id(1))
        # whose the tile is that was fetched last, and where it begins in the cache
        ahead = request
        next_at = 0
        if WHO == 0:
            latent_tma, rope_tma, tables, table_row = cache
            for i in gl.static_range(STAGES):
                if tile + i < last:
                    ahead, next_at = locate(
                        tables, table_row, starts, ahead, tile + i, PAGE, TOKENS
                    )
                    _fetch(latent_tma, next_at, full.index(i), latents.index(i))
                    if i < 2:
                        _fetch(rope_tma, next_at, rope_full.index(i), ropes.index(i))
        stage = 0
        phase = 0
        turn = 0
        while tile < last:
            request = owner_of(starts, request, tile)
            stop = gl.minimum(gl.load(starts + request + 1), last)
            acc = gl.full([ROWS, HALF], 0.0, gl.float32, SUMS)
            total = gl.full([ROWS], 0.0, gl.float32, ROW)
            while tile < stop:
                mbarrier.wait(ready.index(stage), phase)
                acc = acc * shrinks.index(stage).load(ROW)[:, None]
                values = (
                    latents.index(stage)
                    ._reinterpret(gl.bfloat16, [2, TOKENS, HALF], SHARED)
                    .index(WHO)
                )
                mbarrier.wait(go.index(stage), phase)
                if tile + 1 == stop:
                    total = totals.index(stage).load(ROW)
                acc = warpgroup_mma_wait(
                    0, deps=[warpgroup_mma(ropes.index(turn % 2), values, acc, is_async=True)]
                )
                if WHO == 1:
                    mbarrier.arrive(empty.index(stage), count=1)
                else:
                    mbarrier.wait(empty.index(stage), phase)
                    thread_barrier()
                    if tile + 2 < last:
                        _fetch(rope_tma, next_at, rope_full.index(turn % 2), ropes.index(turn % 2))
                    if tile + STAGES < last:
                        ahead, next_at = locate(
                            tables, table_row, starts, ahead, tile + STAGES, PAGE, TOKENS
                        )
                        _fetch(latent_tma, next_at, full.index(stage), latents.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)
                turn = turn + 1
                # not +=: tests run this on tensors, which that would change in place
                tile = tile + 1
            put_sums(
                acc,
                total,
                schedule,
                results,
                request,
                stop,
                HEADS,
                QUERIES,
                WHO * HALF,
                RANK,
                SUMS,
            )


@gluon.jit(do_not_specialize=["requests", "min_tiles", "table_row"])
def _mla_hopper_kernel(
    q_latent,
    q_rope,
    latent_tma,
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
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Grid (row blocks, workers). `factor` is the softmax scale times log2(e); starts, first,
    partial, lse as in split_kv.py."""
    SHARED: gl.constexpr = latent_tma.layout
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query_ends = gl.allocate_shared_memory(gl.bfloat16, [ROWS, 64], SHARED)
    query_ropes = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], SHARED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, RANK], SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, ROPE], SHARED)
    shrinks = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    totals = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    rope_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(2):
        mbarrier.init(rope_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(go.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    schedule = (starts, first, requests, min_tiles)
    queries = (q_latent, q_token, q_head, q_rope, qr_token, qr_head, query_ends, query_ropes)
    cache = (latent_tma, rope_tma, tables, table_row)
    shared = (latents, ropes, shrinks, totals, full, rope_full, ready, go, empty)
    results = (out, out_token, out_head, partial)
    scored = (schedule, queries, shared, kv_lens, lse)
    added = (schedule, cache, shared, results)
    gl.warp_specialize(
        [
            (
                _score,
                (scored, factor, HEADS, QUERIES, ROWS, TOKENS, RANK, STAGES, SHARED, DEPENDENT),
            ),
            (
                add_up,
                (added, HEADS, QUERIES, PAGE, ROWS, TOKENS, RANK, STAGES, 0, SHARED, DEPENDENT),
            ),
            (
                add_up,
                (added, HEADS, QUERIES, PAGE, ROWS, TOKENS, RANK, STAGES, 1, SHARED, DEPENDENT),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def supported(q_latent: Tensor, cache: Tensor, rows: int, tokens: int) -> bool:
    """bf16 queries and cache of DeepSeek's widths, whole tiles in a page, and a schedule of this
    kernel's tiles."""
    fits = (
        q_latent.dtype == cache.dtype == torch.bfloat16
        and q_latent.shape[-1] == RANK
        and cache.shape[-1] == RANK + ROPE
    )
    return (
        fits
        and cache.shape[1] % TOKENS == 0
        and cache.stride(1) % 8 == 0
        and (rows, tokens) == (ROWS, TOKENS)
    )


def launch(work: LatentDecode) -> None:
    """As mla_decode.mla_decode, which puts partial results together afterwards."""
    rows = work.cache.flatten(0, 1)
    layout: Any = gl.NVMMASharedLayout(128, 16, rank=2)
    _mla_hopper_kernel[work.grid](
        work.q_latent,
        work.q_rope,
        TensorDescriptor.from_tensor(rows[:, :RANK], [TOKENS, RANK], layout),
        TensorDescriptor.from_tensor(rows[:, RANK:], [TOKENS, ROPE], layout),
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
        STAGES,
        REGISTERS,
        num_warps=4,
        maxnreg=168,
        **dependent(work.out.device),
    )
