"""MLA decode for many rows of queries on Hopper, in Gluon: the layouts that Triton's own compiler would not choose.

With two warpgroups and 64 rows a program, Triton gives both the whole product of queries and keys, since another product follows it; the
work is done twice and shared memory is read three times as often as need be. Here each warpgroup multiplies the queries with half of a
tile's 64 tokens, the weights meet in shared memory, and each then adds up half of the latent's columns. The next tile is fetched from the
moment the one before it has been used, so a fetch has a whole tile's time.

Cycles of one tile, on a multiprocessor that multiplies 64 x 64 x 16 in 32 and reads 128 bytes of shared memory in one: queries and keys 36
steps of 48 (bound by shared memory: 2 x (64 + 32) x 16 x 2 bytes a step; Triton's own 96), weights and values 1024, softmax about 400 (its
own 700).
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rorqual.ops.triton.hopper import let_next_start, wait_for_inputs
from rorqual.ops.triton.launch import dependent
from rorqual.ops.triton.split_kv import SplitPlan

ROWS, TOKENS, RANK, ROPE = 64, 64, 512, 64
WARPS = 8


@gluon.jit
def span(starts, requests, min_tiles):
    """(first tile of this worker, the one after its last): as split_kv.py shares them out."""
    all_tiles, workers = gl.load(starts + requests), gl.num_programs(1)
    chunk = gl.maximum((all_tiles + workers - 1) // workers, min_tiles)
    tile = gl.program_id(1) * chunk
    return tile, gl.minimum(tile + chunk, all_tiles)


@gluon.jit
def locate(tables, table_row, starts, request, begin, end, tile, PAGE: gl.constexpr, TOKENS: gl.constexpr):
    """(whose tile it is, `request` or a later one, its first tile and the one after its last, the tile's page). Tiles are counted over all
    requests. These loads follow one another: whoever is about to fetch should have asked before."""
    while end <= tile:
        request = request + 1
        begin, end = end, gl.load(starts + request + 1)
    page = gl.load(tables + request.to(gl.int64) * table_row + (tile - begin) * TOKENS // PAGE)
    return request, begin, end, page.to(gl.int32)


@gluon.jit
def _fetch(latent_tma, rope_tma, page, token, tile, latents, ropes, barriers, PAGE: gl.constexpr):
    """Start the copy of `tile`, which begins at a request's token."""
    row, stage = page * PAGE + token % PAGE, tile % 2
    bytes: gl.constexpr = latents.shape[1] * (latents.shape[2] + ropes.shape[2]) * 2
    mbarrier.expect(barriers.index(stage), bytes)
    tma.async_copy_global_to_shared(latent_tma, [row, 0], barriers.index(stage), latents.index(stage))
    tma.async_copy_global_to_shared(rope_tma, [row, 0], barriers.index(stage), ropes.index(stage))


@gluon.jit
def _clear_end(latents, stage, first, length, COPY: gl.constexpr):
    """Zero the rows of a tile past the request's end: they may hold anything, and a weight of zero does not cure a NaN."""
    tile = latents.index(stage)
    token = first + gl.arange(0, latents.shape[1], gl.SliceLayout(1, COPY))
    values = tile.load(COPY)
    tile.store(gl.where((token < length)[:, None], values, 0.0))
    fence_async_shared()


@gluon.jit
def _put_queries(q_latent, q_rope, token, head, ok, q_token, q_head, qr_token, qr_head, queries, query_ropes, COPY: gl.constexpr):
    wide = gl.arange(0, queries.shape[1], gl.SliceLayout(0, COPY))
    narrow = gl.arange(0, query_ropes.shape[1], gl.SliceLayout(0, COPY))
    rows, rope_rows = token * q_token + head * q_head, token * qr_token + head * qr_head
    queries.store(gl.load(q_latent + rows[:, None] + wide[None, :], mask=ok[:, None], other=0.0))
    query_ropes.store(gl.load(q_rope + rope_rows[:, None] + narrow[None, :], mask=ok[:, None], other=0.0))
    fence_async_shared()


@gluon.jit(do_not_specialize=["requests", "min_tiles", "table_row"])
def _mla_hopper_kernel(q_latent, q_rope, latent_tma, rope_tma, tables, kv_lens, starts, first, out, partial, lse, factor, q_token, q_head,
                       qr_token, qr_head, table_row, out_token, out_head, requests, min_tiles, HEADS: gl.constexpr, QUERIES: gl.constexpr,
                       PAGE: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
                       DEPENDENT: gl.constexpr):  # fmt: skip
    """Grid (row blocks, workers), 8 warps. `factor` is the softmax scale times log2(e); starts, first, partial, lse as in split_kv.py."""
    TOTAL: gl.constexpr = HEADS * QUERIES
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TOKENS // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    queries = gl.allocate_shared_memory(gl.bfloat16, [ROWS, RANK], SHARED)
    query_ropes = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [ROWS, TOKENS], SHARED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, RANK], latent_tma.layout)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, ROPE], rope_tma.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=1)
    mbarrier.init(barriers.index(1), count=1)
    fence_async_shared()

    let_next_start(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    worker, block = gl.program_id(1), gl.program_id(0)
    tile, last = span(starts, requests, min_tiles)
    if tile < last:
        request = gl.load(first + worker)
        # Of the tile that is fetched next: whose it is, that request's first tile and the one after its last, its page.
        ahead, ahead_begin, ahead_end, page = locate(
            tables, table_row, starts, request, gl.load(starts + request), gl.load(starts + request + 1), tile, PAGE, TOKENS
        )
        _fetch(latent_tma, rope_tma, page, (tile - ahead_begin) * TOKENS, tile, latents, ropes, barriers, PAGE)
        phase = 0  # of both barriers: bit s says how often stage s has been filled, modulo 2
        while tile < last:
            while gl.load(starts + request + 1) <= tile:
                request = request + 1
            begin, end = gl.load(starts + request), gl.load(starts + request + 1)
            stop, position = gl.minimum(end, last), tile
            length = gl.load(kv_lens + request).to(gl.int32)
            row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
            _put_queries(q_latent, q_rope, request.to(gl.int64) * QUERIES + row // HEADS, row % HEADS, row < TOTAL, q_token, q_head,
                         qr_token, qr_head, queries, query_ropes, COPY)  # fmt: skip
            score_row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            score_token = gl.arange(0, TOKENS, gl.SliceLayout(0, SCORES))
            seen_until = length - QUERIES + score_row // HEADS  # the last token that a row may see
            peak = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, SCORES))  # finite: a row that sees nothing makes no NaN
            total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
            pending = warpgroup_mma_init(gl.full([ROWS, RANK], 0.0, gl.float32, SUMS))
            while tile < stop:
                stage = tile % 2
                if tile + 1 < last:  # nobody waits for the page's number here
                    ahead, ahead_begin, ahead_end, page = locate(
                        tables, table_row, starts, ahead, ahead_begin, ahead_end, tile + 1, PAGE, TOKENS
                    )
                mbarrier.wait(barriers.index(stage), (phase >> stage) & 1)
                phase = phase ^ (1 << stage)
                at = (tile - begin) * TOKENS
                keys, key_ropes = latents.index(stage), ropes.index(stage)
                acc = warpgroup_mma_wait(0, deps=[pending])  # once all warps are here, the place of the tile before is free
                gl.thread_barrier()
                if tile + 1 < last:
                    _fetch(latent_tma, rope_tma, page, (tile + 1 - ahead_begin) * TOKENS, tile + 1, latents, ropes, barriers, PAGE)
                if at + TOKENS > length:
                    _clear_end(latents, stage, at, length, COPY)
                scores = warpgroup_mma(
                    queries, keys.permute((1, 0)), gl.full([ROWS, TOKENS], 0.0, gl.float32, SCORES), use_acc=False, is_async=True
                )
                scores = warpgroup_mma(query_ropes, key_ropes.permute((1, 0)), scores, is_async=True)
                scores = warpgroup_mma_wait(0, deps=[scores])
                if at + TOKENS > length - QUERIES + 1:
                    scores = gl.where((at + score_token)[None, :] <= seen_until[:, None], scores, float("-inf"))
                new_peak = gl.maximum(peak, gl.max(scores, 1) * factor)
                p = gl.exp2(scores * factor - new_peak[:, None])
                shrink = gl.exp2(peak - new_peak)
                total = total * shrink + gl.sum(p, 1)
                peak = new_peak
                weights.store(p.to(gl.bfloat16))
                fence_async_shared()
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
                pending = warpgroup_mma(weights, keys, acc, is_async=True)
                tile = tile + 1  # not +=: tests run this on tensors, which that would change in place
            acc = warpgroup_mma_wait(0, deps=[pending])
            sums_row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
            column = gl.arange(0, RANK, gl.SliceLayout(0, SUMS))
            there = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
            acc = acc / gl.where(there > 0, there, 1.0)[:, None]
            if (position == begin) & (stop == end):
                place = (request.to(gl.int64) * QUERIES + sums_row // HEADS) * out_token + (sums_row % HEADS) * out_head
                gl.store(out + place[:, None] + column[None, :], acc.to(gl.bfloat16), mask=(sums_row < TOTAL)[:, None])
            else:
                slot = (2 * worker + (position == begin).to(gl.int32)).to(gl.int64) * TOTAL
                found = gl.where(total > 0, peak + gl.log2(gl.maximum(total, 1e-37)), float("-inf"))
                gl.store(lse + slot + score_row, found, mask=score_row < TOTAL)
                gl.store(partial + (slot + sums_row)[:, None] * RANK + column[None, :], acc, mask=(sums_row < TOTAL)[:, None])


def supported(q_latent: Tensor, cache: Tensor, rows: int, tokens: int) -> bool:
    """bf16 queries and cache of DeepSeek's widths, whole tiles in a page, and a schedule of this kernel's tiles."""
    fits = q_latent.dtype == cache.dtype == torch.bfloat16 and q_latent.shape[-1] == RANK and cache.shape[-1] == RANK + ROPE
    return fits and cache.shape[1] % TOKENS == 0 and cache.stride(1) % 8 == 0 and (rows, tokens) == (ROWS, TOKENS)


def launch(q_latent: Tensor, q_rope: Tensor, cache: Tensor, tables: Tensor, kv_lens: Tensor, factor: float, plan: SplitPlan, out: Tensor,
           grid: tuple[int, int]) -> None:  # fmt: skip
    """As mla_decode.mla_decode, which puts partial results together afterwards."""
    rows, (_, heads, _) = cache.flatten(0, 1), q_latent.shape
    layout: Any = gl.NVMMASharedLayout(128, 16, rank=2)
    latent_tma = TensorDescriptor.from_tensor(rows[:, :RANK], [TOKENS, RANK], layout)
    rope_tma = TensorDescriptor.from_tensor(rows[:, RANK:], [TOKENS, ROPE], layout)
    _mla_hopper_kernel[grid](
        q_latent, q_rope, latent_tma, rope_tma, tables, kv_lens, plan.starts, plan.first, out, plan.partial, plan.lse, factor,
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1), tables.stride(0), out.stride(0), out.stride(1),
        kv_lens.shape[0], plan.min_tiles, heads, q_latent.shape[0] // kv_lens.shape[0], cache.shape[1], ROWS, TOKENS, RANK, ROPE,
        num_warps=WARPS, **dependent(q_latent.device))  # fmt: skip
