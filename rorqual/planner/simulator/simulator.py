"""Discrete events: requests arrive, wait, are computed and leave, on the engine's own scheduler
over a cost runner. No torch.

A pool is a number of equal replicas. A replica is one stage of ranks that step together, as long as
the slowest of them, each rank with its own scheduler and pages; with a pipeline of several stages
it has as many such groups, which enter the pipeline one after another. A request goes to the rank
with the fewest live tokens. With two pools the first computes prompts and sends their caches to the
second.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.errors import ConfigError
from rorqual.planner.simulator.cost_runner import IDLE, StepCosts, StepLoad
from rorqual.planner.simulator.settings import SimulationSettings
from rorqual.planner.simulator.simulated_rank import RequestTimeline, SimulatedRank
from rorqual.planner.simulator.timeline import Timeline
from rorqual.planner.simulator.workload import Arrival, Workload

ROUTING = ("live-tokens", "round-robin")
ARRIVE, LAND, END, BEGIN = range(4)  # of events at the same moment, the order in which they happen


@dataclass(frozen=True)
class Pool:
    """replicas of `ranks` data-parallel ranks and `groups` pipeline groups each, on `gpus`
    devices. steps_in_flight 2: the next step is planned while one runs, so a request joins a step
    later. remote and first_only: see SimulatedRank. acceptance: of drafts, by place."""

    name: str
    scheduler: SchedulerConfig
    costs: StepCosts
    replicas: int = 1
    ranks: int = 1
    groups: int = 1
    gpus: int = 1
    steps_in_flight: int = 1
    acceptance: tuple[float, ...] = ()
    remote: bool = False
    first_only: bool = False

    def __post_init__(self) -> None:
        for name in ("replicas", "ranks", "groups", "gpus"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.name}: {name}={getattr(self, name)} must be at least 1")
        if self.steps_in_flight not in (1, 2):
            raise ConfigError(
                f"{self.name}: steps_in_flight={self.steps_in_flight}; accepted: 1 or 2"
            )
        if len(self.acceptance) != self.scheduler.num_speculative_tokens or not all(
            0 <= rate <= 1 for rate in self.acceptance
        ):
            raise ConfigError(
                f"acceptance={self.acceptance} must hold a probability for each of "
                f"num_speculative_tokens={self.scheduler.num_speculative_tokens} drafts"
            )


@dataclass(frozen=True)
class Deployment:
    """pools: one, or prompts and decoding apart. transfer: seconds a prompt of so many tokens
    takes from one pool to the other; a prompt's replica sends one at a time. delivery: seconds
    between the engine and a client, both ways together."""

    pools: tuple[Pool, ...]
    transfer: Callable[[int], float] | None = None
    delivery: float = 0.0
    routing: str = SimulationSettings.balancing

    def __post_init__(self) -> None:
        if self.routing not in ROUTING:
            raise ConfigError(
                f"routing={self.routing!r} is not known; accepted: {', '.join(ROUTING)}"
            )
        roles = [(pool.first_only, pool.remote) for pool in self.pools]
        assert roles in ([(False, False)], [(True, False), (False, True)]), (
            "one pool for all, or prompts first and decoding second"
        )
        assert (self.transfer is not None) == (len(self.pools) == 2)

    @property
    def gpus(self) -> int:
        return sum(pool.gpus * pool.replicas for pool in self.pools)


@dataclass(slots=True)
class Watched:
    """A step to be drawn: when it began, and its ranks' loads."""

    began: float
    loads: list[StepLoad]


class Replica:
    """What the groups of a replica share: the entry of its pipeline, and the link its caches
    leave by."""

    def __init__(self) -> None:
        self.entry = self.link = 0.0


class StageGroup:
    """Ranks that step together."""

    def __init__(self, pool: int, replica: Replica, ranks: list[SimulatedRank]):
        self.pool = pool
        self.replica = replica
        self.ranks = ranks
        self.running = self.waking = False
        self.began = self.ended = 0.0
        self.loads: list[StepLoad] = []


@dataclass
class Simulation:
    """One run. watch: from when on, and how many steps of the first group of the last pool are
    kept to be drawn."""

    deployment: Deployment
    workload: Workload
    seed: int = SimulationSettings.seed
    interval: float = SimulationSettings.interval
    watch: tuple[float, int] = (0.0, 0)
    records: list[RequestTimeline] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.events: list[tuple[float, int, int, Arrival | RequestTimeline | StageGroup]] = []
        self.count = self.turn = 0
        self.groups = [
            self._groups(index, pool) for index, pool in enumerate(self.deployment.pools)
        ]
        self.places = [
            [(rank, group) for group in groups for rank in group.ranks] for groups in self.groups
        ]
        self.timelines = [
            Timeline(pool.costs.resources, pool.replicas, self.interval)
            for pool in self.deployment.pools
        ]
        self.jobs: Iterator[Arrival] = iter(self.workload.jobs(self.seed))

    def _groups(self, index: int, pool: Pool) -> list[StageGroup]:
        found = []
        for number in range(pool.replicas):
            replica = Replica()
            for group in range(pool.groups):
                draws = [
                    random.Random(f"{self.seed} acceptance {index} {number} {group} {rank}")
                    for rank in range(pool.ranks)
                ]
                ranks = [
                    SimulatedRank(
                        pool.scheduler, pool.acceptance, draw, pool.remote, pool.first_only
                    )
                    for draw in draws
                ]
                found.append(StageGroup(index, replica, ranks))
        return found

    # ---- events

    def run(self) -> Simulation:
        """Until every request is done. Raises ConfigError where there are none, or none could be
        served."""
        arrivals = self.workload.arrivals
        for _ in range(
            arrivals.clients if arrivals.kind == "closed" and self.workload.trace is None else 1
        ):
            self._next_job()
        handlers = {ARRIVE: self._arrive, LAND: self._land, END: self._end, BEGIN: self._begin}
        while self.events:
            time, kind, _, what = heapq.heappop(self.events)
            if time >= self.timelines[0].next_sample:
                self._sample(time)
            self.now = time
            handlers[kind](what)  # type: ignore[operator]
        self._check()
        return self

    def _push(self, time: float, kind: int, what: Arrival | RequestTimeline | StageGroup) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, kind, self.count, what))

    def _next_job(self) -> None:
        job = next(self.jobs, None)
        if job is not None:
            self._push(max(job.arrival, self.now), ARRIVE, job)

    @property
    def _closed(self) -> bool:
        return self.workload.arrivals.kind == "closed" and self.workload.trace is None

    def _arrive(self, job: Arrival) -> None:
        record = RequestTimeline(job, self.now)
        self.records.append(record)
        self._route(0, record)
        if not self._closed:
            self._next_job()

    def _land(self, record: RequestTimeline) -> None:
        """A prompt's cache is there: the request goes on in the second pool."""
        record.paused = record.first
        self._route(1, record)

    def _route(self, pool: int, record: RequestTimeline) -> None:
        places = self.places[pool]
        if self.deployment.routing == "round-robin":
            rank, group = places[self.turn % len(places)]
            self.turn += 1
        else:
            rank, group = min(places, key=lambda place: place[0].live)
        rank.put(record, self.now)
        self._wake(group)

    def _wake(self, group: StageGroup) -> None:
        if not group.running and not group.waking:
            group.waking = True
            self._push(max(self.now, group.replica.entry), BEGIN, group)

    # ---- steps

    def _begin(self, group: StageGroup) -> None:
        pool = self.deployment.pools[group.pool]
        if group.replica.entry > self.now:  # another group entered the pipeline in between
            self._push(group.replica.entry, BEGIN, group)
            return
        group.waking = False
        # The next step was planned when the last one began: what came since then joins the one
        # after.
        on_time = self.now == group.ended and pool.steps_in_flight == 2
        loads = self._loads(group, group.began if on_time else self.now)
        if on_time and all(load == IDLE for load in loads):
            loads = self._loads(group, self.now)
        if all(load == IDLE for load in loads):
            return
        cost = pool.costs.step(loads, pool.scheduler.num_speculative_tokens)
        group.running = True
        group.began = self.now
        group.loads = loads
        group.replica.entry = self.now + (cost.stage if pool.groups > 1 else 0.0)
        self.timelines[group.pool].step(self.now, cost, loads)
        if (
            len(self.watched) < self.watch[1]
            and self.now >= self.watch[0]
            and group is self.groups[-1][0]
        ):
            self.watched.append(Watched(self.now, loads))
        self._push(self.now + cost.seconds, END, group)

    def _loads(self, group: StageGroup, until: float) -> list[StepLoad]:
        found = []
        for rank in group.ranks:
            if rank.inbox:
                for _ in rank.take_in(until):
                    self._done()
            found.append(rank.begin(self.now))
        return found

    def _end(self, group: StageGroup) -> None:
        timeline = self.timelines[group.pool]
        rows = 0
        for rank, load in zip(group.ranks, group.loads, strict=True):
            if load == IDLE:
                continue
            ended = rank.end(self.now)
            rows += ended.rows
            timeline.gaps.update(ended.gaps)
            for record in ended.done:
                self._leave(group, record)
        if rows:
            # whoever decoded got a token in the step before
            timeline.gaps[self.now - group.ended] += rows
        group.running = False
        group.ended = self.now
        group.waking = True
        self._push(max(self.now, group.replica.entry), BEGIN, group)

    def _leave(self, group: StageGroup, record: RequestTimeline) -> None:
        """A request is done, or done here and its cache is sent on."""
        if group.pool + 1 == len(self.deployment.pools) or record.wanted == 1:
            self._done()
            return
        assert self.deployment.transfer is not None
        seconds = self.deployment.transfer(record.job.prompt)
        group.replica.link = max(self.now, group.replica.link) + seconds
        self.timelines[group.pool].sent += seconds
        self._push(group.replica.link, LAND, record)

    def _done(self) -> None:
        """A client is free."""
        if self._closed:
            self._next_job()

    def _sample(self, until: float) -> None:
        for groups, timeline in zip(self.groups, self.timelines, strict=True):
            ranks = [rank for group in groups for rank in group.ranks]
            waiting = sum(rank.waiting for rank in ranks)
            running = sum(rank.scheduler.num_running for rank in ranks)
            timeline.sample(until, waiting, running, sum(rank.live for rank in ranks))

    # ---- what must hold

    def _check(self) -> None:
        """Conservation: every request is done or was refused, every token it asked for was made
        once, and nothing is left behind."""
        if not self.records:
            raise ConfigError("the workload holds no requests")
        ranks = [rank for groups in self.groups for group in groups for rank in group.ranks]
        for rank in ranks:
            rank.check_idle()
        served = [record for record in self.records if record.refused is None]
        if not served:
            raise ConfigError(
                "no request could be served; the first was refused because "
                f"{self.records[0].refused}"
            )
        for record in served:
            number = record.job.number
            made = record.made
            wanted = record.wanted
            assert made == wanted, f"request {number} got {made} tokens of {wanted}"
            assert record.admitted is not None
            assert record.first is not None
            assert record.last is not None
            assert record.arrival <= record.admitted < record.first <= record.last, (
                f"request {number} ran backwards"
            )
        made = sum(record.made for record in self.records)
        emitted = sum(rank.emitted for rank in ranks)
        assert emitted == made, f"{emitted} tokens were made, requests got {made}"
