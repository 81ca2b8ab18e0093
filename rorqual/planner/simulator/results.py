"""A simulation's figures: latencies by percentile, throughput for a device and a user, use of
resources, and all of it as JSON. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rorqual.errors import ConfigError
from rorqual.planner.simulator.simulated_rank import RequestTimeline
from rorqual.planner.simulator.simulator import Simulation

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Percentiles:
    """Seconds: the mean and the percentiles."""

    mean: float
    p50: float
    p90: float
    p99: float


def spread(values: Sequence[float]) -> Percentiles:
    """Percentiles are linear between the two nearest values."""
    ordered = sorted(values)
    return Percentiles(fmean(ordered), *(_percentile(ordered, percent) for percent in PERCENTILES))


def _percentile(ordered: Sequence[float], percent: float) -> float:
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def weighted_spread(counts: Counter[float]) -> Percentiles:
    """Of values with how often each occurs: a percentile is the smallest value that so many do
    not exceed."""
    total = sum(counts.values())
    ordered = sorted((value, count) for value, count in counts.items() if count)
    found = []
    reached = 0
    percents = list(PERCENTILES)
    for value, count in ordered:
        reached += count
        while percents and reached >= total * percents[0] / 100:
            found.append(value)
            percents.pop(0)
    return Percentiles(sum(value * count for value, count in ordered) / total, *found)


@dataclass(frozen=True)
class BalanceOutcome:
    """One replica's experts: balancedness of the ranks at the end, and what the policy did."""

    replica: str
    balancedness: float
    rebalances: int
    moves: int
    slots: int


@dataclass(frozen=True)
class Outcome:
    """Seconds and tokens. Latencies are of requests that arrived after the warm-up. TTFT and E2E
    include the delivery to the client, queue is from arrival to the first step; TPOT is (last -
    first) / (tokens - 1); ITL is the time between two deliveries of one request, a delivery
    being one step's tokens. Rates are of the whole run, from the first arrival to the last
    token."""

    requests: int
    refused: int
    seconds: float
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    output_tokens: int
    preemptions: int
    moved: int
    gpus: float
    ttft: Percentiles
    queue: Percentiles
    tpot: Percentiles | None
    itl: Percentiles | None
    e2e: Percentiles
    accepted: tuple[float, ...]
    utilization: dict[str, dict[str, float]]
    transfers: float
    balance: tuple[BalanceOutcome, ...]

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def output_rate_per_gpu(self) -> float:
        return self.output_rate / self.gpus

    @property
    def rate_per_user(self) -> float | None:
        return 1 / self.tpot.p50 if self.tpot and self.tpot.p50 else None

    @property
    def total_rate_per_gpu(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds / self.gpus


def outcome(simulation: Simulation, warm_up: float = 0.0) -> Outcome:
    """Raises ConfigError where no request came after the warm-up."""
    served = [record for record in simulation.records if record.refused is None]
    counted = [record for record in served if record.arrival >= warm_up]
    if not counted:
        raise ConfigError(
            f"warm_up={warm_up} s leaves none of {len(served)} requests; the last came at "
            f"{served[-1].arrival:.1f} s"
        )
    start = served[0].arrival
    late = simulation.deployment.delivery
    seconds = max(_at(record.last) for record in served) - start
    gaps: Counter[float] = sum((timeline.gaps for timeline in simulation.timelines), Counter())
    several = [record for record in counted if record.made > 1]
    pools = simulation.deployment.pools
    end = start + seconds
    held = [sum(one.seconds(start, end) for one in replicas) for replicas in simulation.replicas]
    used = {
        pool.name: timeline.utilization(whole)
        for pool, timeline, whole in zip(pools, simulation.timelines, held, strict=True)
    }
    return Outcome(
        requests=len(served),
        refused=len(simulation.records) - len(served),
        seconds=seconds,
        prompt_tokens=sum(record.job.prompt for record in served),
        reused_tokens=sum(record.reused for record in served),
        recomputed_tokens=sum(_again(record) for record in served),
        output_tokens=sum(record.made for record in served),
        preemptions=sum(record.preemptions for record in served),
        moved=sum(record.moved for record in served),
        # whole where none came or went: seconds are sums of steps
        gpus=round(
            sum(pool.gpus * whole for pool, whole in zip(pools, held, strict=True)) / seconds, 6
        ),
        ttft=spread([_at(record.first) - record.arrival + late for record in counted]),
        queue=spread([_at(record.admitted) - record.arrival for record in counted]),
        tpot=spread(
            [(_at(record.last) - _at(record.first)) / (record.made - 1) for record in several]
        )
        if several
        else None,
        itl=weighted_spread(gaps) if any(gaps.values()) else None,
        e2e=spread([_at(record.last) - record.arrival + late for record in counted]),
        accepted=_accepted(simulation),
        utilization=used,
        transfers=sum(timeline.sent for timeline in simulation.timelines),
        balance=_balance(simulation),
    )


def _balance(simulation: Simulation) -> tuple[BalanceOutcome, ...]:
    found = []
    for pool, replicas in zip(simulation.deployment.pools, simulation.replicas, strict=True):
        for one in replicas:
            if one.balance is not None:
                stats = one.balance.stats
                figures = (one.balance.balance, stats.rebalances, stats.moves, stats.slots)
                found.append(BalanceOutcome(f"{pool.name} {one.number}", *figures))
    return tuple(found)


def _at(moment: float | None) -> float:
    assert moment is not None
    return moment


def _again(record: RequestTimeline) -> int:
    """Prompt tokens, and outputs after a preemption, that were computed or found a second time."""
    return max(0, record.computed + record.reused - record.job.prompt)


def _accepted(simulation: Simulation) -> tuple[float, ...]:
    """Shares of drafts accepted, by place."""
    schedulers = [rank.scheduler for one in simulation.replicas[-1] for rank in one.ranks]
    pairs = zip(*(zip(one.accepted, one.drafted, strict=True) for one in schedulers), strict=True)
    return tuple(
        sum(right for right, _ in place) / max(1, sum(tried for _, tried in place))
        for place in pairs
    )


def as_json(simulation: Simulation, found: Outcome, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything needed to repeat the run, its figures, and what happened over time."""
    rates = ("output_rate", "output_rate_per_gpu", "rate_per_user", "total_rate_per_gpu")
    pools = zip(simulation.deployment.pools, simulation.timelines, strict=True)
    return {
        "settings": {**settings, "workload": asdict(simulation.workload), "seed": simulation.seed},
        "schedulers": {
            pool.name: {**asdict(pool.scheduler), "replicas": pool.replicas, "ranks": pool.ranks}
            for pool in simulation.deployment.pools
        },
        "figures": {**asdict(found), **{name: getattr(found, name) for name in rates}},
        "incidents": [asdict(incident) for incident in simulation.incidents],
        "over_time": {
            pool.name: {**timeline.series(), "steps": timeline.steps} for pool, timeline in pools
        },
    }
