"""HandleExchange: a RemoteExchange some of whose calls go over memory that GPUs share (handles.py),
and are nothing but kernels then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rorqual.ops.reference import ExpertWeights
from rorqual.parallel.exchange import SlotMap
from rorqual.parallel.layout import Layout
from rorqual.parallel.remote.exchange import RemoteExchange
from rorqual.parallel.remote.handles import HandleCalls

NO_LANE = -1


@dataclass(eq=False)
class HandleTicket:
    """x: as it was dispatched. lane: NO_LANE where it has no rows, and no server is called: one
    of several ranks may have none."""

    x: Tensor
    lane: int


class HandleExchange:
    """Of one layer. Calls of up to as many rows as the shared memory holds go through it, if it is
    in use at all; others as `plain` goes. Sums are the same: of several servers they are added in
    fp32, in the order of their addresses."""

    def __init__(self, plain: RemoteExchange, calls: HandleCalls):
        self.plain = plain
        self.calls = calls
        self.lanes = plain.lanes

    @property
    def capturable(self) -> bool:
        return self.calls.on

    @property
    def load(self) -> Tensor:
        return self.plain.load

    @property
    def record_load(self) -> bool:
        return self.plain.record_load

    @record_load.setter
    def record_load(self, value: bool) -> None:
        self.plain.record_load = value

    @property
    def experts(self) -> ExpertWeights:
        return self.plain.experts

    def remap(self, slots: SlotMap, rows: Tensor | None = None) -> None:
        self.plain.remap(slots, rows)

    def takes_absent(self, x: Tensor, top_k: int, layout: Layout) -> bool:
        return False

    def counts_first(self, layout: Layout) -> bool:
        return False

    def send(self, ticket: Any) -> None:
        self.plain.send(ticket)

    def dense_rows(self, ticket: Any) -> Tensor | None:
        return None

    # ---- the stages

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> Any:
        calls = self.calls
        rows = x.shape[0]
        if calls.on and not rows:
            return HandleTicket(x, NO_LANE)
        if not calls.takes(rows):
            return self.plain.dispatch(x, ids, weights, layout)
        self.plain.count(ids, layout)
        ticket = HandleTicket(x, self.lanes.take())
        self.lanes.hold(ticket.lane, ticket)
        layer = self.plain.layer
        calls.announce(ticket.lane, layer, rows)
        calls.kernels.dispatch(
            calls.lanes[ticket.lane],
            calls.holders[calls.layers[layer]],
            x,
            ids,
            weights,
            layer,
            calls.fp8,
            layout.own_padded,
            self.plain.ue8m0,
        )
        return ticket

    def run_experts(self, ticket: Any, dense: Tensor | None = None) -> None:
        self.plain.run_experts(ticket, dense)

    def combine(self, ticket: Any, base: Tensor | None = None) -> Tensor:
        if not isinstance(ticket, HandleTicket):
            return self.plain.combine(ticket, base)
        if ticket.lane == NO_LANE:
            return ticket.x
        y = self.calls.kernels.combine(self.calls.lanes[ticket.lane], ticket.x, base)
        self.lanes.free(ticket)
        return y
