"""All-gather, experts, reduce-scatter: every rank sees every token, and computes with what experts,
or columns of experts, it holds.

No counts and no sync with the host; sums come in a fixed order. One class serves tensor-parallel
experts, whole experts and both.

The ranks of a dense group lie side by side in the exchange's axis, so their rows are among those
gathered, and what these ranks add to the sums of these rows comes to the dense layer's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.parallel.collectives import Axis, PendingCollective, Ready
from rorqual.parallel.exchange import StoreExchange
from rorqual.parallel.layout import Layout


def pack(ids: Tensor, weights: Tensor) -> Tensor:
    """Ids (slots or local ids) and fp32 weights [T, K] as one message, int32 [T, 2 K]."""
    return torch.cat((ids.to(torch.int32), weights.view(torch.int32)), 1)


def unpack(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The ids, as `dtype`, and the weights."""
    ids, weights = message.chunk(2, 1)
    return ids.to(dtype).contiguous(), weights.contiguous().view(torch.float32)


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
        routing = pack(self.store.slots(ids, layout.counted, layout.first_row), weights)
        messages = axis.start_all_gather(x, counts), axis.start_all_gather(routing, counts)
        return GatherTicket(axis, counts, *messages, ids.dtype, layout.dense_rows)

    def dense_rows(self, ticket: GatherTicket) -> Tensor | None:
        if ticket.dense is None:
            return None
        ticket.x = Ready(ticket.x.wait())  # waited for once, put into shape once
        return ticket.x.wait()[ticket.dense]

    def run_experts(self, ticket: GatherTicket, dense: Tensor | None = None) -> None:
        slots, weights = unpack(ticket.routing.wait(), ticket.ids)
        y = self.store.run(ticket.x.wait(), self.store.here(slots), weights)
        if dense is not None:
            y[ticket.dense] += dense
        ticket.y = ticket.axis.start_reduce_scatter(y, ticket.counts)

    def combine(self, ticket: GatherTicket) -> Tensor:
        assert ticket.y is not None, "run_experts comes before combine"
        return ticket.y.wait()
