"""An exchange through memory that the ranks' GPUs share, instead of process-group collectives.

Results equal those of `low_latency` over collectives bit for bit: partial sums are added in fp32 in
rank order. A row is sent only to ranks that hold one of its experts, even if it replaces an
all-gather.
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
    """Uses `axis.p2p_dispatch`, if the axis has one and the step's rows fit; else `plain`. All
    ranks decide alike, since they all know the longest rank's rows. Traffic is counted as
    `plain` would count rows in the form sent here, an upper bound, since only the device knows the
    actual rows.

    gathers: `plain` is an all-gather. shared: the layer has shared experts. If these use the
    gathered rows (Layout.dense_rows), `plain` is used, since here only rows for routed experts are
    sent.
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
        if not self._shared(x, ids.shape[1], layout):
            return self.plain.dispatch(x, ids, weights, layout)
        assert axis.p2p_dispatch is not None
        capacity = max(layout.moe_rows or (x.shape[0],))
        slots = self.store.slots_of(ids, layout)
        place = self._place(layout)
        ue8m0 = self.store.experts.gate_up.ue8m0
        flight = axis.p2p_dispatch.dispatch(
            x, slots, weights, capacity, place, self.fp8, layout.own_padded, ue8m0
        )
        row = fp8_row_bytes(x.shape[1]) if self.fp8 else x.shape[1] * x.element_size()
        self._count(axis, "all_gather", capacity * (row + ROUTING_BYTES * ids.shape[1]))
        return P2PTicket(axis, flight, x.dtype)

    def takes_absent(self, x: Tensor, top_k: int, layout: Layout) -> bool:
        """Over shared memory padding is not sent, whatever its ids."""
        return not self._shared(x, top_k, layout) and self.plain.takes_absent(x, top_k, layout)

    def _shared(self, x: Tensor, top_k: int, layout: Layout) -> bool:
        """Whether this step goes over memory that the ranks share."""
        axis = layout.moe_axis
        if self.brings_rows and layout.dense_rows is not None:
            return False
        capacity = max(layout.moe_rows or (x.shape[0],))
        return axis.p2p_dispatch is not None and axis.p2p_dispatch.takes(x, capacity, top_k)

    def _place(self, layout: Layout) -> Any:
        """The experts of the axis's ranks: those of all ranks of the stage, or of every tp-th rank
        if tokens are replicated over tp."""
        from rorqual.ops.triton.comm.dispatch_combine import ExpertPlacement

        mesh = layout.mesh
        share = mesh.sizes.stage // self.store.shard.count
        return (
            ExpertPlacement(len(self.store.local_slots), share)
            if layout.sharded
            else ExpertPlacement(len(self.store.local_slots), share, mesh.sizes.tp, mesh.tp_rank)
        )

    def _count(self, axis: Axis, call: str, block: int) -> None:
        """Count a message with one block of `block` bytes from, or to, every rank."""
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
        p2p = ticket.axis.p2p_dispatch
        flight = ticket.flight
        assert p2p is not None
        parts, local_ids, weights = p2p.recv_dispatch(flight)
        y = self.store.run_received(parts, ticket.dtype, local_ids, weights)
        self._count(ticket.axis, "reduce_scatter", y.nbytes // ticket.axis.size)
        p2p.send_combine(flight, y)
        return None

    def combine(self, ticket: Any, base: Tensor | None = None) -> Tensor:
        if not isinstance(ticket, P2PTicket):
            return self.plain.combine(ticket, base)
        assert ticket.axis.p2p_dispatch is not None
        return ticket.axis.p2p_dispatch.combine(ticket.flight, base)
