"""Exchange: dispatch of tokens to experts, and combine. MoE layers use this protocol and do not
know where experts are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.errors import ConfigError
from rorqual.ops.interface import Ops
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.rank_rows import RankParts, local_ids
from rorqual.ops.reference import FP8, ExpertWeights
from rorqual.parallel.layout import Layout
from rorqual.parallel.shard import WHOLE, Shard

ExpertsFn = Callable[..., Tensor]  # Ops.experts
ExpertsFp8Fn = Callable[..., Tensor]  # Ops.experts_fp8


@dataclass(frozen=True)
class SlotMap:
    """The logical expert in each physical slot. An expert may have several slots (replicas).
    Expert-parallel rank r of n has the r-th of n equal runs of slots."""

    physical_to_logical: tuple[int, ...]
    num_experts: int

    @staticmethod
    def identity(num_experts: int) -> SlotMap:
        return SlotMap(tuple(range(num_experts)), num_experts)

    @property
    def num_slots(self) -> int:
        return len(self.physical_to_logical)

    @property
    def is_identity(self) -> bool:
        return self.physical_to_logical == tuple(range(self.num_experts))

    def local(self, shard: Shard) -> range:
        """The slots of one expert-parallel rank. Raises ConfigError if they do not divide
        equally."""
        if self.num_slots % shard.count:
            raise ConfigError(f"ep={shard.count} does not divide {self.num_slots} expert slots")
        return range(*shard.span(self.num_slots))

    def replicas(self) -> list[list[int]]:
        """The physical slots of each logical expert."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.physical_to_logical):
            found[expert].append(slot)
        return found

    @property
    def max_replicas(self) -> int:
        """Most replicas of one expert in any map with this many slots."""
        return self.num_slots - self.num_experts + 1

    def logical_to_physical(self) -> list[list[int]]:
        """[E, 1 + max_replicas]: the number of slots of each expert, then the slots, padded with
        -1."""
        replicas = self.replicas()
        assert all(replicas), "every expert needs a slot"
        most = self.max_replicas
        return [[len(slots), *slots, *[-1] * (most - len(slots))] for slots in replicas]


class Exchange(Protocol):
    """The stages of an MoE layer; any of them may be a no-op. Expert ids are logical.

    - dispatch(x [T, hidden], ids [T, K], weights [T, K], layout) sends the rows. If
      `counts_first(layout)`, it only sends the row counts; send(ticket) waits for them and sends
      the rows. Other micro-batches may compute in between.
    - dense_rows(ticket), between dispatch and run_experts: the rows of the layout's dense group if
      this exchange has gathered them, else None. A shared expert uses them instead of gathering
      its own, and passes its partial sums to run_experts, to be returned with the experts' sums.
    - run_experts(ticket) computes.
    - combine(ticket) returns the weighted sum over the chosen experts, [T, hidden]: a partial sum
      over tp, or complete if tokens are sharded. `base` is added to it.

    Rows that are padding (Layout.padded) are not counted in `load`, and exchanges may leave out
    their experts. If `takes_absent(x, K, layout)` their ids may be -1 already.

    `capturable`: whether a device graph can capture the stages of a decode step. `experts`: weights
    by physical slot. `load` [E] int64: how many (token, expert) pairs were dispatched here, by
    logical expert, while `record_load` is on. If ranks dispatch the same tokens only one of them
    counts (Layout.counted), so a sum over all ranks has each token once. All are updated in place.
    """

    record_load: bool

    @property
    def experts(self) -> ExpertWeights: ...

    @property
    def load(self) -> Tensor: ...

    @property
    def capturable(self) -> bool: ...

    def remap(self, slots: SlotMap, rows: Tensor | None = None) -> None: ...

    def takes_absent(self, x: Tensor, top_k: int, layout: Layout) -> bool: ...

    def counts_first(self, layout: Layout) -> bool: ...

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> Any: ...

    def send(self, ticket: Any) -> None: ...

    def dense_rows(self, ticket: Any) -> Tensor | None: ...

    def run_experts(self, ticket: Any, dense: Tensor | None = None) -> None: ...

    def combine(self, ticket: Any, base: Tensor | None = None) -> Tensor: ...


class ExpertStore:
    """The experts of this rank and the slot map, shared by all exchanges of a layer.

    `shard`: the expert-parallel part; this rank holds slots.local(shard). `table`:
    SlotMap.logical_to_physical() as int64, and a last row for the id -1, whose slot is -1; None if
    logical and physical ids are equal; `placed` forces a table, so that `remap` can change it. A
    token in row i uses replica i mod n of an expert's n, so ranks with the same tokens agree.
    `compute`, `compute_fp8`: the ops `experts` and `experts_fp8`. `ops`: for what exchanges compute
    themselves; the reference's if left out. Fused shared experts require all routed experts on this
    rank; they are not counted in `load`.
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
        ops: Ops | None = None,
    ):
        shared = experts.num_fused_shared_experts
        self.experts = experts
        self.compute = compute
        self.compute_fp8 = compute_fp8
        self.ops = ops or Ops()
        self.shard = shard
        self.local_slots = slots.local(shard)
        in_order = slots.is_identity and not placed
        self.table = None if in_order else _table(slots, device)
        self.expert_counts = torch.zeros(
            slots.num_experts + shared, dtype=torch.int64, device=device
        )
        self.load = self.expert_counts[: slots.num_experts]
        self.record_load = False
        self.plain = self.table is None and shard.count == 1  # logical ids are local ids
        assert self.plain or not shared

    def parts(self, ranks: int) -> RankParts:
        """The experts of an axis of `ranks` ranks, of which consecutive ones share experts."""
        return RankParts(ranks, len(self.local_slots), ranks // self.shard.count)

    def to_physical(
        self, ids: Tensor, counted: bool = True, first: int = 0, padded: PaddedRows | None = None
    ) -> Tensor:
        """Logical ids [T, K] to physical slots, -1 to -1. Adds them to `load` if `counted`, except
        those of padding, which alone may be -1. first: number of the first row, for the choice of
        replicas."""
        if self.record_load and counted:
            count_experts(self.expert_counts, ids, padded)
        if self.table is None:
            return ids
        if self.table.shape[1] == 2:
            return self.table[:, 1][ids]
        row = torch.arange(first, first + ids.shape[0], device=ids.device)
        return self.table[ids, 1 + row[:, None] % self.table[:, 0][ids]]

    def slots_of(self, ids: Tensor, layout: Layout) -> Tensor:
        """`to_physical` of a step's own rows."""
        return self.to_physical(ids, layout.counted, layout.first_row, layout.own_padded)

    def remap(self, slots: SlotMap, rows: Tensor | None = None) -> None:
        """Use another map with as many slots, in place; the caller has moved the weights. rows: the
        map's logical_to_physical(), if it is on the device already."""
        assert self.table is not None, "the layer was made with one slot for each expert"
        if slots.num_slots != len(self.local_slots) * self.shard.count:
            raise ConfigError(
                f"the new map has {slots.num_slots} slots, the layer "
                f"{len(self.local_slots) * self.shard.count}"
            )
        found = torch.tensor(slots.logical_to_physical()) if rows is None else rows
        self.table[:-1].copy_(found)

    def to_local(self, slots: Tensor) -> Tensor:
        """Physical slots to local ids, -1 where another rank holds the slot."""
        if self.shard.count == 1:
            return slots
        return local_ids(slots, self.local_slots.start, len(self.local_slots))

    def run(
        self, x: Tensor, local_ids: Tensor, weights: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """The weighted sum over the local experts: x [T, hidden], local_ids and weights [T, K] (-1:
        on another rank). `base` is added."""
        if not x.shape[0]:
            return x
        return self.compute(x, local_ids, weights, self.experts, base)

    def run_received(
        self, parts: Sequence[Tensor], dtype: torch.dtype, local_ids: Tensor, weights: Tensor
    ) -> Tensor:
        """`run` for received rows: (rows,), or (e4m3 rows, scales)."""
        if len(parts) == 1:
            return self.run(parts[0], local_ids, weights)
        assert self.compute_fp8 is not None, "the layer was made without fp8 dispatch"
        rows, scales = parts
        return self.compute_fp8(rows.view(FP8), scales, dtype, local_ids, weights, self.experts)

    def run_in_pieces(
        self, parts: Sequence[Tensor], dtype: torch.dtype, local_ids: Tensor, weights: Tensor
    ) -> Iterator[Tensor]:
        """`run_received`, in one or more pieces of columns: each is computed when it is asked
        for."""
        if len(parts) > 1:
            parts = (parts[0].view(FP8), *parts[1:])
        given = (dtype, local_ids, weights, self.experts)
        pieces = self.ops.experts_in_pieces(parts, *given) if parts[0].shape[0] else None
        return pieces or iter((self.run_received(parts, dtype, local_ids, weights),))


def _table(slots: SlotMap, device: torch.device) -> Tensor:
    """[E + 1, 1 + max_replicas] int64: see ExpertStore."""
    absent = [1, *[-1] * slots.max_replicas]
    return torch.tensor([*slots.logical_to_physical(), absent], device=device)


def count_experts(load: Tensor, ids: Tensor, padded: PaddedRows | None) -> None:
    """Add the logical ids [T, K] to `load`, without those of padding, which may be -1."""
    each = torch.ones_like(ids)
    if padded is not None:
        each = padded.is_real(ids.shape[0])[:, None]
        ids = ids.clamp_min(0)
    load.index_add_(0, ids.flatten(), each.to(load.dtype).expand_as(ids).flatten())


class StoreExchange:
    """Base of the exchanges over an ExpertStore."""

    capturable = True

    def __init__(self, store: ExpertStore):
        self.store = store

    @property
    def experts(self) -> ExpertWeights:
        return self.store.experts

    def takes_absent(self, x: Tensor, top_k: int, layout: Layout) -> bool:
        """Other exchanges send rows to the ranks of their ids."""
        return False

    def counts_first(self, layout: Layout) -> bool:
        return False

    def send(self, ticket: Any) -> None:
        raise AssertionError("dispatch has sent the rows already")

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
    """Every rank has every token: nothing is sent, and each rank computes with its experts, or its
    columns of experts."""

    def takes_absent(self, x: Tensor, top_k: int, layout: Layout) -> bool:
        return True

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> Ticket:
        store = self.store
        plain = store.plain and not store.record_load
        if not plain:
            ids = store.to_local(store.slots_of(ids, layout))
        return Ticket(x, ids, weights)

    def dense_rows(self, ticket: Ticket) -> Tensor:
        """The layer's own rows: a dense layer has the same tokens as the experts, and is summed
        over the same ranks."""
        return ticket.x

    def run_experts(self, ticket: Ticket, dense: Tensor | None = None) -> None:
        ticket.y = self.store.run(ticket.x, ticket.local_ids, ticket.weights, dense)

    def combine(self, ticket: Ticket, base: Tensor | None = None) -> Tensor:
        assert ticket.y is not None, "run_experts comes before combine"
        return plus(ticket.y, base)


def plus(y: Tensor, base: Tensor | None) -> Tensor:
    return y if base is None else y + base
