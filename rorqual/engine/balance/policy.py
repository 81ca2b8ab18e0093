"""When experts are moved, and where to: a function of counts alone. No torch.

Counts are evaluated one window at a time. Where the newest window's balancedness is below the
threshold, a plan is made that aims well above it, so that small changes do not trigger another at
once. The plan is carried out if its expected gain exceeds noise and saves, over the next HORIZON
steps, more time than the move costs. Otherwise the next plan waits, longer each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rorqual.engine.balance.moves import Move, changed_slots, moves
from rorqual.parallel.eplb.movement import WITHIN, rebalance
from rorqual.parallel.eplb.placement import Floats, Ints, balancedness, balancedness_by_layer

MIN_GAIN = 0.02  # of balancedness
HORIZON = 2000  # steps for which the load is expected to stay the same
# estimates, until measured: the share of a step spent on experts, and the share of a move's time
# that delays steps
EXPERT_SHARE = 0.4
DISTURBANCE = 0.1
SLOT_SECONDS = 0.05  # for one expert, before the first has been moved
MAX_PAUSE = 16  # windows


@dataclass
class LoadWindow:
    """Counts over windows of at least `steps` steps: `newest`, and `load`, the sum in which each
    earlier window is weighted by a further factor `decay`."""

    steps: int
    decay: float
    newest: Floats | None = None
    load: Floats | None = None
    seen: tuple[int, Floats] | None = None

    def add(self, step: int, totals: Any) -> bool:
        """Add counts since the engine started, as of a step; returns whether they complete a
        window."""
        counts = np.asarray(totals, np.float64)
        if self.seen is None or (counts < self.seen[1]).any():  # counters were reset
            self.seen = (step, counts)
            return False
        if step - self.seen[0] < self.steps or (counts == self.seen[1]).all():
            return False
        self.newest = counts - self.seen[1]
        before = 0.0 if self.load is None else self.load * self.decay
        self.load = self.newest + before
        self.seen = (step, counts)
        return True


@dataclass
class Plan:
    """Balancedness of the newest window `before`, and `expected` after."""

    placement: Ints
    before: float
    expected: float
    slots: int  # changed slots of the rank with most
    moves: list[Move]


@dataclass
class BalanceStats:
    """balancedness: of the newest window. plans: number made, rebalances: plans carried out, moves:
    applied, slots: changed by them. failed: moves cancelled."""

    balancedness: float | None = None
    plans: int = 0
    rebalances: int = 0
    moves: int = 0
    slots: int = 0
    failed: int = 0
    by_layer: list[float] = field(default_factory=list)


class RebalancePolicy:
    """placement [layers, slots]: the current one. `layers`: their numbers in the model."""

    def __init__(
        self,
        placement: Ints,
        layers: Sequence[int],
        ranks: int,
        threshold: float,
        window: LoadWindow,
        most: int,
    ):
        self.placement = placement.copy()
        self.layers = list(layers)
        self.ranks = ranks
        self.threshold = threshold
        self.window = window
        self.most = most
        self.stats = BalanceStats()
        self.slot_seconds = SLOT_SECONDS
        self.pause = 1
        self.not_before = 0
        self.number = 0  # of the newest move

    def observe(self, step: int, totals: Any) -> bool:
        """Add counts as of a step; returns whether a plan should be made now."""
        if not self.window.add(step, totals):
            return False
        newest = self.window.newest
        assert newest is not None
        by_layer = balancedness_by_layer(self.placement, newest, self.ranks)
        self.stats.by_layer = by_layer.tolist()
        self.stats.balancedness = float(by_layer.mean())
        if self.stats.balancedness >= self.threshold:
            self.pause = 1
            return False
        return step >= self.not_before

    def plan(self) -> Plan:
        """May run on another thread, while no other method is called."""
        load, newest = self.window.load, self.window.newest
        assert load is not None
        assert newest is not None
        # halfway between the threshold and perfect balance
        within = max(WITHIN, (1 - self.threshold) / 2)
        for counts in (load, newest):
            found = rebalance(self.placement, counts, self.ranks, within=within)
            expected = balancedness(found, counts, self.ranks) * noise_limit(counts, self.ranks)
            if balancedness(found, newest, self.ranks) > 1 - 1.5 * within:
                break  # otherwise the load has changed, and older windows mislead
        changes = np.zeros(self.ranks, np.int64)
        for old, new in zip(self.placement.tolist(), found.tolist(), strict=True):
            changes += changed_slots(old, new, self.ranks)
        before = balancedness(self.placement, newest, self.ranks)
        return Plan(found, before, expected, int(changes.max()), self._moves(found, newest))

    def _moves(self, wanted: Ints, newest: Floats) -> list[Move]:
        """The least balanced layers first."""
        balance = balancedness_by_layer(self.placement, newest, self.ranks)
        order = np.argsort(balance, kind="stable").tolist()
        layers = [(index, wanted[index].tolist()) for index in order]
        present = dict(enumerate(self.placement.tolist()))
        return list(moves(present, layers, self.ranks, self.most, self.number + 1))

    def decide(self, plan: Plan, step: int, step_seconds: float) -> list[Move]:
        """The moves to make; none where the gain is too small."""
        self.stats.plans += 1
        saved = step_seconds * EXPERT_SHARE * (1 - plan.before / max(plan.expected, 1e-9))
        cost = plan.slots * self.slot_seconds * DISTURBANCE
        gain = plan.expected - plan.before
        if gain < MIN_GAIN or not plan.slots or saved * HORIZON < cost:
            self._wait(step)
            return []
        self.pause = 1
        return plan.moves

    def _wait(self, step: int) -> None:
        """Pause, longer each time, until the load is balanced or a plan is carried out."""
        self.not_before = step + self.pause * self.window.steps
        self.pause = min(2 * self.pause, MAX_PAUSE)

    def applied(self, move: Move, slots: int, slots_here: int, seconds: float) -> None:
        """A move was applied: `slots` changed in all, `slots_here` of the slowest rank, in
        `seconds`."""
        for index, placement in move.layers:
            self.placement[index] = placement
        self.stats.moves += 1
        self.stats.slots += slots
        if slots_here:
            self.slot_seconds += 0.5 * (seconds / slots_here - self.slot_seconds)

    def failed(self, step: int) -> None:
        """A move was cancelled; the placement stays."""
        self.stats.failed += 1
        self._wait(step)

    def numbered(self, move: Move) -> Move:
        """The move with the model's layer numbers in place of rows of `placement`."""
        self.number = move.number
        return Move(move.number, tuple((self.layers[row], slots) for row, slots in move.layers))


def noise_limit(load: Floats, ranks: int) -> float:
    """Balancedness that this many random choices reach where every rank's expected load is equal:
    the largest of `ranks` Poisson counts lies sqrt(2 ln ranks) deviations above their mean."""
    mean = float(load.sum(1).mean()) / ranks
    return 1 / (1 + math.sqrt(2 * math.log(ranks) / mean)) if mean > 0 else 0.0
