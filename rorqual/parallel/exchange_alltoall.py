"""All-to-all: a token goes once to each rank that holds any of its experts, however many, and comes
back as one partial sum.

`AllToAllExchange` tells the receivers first how many rows will come: least bytes, but the host
reads the counts, so no graph can hold it. `LowLatencyExchange` sends padded blocks of a capacity
that no step exceeds: no count, no sync, fit for a graph. `FusedExchange` does the same by two
operators of the device, which sort rows by expert on the way (ops/npu/dispatch.py). The others
add a token's partial sums in the order of ranks, in fp32, so that results do not depend on arrival.

Each token must start from one rank alone: the layout shards tokens where attention groups have
several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rorqual.ops.reference import quantize_activation
from rorqual.parallel.collectives import Axis, PendingCollective
from rorqual.parallel.exchange import ExpertStore, StoreExchange
from rorqual.parallel.exchange_gather import pack, unpack
from rorqual.parallel.layout import Layout


def wanted(store: ExpertStore, slots: Tensor, ranks: int) -> Tensor:
    """[T, ranks] bool: which ranks must see a token whose experts lie in `slots`. The ranks of
    an expert_tp block all must."""
    groups = store.shard.count
    mask = torch.zeros(slots.shape[0], groups, dtype=torch.bool, device=slots.device)
    mask.scatter_(1, slots.long() // len(store.mine), True)
    return mask.repeat_interleave(ranks // groups, 1)


def local_ids_at(store: ExpertStore, slots: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """Slots [N, K] of rows that go to `rank` [N], as local ids there; -1 where that rank does not
    hold them."""
    each = len(store.mine)
    local = slots - (rank // (ranks // store.shard.count) * each)[:, None]
    return local.masked_fill((local < 0) | (local >= each), -1)


def add_parts(parts: Tensor, row: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    """Sum over ranks d of parts[row[t, d]] where mask[t, d]; row and mask [T, ranks]. fp32 sums
    in the order of ranks."""
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    if parts.shape[0] == 0:
        return total.to(like.dtype)
    for rank in range(mask.shape[1]):
        found = parts.index_select(0, row[:, rank]).float()
        total += found.masked_fill_(~mask[:, rank, None], 0)
    return total.to(like.dtype)


@dataclass
class AllToAllTicket:
    """What `wait` needs to put partial sums back: `row` [T, ranks] in the message, where `mask`
    says that there is one."""

    axis: Axis
    like: Tensor
    row: Tensor
    mask: Tensor
    ids: torch.dtype
    messages: list[PendingCollective] = field(default_factory=list)
    send: list[int] = field(default_factory=list)
    receive: list[int] = field(default_factory=list)
    y: PendingCollective | None = None
    announced: Announcement | None = None


@dataclass
class Announcement:
    """What is to be sent once the other ranks' counts have come."""

    counts: Tensor
    received: PendingCollective
    slots: Tensor
    weights: Tensor


class AllToAllExchange(StoreExchange):
    capturable = False

    def counts_first(self, layout: Layout) -> bool:
        return True

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> AllToAllTicket:
        axis = layout.moe_axis
        slots = self.store.slots(ids, layout.counted, layout.first_row)
        mask = wanted(self.store, slots, axis.size)
        counts = mask.sum(0)
        received = axis.start_all_to_all_fixed(counts)
        row = (mask.t().flatten().cumsum(0) - 1).clamp_(0).view(axis.size, -1).t()
        sent = AllToAllTicket(axis, x, row, mask, ids.dtype)
        sent.announced = Announcement(counts, received, slots, weights)
        return sent

    def send(self, ticket: AllToAllTicket) -> None:
        """The host waits for the counts of all ranks."""
        axis = ticket.axis
        announced = ticket.announced
        assert announced is not None, "rows leave once"
        counts = torch.stack((announced.counts, announced.received.wait()))
        ticket.send, ticket.receive = counts.tolist()
        rank, token = ticket.mask.t().nonzero(as_tuple=True)  # by rank, then by token
        routing = pack(
            local_ids_at(self.store, announced.slots.index_select(0, token), rank, axis.size),
            announced.weights.index_select(0, token),
        )
        for message in (ticket.like.index_select(0, token), routing):
            ticket.messages.append(axis.start_all_to_all(message, ticket.send, ticket.receive))
        ticket.announced = None

    def run_experts(self, ticket: AllToAllTicket, dense: Tensor | None = None) -> None:
        assert dense is None, "no dense rows were offered"
        x, routing = (message.wait() for message in ticket.messages)
        local_ids, weights = unpack(routing, ticket.ids)
        y = self.store.run(x, local_ids, weights)
        ticket.y = ticket.axis.start_all_to_all(y, ticket.receive, ticket.send)

    def combine(self, ticket: AllToAllTicket) -> Tensor:
        assert ticket.y is not None, "run_experts comes before combine"
        return add_parts(ticket.y.wait(), ticket.row, ticket.mask, ticket.like)


class LowLatencyExchange(StoreExchange):
    """Blocks hold as many rows as the longest rank brings: every token could go to one rank, and
    none is ever dropped."""

    def __init__(self, store: ExpertStore, fp8: bool = False):
        super().__init__(store)
        self.fp8 = fp8

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> AllToAllTicket:
        axis = layout.moe_axis
        slots = self.store.slots(ids, layout.counted, layout.first_row)
        capacity = max(layout.moe_rows or (x.shape[0],))
        mask = wanted(self.store, slots, axis.size)
        place = mask.cumsum(0) - 1
        token = _filled(place.masked_fill(~mask, capacity), capacity)
        row = place.clamp(0) + torch.arange(axis.size, device=x.device) * capacity
        sent = AllToAllTicket(axis, x, row, mask, ids.dtype)
        if capacity:
            routing = self._routing(slots, weights, token, mask.sum(0), capacity)
            sent.messages = [
                axis.start_all_to_all_fixed(message)
                for message in (*self._payload(x, token, axis.size), routing)
            ]
        return sent

    def _payload(self, x: Tensor, token: Tensor, ranks: int) -> list[Tensor]:
        """Hidden states by destination, [ranks, capacity, ...]; as fp8 with scales if so chosen."""
        if not x.shape[0]:
            x = x.new_zeros(1, x.shape[1])  # a rank without tokens still sends its blocks
        parts: tuple[Tensor, ...] = (x,)
        if self.fp8:
            data, scale = quantize_activation(x)
            parts = (data.view(torch.uint8), scale)
        return [part.index_select(0, token).view(ranks, -1, part.shape[1]) for part in parts]

    def _routing(
        self, slots: Tensor, weights: Tensor, token: Tensor, counts: Tensor, capacity: int
    ) -> Tensor:
        ranks = counts.shape[0]
        if not slots.shape[0]:
            slots = slots.new_zeros(1, slots.shape[1])
            weights = weights.new_zeros(1, weights.shape[1])
        rank = torch.arange(ranks, device=slots.device).repeat_interleave(capacity)
        local_ids = local_ids_at(self.store, slots.index_select(0, token), rank, ranks)
        empty = torch.arange(capacity, device=slots.device) >= counts[:, None]
        local_ids = local_ids.masked_fill(empty.view(-1, 1), -1)
        return pack(local_ids, weights.index_select(0, token)).view(ranks, capacity, -1)

    def run_experts(self, ticket: AllToAllTicket, dense: Tensor | None = None) -> None:
        assert dense is None, "no dense rows were offered"
        if not ticket.messages:
            return
        *parts, routing = (message.wait() for message in ticket.messages)
        local_ids, weights = unpack(routing.flatten(0, 1), ticket.ids)
        y = self.store.run_sent(
            [part.flatten(0, 1) for part in parts], ticket.like.dtype, local_ids, weights
        )
        ticket.y = ticket.axis.start_all_to_all_fixed(y.view(ticket.axis.size, -1, y.shape[1]))

    def combine(self, ticket: AllToAllTicket) -> Tensor:
        if ticket.y is None:
            return ticket.like
        return add_parts(ticket.y.wait().flatten(0, 1), ticket.row, ticket.mask, ticket.like)


def _filled(place: Tensor, capacity: int) -> Tensor:
    """[ranks * capacity]: the token at each place of each block, 0 where none is. place [T,
    ranks], `capacity` meaning nowhere."""
    tokens, ranks = place.shape
    blocks = torch.zeros(ranks, capacity + 1, dtype=torch.int64, device=place.device)
    order = torch.arange(tokens, device=place.device).expand(ranks, -1)
    return blocks.scatter_(1, place.t(), order)[:, :capacity].reshape(-1)


@dataclass
class FusedTicket:
    """`sent` is the operators' own; None where no rank has a row."""

    axis: Axis
    like: Tensor
    sent: Any
    y: Tensor | None = None


class FusedExchange(StoreExchange):
    """`fused` are the operators. Rows for experts with int8 weights travel as these take them: in
    int8, with a scale each."""

    def __init__(self, store: ExpertStore, fused: Any):
        super().__init__(store)
        self.fused = fused
        self.eight_bits = store.experts.gate_up.data.dtype == torch.int8

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> FusedTicket:
        axis = layout.moe_axis
        slots = self.store.slots(ids, layout.counted, layout.first_row)
        capacity = max(layout.moe_rows or (x.shape[0],))
        if not capacity:
            return FusedTicket(axis, x, None)
        group = self.fused.group(axis, len(self.store.mine) * self.store.shard.count)
        row = x.shape[1] * (1 if self.eight_bits else x.element_size())
        axis.count("all_to_all", (axis.size - 1) * capacity * row)
        sent = self.fused.dispatch(x, slots, weights, capacity, group, self.eight_bits)
        return FusedTicket(axis, x, sent)

    def run_experts(self, ticket: FusedTicket, dense: Tensor | None = None) -> None:
        assert dense is None, "no dense rows were offered"
        if ticket.sent is not None:
            ticket.y = self.fused.compute(ticket.sent, self.store.experts, ticket.like.dtype)

    def combine(self, ticket: FusedTicket) -> Tensor:
        if ticket.sent is None:
            return ticket.like
        assert ticket.y is not None, "run_experts comes before combine"
        slots = len(self.store.mine) * self.store.shard.count
        group = self.fused.group(ticket.axis, slots)
        ticket.axis.count("all_to_all", (ticket.axis.size - 1) * ticket.like.nbytes)
        return self.fused.combine(ticket.y, ticket.sent, group)
