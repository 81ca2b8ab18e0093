"""MLA decode for many rows of queries on Hopper, in Gluon: two tiles of the cache at a time, one for each warpgroup's scores.

A warpgroup multiplies all 64 rows of queries with a tile of its own, so that nothing is multiplied twice and a product reads as much
shared memory as the tensor cores have time for. Both then know the rows' greatest score, each turns its scores into weights, and each adds
up half of the latent's columns over both tiles. Weights lie where their tile's rope keys were, which nobody needs any more. A warp of its
own copies: a tile's next occupant comes as soon as both warpgroups have added it up, in three parts, so that its scores begin with the
first.

Cycles of two tiles, on a multiprocessor that multiplies 64 x 64 x 16 in 32 and reads 128 bytes of shared memory in one: queries and keys
2 x 36 steps of 32, weights and values 2 x 1024, softmax, rescaling and three meetings about 800 for both: 5,150, or 2,600 a tile
(mla_hopper.py: 3,150, and 4,970 on a card). What a copy takes beyond the 1,024 cycles that the other tile's values need is not hidden, but
for its first part.
"""

from __future__ import annotations

from typing import Any

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

from rorqual.ops.triton.hopper import let_next_start, wait_for_inputs
from rorqual.ops.triton.launch import dependent
from rorqual.ops.triton.mla_hopper import RANK, ROPE, ROWS, TOKENS, _put_queries, locate, span
from rorqual.ops.triton.split_kv import SplitPlan

PARTS = gl.constexpr(3)  # of a tile, each with a barrier: 3 of its 9 blocks of 64 columns
REGISTERS = (240, 24)  # of a thread that multiplies, of one that copies


@gluon.jit
def _copy(latent_tma, rope_tma, tables, starts, first, latents, ropes, full, empty, table_row, requests, min_tiles, PAGE: gl.constexpr,
          TOKENS: gl.constexpr, DEPENDENT: gl.constexpr):  # fmt: skip
    """Tiles of a request go to the two places in turn, beginning with the first."""
    SHARED: gl.constexpr = latent_tma.layout
    BLOCKS: gl.constexpr = latents.shape[2] // 64
    wait_for_inputs(DEPENDENT)
    tile, last = span(starts, requests, min_tiles)
    if tile < last:
        request = gl.load(first + gl.program_id(1))
        begin, end = gl.load(starts + request), gl.load(starts + request + 1)
        side, phases = 0, 3  # of both places: bit s turns each time place s is given up
        while tile < last:
            before = request
            request, begin, end, page = locate(tables, table_row, starts, request, begin, end, tile, PAGE, TOKENS)
            side = gl.where(request == before, side, 0)
            row = page * PAGE + (tile - begin) * TOKENS % PAGE
            mbarrier.wait(empty.index(side), (phases >> side) & 1)
            phases = phases ^ (1 << side)
            blocks = latents.index(side)._reinterpret(gl.bfloat16, [BLOCKS, TOKENS, 64], SHARED)
            for part in gl.static_range(PARTS):
                barrier = full.index(side * PARTS + part)
                mbarrier.expect(barrier, 3 * TOKENS * 128)
                for i in gl.static_range(3):
                    if 3 * part + i < BLOCKS:
                        tma.async_copy_global_to_shared(latent_tma, [row, (3 * part + i) * 64], barrier, blocks.index(3 * part + i))
                    else:
                        tma.async_copy_global_to_shared(rope_tma, [row, 0], barrier, ropes.index(side))
            side, tile = 1 - side, tile + 1


@gluon.jit
def _meet(met, phase):
    """Both warpgroups are here, and each sees what the other has written. The next phase."""
    gl.thread_barrier()
    mbarrier.arrive(met, count=1)
    mbarrier.wait(met, phase)
    return phase ^ 1


@gluon.jit
def _clear_end(blocks, first, length, BLOCKS: gl.constexpr, COPY: gl.constexpr):
    """Zero the rows of a tile past the request's end: they may hold anything, and a weight of zero does not cure a NaN."""
    token = first + gl.arange(0, blocks.shape[1], gl.SliceLayout(1, COPY))
    for i in gl.static_range(BLOCKS):
        block = blocks.index(i)
        block.store(gl.where((token < length)[:, None], block.load(COPY), 0.0))
    fence_async_shared()


@gluon.jit
def _scores(queries, query_ropes, blocks, ropes, full, phase, at, length, WHO: gl.constexpr, BLOCKS: gl.constexpr, SCORES: gl.constexpr,
            COPY: gl.constexpr, SHARED: gl.constexpr):  # fmt: skip
    """Queries [rows, .] with the keys of this warpgroup's tile, part after part as they come."""
    if at + blocks.shape[1] > length:
        for part in gl.static_range(PARTS):
            mbarrier.wait(full.index(WHO * PARTS + part), phase)
        _clear_end(blocks, at, length, BLOCKS, COPY)
    query_blocks = queries._reinterpret(gl.bfloat16, [BLOCKS, queries.shape[0], 64], SHARED)
    scores = gl.full([queries.shape[0], blocks.shape[1]], 0.0, gl.float32, SCORES)
    for part in gl.static_range(PARTS):
        mbarrier.wait(full.index(WHO * PARTS + part), phase)
        for i in gl.static_range(3):
            if 3 * part + i < BLOCKS:
                keys = blocks.index(3 * part + i).permute((1, 0))
                scores = warpgroup_mma(query_blocks.index(3 * part + i), keys, scores, use_acc=3 * part + i > 0, is_async=True)
            else:
                scores = warpgroup_mma(query_ropes, ropes.permute((1, 0)), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _attend(q_latent, q_rope, kv_lens, starts, first, out, partial, lse, queries, query_ropes, latents, ropes, peaks, full, empty, met,
            factor, q_token, q_head, qr_token, qr_head, out_token, out_head, requests, min_tiles, HEADS: gl.constexpr,
            QUERIES: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, RANK: gl.constexpr, WHO: gl.constexpr,
            SHARED: gl.constexpr, DEPENDENT: gl.constexpr):  # fmt: skip
    """Warpgroup WHO: scores of the tiles WHO, WHO + 2, ... of a request, columns WHO RANK / 2 and following of its sums."""
    TOTAL: gl.constexpr = HEADS * QUERIES
    HALF: gl.constexpr = RANK // 2
    BLOCKS: gl.constexpr = RANK // 64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    wait_for_inputs(DEPENDENT)
    worker, block = gl.program_id(1), gl.program_id(0)
    tile, last = span(starts, requests, min_tiles)
    if tile < last:
        request = gl.load(first + worker)
        phase, filled = 0, 0  # of the meetings; of both places: bit s turns each time place s is filled
        while tile < last:
            while gl.load(starts + request + 1) <= tile:
                request = request + 1
            begin, end = gl.load(starts + request), gl.load(starts + request + 1)
            stop, position = gl.minimum(end, last), tile
            length = gl.load(kv_lens + request).to(gl.int32)
            row = block * ROWS + WHO * (ROWS // 2) + gl.arange(0, ROWS // 2, gl.SliceLayout(1, COPY))
            _put_queries(q_latent, q_rope, request.to(gl.int64) * QUERIES + row // HEADS, row % HEADS, row < TOTAL, q_token, q_head,
                         qr_token, qr_head, queries.slice(WHO * (ROWS // 2), ROWS // 2), query_ropes.slice(WHO * (ROWS // 2), ROWS // 2),
                         COPY)  # fmt: skip
            phase = _meet(met, phase)
            score_row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            score_token = gl.arange(0, TOKENS, gl.SliceLayout(0, SCORES))
            seen_until = length - QUERIES + score_row // HEADS  # the last token that a row may see
            peak = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, SCORES))  # finite: a row that sees nothing makes no NaN
            total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.full([ROWS, HALF], 0.0, gl.float32, SUMS)
            while tile < stop:
                two = tile + 1 < stop
                scores = gl.full([ROWS, TOKENS], float("-inf"), gl.float32, SCORES)
                at = (tile + WHO - begin) * TOKENS
                if tile + WHO < stop:
                    blocks = latents.index(WHO)._reinterpret(gl.bfloat16, [BLOCKS, TOKENS, 64], SHARED)
                    scores = _scores(queries, query_ropes, blocks, ropes.index(WHO), full, (filled >> WHO) & 1, at, length, WHO, BLOCKS,
                                     SCORES, COPY, SHARED)  # fmt: skip
                if at + TOKENS > length - QUERIES + 1:
                    scores = gl.where((at + score_token)[None, :] <= seen_until[:, None], scores, float("-inf"))
                own = gl.max(scores, 1) * factor
                peaks.index(WHO).store(own)
                phase = _meet(met, phase)
                other = peaks.index(1 - WHO).load(gl.SliceLayout(1, SCORES))
                new_peak = gl.maximum(peak, gl.maximum(own, other))
                p = gl.exp2(scores * factor - new_peak[:, None])
                shrink = gl.exp2(peak - new_peak)
                total = total * shrink + gl.sum(p, 1)
                peak = new_peak
                if tile + WHO < stop:
                    ropes.index(WHO).store(p.to(gl.bfloat16))
                fence_async_shared()
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
                phase = _meet(met, phase)
                values = latents.index(0)._reinterpret(gl.bfloat16, [2, TOKENS, HALF], SHARED).index(WHO)
                acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(ropes.index(0), values, acc, is_async=True)])
                mbarrier.arrive(empty.index(0), count=1)
                filled = filled ^ 1
                if two:
                    values = latents.index(1)._reinterpret(gl.bfloat16, [2, TOKENS, HALF], SHARED).index(WHO)
                    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(ropes.index(1), values, acc, is_async=True)])
                    mbarrier.arrive(empty.index(1), count=1)
                    filled = filled ^ 2
                tile = gl.minimum(tile + 2, stop)
            peaks.index(WHO).store(total)
            phase = _meet(met, phase)
            total = total + peaks.index(1 - WHO).load(gl.SliceLayout(1, SCORES))
            sums_row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
            column = WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(0, SUMS))
            there = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
            acc = acc / gl.where(there > 0, there, 1.0)[:, None]
            if (position == begin) & (stop == end):
                place = (request.to(gl.int64) * QUERIES + sums_row // HEADS) * out_token + (sums_row % HEADS) * out_head
                gl.store(out + place[:, None] + column[None, :], acc.to(gl.bfloat16), mask=(sums_row < TOTAL)[:, None])
            else:
                slot = (2 * worker + (position == begin).to(gl.int32)).to(gl.int64) * TOTAL
                if WHO == 0:
                    found = gl.where(total > 0, peak + gl.log2(gl.maximum(total, 1e-37)), float("-inf"))
                    gl.store(lse + slot + score_row, found, mask=score_row < TOTAL)
                gl.store(partial + (slot + sums_row)[:, None] * RANK + column[None, :], acc, mask=(sums_row < TOTAL)[:, None])


@gluon.jit(do_not_specialize=["requests", "min_tiles", "table_row"])
def _mla_pairs_kernel(q_latent, q_rope, latent_tma, rope_tma, tables, kv_lens, starts, first, out, partial, lse, factor, q_token, q_head,
                      qr_token, qr_head, table_row, out_token, out_head, requests, min_tiles, HEADS: gl.constexpr, QUERIES: gl.constexpr,
                      PAGE: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
                      MULTIPLIER: gl.constexpr, COPIER: gl.constexpr, DEPENDENT: gl.constexpr):  # fmt: skip
    """Grid (row blocks, workers). `factor` is the softmax scale times log2(e); starts, first, partial, lse as in split_kv.py."""
    SHARED: gl.constexpr = latent_tma.layout
    queries = gl.allocate_shared_memory(gl.bfloat16, [ROWS, RANK], SHARED)
    query_ropes = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], SHARED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, RANK], SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, ROPE], SHARED)
    peaks = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    let_next_start(DEPENDENT)
    for i in gl.static_range(2 * PARTS):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(met, count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (q_latent, q_rope, kv_lens, starts, first, out, partial, lse, queries, query_ropes, latents, ropes, peaks, full,
                       empty, met, factor, q_token, q_head, qr_token, qr_head, out_token, out_head, requests, min_tiles, HEADS, QUERIES,
                       ROWS, TOKENS, RANK, 0, SHARED, DEPENDENT)),
            (_attend, (q_latent, q_rope, kv_lens, starts, first, out, partial, lse, queries, query_ropes, latents, ropes, peaks, full,
                       empty, met, factor, q_token, q_head, qr_token, qr_head, out_token, out_head, requests, min_tiles, HEADS, QUERIES,
                       ROWS, TOKENS, RANK, 1, SHARED, DEPENDENT)),
            (_copy, (latent_tma, rope_tma, tables, starts, first, latents, ropes, full, empty, table_row, requests, min_tiles, PAGE,
                     TOKENS, DEPENDENT)),
        ],
        [4, 1],
        [MULTIPLIER, COPIER],
    )  # fmt: skip


def launch(q_latent: Tensor, q_rope: Tensor, cache: Tensor, tables: Tensor, kv_lens: Tensor, factor: float, plan: SplitPlan, out: Tensor,
           grid: tuple[int, int]) -> None:  # fmt: skip
    """What mla_hopper.launch does, where mla_hopper.supported says so."""
    rows, (_, heads, _) = cache.flatten(0, 1), q_latent.shape
    layout: Any = gl.NVMMASharedLayout(128, 16, rank=2)
    latent_tma = TensorDescriptor.from_tensor(rows[:, :RANK], [TOKENS, 64], layout)
    rope_tma = TensorDescriptor.from_tensor(rows[:, RANK:], [TOKENS, ROPE], layout)
    _mla_pairs_kernel[grid](
        q_latent, q_rope, latent_tma, rope_tma, tables, kv_lens, plan.starts, plan.first, out, plan.partial, plan.lse, factor,
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1), tables.stride(0), out.stride(0), out.stride(1),
        kv_lens.shape[0], plan.min_tiles, heads, q_latent.shape[0] // kv_lens.shape[0], cache.shape[1], ROWS, TOKENS, RANK, ROPE,
        *REGISTERS, num_warps=4, maxnreg=168, **dependent(q_latent.device))  # fmt: skip
