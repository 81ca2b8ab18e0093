"""Expert load balancing over expert servers: an attention engine orders which server holds which
experts.

A thread checks what the servers hold. Where an expert has no holder, or a window's balancedness
over servers is below the threshold, it makes a plan (parallel/eplb/servers.py) and sends orders
towards it, one per server at a time, the next when all servers have reported what they hold. Steps
never wait for it: rows are routed by the present holdings. It relies only on what servers report,
so a server that ends, hangs or reconnects in between only leads to another plan.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rorqual.engine.balance.policy import MAX_PAUSE, MIN_GAIN, BalanceStats, noise_limit
from rorqual.parallel.eplb.placement import Bools, Floats, Ints
from rorqual.parallel.eplb.servers import (
    next_changes,
    place_on_servers,
    server_balancedness,
)
from rorqual.parallel.remote.control import ServerLink
from rorqual.parallel.remote.orders import SlotChange, SlotOrder
from rorqual.parallel.remote.servers import ExpertServers
from rorqual.parallel.remote.wire import Holdings

log = logging.getLogger("rorqual.engine")
POLL_SECONDS = 0.1
ANSWER_SECONDS = 10.0
MAX_LOADS = 16  # of one order
RETRY_SECONDS = 5.0  # after an order failed, or while another process gives orders
UNHELD_SECONDS = 0.5  # for a server to reconnect, before others load its experts


@dataclass
class SlotsHeld:
    """The current holdings: held [layers, servers, experts], room [layers, servers]. holdings: the
    reports of `links` that these come from."""

    links: tuple[ServerLink, ...]
    holdings: tuple[Holdings, ...]
    held: Bools
    room: Ints


@dataclass
class SlotGoal:
    """The wanted holdings of these servers."""

    links: tuple[ServerLink, ...]
    wanted: Bools
    before: float
    expected: float


class SlotBalancer:
    """layers: numbers of all that have experts. threshold: balancedness under which experts are
    moved."""

    def __init__(
        self, servers: ExpertServers, layers: Sequence[int], num_experts: int, threshold: float
    ):
        self.servers = servers
        self.layers = list(layers)
        self.num_experts = num_experts
        self.threshold = threshold
        self.stats = BalanceStats()
        self.load: tuple[Floats, Floats] | None = None  # over some windows, and of the newest
        self.fresh = False  # load has not been evaluated yet
        self.seen: tuple[ServerLink, ...] = ()
        self.goal: SlotGoal | None = None
        self.number = secrets.randbits(48)
        self.orders_sent: dict[ServerLink, int] = {}
        self.claimed: set[ServerLink] = set()
        self.not_before = 0.0
        self.warned = ""
        self.unheld_since: float | None = None
        self.pause = 1  # windows until another plan, after one with too little gain
        self.windows = 0  # still to be skipped
        self.closing = threading.Event()
        arguments = (weakref.ref(self), self.closing)
        self.thread = threading.Thread(
            target=_run, args=arguments, name="slot balancer", daemon=True
        )
        self.thread.start()

    def observe(self, load: Floats, newest: Floats) -> None:
        """Add counts [layers, experts]: over some windows, and of the newest. Any thread."""
        self.load = (load, newest)
        self.windows = max(0, self.windows - 1)
        self.fresh = not self.windows

    def close(self) -> None:
        self.closing.set()

    def _step(self) -> None:
        try:
            self._check()
        except Exception:  # steps go on without it
            log.exception("experts stay where they are")
            self._back_off()

    def _back_off(self) -> None:
        """Wait a random time: two processes that compete to give orders must not retry in step."""
        self.goal = None
        self.not_before = time.monotonic() + random.uniform(1, 2) * RETRY_SECONDS

    def _check(self) -> None:
        links = self.servers.links
        if not links or time.monotonic() < self.not_before or not self._claim_servers(links):
            return
        present = self._present(links)
        if self._in_progress(present):
            return
        if self.goal is None or self.goal.links != links:
            self.goal = self._plan(present)
        self.seen = links
        if self.goal is not None:
            self._approach(self.goal, present)

    def _claim_servers(self, links: tuple[ServerLink, ...]) -> bool:
        """Claim all servers: only one process may give orders. A server drops a claim with its
        connection. When one server refuses, release the others too."""
        self.claimed &= set(links)
        self.orders_sent = {
            link: number for link, number in self.orders_sent.items() if link in links
        }
        for link in sorted(set(links) - self.claimed, key=lambda link: link.address):
            refused = link.order(SlotOrder(0, {}), ANSWER_SECONDS)
            if refused:
                self._warn_once(f"{link.name}: {refused}")
                for other in self.claimed:
                    other.order(SlotOrder(0, {}, release=True), ANSWER_SECONDS)
                self.claimed.clear()
                self._back_off()
                return False
            self.claimed.add(link)
        return True

    def _warn_once(self, reason: str) -> None:
        if reason != self.warned:
            self.warned = reason
            log.warning("experts stay where they are: %s", reason)

    def _present(self, links: tuple[ServerLink, ...]) -> SlotsHeld:
        holdings = tuple(link.holdings for link in links)
        held = np.zeros((len(self.layers), len(links), self.num_experts), bool)
        room = np.zeros((len(self.layers), len(links)), np.int64)
        for number, found in enumerate(holdings):
            for row, layer in enumerate(self.layers):
                if layer in found.layers:
                    held[row, number, list(found.layers[layer])] = True
                    room[row, number] = max(found.max_slots, len(found.layers[layer]))
        return SlotsHeld(links, holdings, held, room)

    def _in_progress(self, present: SlotsHeld) -> bool:
        """Whether a server still carries out an order; records the finished ones."""
        found = dict(zip(present.links, present.holdings, strict=True))
        for link, number in list(self.orders_sent.items()):
            if found[link].finished != number:
                continue
            del self.orders_sent[link]
            if found[link].failure:
                self.stats.failed += 1
                log.warning(
                    "experts of %s: an order was given up: %s", link.name, found[link].failure
                )
                self._back_off()
            else:
                self.stats.moves += 1
        return bool(self.orders_sent)

    # ---- plans

    def _plan(self, present: SlotsHeld) -> SlotGoal | None:
        """A plan where an expert has no holder, servers connected or failed, or there are new
        counts."""
        unheld = self._has_unheld(present)
        if not (unheld or self.fresh or present.links != self.seen):
            return None
        self.fresh = False
        if self.load is None and not unheld:
            return None
        ones = np.ones((len(self.layers), self.num_experts))
        load, newest = self.load or (ones, ones)
        before = self._balancedness(present.held, newest)
        self.stats.by_layer = before
        self.stats.balancedness = float(np.mean(before))
        if not unheld and self.stats.balancedness >= self.threshold:
            return None
        return self._goal(present, load, newest, unheld)

    def _has_unheld(self, present: SlotsHeld) -> bool:
        """Whether some expert has had no holder for UNHELD_SECONDS."""
        now = time.monotonic()
        if present.held.any(1).all():
            self.unheld_since = None
        elif self.unheld_since is None:
            self.unheld_since = now
        return self.unheld_since is not None and now - self.unheld_since > UNHELD_SECONDS

    def _goal(
        self, present: SlotsHeld, load: Floats, newest: Floats, unheld: bool
    ) -> SlotGoal | None:
        self.stats.plans += 1
        enough = (1 + self.threshold) / 2
        parts = zip(present.held, load, present.room, strict=True)
        wanted = np.stack([place_on_servers(*part, enough) for part in parts])
        before = float(np.mean(self._balancedness(present.held, newest)))
        expected = float(np.mean(self._balancedness(wanted, load)))
        expected *= noise_limit(load, len(present.links))
        covered = unheld and wanted.any(1).sum() > present.held.any(1).sum()
        if not covered and expected - before < MIN_GAIN:
            if unheld:
                self._warn_once("no server has room for experts that none holds")
                self._back_off()
            self.windows = self.pause
            self.pause = min(2 * self.pause, MAX_PAUSE)
            return None
        self.pause = 1
        log.info(
            "experts move between servers: balancedness %.3f, %.3f expected, %d to load",
            before,
            expected,
            (wanted & ~present.held).sum(),
        )
        return SlotGoal(present.links, wanted, before, expected)

    def _balancedness(self, held: Bools, load: Floats) -> list[float]:
        """By layer."""
        return [server_balancedness(*part) for part in zip(held, load, strict=True)]

    # ---- orders

    def _approach(self, goal: SlotGoal, present: SlotsHeld) -> None:
        changes = self._changes(goal, present)
        if not changes:
            self.stats.rebalances += 1
            self.goal = None
            left = int((goal.wanted & ~present.held).sum())
            log.info("experts have moved; %d could not", left)
            if left:
                self._back_off()
            return
        for number, layers in changes.items():
            link = present.links[number]
            self.number += 1
            refused = link.order(SlotOrder(self.number, layers), ANSWER_SECONDS)
            if refused:
                self._warn_once(f"{link.name}: {refused}")
                self._back_off()
                return
            self.orders_sent[link] = self.number
            self.stats.slots += sum(len(change.load) for change in layers.values())

    def _changes(self, goal: SlotGoal, present: SlotsHeld) -> dict[int, dict[int, SlotChange]]:
        """The changes that can be made now, by server and layer; limited to some layers where there
        are many."""
        found: dict[int, dict[int, SlotChange]] = {}
        counts = np.zeros(len(present.links), np.int64)
        for row, layer in enumerate(self.layers):
            loads, drops = next_changes(present.held[row], goal.wanted[row], present.room[row])
            more = loads.sum(1)
            if (counts + more > MAX_LOADS)[counts > 0].any():
                continue
            counts += more
            for number in np.flatnonzero((loads | drops).any(1)).tolist():
                found.setdefault(number, {})[layer] = SlotChange(
                    tuple(np.flatnonzero(drops[number]).tolist()),
                    tuple(np.flatnonzero(loads[number]).tolist()),
                )
        return found


def _run(owner: weakref.ref[SlotBalancer], closing: threading.Event) -> None:
    """Until it is closed, or dropped with its engine."""
    while not closing.wait(POLL_SECONDS):
        balancer = owner()
        if balancer is None:
            return
        balancer._step()
        del balancer
