"""Experts of a simulated replica whose load drifts from one workload to another, and the engine's
own policy that moves them. No torch.

The fullest rank's load determines the experts' time in a step: it is `fullest` times the mean. The
counts of a window are Poisson samples around the current load, for the number of the window's
tokens, so that the policy sees noise like in the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rorqual.engine.balance.moves import Move, changed_slots
from rorqual.engine.balance.policy import DISTURBANCE, BalanceStats, LoadWindow, RebalancePolicy
from rorqual.errors import ConfigError
from rorqual.parallel.eplb.load_file import loads_by_layer, read_expert_load
from rorqual.parallel.eplb.placement import (
    Floats,
    Ints,
    balancedness,
    combined_loads,
    identity_placement,
    place,
)
from rorqual.planner.simulator.settings import SimulationSettings

MOST_SLOTS = 16  # of a rank in one move, as engine/balance/mover.py has it
STEPS = 64  # of fullness, to 1: so many step tables are made at most between two whole numbers


@dataclass(frozen=True, eq=False)
class ExpertDrift:
    """loads: [layers, experts] of successive workloads. Workload i applies fully at i * `period`
    seconds, and the last one from then on; in between they are interpolated. ranks: number of
    expert-parallel ranks. The initial placement is for the first load if there are replicas or
    moves, else in order. slot_seconds: time to move one expert to another rank."""

    loads: tuple[Floats, ...]
    top_k: int
    ranks: int
    period: float = SimulationSettings.expert_load_seconds
    redundant: int = SimulationSettings.redundant_experts
    moves: bool = SimulationSettings.enable_eplb
    window: int = SimulationSettings.eplb_window
    threshold: float = SimulationSettings.eplb_threshold
    decay: float = 0.5
    slot_seconds: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.period < math.inf:
            raise ConfigError(f"expert_load_seconds={self.period} must be above 0")
        if self.window < 1:
            raise ConfigError(f"eplb_window={self.window} must be at least 1")
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"eplb_threshold={self.threshold} must lie between 0 and 1")
        combined_loads(self.loads)  # of one shape

    @staticmethod
    def read(
        paths: Sequence[Path], layers: Sequence[int], experts: int, top_k: int, **rest: float
    ) -> ExpertDrift:
        """layers: numbers of the model's MoE layers. Raises ConfigError for what is no such
        file."""
        loads = tuple(
            loads_by_layer(read_expert_load(path), layers, experts, path) for path in paths
        )
        return ExpertDrift(loads, top_k, **rest)  # type: ignore[arg-type]

    def at(self, now: float) -> Floats:
        """[layers, experts], each layer's shares."""
        place_ = min(now / self.period, len(self.loads) - 1.0)
        low = int(place_)
        share = place_ - low
        first = combined_loads(self.loads[low : low + 1])
        return (
            first
            if not share
            else first * (1 - share) + combined_loads([self.loads[low + 1]]) * share
        )

    def first_placement(self) -> Ints:
        layers, experts = self.loads[0].shape
        if not self.redundant and not self.moves:
            return identity_placement(layers, experts)
        return place(self.loads[0], experts + self.redundant, self.ranks)


def levelled(fullest: float) -> float:
    """Rounded, so that steps of nearly the same balance share their costs."""
    return round(fullest * STEPS) / STEPS


class ReplicaBalance:
    """One replica's placement and the policy's state. fullest: the fullest rank's load over the
    mean, averaged over layers, for the load at the last window's end."""

    def __init__(self, drift: ExpertDrift, seed: int, name: str):
        self.drift = drift
        placement = drift.first_placement()
        self.policy = RebalancePolicy(
            placement,
            range(len(placement)),
            drift.ranks,
            drift.threshold,
            LoadWindow(drift.window, drift.decay),
            MOST_SLOTS,
        )
        self.policy.slot_seconds = drift.slot_seconds
        self.draw = np.random.default_rng(abs(hash_of(f"{seed} experts {name}")))
        self.totals = np.zeros(drift.loads[0].shape)
        self.policy.observe(0, self.totals)
        self.steps = 0
        self.tokens = 0
        self.step_seconds = 0.0
        self.moves: list[Move] = []
        self.busy_until = 0.0
        self.balance = balancedness(placement, drift.at(0.0), drift.ranks)

    @property
    def stats(self) -> BalanceStats:
        return self.policy.stats

    @property
    def fullest(self) -> float:
        return levelled(1 / self.balance)

    def factor(self, now: float) -> float:
        """Factor on a step's time while experts are moved."""
        return 1 + DISTURBANCE if now < self.busy_until else 1.0

    def step(self, now: float, tokens: int, seconds: float) -> bool:
        """A step of so many tokens over all ranks is over; whether `fullest` is another now."""
        self.steps += 1
        self.tokens += tokens
        self.step_seconds += 0.1 * (seconds - self.step_seconds)
        before = self.fullest
        self._moved(now)
        if self.steps % self.drift.window == 0:
            self._window(now)
        return self.fullest != before

    def _window(self, now: float) -> None:
        load = self.drift.at(now)
        self.totals = self.totals + self.draw.poisson(load * (self.tokens * self.drift.top_k))
        self.tokens = 0
        wanted = self.policy.observe(self.steps, self.totals)
        if wanted and self.drift.moves and not self.moves:
            self.moves = self.policy.decide(self.policy.plan(), self.steps, self.step_seconds)
            if self.moves:
                self.stats.rebalances += 1
                self.busy_until = now + self._seconds()
        self.balance = balancedness(self.policy.placement, load, self.drift.ranks)

    def _moved(self, now: float) -> None:
        """Complete the current move: its placement is used from the next step on."""
        if not self.moves or now < self.busy_until:
            return
        changed = self._changed(self.moves[0])
        seconds = self._seconds()
        self.policy.applied(self.moves.pop(0), sum(changed), max(changed), seconds)
        self.balance = balancedness(self.policy.placement, self.drift.at(now), self.drift.ranks)
        self.busy_until = now + self._seconds() if self.moves else 0.0

    def _changed(self, move: Move) -> list[int]:
        """Slots of each rank that the move fills anew."""
        found = [0] * self.drift.ranks
        for layer, wanted in move.layers:
            old = self.policy.placement[layer].tolist()
            for rank, count in enumerate(changed_slots(old, wanted, self.drift.ranks)):
                found[rank] += count
        return found

    def _seconds(self) -> float:
        """Ranks move their experts in parallel."""
        return max(self._changed(self.moves[0])) * self.drift.slot_seconds


def hash_of(text: str) -> int:
    """The same in every process, as hash() is not."""
    found = 0
    for character in text.encode():
        found = (found * 257 + character) & 0xFFFFFFFFFFFF
    return found
