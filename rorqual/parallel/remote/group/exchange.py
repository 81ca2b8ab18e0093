"""GroupExchange: a RemoteExchange some of whose calls go by messages of a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rorqual.parallel.exchange import plus
from rorqual.parallel.layout import Layout
from rorqual.parallel.remote.exchange import RemoteExchange, RemoteLanes
from rorqual.parallel.remote.group.calls import GroupCalls
from rorqual.parallel.remote.servers import ExpertServers


@dataclass(eq=False)
class GroupTicket:
    """x: as it was dispatched."""

    x: Tensor
    lane: int


class GroupExchange(RemoteExchange):
    """Of one layer. Calls of up to as many rows as the group's buffers hold go through it as long
    as there is one, others over sockets. Sums are the same: of several servers they are added in
    fp32, in the order of their addresses."""

    def __init__(
        self,
        servers: ExpertServers,
        lanes: RemoteLanes,
        layer: int,
        device: torch.device,
        fp8: bool,
        calls: GroupCalls,
    ):
        super().__init__(servers, lanes, layer, device, fp8, ue8m0=calls.form.ue8m0)
        self.calls = calls

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        return self.calls.on

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> Any:
        if not self.calls.takes(x.shape[0]):
            return super().dispatch(x, ids, weights, layout)
        self.count(ids, layout)
        ticket = GroupTicket(x, self.lanes.take())
        self.lanes.hold(ticket.lane, ticket)
        self.calls.send(ticket.lane, self.layer, x, ids, weights)
        return ticket

    def combine(self, ticket: Any, base: Tensor | None = None) -> Tensor:
        if not isinstance(ticket, GroupTicket):
            return super().combine(ticket, base)
        y = self.calls.receive(ticket.lane, ticket.x)
        self.lanes.free(ticket)
        return plus(y, base)
