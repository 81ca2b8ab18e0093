"""All-gather, experts, reduce-scatter: every rank sees every token, and computes with what experts, or columns of experts, it holds.

No counts and no sync with the host; sums come in a fixed order. One class serves tensor-parallel experts, whole experts and both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.parallel.collectives import Axis, Pending
from rorqual.parallel.exchange import StoreExchange
from rorqual.parallel.layout import Layout


def pack(places: Tensor, weights: Tensor) -> Tensor:
    """Places and fp32 weights [T, K] as one message, int32 [T, 2 K]."""
    return torch.cat((places.to(torch.int32), weights.view(torch.int32)), 1)


def unpack(message: Tensor, ids: torch.dtype) -> tuple[Tensor, Tensor]:
    places, weights = message.chunk(2, 1)
    return places.to(ids).contiguous(), weights.contiguous().view(torch.float32)


@dataclass
class GatherTicket:
    axis: Axis
    counts: tuple[int, ...] | None
    x: Pending
    picks: Pending
    ids: torch.dtype
    y: Pending | None = None


class AllGatherExchange(StoreExchange):
    def submit(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> GatherTicket:
        axis, counts = layout.moe_axis, layout.moe_rows
        picks = pack(self.store.slots(ids), weights)
        return GatherTicket(axis, counts, axis.start_all_gather(x, counts), axis.start_all_gather(picks, counts), ids.dtype)

    def run_experts(self, ticket: GatherTicket) -> None:
        slots, weights = unpack(ticket.picks.wait(), ticket.ids)
        y = self.store.run(ticket.x.wait(), self.store.here(slots), weights)
        ticket.y = ticket.axis.start_reduce_scatter(y, ticket.counts)

    def wait(self, ticket: GatherTicket) -> Tensor:
        assert ticket.y is not None, "run_experts comes before wait"
        return ticket.y.wait()
