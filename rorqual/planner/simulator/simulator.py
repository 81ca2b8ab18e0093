"""Discrete-event simulation: requests arrive, wait, are computed and leave, with the engine's own
scheduler over a cost runner. No torch.

A pool has a number of equal replicas. A replica is one stage of ranks that step together, as slow
as the slowest of them, each with its own scheduler and pages; a pipeline of several stages has as
many such groups, which enter the pipeline one after another. A request goes to the rank with the
fewest live tokens. With two pools the first computes prompts and sends their caches to the second.

A replica may die: its requests go to others with their tokens so far, as the router does it, and
prompts and tokens are computed again. An autoscaling rule may add and remove replicas, and the
experts' load may be uneven over a replica's ranks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from rorqual.engine.scheduling.chunk_controller import OFF, ChunkController, chunk_controller
from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.engine.scheduling.sequence import PendingLoad
from rorqual.errors import ConfigError
from rorqual.planner.simulator.cost_runner import IDLE, HostTimes, StepCosts, StepLoad
from rorqual.planner.simulator.expert_drift import ExpertDrift, ReplicaBalance
from rorqual.planner.simulator.incidents import Autoscaler, Autoscaling, Incident, ReplicaFailure
from rorqual.planner.simulator.replicas import Replica, StageGroup
from rorqual.planner.simulator.settings import SimulationSettings
from rorqual.planner.simulator.simulated_rank import RequestTimeline, SimulatedRank
from rorqual.planner.simulator.timeline import Timeline
from rorqual.planner.simulator.workload import Arrival, Workload

MOST_RANKS = 8192
MOST_PAGES = 100_000_000  # of 50 bytes
ROUTING = ("live-tokens", "round-robin")
# of events at the same moment, the order in which they happen
CALL, ARRIVE, LAND, END, BEGIN = range(5)


@dataclass(frozen=True)
class Pool:
    """`replicas` replicas of `ranks` data-parallel ranks and `groups` pipeline groups each, on
    `gpus` devices. steps_in_flight 2: the next step is scheduled while one runs, so a request joins
    one step later. remote, first_only: see SimulatedRank. acceptance: of drafts, by position.
    drift: uneven load of experts; `balanced` then gives the costs of steps for the fullest expert
    rank's load relative to the mean. itl_ms: how long a step with prompts may hold up decoding, as
    EngineConfig has it. host: the server's work beside its steps."""

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
    drift: ExpertDrift | None = None
    balanced: Callable[[float], StepCosts] | None = None
    itl_ms: str = OFF
    host: HostTimes = field(default_factory=HostTimes)

    def __post_init__(self) -> None:
        assert (self.drift is None) == (self.balanced is None)
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
        self.chunks()

    def chunks(self) -> ChunkController | None:
        """What decides how many prompt tokens a step takes; None: all that fit, or none is computed
        here. Raises ConfigError."""
        if self.remote:
            return None
        return chunk_controller(self.itl_ms, self.scheduler.max_num_batched_tokens)


@dataclass(frozen=True)
class Deployment:
    """pools: one, or prefill and decode separately. transfer: seconds to send the cache of a prompt
    with so many tokens to the other pool; a replica sends one at a time. redraws: the decode pool
    samples a prompt's first token, as this engine does, instead of the prefill pool. delivery:
    seconds between the engine and a client, round trip. failover: seconds until a dead replica's
    requests are sent to others. autoscaling: at most one rule per pool."""

    pools: tuple[Pool, ...]
    transfer: Callable[[int], float] | None = None
    delivery: float = 0.0
    routing: str = SimulationSettings.balancing
    failures: tuple[ReplicaFailure, ...] = ()
    failover: float = SimulationSettings.failover
    autoscaling: tuple[Autoscaling, ...] = ()
    redraws: bool = False

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
        self._check_incidents()

    def _check_incidents(self) -> None:
        if not 0 <= self.failover < math.inf:
            raise ConfigError(f"failover={self.failover} s must be at least 0")
        scaled = {rule.pool: rule for rule in self.autoscaling}
        self._check_size(scaled)
        if len(scaled) < len(self.autoscaling):
            raise ConfigError("autoscale: a pool has one rule at most")
        for rule in self.autoscaling:
            there = self.pools[self.index(rule.pool)].replicas
            if not rule.least <= there <= rule.most:
                raise ConfigError(
                    f"autoscale {rule.pool}={rule.least}:{rule.most}: it starts with {there} "
                    "replicas"
                )
        for failure in self.failures:
            pool = self.pools[self.index(failure.pool)]
            most = scaled[pool.name].most if pool.name in scaled else pool.replicas
            if failure.replica >= most:
                raise ConfigError(
                    f"fail: pool {pool.name} has no replica {failure.replica}; they count from 0 "
                    f"to {most - 1}"
                )

    def _check_size(self, scaled: Mapping[str, Autoscaling]) -> None:
        """Every rank and every page of its cache is an object of the simulation."""
        ranks = pages = 0
        for pool in self.pools:
            rule = scaled.get(pool.name)
            most = max(pool.replicas, rule.most if rule else 0) * pool.ranks * pool.groups
            ranks += most
            pages += most * pool.scheduler.num_pages
        if ranks > MOST_RANKS:
            raise ConfigError(f"all replicas have {ranks:,} ranks; accepted: {MOST_RANKS:,}")
        if pages > MOST_PAGES:
            raise ConfigError(
                f"the caches of all ranks have {pages:,} pages; accepted: {MOST_PAGES:,}, as with "
                "fewer replicas or a larger page_size"
            )

    def index(self, name: str) -> int:
        """Of a pool."""
        names = [pool.name for pool in self.pools]
        if name not in names:
            raise ConfigError(f"pool {name!r} is not there; accepted: {', '.join(names)}")
        return names.index(name)

    @property
    def gpus(self) -> int:
        return sum(pool.gpus * pool.replicas for pool in self.pools)


@dataclass(slots=True)
class Watched:
    """A step to be drawn: when it began, and its ranks' loads."""

    began: float
    loads: list[StepLoad]


@dataclass(slots=True)
class Landing:
    """A cache in transfer. died: the sender's number of deaths when it started."""

    record: RequestTimeline
    replica: Replica
    died: int


Event = Arrival | Landing | StageGroup | Callable[[], None]


@dataclass
class Simulation:
    """One run. watch: from when, and how many, steps of the last pool's first group are recorded
    for the chart. open: requests in progress. coming: requests still to arrive. looks: pending
    evaluations of autoscaling rules."""

    deployment: Deployment
    workload: Workload
    seed: int = SimulationSettings.seed
    interval: float = SimulationSettings.interval
    watch: tuple[float, int] = (0.0, 0)
    records: list[RequestTimeline] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.events: list[tuple[float, int, int, Event]] = []
        self.count = self.turn = self.emitted = 0
        self.open = self.coming = self.looks = 0
        pools = self.deployment.pools
        # by number; what a rule removed stays in the list, for its GPUs count
        self.replicas: list[list[Replica]] = [[] for _ in pools]
        self.places: list[list[tuple[SimulatedRank, StageGroup]]] = [[] for _ in pools]
        self.parked: list[list[RequestTimeline]] = [[] for _ in pools]
        for index, pool in enumerate(pools):
            for _ in range(pool.replicas):
                self._start(self._ordered(index))
        self.scalers = {
            self.deployment.index(rule.pool): Autoscaler(rule)
            for rule in self.deployment.autoscaling
        }
        self.timelines = [Timeline(pool.costs.resources, self.interval) for pool in pools]
        self.jobs: Iterator[Arrival] = iter(self.workload.jobs(self.seed))

    # ---- events

    def run(self) -> Simulation:
        """Until every request is done. Raises ConfigError where there are none, or none could be
        served."""
        arrivals = self.workload.arrivals
        for _ in range(
            arrivals.clients if arrivals.kind == "closed" and self.workload.trace is None else 1
        ):
            self._next_job()
        for failure in self.deployment.failures:
            self._push(failure.down, CALL, partial(self._fail, failure))
        for index in self.scalers:
            self._look_again(index)
        handlers = {
            CALL: lambda call: call(),
            ARRIVE: self._arrive,
            LAND: self._land,
            END: self._end,
            BEGIN: self._begin,
        }
        while self.events and (self.open or self.coming):
            time, kind, _, what = heapq.heappop(self.events)
            if time >= self.timelines[0].next_sample:
                self._sample(time)
            self.now = time
            handlers[kind](what)  # type: ignore[operator]
        self._check()
        return self

    def _push(self, time: float, kind: int, what: Event) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, kind, self.count, what))

    def _next_job(self, earliest: float = 0.0) -> None:
        job = next(self.jobs, None)
        if job is not None:
            self._push(max(job.arrival, self.now, earliest), ARRIVE, job)
            self.coming += 1

    @property
    def _closed(self) -> bool:
        return self.workload.arrivals.kind == "closed" and self.workload.trace is None

    def _arrive(self, job: Arrival) -> None:
        record = RequestTimeline(job, self.now)
        self.records.append(record)
        self.open += 1
        self.coming -= 1
        self._route(0, record)
        if not self._closed:
            self._next_job()

    def _land(self, landing: Landing) -> None:
        """A prompt's cache is there: the request goes on in the second pool."""
        record = landing.record
        record.paused = record.last if record.first is not None else None
        if landing.replica.died != landing.died:  # the sender died: the rest will not arrive
            record.moved += 1
            self._again([record])
        else:
            self._route(1, record)

    def _route(self, pool: int, record: RequestTimeline) -> None:
        places = self.places[pool]
        if not places:
            self.parked[pool].append(record)
            return
        if self.deployment.routing == "round-robin":
            rank, group = places[self.turn % len(places)]
            self.turn += 1
        else:
            lives = [rank.live for rank, _ in places]  # faster than min by a key
            rank, group = places[lives.index(min(lives))]
        rank.put(record, self.now)
        host = self.deployment.pools[pool].host
        if group.running or group.waking:
            group.work += host.request
        group.work += host.received if self.deployment.pools[pool].remote else 0.0
        self._wake(group)

    def _wake(self, group: StageGroup) -> None:
        if not group.running and not group.waking:
            group.waking = True
            self._push(max(self.now, group.replica.entry, group.ready), BEGIN, group)

    # ---- steps

    def _begin(self, group: StageGroup) -> None:
        if group.dead:
            return
        pool = self.deployment.pools[group.pool]
        replica = group.replica
        if replica.entry > self.now:  # another group entered the pipeline in between
            self._push(replica.entry, BEGIN, group)
            return
        group.waking = False
        # The next step was planned when the last one began: what came since then joins the one
        # after.
        on_time = self.now == group.ready and pool.steps_in_flight == 2
        loads = self._loads(group, group.began if on_time else self.now)
        if on_time and all(load == IDLE for load in loads):
            loads = self._loads(group, self.now)
        if all(load == IDLE for load in loads):
            return
        cost = replica.costs.step(loads, pool.scheduler.num_speculative_tokens)
        seconds = cost.seconds
        if replica.balance is not None:
            seconds *= replica.balance.factor(self.now)
        group.running = True
        group.began = self.now
        group.loads = loads
        replica.entry = self.now + (cost.stage if pool.groups > 1 else 0.0)
        self.timelines[group.pool].step(self.now, cost, loads)
        if (
            len(self.watched) < self.watch[1]
            and self.now >= self.watch[0]
            and replica is self.replicas[-1][0]
            and group is replica.groups[0]
        ):
            self.watched.append(Watched(self.now, loads))
        self._push(self.now + seconds, END, group)

    def _loads(self, group: StageGroup, until: float) -> list[StepLoad]:
        for rank in group.ranks:
            if rank.inbox:
                for _ in rank.take_in(until):
                    self._done()
        if group.chunks is not None:
            pending = [rank.scheduler.next_load() for rank in group.ranks]
            tokens = group.chunks.budget(PendingLoad(*map(max, zip(*pending, strict=True))))
            for rank in group.ranks:
                rank.allow(tokens)
        return [rank.begin(self.now) for rank in group.ranks]

    def _end(self, group: StageGroup) -> None:
        if group.dead:
            return
        timeline = self.timelines[group.pool]
        replica = group.replica
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
            # decoding requests got a token in the previous step
            timeline.gaps[self.now - group.ended] += rows
        if replica.balance is not None:
            self._balanced(replica, replica.balance, group)
        if group.chunks is not None:
            decoding = sum(load.rows for load in group.loads)
            prompts = sum(load.prompts * load.new for load in group.loads)
            group.chunks.observe(decoding, prompts, self.now - group.began)
        group.running = False
        group.ended = self.now
        group.ready = self.now + self.deployment.pools[group.pool].host.after(rows) + group.work
        group.work = 0.0
        if replica.draining and replica.empty:
            self._remove(replica)
            return
        group.waking = True
        self._push(max(group.ready, replica.entry), BEGIN, group)

    def _balanced(self, replica: Replica, balance: ReplicaBalance, group: StageGroup) -> None:
        """Update the replica's experts after a step; a changed placement changes its step costs."""
        pool = self.deployment.pools[replica.pool]
        drafts = pool.scheduler.num_speculative_tokens
        tokens = sum(load.tokens(drafts) for load in group.loads)
        if balance.step(self.now, tokens, self.now - group.began):
            assert pool.balanced is not None
            replica.costs = pool.balanced(balance.fullest)

    def _leave(self, group: StageGroup, record: RequestTimeline) -> None:
        """A request is done, or done here and its cache is sent on."""
        if self.deployment.redraws and group.pool == 0:
            record.made -= 1
            self.emitted -= 1
            if not record.made:
                record.first = None
        elif record.made == record.wanted:
            self._done()
            return
        assert self.deployment.transfer is not None
        seconds = self.deployment.transfer(record.length - 1)
        replica = group.replica
        replica.link = max(self.now, replica.link) + seconds
        group.work += self.deployment.pools[group.pool].host.sent
        self.timelines[group.pool].sent += seconds
        self._push(replica.link, LAND, Landing(record, replica, replica.died))

    def _done(self) -> None:
        """A client got its last token; its next request arrives one delivery round trip later."""
        self.open -= 1
        if self._closed:
            self._next_job(self.now + self.deployment.delivery)

    def _sample(self, until: float) -> None:
        for replicas, parked, timeline in zip(
            self.replicas, self.parked, self.timelines, strict=True
        ):
            ranks = [rank for replica in replicas for rank in replica.ranks]
            waiting = sum(rank.waiting for rank in ranks) + len(parked)
            running = sum(rank.scheduler.num_running for rank in ranks)
            held = sum(replica.gone is None for replica in replicas)
            timeline.sample(until, waiting, running, sum(rank.live for rank in ranks), held)

    # ---- replicas that come and go

    def _ordered(self, index: int) -> Replica:
        """Holds its GPUs from now on, and serves once it is started."""
        pool = self.deployment.pools[index]
        number = len(self.replicas[index])
        balance = None
        costs = pool.costs
        if pool.drift is not None and pool.balanced is not None:
            balance = ReplicaBalance(pool.drift, self.seed, f"{index} {number}")
            costs = pool.balanced(balance.fullest)
        replica = Replica(index, number, costs, self.now, balance)
        self.replicas[index].append(replica)
        return replica

    def _start(self, replica: Replica) -> None:
        if replica.gone is not None or replica.up:
            return
        pool = self.deployment.pools[replica.pool]
        replica.start(
            self.seed,
            pool.scheduler,
            pool.acceptance,
            pool.groups,
            pool.ranks,
            pool.remote,
            pool.first_only,
            pool.chunks,
        )
        self._place(replica.pool)
        waiting = self.parked[replica.pool]
        self.parked[replica.pool] = []
        for record in waiting:
            self._route(replica.pool, record)

    def _place(self, pool: int) -> None:
        """Where a pool's requests may go from now on."""
        self.places[pool] = [
            (rank, group)
            for replica in self.replicas[pool]
            if replica.up and not replica.draining
            for group in replica.groups
            for rank in group.ranks
        ]

    def _note(self, pool: int, text: str) -> None:
        self.incidents.append(Incident(self.now, f"{self.deployment.pools[pool].name} {text}"))

    def _fail(self, failure: ReplicaFailure) -> None:
        pool = self.deployment.index(failure.pool)
        there = self.replicas[pool]
        replica = there[failure.replica] if failure.replica < len(there) else None
        if replica is None or not replica.up:
            self._note(pool, f"{failure.replica} should have died, and was not there")
            return
        requests, emitted = replica.die()
        self.emitted += emitted
        self._place(pool)
        self._note(pool, f"{failure.replica} died with {len(requests)} requests")
        if replica.draining:
            self._remove(replica)
        elif failure.up is not None:
            self._push(failure.up, CALL, partial(self._back, replica))
        if requests:
            self._push(self.now + self.deployment.failover, CALL, partial(self._again, requests))

    def _back(self, replica: Replica) -> None:
        self._note(replica.pool, f"{replica.number} is back")
        self._start(replica)

    def _again(self, requests: list[RequestTimeline]) -> None:
        """Their caches are lost: prompts and the tokens they have are computed again."""
        for record in requests:
            self._route(0, record)

    def _scale(self, pool: int) -> None:
        self.looks -= 1
        scaler = self.scalers[pool]
        present = [
            replica
            for replica in self.replicas[pool]
            if replica.gone is None and not replica.draining and (replica.up or not replica.died)
        ]
        requests = sum(replica.requests for replica in self.replicas[pool])
        requests += len(self.parked[pool])
        wanted = scaler.replicas(self.now, requests, len(present))
        if wanted != len(present):
            self._note(pool, f"from {len(present)} to {wanted} replicas, {requests} requests")
        for _ in range(wanted - len(present)):
            replica = self._ordered(pool)
            self._push(self.now + scaler.rule.start_seconds, CALL, partial(self._start, replica))
        # those that do not serve yet first, then those with least to do
        order = sorted(present, key=lambda one: (one.up, one.requests, -one.number))
        for replica in order[: max(0, len(present) - wanted)]:
            replica.draining = True
            if replica.empty:
                self._remove(replica)
        self._place(pool)
        if len(self.events) > self.looks:  # else nothing will ever happen
            self._look_again(pool)

    def _look_again(self, pool: int) -> None:
        self.looks += 1
        interval = self.scalers[pool].rule.interval
        self._push(self.now + interval, CALL, partial(self._scale, pool))

    def _remove(self, replica: Replica) -> None:
        """It has no requests; its GPUs are free once its last cache has left."""
        for rank in replica.ranks:
            rank.check_idle()
            self.emitted += rank.emitted
        replica.gone = max(self.now, replica.link)
        replica.up = False
        for group in replica.groups:
            group.dead = True
        replica.groups = []
        self._place(replica.pool)

    # ---- what must hold

    def _check(self) -> None:
        """Conservation: every request is done or was refused, every token it asked for was made
        once, and nothing is left behind."""
        if not self.records:
            raise ConfigError("the workload holds no requests")
        for parked, pool in zip(self.parked, self.deployment.pools, strict=True):
            if parked:
                raise ConfigError(
                    f"no replica of pool {pool.name} is left or comes back; {len(parked)} "
                    "requests wait for one"
                )
        ranks = [rank for pool in self.replicas for replica in pool for rank in replica.ranks]
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
        emitted = self.emitted + sum(rank.emitted for rank in ranks)
        assert emitted == made, f"{emitted} tokens were made, requests got {made}"
