"""Exchange: how tokens reach experts. MoE layers are written once against this protocol; where
experts live is behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.errors import ConfigError
from rorqual.ops.reference import FP8, Weight
from rorqual.parallel.layout import Layout
from rorqual.parallel.shard import WHOLE, Shard

ExpertsFn = Callable[..., Tensor]  # Ops.experts
ExpertsFp8Fn = Callable[..., Tensor]  # Ops.experts_fp8


@dataclass(frozen=True)
class SlotMap:
    """Which logical expert each physical slot holds. An expert may have several slots
    (replicas). Slots of expert-parallel rank r of n are the r-th of n equal runs."""

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

    def local(self, shard: Shard) -> range:
        """The slots of one expert-parallel rank. Raises ConfigError where they cannot be dealt
        out equally."""
        if self.num_slots % shard.count:
            raise ConfigError(f"ep={shard.count} does not divide {self.num_slots} expert slots")
        return range(*shard.span(self.num_slots))

    def replicas(self) -> list[list[int]]:
        """The physical slots of each logical expert."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.logical):
            found[expert].append(slot)
        return found

    def rows(self) -> list[list[int]]:
        """[E, R]: the slots of each expert, repeated in turn up to R, the most replicas of any."""
        replicas = self.replicas()
        assert all(replicas), "every expert needs a slot"
        most = max(map(len, replicas))
        return [[slots[i % len(slots)] for i in range(most)] for slots in replicas]


class Exchange(Protocol):
    """Three stages a layer chains; any of them may be a no-op. Expert ids are logical.

    dispatch(x [T, hidden], ids [T, K], weights [T, K], layout) sends; run_experts(ticket) computes;
    combine(ticket) returns the weighted sum over the chosen experts, [T, hidden], as the step's
    layout says: a partial sum over tp, or complete where tokens are sharded. dense_rows(ticket),
    between dispatch and run_experts: the rows of the layout's dense group where this exchange has
    gathered them anyway, else None. A dense layer beside the experts takes them instead of
    gathering its own, and gives run_experts its partial sums of them, which then come back with
    the experts'.
    `capturable` says whether the stages of a decode step may be recorded in a device graph.
    `gate_up` and `down` are the expert weights by physical slot (behind them shared experts, where
    these are chosen like others), `load` [E] int64 counts by logical expert how often the tokens
    dispatched here chose it while `record_load` is on; all are updated in place. Where ranks
    dispatch the same tokens one of them counts (Layout.counted): a sum over all ranks then has each
    token once.
    """

    record_load: bool

    @property
    def gate_up(self) -> Weight: ...

    @property
    def down(self) -> Weight: ...

    @property
    def load(self) -> Tensor: ...

    @property
    def capturable(self) -> bool: ...

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> Any: ...

    def dense_rows(self, ticket: Any) -> Tensor | None: ...

    def run_experts(self, ticket: Any, dense: Tensor | None = None) -> None: ...

    def combine(self, ticket: Any) -> Tensor: ...


class ExpertStore:
    """The experts of this rank and how to find any expert: what all exchanges of a layer share.

    `shard` is the expert-parallel part: this rank holds slots.local(shard). `table` [E, R]
    int64 names physical slots; a token in row i of its step takes replica i mod R, so ranks that
    hold the same tokens agree. `compute` and `compute_fp8` are the ops `experts` and `experts_fp8`.
    `shared`: so many experts that every token takes stand behind the routed ones, which are then
    all here; they are not counted.
    """

    def __init__(
        self,
        slots: SlotMap,
        gate_up: Weight,
        down: Weight,
        compute: ExpertsFn,
        device: torch.device,
        shard: Shard = WHOLE,
        compute_fp8: ExpertsFp8Fn | None = None,
        shared: int = 0,
    ):
        self.gate_up = gate_up
        self.down = down
        self.compute_fp8 = compute_fp8
        self.shard = shard
        self.compute = partial(compute, shared=shared) if shared else compute
        self.mine = slots.local(shard)
        self.table = None if slots.is_identity else torch.tensor(slots.rows(), device=device)
        self.picked = torch.zeros(slots.num_experts + shared, dtype=torch.int64, device=device)
        self.load = self.picked[: slots.num_experts]
        self.record_load = False
        self.plain = self.table is None and shard.count == 1  # logical ids are local ids
        assert self.plain or not shared

    def slots(self, ids: Tensor, counted: bool = True) -> Tensor:
        """Logical ids [T, K] to physical slots; counts them, unless another rank does."""
        if self.record_load and counted:
            self.picked.index_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))
        if self.table is None:
            return ids
        if self.table.shape[1] == 1:
            return self.table[:, 0][ids]
        row = torch.arange(ids.shape[0], device=ids.device) % self.table.shape[1]
        return self.table[ids, row[:, None]]

    def local_ids(self, ids: Tensor, counted: bool = True) -> Tensor:
        """Logical ids [T, K] to local ids (indices of gate_up and down), -1 where another rank
        holds the expert."""
        return self.here(self.slots(ids, counted))

    def remap(self, slots: SlotMap) -> None:
        """Another map of as many slots, in place; the caller has moved the weights."""
        rows = slots.rows()
        assert self.table is not None, "the layer was made with one slot for each expert"
        if (len(rows), len(rows[0])) != tuple(self.table.shape):
            raise ConfigError(
                f"the new map has up to {len(rows[0])} replicas of an expert, the table "
                f"holds {self.table.shape[1]}"
            )
        self.table.copy_(torch.tensor(rows))

    def here(self, slots: Tensor) -> Tensor:
        """Physical slots to local ids, -1 where another rank holds the slot."""
        if self.shard.count == 1:
            return slots
        local = slots - self.mine.start
        return local.masked_fill((local < 0) | (local >= len(self.mine)), -1)

    def run(
        self, x: Tensor, local_ids: Tensor, weights: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """The weighted sum over the experts that are here: x [T, hidden], local_ids and weights
        [T, K] (-1: not here). `base` is added."""
        if not x.shape[0]:
            return x
        return self.compute(x, local_ids, weights, self.gate_up, self.down, base)

    def run_sent(
        self, parts: Sequence[Tensor], dtype: torch.dtype, local_ids: Tensor, weights: Tensor
    ) -> Tensor:
        """The same for rows as they travelled: (rows,), or (e4m3 rows, scales)."""
        if len(parts) == 1:
            return self.run(parts[0], local_ids, weights)
        assert self.compute_fp8 is not None, "the layer was made without fp8 dispatch"
        return self.compute_fp8(
            parts[0].view(FP8), parts[1], dtype, local_ids, weights, self.gate_up, self.down
        )


class StoreExchange:
    """What every exchange over an ExpertStore has in common."""

    capturable = True

    def __init__(self, store: ExpertStore):
        self.store = store

    @property
    def gate_up(self) -> Weight:
        return self.store.gate_up

    @property
    def down(self) -> Weight:
        return self.store.down

    def dense_rows(self, ticket: Any) -> Tensor | None:
        return None

    @property
    def load(self) -> Tensor:
        return self.store.load

    @property
    def record_load(self) -> bool:
        return self.store.record_load

    @record_load.setter
    def record_load(self, value: bool) -> None:
        self.store.record_load = value


@dataclass
class Ticket:
    x: Tensor
    local_ids: Tensor
    weights: Tensor
    y: Tensor | None = None


class LocalExchange(StoreExchange):
    """Every rank has every token: nothing travels, and each computes with what experts, or
    columns of experts, it holds."""

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> Ticket:
        store = self.store
        plain = store.plain and not store.record_load
        return Ticket(x, ids if plain else store.local_ids(ids, layout.counted), weights)

    def dense_rows(self, ticket: Ticket) -> Tensor:
        """Every rank's columns of a dense layer meet the same tokens as its experts, and are
        summed over the same ranks."""
        return ticket.x

    def run_experts(self, ticket: Ticket, dense: Tensor | None = None) -> None:
        ticket.y = self.store.run(ticket.x, ticket.local_ids, ticket.weights, dense)

    def combine(self, ticket: Ticket) -> Tensor:
        assert ticket.y is not None, "run_experts comes before combine"
        return ticket.y
