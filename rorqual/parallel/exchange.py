"""Exchange: how tokens reach experts. MoE layers are written once against this protocol; where experts live is behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.ops.reference import Weight

ExpertsFn = Callable[[Tensor, Tensor, Tensor, Weight, Weight], Tensor]


@dataclass(frozen=True)
class SlotMap:
    """Which logical expert each physical slot holds. An expert may have several slots (replicas)."""

    logical: tuple[int, ...]
    num_experts: int

    @staticmethod
    def identity(num_experts: int) -> SlotMap:
        return SlotMap(tuple(range(num_experts)), num_experts)

    @property
    def num_slots(self) -> int:
        return len(self.logical)

    @property
    def is_identity(self) -> bool:
        return self.logical == tuple(range(self.num_experts))

    def first_slots(self) -> list[int]:
        """For each logical expert a physical slot that holds it."""
        return [self.logical.index(expert) for expert in range(self.num_experts)]


class Exchange(Protocol):
    """Three stages a layer chains; any of them may be a no-op. Expert ids are logical.

    submit(x [T, hidden], ids [T, K], weights [T, K]) sends; run_experts(ticket) computes; wait(ticket) returns the weighted sum
    over the chosen experts, [T, hidden]. `capturable` says whether the stages may be recorded in a device graph.
    `gate_up` and `down` are the expert weights by physical slot, `load` [E] int64 counts picks by logical expert while
    `record_load` is on; all are updated in place.
    """

    gate_up: Weight
    down: Weight
    load: Tensor
    record_load: bool
    capturable: bool

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor) -> Any: ...

    def run_experts(self, ticket: Any) -> None: ...

    def wait(self, ticket: Any) -> Tensor: ...


@dataclass
class Ticket:
    x: Tensor
    slots: Tensor
    weights: Tensor
    y: Tensor | None = None


class LocalExchange:
    """All experts on this device: nothing travels."""

    capturable = True

    def __init__(self, slots: SlotMap, gate_up: Weight, down: Weight, compute: ExpertsFn, device: torch.device):
        self.gate_up, self.down, self.compute = gate_up, down, compute
        self.table = None if slots.is_identity else torch.tensor(slots.first_slots(), device=device)
        self.load = torch.zeros(slots.num_experts, dtype=torch.int64, device=device)
        self.record_load = False

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor) -> Ticket:
        if self.record_load:
            self.load.index_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))
        return Ticket(x, ids if self.table is None else self.table[ids], weights)

    def run_experts(self, ticket: Ticket) -> None:
        ticket.y = self.compute(ticket.x, ticket.slots, ticket.weights, self.gate_up, self.down)

    def wait(self, ticket: Ticket) -> Tensor:
        assert ticket.y is not None, "run_experts comes before wait"
        return ticket.y
