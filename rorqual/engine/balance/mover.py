"""Moves experts between ranks while the engine serves: every rank's side.

A move has two phases. `begin` transfers incoming experts into staging memory, on its own thread,
process group and stream; the weights in use do not change. `switch`, on the steps' thread and
stream, copies them into the live tensors and updates the tables: no address changes, so captured
steps stay valid. All ranks switch before the same step, once all have reported that the first phase
succeeded; until then any rank can still cancel it.

Before anything is sent the ranks agree that all can take part: if one cannot, none sends or waits,
and the next move may succeed. A later error leaves messages in flight, so the group is unusable
afterwards; the weights in use are not affected.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rorqual.engine.balance.moves import Move, MoveResult, changed_slots
from rorqual.layers.moe import MoE
from rorqual.parallel.exchange import SlotMap
from rorqual.parallel.mesh import WeightsGroup
from rorqual.platforms.base import Platform

log = logging.getLogger("rorqual.engine")
STAGING_BYTES = 256 * 2**20
MAX_SLOTS = 16
LEAVE_SECONDS = 5.0


class MoveRefusedError(Exception):
    """Some rank could not take part; nothing was sent."""


def bytes_of(parts: Iterable[Tensor]) -> int:
    """Bytes of one slot."""
    return sum(part[0].nbytes for part in parts)


def slots_per_move(layers: Iterable[MoE]) -> int:
    """Slots of this rank that a move may change: the size of staging memory."""
    most = max((bytes_of(layer.slot_parts()) for layer in layers), default=0)
    return max(2, min(MAX_SLOTS, STAGING_BYTES // most)) if most else MAX_SLOTS


@dataclass
class Transfer:
    """A copy of a layer's expert from one slot to another, by way of a row of staging memory."""

    layer: int
    source: int
    slot: int
    row: int


@dataclass
class StagedMove:
    """A received move: this rank's incoming transfers, and the new tables of its layers."""

    move: Move
    incoming: list[Transfer]
    rows: dict[int, Tensor]


class ExpertMover:
    """layers: those of this rank, by number; most: slots that a move changes on any rank."""

    def __init__(
        self, layers: Mapping[int, MoE], group: WeightsGroup, platform: Platform, most: int
    ):
        self.layers = layers
        self.group = group
        self.platform = platform
        self.most = most
        self.maps = {number: layer.slots for number, layer in layers.items()}
        width = max((bytes_of(layer.slot_parts()) for layer in layers.values()), default=0)
        self.staging = torch.empty(most, width, dtype=torch.uint8, device=platform.device)
        self.received = platform.host_empty((most, width), torch.uint8)
        self.sent = platform.host_empty((most, width), torch.uint8)
        self.staged: StagedMove | None = None
        self.switched: Callable[[], None] = lambda: None
        self.broken = ""
        self.work: queue.SimpleQueue[tuple[Move, Callable[[MoveResult], None]] | None]
        self.work = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    # ---- the first phase

    def begin(self, move: Move, report: Callable[[MoveResult], None]) -> None:
        """Returns at once; `report` is called from the thread."""
        self.work.put((move, report))

    def close(self) -> None:
        """Wait for a move in progress, at most LEAVE_SECONDS."""
        self.work.put(None)
        self.thread.join(LEAVE_SECONDS)

    def _serve(self) -> None:
        while (item := self.work.get()) is not None:
            move, report = item
            start = time.perf_counter()
            found: MoveResult
            try:
                self.staged = None
                self.staged = self._stage(move)
                seconds = time.perf_counter() - start
                found = MoveResult(move.number, len(self.staged.incoming), seconds)
            except MoveRefusedError as error:
                found = MoveResult(move.number, error=str(error))
            except Exception as error:  # rank 0 decides how to react
                self.broken = f"{type(error).__name__}: {' '.join(str(error).split())}"
                found = MoveResult(move.number, error=self.broken, broken=True)
            try:
                report(found)
            except OSError:
                return  # rank 0 is gone, and this process ends

    @torch.inference_mode()
    def _stage(self, move: Move) -> StagedMove:
        transfers, rows = self._agreed(move)
        me = self.group.rank
        incoming = [found for found in transfers if self._rank(found.layer, found.slot) == me]
        outgoing = [
            found
            for found in transfers
            if self._rank(found.layer, found.source) == me
            and self._rank(found.layer, found.slot) != me
        ]
        away = [found for found in incoming if self._rank(found.layer, found.source) != me]
        messages = [(self._receive(found), self._width(found.layer), found) for found in away]
        self._send(outgoing)
        for message, _, _ in messages:
            message.wait()
        with self.platform.background() as wait:
            self.switched()
            for _, width, found in messages:
                self.staging[found.row, :width].copy_(
                    self.received[found.row, :width], non_blocking=True
                )
            for found in incoming:
                if self._rank(found.layer, found.source) == me:
                    self._pack(found, self.staging[found.row])
            wait()
        return StagedMove(move, incoming, rows)

    def _agreed(self, move: Move) -> tuple[list[Transfer], dict[int, Tensor]]:
        """The transfers, identical on all ranks, and the new tables. Raises MoveRefusedError on
        every rank where one cannot take part."""
        if self.broken:
            raise MoveRefusedError(f"an earlier move has failed: {self.broken}")
        reason = ""
        transfers: list[Transfer] = []
        rows: dict[int, Tensor] = {}
        try:
            transfers = self._transfers(move)
            rows = self._tables(move)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        able = torch.tensor(0 if reason else 1)
        dist.all_reduce(able, dist.ReduceOp.MIN, group=self.group.group)
        if not int(able):
            raise MoveRefusedError(reason or "another rank cannot take part")
        return transfers, rows

    def _tables(self, move: Move) -> dict[int, Tensor]:
        found = {}
        with self.platform.background() as wait:
            for number, slots in move.layers:
                if number in self.layers:
                    rows = SlotMap(slots, self.maps[number].num_experts).logical_to_physical()
                    found[number] = torch.tensor(rows).to(self.platform.device)
            wait()
        return found

    def _transfers(self, move: Move) -> list[Transfer]:
        """The transfers of this rank's layers, for all ranks of its group."""
        found = []
        ranks = len(self.group.ranks)
        used = [0] * ranks
        for number, wanted in move.layers:
            if number not in self.layers:
                continue
            old = self.maps[number].physical_to_logical
            for rank, count in enumerate(changed_slots(old, wanted, ranks)):
                if used[rank] + count > self.most:
                    raise ValueError(f"more than {self.most} slots of rank {rank} would change")
            holders = self.maps[number].replicas()
            for slot, (before, after) in enumerate(zip(old, wanted, strict=True)):
                if before == after:
                    continue
                rank = self._rank(number, slot)
                here = [held for held in holders[after] if self._rank(number, held) == rank]
                source = here[0] if here else holders[after][slot % len(holders[after])]
                found.append(Transfer(number, source, slot, used[rank]))
                used[rank] += 1
        return found

    def _rank(self, layer: int, slot: int) -> int:
        return slot // (self.maps[layer].num_slots // len(self.group.ranks))

    def _width(self, layer: int) -> int:
        return bytes_of(self.layers[layer].slot_parts())

    def _receive(self, transfer: Transfer) -> dist.Work:
        """Messages between two ranks arrive in the order sent."""
        row = self.received[transfer.row, : self._width(transfer.layer)]
        source = self.group.ranks[self._rank(transfer.layer, transfer.source)]
        work = dist.irecv(row, source, group=self.group.group)
        assert work is not None, "this rank is part of the group"
        return work

    def _send(self, outgoing: list[Transfer]) -> None:
        """All ranks have posted their receives before they send, so every send completes, and its
        memory can be reused."""
        pending: dict[int, dist.Work] = {}
        for index, transfer in enumerate(outgoing):
            place = index % self.most
            if place in pending:
                pending.pop(place).wait()
            row = self.sent[place, : self._width(transfer.layer)]
            with self.platform.background() as wait:
                self.switched()
                self._pack(transfer, row)
                wait()
            target = self.group.ranks[self._rank(transfer.layer, transfer.slot)]
            work = dist.isend(row, target, group=self.group.group)
            assert work is not None, "this rank is part of the group"
            pending[place] = work
        for work in pending.values():
            work.wait()

    def _pack(self, transfer: Transfer, row: Tensor) -> None:
        """Copy a local expert's bytes into `row`, part after part."""
        for view, held in self._pieces(transfer.layer, transfer.source, row):
            held.copy_(view, non_blocking=True)

    def _pieces(self, layer: int, slot: int, row: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """(bytes of each part of a slot, the matching bytes of a staging row)."""
        moe = self.layers[layer]
        start = 0
        for part in moe.slot_parts():
            view = part[slot - moe.local_experts.local_slots[0]].reshape(-1).view(torch.uint8)
            yield view, row[start : start + view.numel()]
            start += view.numel()

    # ---- the second phase

    @torch.inference_mode()
    def switch(self, number: int) -> None:
        """Apply move `number`; all ranks do, before the same step."""
        staged = self.staged
        assert staged is not None, f"move {number} was never begun"
        assert staged.move.number == number, f"move {number}, but {staged.move.number} came"
        for transfer in staged.incoming:
            row = self.staging[transfer.row]
            for view, held in self._pieces(transfer.layer, transfer.slot, row):
                view.copy_(held)
        for layer, slots in staged.move.layers:
            if layer in self.layers:
                self.maps[layer] = SlotMap(slots, self.maps[layer].num_experts)
                self.layers[layer].remap(self.maps[layer], staged.rows[layer])
        self.staged = None
        self.switched = self.platform.mark()
