"""Routing as messages, blocks of rows by rank, and sums of what the ranks return:
rorqual.ops.rank_rows, bit for bit, in one kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.rank_rows import RankBlocks, RankParts
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs

TOKENS_AT_ONCE = 64
ROWS_AT_ONCE = 8  # loads of partial sums in flight
PICKS_AT_ONCE = 1024


@triton.jit(do_not_specialize=["picks"])
def _pack_kernel(
    slots,
    weights,
    message,
    picks,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """SIZE picks of all tokens."""
    wait_for_inputs(DEPENDENT)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < picks
    slot = tl.load(slots + at, mask=inside, other=0).to(tl.int32)
    weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    to = message + at // TOP_K * (2 * TOP_K) + at % TOP_K
    tl.store(to, slot, mask=inside)
    tl.store(to + TOP_K, weight, mask=inside)


@triton.jit(
    do_not_specialize=["picks", "row_stride", "first", "count"],
    do_not_specialize_on_alignment=["message"],
)
def _unpack_kernel(
    message,
    ids,
    weights,
    picks,
    row_stride,
    first,
    count,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """SIZE picks of all tokens."""
    wait_for_inputs(DEPENDENT)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < picks
    place = message + (at // TOP_K).to(tl.int64) * row_stride + at % TOP_K
    local = tl.load(place, mask=inside, other=0) - first
    local = tl.where((local >= 0) & (local < count), local, -1)
    weight = tl.load(place + TOP_K, mask=inside, other=0).to(tl.float32, bitcast=True)
    tl.store(ids + at, local.to(ids.dtype.element_ty), mask=inside)
    tl.store(weights + at, weight, mask=inside)


@triton.jit(do_not_specialize=["tokens", "capacity"])
def _blocks_kernel(
    slots,
    weights,
    rows,
    token_of,
    routing,
    tokens,
    capacity,
    RANKS: tl.constexpr,
    EACH: tl.constexpr,
    SHARE: tl.constexpr,
    TOP_K: tl.constexpr,
    PICKS: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program r makes rank r's block."""
    wait_for_inputs(DEPENDENT)
    rank = tl.program_id(0)
    start = rank * capacity
    pick = tl.arange(0, PICKS)[None, :]
    mine = pick < TOP_K
    sent = 0
    for first in range(0, tokens, CHUNK):
        token = first + tl.arange(0, CHUNK)
        real = token < tokens
        at = token[:, None] * TOP_K + pick
        given = real[:, None] & mine
        local = tl.load(slots + at, mask=given, other=-1).to(tl.int32) - rank // SHARE * EACH
        local = tl.where(given & (local >= 0) & (local < EACH), local, -1)
        goes = tl.max(local, 1) >= 0
        one = goes.to(tl.int32)
        row = start + sent + tl.cumsum(one, 0) - 1
        tl.store(rows + token * RANKS + rank, tl.where(goes, row, -1), mask=real)
        tl.store(token_of + row, token, mask=goes)
        to = routing + row[:, None] * (2 * TOP_K) + pick
        weight = tl.load(weights + at, mask=given, other=0.0)
        tl.store(to, local, mask=goes[:, None] & mine)
        tl.store(to + TOP_K, weight.to(tl.int32, bitcast=True), mask=goes[:, None] & mine)
        sent += tl.sum(one, 0)
    # unused rows have token 0's weights
    weight = tl.load(weights + pick, mask=mine & (tokens > 0), other=0.0).to(tl.int32, bitcast=True)
    for first in range(0, capacity, CHUNK):
        place = first + tl.arange(0, CHUNK)
        unused = (place >= sent) & (place < capacity)
        row = start + place
        tl.store(token_of + row, 0, mask=unused)
        to = routing + row[:, None] * (2 * TOP_K) + pick
        tl.store(to, -1, mask=unused[:, None] & mine)
        tl.store(to + TOP_K, tl.broadcast_to(weight, (CHUNK, PICKS)), mask=unused[:, None] & mine)


@triton.jit
def _sums_kernel(
    parts,
    rows,
    base,
    out,
    columns,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """SIZE columns of one token. A rank without a part adds nothing, and nothing is read."""
    wait_for_inputs(DEPENDENT)
    kind: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = offsets < columns
    more = tl.zeros([SIZE], tl.float32)
    if base is not None:
        more = tl.load(base + token * columns + offsets, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    for first in range(0, RANKS, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            rank = first + step
            row = tl.load(rows + token * RANKS + rank, mask=rank < RANKS, other=-1).to(tl.int64)
            part = tl.load(parts + row * columns + offsets, mask=inside & (row >= 0), other=0.0)
            total += part.to(tl.float32)
    if base is not None:
        total = total.to(kind).to(tl.float32) + more
    tl.store(out + token * columns + offsets, total.to(kind), mask=inside)


def pack_routing(slots: Tensor, weights: Tensor) -> Tensor:
    """rorqual.ops.rank_rows.pack."""
    tokens, top_k = slots.shape
    message = torch.empty(tokens, 2 * top_k, dtype=torch.int32, device=slots.device)
    if tokens:
        _pack_kernel[triton.cdiv(tokens * top_k, PICKS_AT_ONCE),](
            slots.contiguous(),
            weights.contiguous(),
            message,
            tokens * top_k,
            top_k,
            PICKS_AT_ONCE,
            num_warps=4,
            **dependent(slots.device),
        )
    return message


def unpack_routing(
    message: Tensor, dtype: torch.dtype, first: int, count: int
) -> tuple[Tensor, Tensor]:
    """rorqual.ops.rank_rows.unpack_local. message [T, 2 K] int32, adjacent columns."""
    assert message.stride(1) == 1
    tokens = message.shape[0]
    top_k = message.shape[1] // 2
    ids = torch.empty(tokens, top_k, dtype=dtype, device=message.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=message.device)
    if tokens:
        _unpack_kernel[triton.cdiv(tokens * top_k, PICKS_AT_ONCE),](
            message,
            ids,
            weights,
            tokens * top_k,
            message.stride(0),
            first,
            count,
            top_k,
            PICKS_AT_ONCE,
            num_warps=4,
            **dependent(message.device),
        )
    return ids, weights


def rank_blocks(slots: Tensor, weights: Tensor, parts: RankParts, capacity: int) -> RankBlocks:
    """rorqual.ops.rank_rows.rank_blocks. Slots of -1 are sent nowhere."""
    (tokens, top_k) = slots.shape
    assert max(1, tokens) <= capacity, (tokens, capacity)
    ranks = parts.ranks
    made = RankBlocks(
        torch.empty(tokens, ranks, dtype=torch.int32, device=slots.device),
        torch.empty(ranks * capacity, dtype=torch.int32, device=slots.device),
        torch.empty(ranks, capacity, 2 * top_k, dtype=torch.int32, device=slots.device),
    )
    _blocks_kernel[ranks,](
        slots.contiguous(),
        weights.contiguous(),
        made.rows,
        made.tokens,
        made.routing,
        tokens,
        capacity,
        ranks,
        parts.each,
        parts.share,
        top_k,
        next_power(top_k),
        TOKENS_AT_ONCE,
        num_warps=4,
        **dependent(slots.device),
    )
    return made


def add_partial_sums(parts: Tensor, rows: Tensor, base: Tensor | None = None) -> Tensor:
    """rorqual.ops.rank_rows.add_partial_sums, with `base` in the dtype of `parts`."""
    (tokens, ranks) = rows.shape
    columns = parts.shape[1]
    assert parts.is_contiguous()
    assert base is None or base.dtype == parts.dtype
    out = torch.empty(tokens, columns, dtype=parts.dtype, device=parts.device)
    if not tokens:
        return out
    size = min(next_power(columns), 512 if tokens <= 64 else 1024)
    _sums_kernel[tokens, triton.cdiv(columns, size)](
        parts,
        rows.contiguous(),
        None if base is None else base.contiguous(),
        out,
        columns,
        ranks,
        size,
        min(ROWS_AT_ONCE, next_power(ranks)),
        num_warps=4,
        **dependent(parts.device),
    )
    return out
