"""All-to-all: a token is sent once to each rank that holds any of its experts, and one partial sum
is returned from each.

`AllToAllExchange` sends the row counts first: fewest bytes, but the host reads the counts, so no
graph can capture it. `LowLatencyExchange` sends padded blocks of a fixed capacity: no counts, no
sync, capturable. `FusedExchange` does the same with two device operators, which also sort rows by
expert (ops/npu/dispatch.py). The first two add a token's partial sums in rank order, in fp32, so
that results do not depend on the order of arrival.

Each token must be dispatched by one rank only: the layout shards tokens if attention groups have
several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rorqual.ops.rank_rows import destination_mask, local_ids_at, pack, unpack
from rorqual.parallel.collectives import Axis, PendingCollective
from rorqual.parallel.exchange import ExpertStore, StoreExchange, plus
from rorqual.parallel.layout import Layout


@dataclass
class AllToAllTicket:
    """State of one exchange. `rows` [T, ranks]: the token's row in the message to each rank; -1:
    not sent there."""

    axis: Axis
    like: Tensor
    rows: Tensor
    ids: torch.dtype
    messages: list[PendingCollective] = field(default_factory=list)
    send: list[int] = field(default_factory=list)
    receive: list[int] = field(default_factory=list)
    y: PendingCollective | None = None
    announced: Announcement | None = None


@dataclass
class Announcement:
    """What to send once the other ranks' counts have been received. `mask` [T, ranks]: to whom."""

    mask: Tensor
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
        slots = self.store.slots_of(ids, layout)
        mask = destination_mask(slots, self.store.parts(axis.size))
        counts = mask.sum(0)
        received = axis.start_all_to_all_fixed(counts)
        rows = (mask.t().flatten().cumsum(0) - 1).view(axis.size, -1).t().masked_fill(~mask, -1)
        sent = AllToAllTicket(axis, x, rows, ids.dtype)
        sent.announced = Announcement(mask, counts, received, slots, weights)
        return sent

    def send(self, ticket: AllToAllTicket) -> None:
        """Blocks the host until all ranks' counts have been received."""
        axis = ticket.axis
        announced = ticket.announced
        assert announced is not None, "rows leave once"
        counts = torch.stack((announced.counts, announced.received.wait()))
        ticket.send, ticket.receive = counts.tolist()
        rank, token = announced.mask.t().nonzero(as_tuple=True)  # by rank, then by token
        routing = pack(
            local_ids_at(announced.slots.index_select(0, token), rank, self.store.parts(axis.size)),
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

    def combine(self, ticket: AllToAllTicket, base: Tensor | None = None) -> Tensor:
        assert ticket.y is not None, "run_experts comes before combine"
        return self.store.ops.add_partial_sums(ticket.y.wait(), ticket.rows, base)


class LowLatencyExchange(StoreExchange):
    """The capacity of a block is the longest rank's number of rows: all of them could go to one
    rank, so no token is dropped."""

    def __init__(self, store: ExpertStore, fp8: bool = False):
        super().__init__(store)
        self.fp8 = fp8

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> AllToAllTicket:
        axis = layout.moe_axis
        slots = self.store.slots_of(ids, layout)
        capacity = max(layout.moe_rows or (x.shape[0],))
        if not capacity:
            return AllToAllTicket(axis, x, ids.new_empty(0, axis.size), ids.dtype)
        blocks = self.store.ops.rank_blocks(slots, weights, self.store.parts(axis.size), capacity)
        sent = AllToAllTicket(axis, x, blocks.rows, ids.dtype)
        sent.messages = [
            axis.start_all_to_all_fixed(message)
            for message in (*self._payload(x, blocks.tokens, axis.size), blocks.routing)
        ]
        return sent

    def _payload(self, x: Tensor, tokens: Tensor, ranks: int) -> list[Tensor]:
        """Hidden states by destination, [ranks, capacity, ...], as fp8 with scales if `fp8`."""
        if not x.shape[0]:
            x = x.new_zeros(1, x.shape[1])  # a rank without tokens still sends its blocks
        parts: tuple[Tensor, ...] = (x,)
        if self.fp8:
            ue8m0 = self.store.experts.gate_up.ue8m0
            data, scale = self.store.ops.quantize_activation(x, ue8m0)
            parts = (data.view(torch.uint8), scale)
        return [part.index_select(0, tokens).view(ranks, -1, part.shape[1]) for part in parts]

    def run_experts(self, ticket: AllToAllTicket, dense: Tensor | None = None) -> None:
        assert dense is None, "no dense rows were offered"
        if not ticket.messages:
            return
        *parts, routing = (message.wait() for message in ticket.messages)
        local_ids, weights = unpack(routing.flatten(0, 1), ticket.ids)
        y = self.store.run_received(
            [part.flatten(0, 1) for part in parts], ticket.like.dtype, local_ids, weights
        )
        ticket.y = ticket.axis.start_all_to_all_fixed(y.view(ticket.axis.size, -1, y.shape[1]))

    def combine(self, ticket: AllToAllTicket, base: Tensor | None = None) -> Tensor:
        if ticket.y is None:
            return ticket.like
        return self.store.ops.add_partial_sums(ticket.y.wait().flatten(0, 1), ticket.rows, base)


@dataclass
class FusedTicket:
    """`sent`: state of the operators; None if no rank has rows."""

    axis: Axis
    like: Tensor
    sent: Any
    y: Tensor | None = None


class FusedExchange(StoreExchange):
    """`fused`: the operators. Rows for experts with int8 weights are sent as int8 with one scale
    per row."""

    def __init__(self, store: ExpertStore, fused: Any):
        super().__init__(store)
        self.fused = fused
        self.eight_bits = store.experts.gate_up.data.dtype == torch.int8

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> FusedTicket:
        axis = layout.moe_axis
        slots = self.store.slots_of(ids, layout)
        capacity = max(layout.moe_rows or (x.shape[0],))
        if not capacity:
            return FusedTicket(axis, x, None)
        group = self.fused.group(axis, len(self.store.local_slots) * self.store.shard.count)
        row = x.shape[1] * (1 if self.eight_bits else x.element_size())
        axis.count("all_to_all", (axis.size - 1) * capacity * row)
        sent = self.fused.dispatch(x, slots, weights, capacity, group, self.eight_bits)
        return FusedTicket(axis, x, sent)

    def run_experts(self, ticket: FusedTicket, dense: Tensor | None = None) -> None:
        assert dense is None, "no dense rows were offered"
        if ticket.sent is not None:
            ticket.y = self.fused.compute(ticket.sent, self.store.experts, ticket.like.dtype)

    def combine(self, ticket: FusedTicket, base: Tensor | None = None) -> Tensor:
        if ticket.sent is None:
            return ticket.like
        assert ticket.y is not None, "run_experts comes before combine"
        slots = len(self.store.local_slots) * self.store.shard.count
        group = self.fused.group(ticket.axis, slots)
        ticket.axis.count("all_to_all", (ticket.axis.size - 1) * ticket.like.nbytes)
        return plus(self.fused.combine(ticket.y, ticket.sent, group), base)
