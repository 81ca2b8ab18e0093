"""All-gather, experts, reduce-scatter: every rank has every token, and computes with its experts,
or its columns of experts.

No counts and no sync with the host; sums have a fixed order. One class handles tensor-parallel
experts, whole experts and both.

The ranks of a dense group are adjacent in the exchange's axis, so their rows are among the gathered
ones, and a shared expert's partial sums can be reduced with the experts'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.ops.rank_rows import pack, unpack
from rorqual.parallel.collectives import Axis, PendingCollective, Ready
from rorqual.parallel.exchange import StoreExchange, plus
from rorqual.parallel.layout import Layout


@dataclass
class GatherTicket:
    axis: Axis
    counts: tuple[int, ...] | None
    x: PendingCollective
    routing: PendingCollective
    ids: torch.dtype
    dense: slice | None
    y: PendingCollective | None = None


class AllGatherExchange(StoreExchange):
    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> GatherTicket:
        axis = layout.moe_axis
        counts = layout.moe_rows
        routing = pack(self.store.slots_of(ids, layout), weights)
        messages = axis.start_all_gather(x, counts), axis.start_all_gather(routing, counts)
        return GatherTicket(axis, counts, *messages, ids.dtype, layout.dense_rows)

    def dense_rows(self, ticket: GatherTicket) -> Tensor | None:
        if ticket.dense is None:
            return None
        ticket.x = Ready(ticket.x.wait())  # so that run_experts does not trim the rows again
        return ticket.x.wait()[ticket.dense]

    def run_experts(self, ticket: GatherTicket, dense: Tensor | None = None) -> None:
        slots, weights = unpack(ticket.routing.wait(), ticket.ids)
        y = self.store.run(ticket.x.wait(), self.store.to_local(slots), weights)
        if dense is not None:
            y[ticket.dense] += dense
        ticket.y = ticket.axis.start_reduce_scatter(y, ticket.counts)

    def combine(self, ticket: GatherTicket, base: Tensor | None = None) -> Tensor:
        assert ticket.y is not None, "run_experts comes before combine"
        return plus(ticket.y.wait(), base)
