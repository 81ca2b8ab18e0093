"""Rows by rank: which ranks hold experts of a row, blocks of rows to send to each of them, and the
sum of what they return. Reference of the ops `rank_blocks` and `add_partial_sums`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RankParts:
    """The experts of `ranks` ranks: `share` consecutive ranks hold columns of the same `each`
    slots."""

    ranks: int
    each: int
    share: int = 1


@dataclass
class RankBlocks:
    """Blocks of equally many rows for the ranks, in the order of tokens; unused rows are at the end
    of a block.

    rows [T, ranks] int32: the token's row among those of all blocks; -1: not sent to that rank.
    tokens [ranks * capacity] int32: the token in each row; 0 in unused rows. routing [ranks,
    capacity, 2 K] int32: `pack` of the local ids at that rank (-1: on another rank, or an unused
    row) and the token's weights."""

    rows: Tensor
    tokens: Tensor
    routing: Tensor


def pack(ids: Tensor, weights: Tensor) -> Tensor:
    """Pack ids (slots or local ids) and fp32 weights, [T, K] each, in one message, int32 [T,
    2 K]."""
    return torch.cat((ids.to(torch.int32), weights.view(torch.int32)), 1)


def unpack(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(ids as `dtype`, weights)."""
    ids, weights = message.chunk(2, 1)
    return ids.to(dtype).contiguous(), weights.contiguous().view(torch.float32)


def unpack_local(
    message: Tensor, dtype: torch.dtype, first: int, count: int
) -> tuple[Tensor, Tensor]:
    """`unpack`, with slots as local ids of a rank that holds `count` of them from `first` on; -1
    for others."""
    slots, weights = unpack(message, dtype)
    return local_ids(slots, first, count), weights


def local_ids(slots: Tensor, first: int | Tensor, count: int) -> Tensor:
    """Slots as local ids of a rank that holds `count` of them from `first` on; -1 for others."""
    local = slots - first
    return local.masked_fill((local < 0) | (local >= count), -1)


def destination_mask(slots: Tensor, parts: RankParts) -> Tensor:
    """[T, ranks] bool: the ranks to which a token with experts in `slots` [T, K] is sent: all that
    hold columns of one of them."""
    groups = parts.ranks // parts.share
    mask = torch.zeros(slots.shape[0], groups, dtype=torch.bool, device=slots.device)
    mask.scatter_(1, slots.long() // parts.each, True)
    return mask.repeat_interleave(parts.share, 1)


def local_ids_at(slots: Tensor, rank: Tensor, parts: RankParts) -> Tensor:
    """Slots [N, K] of rows sent to `rank` [N], as local ids there; -1 if that rank does not hold
    them."""
    return local_ids(slots, (rank // parts.share * parts.each)[:, None], parts.each)


def rank_blocks(slots: Tensor, weights: Tensor, parts: RankParts, capacity: int) -> RankBlocks:
    """Blocks of `capacity` rows, at least T and 1, of tokens with slots [T, K] int32 or int64 and
    weights [T, K] fp32."""
    ranks = parts.ranks
    mask = destination_mask(slots, parts)
    place = mask.cumsum(0) - 1
    first = torch.arange(ranks, device=slots.device) * capacity
    rows = (place + first).masked_fill(~mask, -1)
    tokens = _filled(place.masked_fill(~mask, capacity), capacity)
    if not slots.shape[0]:  # a rank without tokens still sends its blocks
        slots = slots.new_zeros(1, slots.shape[1])
        weights = weights.new_zeros(1, weights.shape[1])
    rank = torch.arange(ranks, device=slots.device).repeat_interleave(capacity)
    local_ids = local_ids_at(slots.index_select(0, tokens), rank, parts)
    empty = torch.arange(capacity, device=slots.device) >= mask.sum(0)[:, None]
    local_ids = local_ids.masked_fill(empty.view(-1, 1), -1)
    routing = pack(local_ids, weights.index_select(0, tokens)).view(ranks, capacity, -1)
    return RankBlocks(rows.to(torch.int32), tokens.to(torch.int32), routing)


def _filled(place: Tensor, capacity: int) -> Tensor:
    """[ranks * capacity]: the token in each row of each block, 0 for unused rows. place [T, ranks]:
    the token's row in each rank's block; `capacity`: not sent there."""
    tokens, ranks = place.shape
    blocks = torch.zeros(ranks, capacity + 1, dtype=torch.int64, device=place.device)
    order = torch.arange(tokens, device=place.device).expand(ranks, -1)
    return blocks.scatter_(1, place.t(), order)[:, :capacity].reshape(-1)


def add_partial_sums(parts: Tensor, rows: Tensor, base: Tensor | None = None) -> Tensor:
    """[T, columns]: the sum over ranks of parts[rows[t, rank]], in fp32 and in rank order, rounded
    to the dtype of `parts`; plus `base` [T, columns]. rows [T, ranks] int32 or int64; -1: that rank
    has no part."""
    total = torch.zeros(rows.shape[0], parts.shape[1], dtype=torch.float32, device=parts.device)
    if parts.shape[0]:
        for row in rows.unbind(1):
            found = parts.index_select(0, row.clamp(0)).float()
            total += found.masked_fill_((row < 0)[:, None], 0)
    y = total.to(parts.dtype)
    return y if base is None else y + base
