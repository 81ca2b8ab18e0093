"""Replicas of a simulated pool: what their groups of ranks share, whether they serve, and for how
long they hold GPUs. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from rorqual.engine.scheduling.chunk_controller import ChunkController
from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.planner.simulator.cost_runner import IDLE, StepCosts, StepLoad
from rorqual.planner.simulator.expert_drift import ReplicaBalance
from rorqual.planner.simulator.simulated_rank import RequestTimeline, SimulatedRank


class StageGroup:
    """Ranks that step together. dead: its replica died, and what is still to happen to it does
    not. chunks: decides how many prompt tokens a step takes, as in the engine. work: seconds of
    its processor that other work than the step in progress has taken since that began (HostTimes);
    ready: when the next step may begin."""

    def __init__(
        self,
        pool: int,
        replica: Replica,
        ranks: list[SimulatedRank],
        chunks: ChunkController | None = None,
    ):
        self.pool = pool
        self.replica = replica
        self.ranks = ranks
        self.running = self.waking = self.dead = False
        self.began = self.ended = self.ready = self.work = 0.0
        self.chunks = chunks
        self.loads: list[StepLoad] = []


class Replica:
    """`groups` of ranks, the entry of their pipeline and the link for sending caches. up: accepts
    requests. draining: only finishes those it has. died: number of deaths. since, gone: when it
    started and stopped to hold its GPUs."""

    def __init__(
        self, pool: int, number: int, costs: StepCosts, since: float, balance: ReplicaBalance | None
    ):
        self.pool = pool
        self.number = number
        self.costs = costs
        self.balance = balance
        self.entry = self.link = 0.0
        self.up = self.draining = False
        self.died = 0
        self.since = since
        self.gone: float | None = None
        self.groups: list[StageGroup] = []

    def start(
        self,
        seed: int,
        scheduler: SchedulerConfig,
        acceptance: tuple[float, ...],
        groups: int,
        ranks: int,
        remote: bool,
        first_only: bool,
        chunks: Callable[[], ChunkController | None] = lambda: None,
    ) -> None:
        """Fresh ranks, with nothing in their caches."""
        self.up = True
        self.groups = []
        again = (self.died,) if self.died else ()
        for group in range(groups):
            names = (self.pool, self.number, group)
            draws = [
                random.Random(" ".join(map(str, (seed, "acceptance", *names, rank, *again))))
                for rank in range(ranks)
            ]
            made = [
                SimulatedRank(scheduler, acceptance, draw, remote, first_only) for draw in draws
            ]
            self.groups.append(StageGroup(self.pool, self, made, chunks()))

    @property
    def ranks(self) -> Iterator[SimulatedRank]:
        return (rank for group in self.groups for rank in group.ranks)

    @property
    def requests(self) -> int:
        """That wait or run here."""
        return sum(len(rank.records) + len(rank.inbox) for rank in self.ranks)

    @property
    def empty(self) -> bool:
        return not any(rank.records or rank.inbox for rank in self.ranks)

    def die(self) -> tuple[list[RequestTimeline], int]:
        """(requests that were here, tokens they got here); steps in flight are lost."""
        found: list[RequestTimeline] = []
        emitted = 0
        for group in self.groups:
            group.dead = True
            for index, rank in enumerate(group.ranks):
                stepping = group.running and group.loads[index] != IDLE
                found += rank.crash(stepping, group.ended)
                emitted += rank.emitted
        self.up = False
        self.died += 1
        self.groups = []
        return found, emitted

    def seconds(self, start: float, end: float) -> float:
        """For which it held its GPUs, of that time."""
        gone = end if self.gone is None else min(self.gone, end)
        return max(0.0, gone - max(self.since, start))
