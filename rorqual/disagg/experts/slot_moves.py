"""Other experts for an expert server while it serves, as callers order them.

An order is carried out on a thread, some experts at a time: dropped experts are announced first;
loaded ones are read into memory set aside, copied into slots, and announced once they are whole.
A dropped expert keeps its slot until another is to take it, and is back at once if it is ordered
again. Before its weights are overwritten, every caller uses newer holdings, or SETTLE_SECONDS
have passed; a call that comes later all the same is answered with what is not here, and its caller
asks elsewhere.

One caller gives orders at a time: two that do not know of each other might each drop an expert that
the other counts on."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rorqual.disagg.experts.shard import ExpertShard
from rorqual.disagg.experts.step_gate import StepGate
from rorqual.parallel.remote.orders import SlotChange, SlotOrder
from rorqual.parallel.remote.wire import Holdings, ranges

log = logging.getLogger("rorqual.experts")
STAGING_BYTES = 256 * 2**20  # of experts that are read at a time, if more than one
SETTLE_SECONDS = 5.0


class Callers:
    """Who calls, and by which version of the holdings."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.versions: dict[object, int] = {}

    def knows(self, caller: object, version: int) -> None:
        with self.changed:
            self.versions[caller] = version
            self.changed.notify_all()

    def leave(self, caller: object) -> None:
        with self.changed:
            self.versions.pop(caller, None)
            self.changed.notify_all()

    def settle(self, version: int, seconds: float) -> bool:
        """Wait until all know that version; whether they do."""
        with self.changed:
            return self.changed.wait_for(
                lambda: all(known >= version for known in self.versions.values()), seconds
            )


class SlotMoves:
    """Orders to one server. computing: held while a call is computed; steps: over shared
    memory."""

    def __init__(
        self,
        shard: ExpertShard,
        computing: threading.Lock,
        max_rows: int,
        steps: StepGate | None = None,
    ):
        self.shard = shard
        self.computing = computing
        self.steps = steps or StepGate()
        self.holdings = Holdings(max_rows, shard.holdings(), shard.max_slots)
        self.callers = Callers()
        self.lock = threading.Lock()
        self.owner: object | None = None
        self.busy = False
        self.work: queue.SimpleQueue[SlotOrder | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def close(self) -> None:
        self.work.put(None)

    # ---- from a caller's thread

    def take(self, order: SlotOrder, caller: object) -> str:
        """Why it is refused; nothing where it will be carried out."""
        with self.lock:
            if self.owner not in (None, caller):
                return "another process gives orders here"
            self.owner = None if order.release else caller
            if order.release or not order.layers:
                return ""
            if self.busy:
                return "an order is being carried out"
            reason = self._wrong(order)
            if reason:
                return reason
            self.busy = True
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="slots", daemon=True)
                self.thread.start()
            self.work.put(order)
            return ""

    def leave(self, caller: object) -> None:
        """Its link has ended."""
        self.callers.leave(caller)
        with self.lock:
            if self.owner is caller:
                self.owner = None

    def _wrong(self, order: SlotOrder) -> str:
        for layer, change in order.layers.items():
            slots = self.shard.slots.get(layer)
            if slots is None:
                return f"layer {layer} is not held here; accepted: {ranges(self.shard.slots)}"
            if set(change.drop) - slots.held:
                unknown = sorted(set(change.drop) - slots.held)
                return f"expert {ranges(unknown)} of layer {layer} is not held here"
            if set(change.load) & slots.held:
                twice = sorted(set(change.load) & slots.held)
                return f"expert {ranges(twice)} of layer {layer} is held here already"
            count = len(slots.held) - len(change.drop) + len(change.load)
            if count > self.shard.max_slots:
                return (
                    f"{count} experts of layer {layer} do not fit; accepted: at most "
                    f"{self.shard.max_slots} (--max-slots)"
                )
        return ""

    # ---- on a thread of its own

    def _run(self) -> None:
        while (order := self.work.get()) is not None:
            failure = ""
            began = time.perf_counter()
            try:
                self._carry_out(order)
            except Exception as error:  # the caller that ordered it reads it in the holdings
                failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
                log.warning("an order is given up: %s", failure)
            else:
                self._log(order, time.perf_counter() - began)
            with self.lock:
                self.busy = False
                self._tell(finished=order.number, failure=failure)

    def _log(self, order: SlotOrder, seconds: float) -> None:
        changes = order.layers.values()
        log.info(
            "of layers %s: %d experts came, %d went (%.2f s)",
            ranges(order.layers),
            sum(len(change.load) for change in changes),
            sum(len(change.drop) for change in changes),
            seconds,
        )

    def _carry_out(self, order: SlotOrder) -> None:
        waiting: list[tuple[int, int]] = []
        for layer, change in order.layers.items():
            waiting += self._keep(layer, change)
        self._tell()
        dropped = self.holdings.version
        for batch in self._batches(waiting):
            self._load(batch, dropped)
            self._tell()

    def _keep(self, layer: int, change: SlotChange) -> list[tuple[int, int]]:
        """Drops experts, and takes back those that are still in a slot; the others."""
        slots = self.shard.slots[layer]
        slots.held -= set(change.drop)
        there = {expert for expert in change.load if slots.slot_of(expert) is not None}
        slots.held |= there
        return [(layer, expert) for expert in change.load if expert not in there]

    def _tell(self, **changes: Any) -> None:
        version = self.holdings.version + 1
        layers = self.shard.holdings()
        self.holdings = replace(self.holdings, version=version, layers=layers, **changes)

    def _batches(self, waiting: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Of what is read at a time."""
        batch: list[tuple[int, int]] = []
        size = 0
        for layer, expert in waiting:
            more = self.shard.slot_bytes(layer)
            if batch and size + more > STAGING_BYTES:
                yield batch
                batch = []
                size = 0
            batch.append((layer, expert))
            size += more
        if batch:
            yield batch

    def _load(self, batch: list[tuple[int, int]], dropped: int) -> None:
        """dropped: the version of the holdings without what may be written over."""
        experts: dict[int, list[int]] = {}
        for layer, expert in batch:
            experts.setdefault(layer, []).append(expert)
        read = self.shard.read(experts)
        if not self.callers.settle(dropped, SETTLE_SECONDS):
            log.warning("a caller has not heard of a dropped expert in %.0f s", SETTLE_SECONDS)
        for layer, found in experts.items():
            for place, expert in enumerate(found):
                with self.steps.between(SETTLE_SECONDS), self.computing:
                    slot = self.shard.empty(layer)
                    self.shard.put(layer, slot, expert, read.layers[layer], place)
