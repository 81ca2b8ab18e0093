"""An exchange by way of memory that the ranks' GPUs share, in place of collectives of a process
group.

Only the way changes: rows meet the same experts, and partial sums are added in fp32 in the order of
ranks, as `low_latency` does over collectives, bit for bit. A row goes only to ranks that hold one
of its experts, also where `plain` is an all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rorqual.parallel.collectives import Axis
from rorqual.parallel.comm_counters import ROUTING_BYTES, fp8_row_bytes
from rorqual.parallel.exchange import Exchange, ExpertStore, StoreExchange
from rorqual.parallel.layout import Layout


@dataclass
class P2PTicket:
    axis: Axis
    flight: Any
    dtype: torch.dtype


class P2PExchange(StoreExchange):
    """Steps whose rows fit go through `axis.peers`, where the axis has them; all others as `plain`
    goes. Ranks decide alike, since all know the longest rank's rows. Traffic is counted as `plain`
    counts it: the most that can leave, as only the device knows more.

    gathers: `plain` is an all-gather. shared: the layer has shared experts; if those take their
    rows from what was gathered (Layout.dense_rows), it stays with the all-gather, since here a row
    only goes where routed experts want it.
    """

    def __init__(
        self, store: ExpertStore, plain: Exchange, gathers: bool, shared: bool, fp8: bool = False
    ):
        super().__init__(store)
        self.plain = plain
        self.gathers = gathers
        self.fp8 = fp8
        self.capturable = plain.capturable
        self.brings_rows = gathers and shared

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> Any:
        axis = layout.moe_axis
        capacity = max(layout.moe_rows or (x.shape[0],))
        gathered = self.brings_rows and layout.dense_rows is not None
        if gathered or axis.peers is None or not axis.peers.takes(x, capacity, ids.shape[1]):
            return self.plain.dispatch(x, ids, weights, layout)
        slots = self.store.slots(ids, layout.counted, layout.first_row)
        flight = axis.peers.send(x, slots, weights, capacity, self._place(layout), self.fp8)
        row = fp8_row_bytes(x.shape[1]) if self.fp8 else x.shape[1] * x.element_size()
        self._count(axis, "all_gather", capacity * (row + ROUTING_BYTES * ids.shape[1]))
        return P2PTicket(axis, flight, x.dtype)

    def _place(self, layout: Layout) -> Any:
        """Which experts the ranks of this step's axis hold: those of a stage, or, with tokens
        replicated over tp, every tp-th of them."""
        from rorqual.ops.triton.comm.dispatch_combine import ExpertPlacement

        mesh = layout.mesh
        share = mesh.sizes.stage // self.store.shard.count
        return (
            ExpertPlacement(len(self.store.mine), share)
            if layout.sharded
            else ExpertPlacement(len(self.store.mine), share, mesh.sizes.tp, mesh.tp_rank)
        )

    def _count(self, axis: Axis, call: str, block: int) -> None:
        """A message with one block of so many bytes from, or to, every rank."""
        if self.gathers:
            axis.count(call, axis.size * block)
        else:
            axis.count("all_to_all", (axis.size - 1) * block)

    def counts_first(self, layout: Layout) -> bool:
        return self.plain.counts_first(layout)

    def dense_rows(self, ticket: Any) -> Tensor | None:
        return None if isinstance(ticket, P2PTicket) else self.plain.dense_rows(ticket)

    def run_experts(self, ticket: Any, dense: Tensor | None = None) -> None:
        if not isinstance(ticket, P2PTicket):
            return self.plain.run_experts(ticket, dense)
        assert dense is None, "no dense rows were offered"
        peers = ticket.axis.peers
        flight = ticket.flight
        assert peers is not None
        parts, local_ids, weights = peers.receive(flight)
        y = self.store.run_sent(parts, ticket.dtype, local_ids, weights)
        self._count(ticket.axis, "reduce_scatter", y.nbytes // ticket.axis.size)
        peers.send_back(flight, y)
        return None

    def combine(self, ticket: Any) -> Tensor:
        if not isinstance(ticket, P2PTicket):
            return self.plain.combine(ticket)
        assert ticket.axis.peers is not None
        return ticket.axis.peers.finish(ticket.flight)
