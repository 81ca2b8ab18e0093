"""Paged decode attention with grouped key/value heads: `Ops.attention` if every request has the
same few query tokens.

The query heads of one key/value head, for all query tokens of the request, are the rows of one
tile, so that each cached key and value is read once. A head size that is not a power of two is
padded with zeros when loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rorqual.ops.reference import EIGHT_BIT_NUMBERS
from rorqual.ops.triton.attention.mla_decode import (
    LOG2E,
    _row,
    _slots,
    _softmax_step,
    _store_part,
    _whole,
    request_at,
    widened,
)
from rorqual.ops.triton.attention.shared_prefix import (
    SharedPrefixes,
    attend_prefixes,
    combine_shared,
    fetch_prefix_ahead,
    prefix_share,
)
from rorqual.ops.triton.attention.split_kv import SplitPlan, _chunk, _together, combine, split_plan
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import (
    COUNTERS,
    dependent,
    is_hopper,
    multiprocessors,
    next_power,
    wait_for_inputs,
    zeroed_counters,
)
from rorqual.ops.triton.runtime.prefetch import fetch_rows_ahead

CACHES = {torch.uint8: "fp8", torch.int8: "int8"}


@dataclass(frozen=True)
class GqaDecodeConfig:
    """block_n: tokens per tile. per_sm: programs per multiprocessor. min_tiles: least tiles per
    program. tma: bulk copies, if block_n divides a page. finish: the last program of a request's
    head merges the partial results, instead of a second kernel. masked: a request's last tile is
    loaded ahead as all others are, and all are masked, instead of a loop of its own for it (without
    bulk copies)."""

    block_n: int
    warps: int
    stages: int
    per_sm: int = 2
    min_tiles: int = 1
    tma: bool = True
    finish: bool = False
    masked: bool = False


def config_for(q: Tensor, k_plane: Tensor, requests: int, max_kv_len: int) -> GqaDecodeConfig:
    """The configuration for this number of requests of this length. rows: of queries that a cached
    key meets, a head's query tokens times its share of heads."""
    tokens, heads, _ = q.shape
    groups = k_plane.shape[2]
    shape = {
        "cache": CACHES.get(k_plane.dtype, "plain"),
        "heads": heads,
        "groups": groups,
        "rows": tokens * heads // (requests * groups),
        "width": q.shape[2],
        "requests": requests,
        "kv": max_kv_len,
    }
    return tuning.config_for(
        "gqa_decode",
        GqaDecodeConfig,
        q.device,
        dtype=str(q.dtype)[6:],
        cached=requests * max_kv_len,
        **shape,
    )


def configs_for(requests: int, max_kv_len: int, dtype: torch.dtype) -> list[GqaDecodeConfig]:
    """Candidate configurations for the tune command, by number of requests and their length."""
    if dtype == torch.float32:
        return [GqaDecodeConfig(16, 4, 1, tma=False)]
    short = [GqaDecodeConfig(64, 4, 3, tma=False), GqaDecodeConfig(32, 4, 3, per_sm=4, tma=False)]
    many = [
        GqaDecodeConfig(64, 4, 5),
        GqaDecodeConfig(64, 4, 5, tma=False),
        GqaDecodeConfig(64, 4, 5, per_sm=3),
        GqaDecodeConfig(64, 4, 3, per_sm=3),
    ]
    long = [
        GqaDecodeConfig(128, 4, 3, tma=False),
        GqaDecodeConfig(128, 4, 2, tma=False),
        GqaDecodeConfig(128, 8, 3, tma=False),
    ]
    if max_kv_len > 2048:
        ends = [replace(config, finish=True, masked=True) for config in long]
        return long + ends + many + short
    short += [replace(config, finish=True) for config in short]
    short += [replace(config, finish=True, masked=True) for config in (short[0], long[0])]
    many += [replace(config, finish=True) for config in many[1:3]]
    return short + many + long if requests * max_kv_len <= 2048 else many + long + short


@triton.jit
def _zero_empty(
    out,
    starts,
    request,
    tile,
    requests,
    first_head,
    out_token,
    out_head,
    QUERIES: tl.constexpr,
    SHARE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Zeros for `request` and those behind it that have no cache and stand before `tile`."""
    rows = tl.arange(0, BLOCK_H)
    columns = tl.arange(0, WIDTH)
    mask = (rows < QUERIES * SHARE)[:, None] & (columns < SIZE)[None, :]
    while (request < requests) & (tl.load(starts + tl.minimum(request + 1, requests)) == tile):
        token = tl.cast(request, tl.int64) * QUERIES + rows // SHARE
        place = (
            out
            + token[:, None] * out_token
            + (first_head + rows % SHARE)[:, None] * out_head
            + columns[None, :]
        )
        tl.store(place, tl.zeros((BLOCK_H, WIDTH), out.dtype.element_ty), mask=mask)
        request += 1


@triton.jit(
    do_not_specialize=["requests", "min_tiles", "table_row"],
    do_not_specialize_on_alignment=["tables", "kv_lens", "starts", "first"],
)
def _gqa_decode_kernel(
    q,
    k_plane,
    v_plane,
    scales,
    k_tma,
    v_tma,
    tables,
    kv_lens,
    starts,
    first,
    out,
    partial,
    lse,
    counters,
    first_pages,
    parts,
    prefix_starts,
    prefix_owners,
    prefix_counts,
    prefix_members,
    prefix_partial,
    prefix_lse,
    own_workers,
    factor,
    q_token,
    q_head,
    kv_row,
    kv_head,
    scale_row,
    table_row,
    out_token,
    out_head,
    requests,
    min_tiles,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    FINISH: tl.constexpr,
    SCALED: tl.constexpr,
    PREFIX_ROWS: tl.constexpr,
    PREFIX_TILE: tl.constexpr,
    PREFIX_STAGES: tl.constexpr,
    MEMBERS: tl.constexpr,
    REQUESTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (key/value heads, workers). SHARE query heads to a key/value head; SIZE columns a
    head, padded to WIDTH; `factor` is the softmax scale times log2(e). counters [requests,
    key/value heads], where FINISH: zero, and left zero. SCALED: the cache is an 8-bit one; a key's
    scale goes to its scores, a value's to its weights. PREFIX_ROWS > 0: kv_lens count
    what follows prefixes, which workers from own_workers [1] on attend to in tiles of PREFIX_ROWS
    rows and PREFIX_TILE tokens (shared_prefix.py)."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    group = tl.program_id(0)
    worker = tl.program_id(1)
    rows = tl.arange(0, BLOCK_H)
    row_ok = rows < QUERIES * SHARE
    query = rows // SHARE
    head = group * SHARE + rows % SHARE
    columns = tl.arange(0, WIDTH)
    offsets = tl.arange(0, BLOCK_N)
    inside = (columns < SIZE)[None, :]
    k_head = k_plane + group * kv_head + columns
    v_head = v_plane + group * kv_head + columns
    scale_head = scales + group * 2 if SCALED else k_plane

    # The schedule is in L2: its kernel ends with `split_kv.stored`, and lets no later one start
    # before. L1 may have the previous step's.
    all_tiles = tl.load(starts + requests, cache_modifier=".cg")
    workers = tl.num_programs(1)
    if PREFIX_ROWS > 0:
        workers = tl.load(own_workers, cache_modifier=".cg")
    chunk = _chunk(all_tiles, workers, min_tiles)
    position = worker * chunk
    last = tl.minimum(position + chunk, all_tiles)
    request = tl.load(first + worker, cache_modifier=".cg")
    begin, end, length = request_at(starts, kv_lens, request, requests)
    if DEPENDENT:  # noqa: SIM102 - known to the compiler
        if position < last:
            tile = position - begin
            table = tables + request.to(tl.int64) * table_row
            if PREFIX_ROWS > 0:
                table += tl.load(first_pages + request, cache_modifier=".cg")
            slots = _slots(table, tile * BLOCK_N + offsets, length, PAGE) * kv_row
            bytes_of: tl.constexpr = SIZE * k_plane.dtype.element_ty.primitive_bitwidth // 8
            fetch_rows_ahead(k_plane + group * kv_head + slots, bytes_of, DEPENDENT)
            fetch_rows_ahead(v_plane + group * kv_head + slots, bytes_of, DEPENDENT)
    if PREFIX_ROWS > 0:
        prefix_tile, prefix_last, prefix_group, prefix_owner = prefix_share(
            prefix_starts,
            prefix_owners,
            requests,
            worker - workers,
            tl.num_programs(1) - workers,
            REQUESTS,
        )
        fetch_prefix_ahead(
            k_plane + group * kv_head,
            v_plane + group * kv_head,
            tables,
            prefix_starts,
            kv_row,
            table_row,
            prefix_tile,
            prefix_last,
            prefix_group,
            prefix_owner,
            SIZE,
            PAGE,
            PREFIX_TILE,
            DEPENDENT,
        )
    wait_for_inputs(DEPENDENT)
    if PREFIX_ROWS > 0:
        attend_prefixes(
            q,
            k_head,
            v_head,
            scale_head,
            tables,
            prefix_starts,
            prefix_owners,
            prefix_counts,
            prefix_members,
            prefix_partial,
            prefix_lse,
            factor,
            q_token,
            q_head,
            kv_row,
            scale_row,
            table_row,
            group,
            worker - workers,
            prefix_tile,
            prefix_last,
            prefix_group,
            prefix_owner,
            SHARE,
            QUERIES,
            MEMBERS,
            SIZE,
            WIDTH,
            PAGE,
            PREFIX_ROWS,
            PREFIX_TILE,
            PREFIX_STAGES,
            PRECISION,
            SCALED,
        )
    if FINISH:  # noqa: SIM102 - known to the compiler
        if worker == 0:  # those before the first tile
            _zero_empty(
                out,
                starts,
                worker,
                0,
                requests,
                group * SHARE,
                out_token,
                out_head,
                QUERIES,
                SHARE,
                SIZE,
                WIDTH,
                BLOCK_H,
            )
    while position < last:
        stop = tl.minimum(end, last)
        if stop > position:
            table = tables + request.to(tl.int64) * table_row
            if PREFIX_ROWS > 0:
                table += tl.load(first_pages + request)
            token = request.to(tl.int64) * QUERIES + query
            q_rows = q + token * q_token + head * q_head
            queries = tl.load(
                q_rows[:, None] + columns[None, :], mask=row_ok[:, None] & inside, other=0.0
            )
            acc = tl.zeros((BLOCK_H, WIDTH), tl.float32)
            # finite, so that a row that has seen no key yet gives no NaN
            peak = tl.full((BLOCK_H,), -1e30, tl.float32)
            total = tl.zeros((BLOCK_H,), tl.float32)
            low = position - begin
            high = stop - begin
            # tiles that every query token sees in full
            plain = tl.minimum(high, tl.maximum((length - QUERIES + 1) // BLOCK_N, low))
            if MASKED:
                plain = low

            for j in tl.range(low, plain, num_stages=STAGES):
                if TMA:
                    slots = _row(table, j * BLOCK_N, PAGE) + offsets
                    here = _row(table, j * BLOCK_N, PAGE).to(tl.int32)
                    k = k_tma.load([here, group * WIDTH])
                    v = v_tma.load([here, group * WIDTH])
                else:
                    if PAGE % BLOCK_N == 0:
                        slots = _row(table, j * BLOCK_N, PAGE) + offsets
                    else:
                        slots = _slots(table, j * BLOCK_N + offsets, length, PAGE)
                    k = _whole(k_head[None, :] + slots[:, None] * kv_row, inside, SIZE == WIDTH)
                    v = _whole(v_head[None, :] + slots[:, None] * kv_row, inside, SIZE == WIDTH)
                scores = tl.dot(queries, widened(k, DTYPE).T, input_precision=PRECISION)
                if SCALED:
                    scale_rows = scale_head + slots * scale_row
                    scores *= tl.load(scale_rows)[None, :]
                weights, shrink, peak, total = _softmax_step(scores, factor, peak, total)
                if SCALED:
                    weights *= tl.load(scale_rows + 1)[None, :]
                acc *= shrink[:, None]
                acc = tl.dot(weights.to(DTYPE), widened(v, DTYPE), acc, input_precision=PRECISION)

            for j in tl.range(plain, high, num_stages=STAGES if MASKED else 1):
                n = j * BLOCK_N + offsets
                if MASKED and PAGE % BLOCK_N == 0:
                    slots = _row(table, j * BLOCK_N, PAGE) + offsets
                else:
                    slots = _slots(table, n, length, PAGE)
                # values past the end may be NaN, which a weight of zero does not cancel
                ok = (n < length)[:, None] & inside
                k = tl.load(k_head[None, :] + slots[:, None] * kv_row, mask=ok, other=0.0)
                v = tl.load(v_head[None, :] + slots[:, None] * kv_row, mask=ok, other=0.0)
                scores = tl.dot(queries, widened(k, DTYPE).T, input_precision=PRECISION)
                if SCALED:
                    scale_rows = scale_head + slots * scale_row
                    scores *= tl.load(scale_rows, mask=n < length, other=0.0)[None, :]
                seen = n[None, :] <= (length - QUERIES + query)[:, None]
                weights, shrink, peak, total = _softmax_step(
                    tl.where(seen, scores, float("-inf")), factor, peak, total
                )
                if SCALED:
                    weights *= tl.load(scale_rows + 1, mask=n < length, other=0.0)[None, :]
                acc *= shrink[:, None]
                acc = tl.dot(weights.to(DTYPE), widened(v, DTYPE), acc, input_precision=PRECISION)

            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            alone = (position == begin) & (stop == end)
            finished = alone
            if PREFIX_ROWS > 0:
                finished = alone & (tl.load(parts + 3 * request + 1) == 0)
            if finished:
                place = (
                    out + token[:, None] * out_token + head[:, None] * out_head + columns[None, :]
                )
                tl.store(place, acc.to(DTYPE), mask=row_ok[:, None] & inside)
            else:
                part = 2 * worker + (position == begin).to(tl.int32)
                if PREFIX_ROWS > 0:
                    part = tl.where(alone, 2 * tl.num_programs(1) + request, part)
                slot = part.to(tl.int64) * (QUERIES * HEADS) + query * HEADS + head
                _store_part(partial, lse, slot, columns, acc, peak, total, row_ok, WIDTH)
                if FINISH:
                    sharing = (end - 1) // chunk - begin // chunk + 1
                    counter = counters + request * tl.num_programs(0) + group
                    # all threads have stored their part before this program is counted
                    tl.debug_barrier()
                    if tl.atomic_add(counter, 1, sem="acq_rel") == sharing - 1:
                        each = query * HEADS + head
                        acc = _together(
                            partial,
                            lse,
                            each,
                            row_ok,
                            begin // chunk,
                            sharing,
                            QUERIES * HEADS,
                            WIDTH,
                            BLOCK_H,
                            4,
                        )
                        place = (
                            out
                            + token[:, None] * out_token
                            + head[:, None] * out_head
                            + columns[None, :]
                        )
                        tl.store(place, acc.to(DTYPE), mask=row_ok[:, None] & inside)
                        tl.store(counter, 0)
            if FINISH:  # noqa: SIM102
                if stop == end:
                    _zero_empty(
                        out,
                        starts,
                        request + 1,
                        end,
                        requests,
                        group * SHARE,
                        out_token,
                        out_head,
                        QUERIES,
                        SHARE,
                        SIZE,
                        WIDTH,
                        BLOCK_H,
                    )
            position = stop
        request += 1
        begin, end, length = request_at(starts, kv_lens, request, requests)


def gqa_workers(
    requests: int, max_kv_len: int, groups: int, config: GqaDecodeConfig, device: torch.device
) -> int:
    """Programs of a key/value head."""
    tiles = requests * triton.cdiv(max(max_kv_len, 1), config.block_n)
    return min(
        max(1, multiprocessors(device) * config.per_sm // groups),
        triton.cdiv(tiles, config.min_tiles),
    )


def gqa_plan(
    kv_lens: Tensor,
    max_kv_len: int,
    queries: int,
    heads: int,
    groups: int,
    width: int,
    config: GqaDecodeConfig,
    shared: SharedPrefixes | None = None,
) -> SplitPlan:
    """The schedule of one step, for all its layers. max_kv_len: any upper bound of kv_lens [R],
    known on the host. shared: kv_lens are its own_lens, and each request has a slot for a partial
    result."""
    requests = kv_lens.shape[0]
    workers = gqa_workers(requests, max_kv_len, groups, config, kv_lens.device)
    rows = queries * heads
    busy = None if shared is None else shared.own_workers
    plan = split_plan(kv_lens, workers, config.block_n, config.min_tiles, rows, padded(width), busy)
    if shared is None:
        return plan
    slots = 2 * workers + requests
    partial = plan.partial.new_empty(slots, rows, padded(width))
    return replace(plan, partial=partial, lse=plan.lse.new_empty(slots, rows))


def padded(width: int) -> int:
    """The columns of a tile that holds a head of that many: a power of two that the tensor cores
    take."""
    return max(16, triton.next_power_of_2(width))


def _descriptor(plane: Tensor, block_n: int) -> TensorDescriptor:
    rows = plane.flatten(2).flatten(0, 1)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [block_n, plane.shape[-1]])


def gqa_decode(
    q: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    tables: Tensor,
    kv_lens: Tensor,
    scale: float,
    max_kv_len: int,
    plan: SplitPlan | None = None,
    out: Tensor | None = None,
    config: GqaDecodeConfig | None = None,
    scales: Tensor | None = None,
    shared: SharedPrefixes | None = None,
) -> Tensor:
    """Attention of R requests with the same number of query tokens each (T / R), causal among them.

    q [T, H, D] bf16 or fp32, any token and head strides; planes [pages, page, G, D] contiguous,
    same dtype; tables [R, columns] int, entries past a request's end are never used; kv_lens [R]
    int, cached tokens including this step's (0 gives zeros). Returns [T, H, D]. Nothing is read
    back to the host. `plan` (from gqa_plan, same config) saves making it anew in each layer.
    scales [pages, page, G, 2] fp32: of an 8-bit cache (`reference.pack_heads`). shared: prefixes of
    these tables and kv_lens, read once a group; `plan` is then of shared.own_lens.
    """
    tokens, heads, width = q.shape
    requests = kv_lens.shape[0]
    config = config or config_for(q, k_plane, requests, max_kv_len)
    if scales is not None:
        assert scales.is_contiguous()
        number = EIGHT_BIT_NUMBERS[k_plane.dtype]
        k_plane, v_plane = k_plane.view(number), v_plane.view(number)
    kv_lens = kv_lens if shared is None else shared.own_lens
    sizes = (max_kv_len, tokens // requests, heads, k_plane.shape[2], width)
    plan = plan or gqa_plan(kv_lens, *sizes, config, shared)
    assert shared is None or shared.workers == plan.workers
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device) if out is None else out
    finish = config.finish and shared is None and requests * k_plane.shape[2] <= COUNTERS
    work = (tables, kv_lens, scale * LOG2E, plan, out, config, finish, shared)
    _launch(q, (k_plane, v_plane), scales, *work)
    if shared is not None:
        combine_shared(plan, shared, out)
    elif not finish:
        combine(plan, out, requests)
    return out


def _launch(
    q: Tensor,
    planes: tuple[Tensor, ...],
    scales: Tensor | None,
    tables: Tensor,
    kv_lens: Tensor,
    factor: float,
    plan: SplitPlan,
    out: Tensor,
    config: GqaDecodeConfig,
    finish: bool,
    shared: SharedPrefixes | None,
) -> None:
    """finish: the last program merges the partial results."""
    for plane in planes:
        assert plane.is_contiguous()
        assert plane.shape == planes[0].shape
    (_, page, groups, width) = planes[0].shape
    requests = kv_lens.shape[0]
    heads = q.shape[1]
    queries = q.shape[0] // requests
    share = heads // groups
    tma = config.tma and page % config.block_n == 0 and padded(width) == width
    describe = [_descriptor(x, config.block_n) if tma else None for x in planes]
    # of prefixes: three tiles under way, 115 KB a program, of which two fit a multiprocessor
    stages = 5 if is_hopper(q.device) and padded(width) <= 128 else 3
    _gqa_decode_kernel[(groups, plan.workers)](
        q,
        *planes,
        scales,
        *describe,
        tables,
        kv_lens,
        plan.starts,
        plan.first,
        out,
        plan.partial,
        plan.lse,
        zeroed_counters(q.device, requests * groups) if finish else None,
        *(shared.tensors if shared else (None,) * 9),
        factor,
        *q.stride()[:2],
        *planes[0].stride()[1:3],
        0 if scales is None else scales.stride(1),
        tables.stride(0),
        *out.stride()[:2],
        requests,
        plan.min_tiles,
        heads,
        share,
        queries,
        width,
        padded(width),
        page,
        max(16, triton.next_power_of_2(queries * share)),
        config.block_n,
        config.stages,
        tma,
        config.masked and not tma,
        "ieee" if q.dtype == torch.float32 else "tf32",
        finish,
        scales is not None,
        *((shared.rows, shared.block_n, stages, shared.members) if shared else (0,) * 4),
        next_power(max(requests, 2)) if shared else 0,
        num_warps=config.warps,
        **dependent(q.device),
    )
