"""Exchange: how tokens reach experts. MoE layers are written once against this protocol; where
experts live is behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.errors import ConfigError
from rorqual.ops.reference import FP8, ExpertWeights
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

    @property
    def most_replicas(self) -> int:
        """That an expert can have in any map of so many slots."""
        return self.num_slots - self.num_experts + 1

    def rows(self) -> list[list[int]]:
        """[E, 1 + most_replicas]: how many slots each expert has, and which; -1 behind them."""
        replicas = self.replicas()
        assert all(replicas), "every expert needs a slot"
        most = self.most_replicas
        return [[len(slots), *slots, *[-1] * (most - len(slots))] for slots in replicas]


class Exchange(Protocol):
    """Stages a layer chains; any of them may be a no-op. Expert ids are logical.

    dispatch(x [T, hidden], ids [T, K], weights [T, K], layout) sends; where `counts_first(layout)`,
    it sends how many rows will come, and send(ticket), which waits for that, the rows: others may
    compute in between. run_experts(ticket) computes;
    combine(ticket) returns the weighted sum over the chosen experts, [T, hidden], as the step's
    layout says: a partial sum over tp, or complete where tokens are sharded. dense_rows(ticket),
    between dispatch and run_experts: the rows of the layout's dense group where this exchange has
    gathered them anyway, else None. A dense layer beside the experts takes them instead of
    gathering its own, and gives run_experts its partial sums of them, which then come back with
    the experts'.
    `capturable` says whether the stages of a decode step may be recorded in a device graph.
    `experts` are the weights by physical slot, `load` [E] int64 counts by logical expert how often
    the tokens dispatched here chose it while `record_load` is on; all are updated in place. Where
    ranks dispatch the same tokens one of them counts (Layout.counted): a sum over all ranks then
    has each token once.
    """

    record_load: bool

    @property
    def experts(self) -> ExpertWeights: ...

    @property
    def load(self) -> Tensor: ...

    @property
    def capturable(self) -> bool: ...

    def remap(self, slots: SlotMap, rows: Tensor | None = None) -> None: ...

    def counts_first(self, layout: Layout) -> bool: ...

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> Any: ...

    def send(self, ticket: Any) -> None: ...

    def dense_rows(self, ticket: Any) -> Tensor | None: ...

    def run_experts(self, ticket: Any, dense: Tensor | None = None) -> None: ...

    def combine(self, ticket: Any) -> Tensor: ...


class ExpertStore:
    """The experts of this rank and how to find any expert: what all exchanges of a layer share.

    `shard` is the expert-parallel part: this rank holds slots.local(shard). `table` is
    SlotMap.rows(), int64; of an expert's n copies a token in row i takes number i mod n, so ranks
    that hold the same tokens agree. placed: there is a table for experts in order as well, so that
    `remap` can move them. `compute` and `compute_fp8` are the ops `experts` and `experts_fp8`.
    Shared experts may stand among them only where all routed ones are here; they are not counted.
    """

    def __init__(
        self,
        slots: SlotMap,
        experts: ExpertWeights,
        compute: ExpertsFn,
        device: torch.device,
        shard: Shard = WHOLE,
        compute_fp8: ExpertsFp8Fn | None = None,
        placed: bool = False,
    ):
        shared = experts.num_fused_shared_experts
        self.experts = experts
        self.compute = compute
        self.compute_fp8 = compute_fp8
        self.shard = shard
        self.mine = slots.local(shard)
        in_order = slots.is_identity and not placed
        self.table = None if in_order else torch.tensor(slots.rows(), device=device)
        self.picked = torch.zeros(slots.num_experts + shared, dtype=torch.int64, device=device)
        self.load = self.picked[: slots.num_experts]
        self.record_load = False
        self.plain = self.table is None and shard.count == 1  # logical ids are local ids
        assert self.plain or not shared

    def slots(self, ids: Tensor, counted: bool = True, first: int = 0) -> Tensor:
        """Logical ids [T, K] to physical slots; counts them, unless another rank does. first: what
        the first row counts as where rows take turns."""
        if self.record_load and counted:
            self.picked.index_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))
        if self.table is None:
            return ids
        if self.table.shape[1] == 2:
            return self.table[:, 1][ids]
        row = torch.arange(first, first + ids.shape[0], device=ids.device)
        return self.table[ids, 1 + row[:, None] % self.table[:, 0][ids]]

    def local_ids(self, ids: Tensor, counted: bool = True, first: int = 0) -> Tensor:
        """Logical ids [T, K] to local ids (indices of gate_up and down), -1 where another rank
        holds the expert."""
        return self.here(self.slots(ids, counted, first))

    def remap(self, slots: SlotMap, rows: Tensor | None = None) -> None:
        """Another map of as many slots, in place; the caller has moved the weights. rows: those
        of the map, where they are on the device already."""
        assert self.table is not None, "the layer was made with one slot for each expert"
        if slots.num_slots != len(self.mine) * self.shard.count:
            raise ConfigError(
                f"the new map has {slots.num_slots} slots, the layer "
                f"{len(self.mine) * self.shard.count}"
            )
        self.table.copy_(torch.tensor(slots.rows()) if rows is None else rows)

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
        return self.compute(x, local_ids, weights, self.experts, base)

    def run_sent(
        self, parts: Sequence[Tensor], dtype: torch.dtype, local_ids: Tensor, weights: Tensor
    ) -> Tensor:
        """The same for rows as they travelled: (rows,), or (e4m3 rows, scales)."""
        if len(parts) == 1:
            return self.run(parts[0], local_ids, weights)
        assert self.compute_fp8 is not None, "the layer was made without fp8 dispatch"
        rows, scales = parts
        return self.compute_fp8(rows.view(FP8), scales, dtype, local_ids, weights, self.experts)


class StoreExchange:
    """What every exchange over an ExpertStore has in common."""

    capturable = True

    def __init__(self, store: ExpertStore):
        self.store = store

    @property
    def experts(self) -> ExpertWeights:
        return self.store.experts

    def counts_first(self, layout: Layout) -> bool:
        return False

    def send(self, ticket: Any) -> None:
        raise AssertionError("rows have left with dispatch")

    def dense_rows(self, ticket: Any) -> Tensor | None:
        return None

    def remap(self, slots: SlotMap, rows: Tensor | None = None) -> None:
        self.store.remap(slots, rows)

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
        if not plain:
            ids = store.local_ids(ids, layout.counted, layout.first_row)
        return Ticket(x, ids, weights)

    def dense_rows(self, ticket: Ticket) -> Tensor:
        """Every rank's columns of a dense layer meet the same tokens as its experts, and are
        summed over the same ranks."""
        return ticket.x

    def run_experts(self, ticket: Ticket, dense: Tensor | None = None) -> None:
        ticket.y = self.store.run(ticket.x, ticket.local_ids, ticket.weights, dense)

    def combine(self, ticket: Ticket) -> Tensor:
        assert ticket.y is not None, "run_experts comes before combine"
        return ticket.y
