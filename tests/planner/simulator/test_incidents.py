"""Replicas that die, come back, are added and removed: every answer that can be worked out by
hand, and conservation in runs with many of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.errors import ConfigError
from rorqual.planner.simulator.cost_runner import ConstantCosts
from rorqual.planner.simulator.incidents import Autoscaler, Autoscaling, ReplicaFailure
from rorqual.planner.simulator.results import Outcome, as_json, outcome
from rorqual.planner.simulator.simulator import Deployment, Pool, Simulation
from rorqual.planner.simulator.workload import Arrivals, LengthDistribution, Workload


def pool(name: str = "all", **changes: Any) -> Pool:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 600}
    scheduler = SchedulerConfig(**sizes, num_pages=400, page_size=16, max_waiting=10**6)
    return Pool(name, scheduler, ConstantCosts(0.01), **changes)


def work(kind: str, requests: int, output: str = "100", **changes: Any) -> Workload:
    return Workload(
        Arrivals(kind, **changes),
        LengthDistribution.parse("100"),
        LengthDistribution.parse(output),
        requests=requests,
    )


def play(
    pools: tuple[Pool, ...], load: Workload, seed: int = 0, **changes: Any
) -> tuple[Simulation, Outcome]:
    run = Simulation(Deployment(pools, **changes), load, seed).run()
    return run, outcome(run)


def test_a_request_goes_on_where_it_was() -> None:
    """It decodes a token each 10 ms; after 0.505 s it has 50. The other replica computes its
    prompt and 50 tokens again in one step, which brings the next token; 50 steps in all follow
    the pause of half a second."""
    failures = (ReplicaFailure("all", 0, 0.505),)
    run, found = play(
        (pool(replicas=2, steps_in_flight=1),),
        work("at-once", 1),
        failures=failures,
        failover=0.5,
    )
    record = run.records[0]
    assert (record.moved, record.made, record.wanted) == (1, 100, 100)
    assert record.last == pytest.approx(0.505 + 0.5 + 50 * 0.01)
    assert found.recomputed_tokens == 100 + 50
    assert found.moved == 1
    # the gap from the 50th token to the 51st
    assert max(run.timelines[0].gaps) == pytest.approx(0.505 + 0.5 + 0.01 - 0.5)
    assert [one.text for one in run.incidents] == ["all 0 died with 1 requests"]


def test_who_comes_back_has_lost_its_cache_and_serves_again() -> None:
    failures = (ReplicaFailure("all", 0, 0.205, 5.0),)
    run, found = play((pool(steps_in_flight=1),), work("at-once", 3), failures=failures)
    assert found.moved == 3
    for record in run.records:
        assert record.last == pytest.approx(5.0 + 0.02 + 0.01 * (100 - 18), abs=0.05)
    assert [one.text for one in run.incidents] == ["all 0 died with 3 requests", "all 0 is back"]


def test_nowhere_to_go_is_said() -> None:
    with pytest.raises(ConfigError, match="no replica of pool all is left or comes back; 4 requ"):
        play((pool(),), work("at-once", 4), failures=(ReplicaFailure("all", 0, 0.1),))


def test_a_cache_on_its_way_from_a_dead_replica_is_computed_again() -> None:
    """Prompts end at 0.01 s and travel for a second; the second prompt replica takes over."""
    pools = (
        pool("prefill", replicas=2, first_only=True, steps_in_flight=1),
        pool("decode", remote=True, steps_in_flight=1),
    )
    failures = (ReplicaFailure("prefill", 0, 0.5),)
    run, _ = play(pools, work("at-once", 1), transfer=lambda tokens: 1.0, failures=failures)
    record = run.records[0]
    assert record.moved == 1
    assert record.computed == 100 + 101
    # it is noticed where the cache should have come, at 1.01 s; a prompt, its way, 98 more tokens
    assert record.last == pytest.approx(1.01 + 0.01 + 1.0 + 98 * 0.01)


def test_a_decode_replica_dies() -> None:
    """What it had goes through the prompts' pool again."""
    pools = (
        pool("prefill", first_only=True, steps_in_flight=1),
        pool("decode", replicas=2, remote=True, steps_in_flight=1),
    )
    failures = (ReplicaFailure("decode", 0, 0.515, 0.6),)
    run, found = play(pools, work("at-once", 2), transfer=lambda tokens: 0.1, failures=failures)
    assert found.moved == 1
    moved = next(record for record in run.records if record.moved)
    assert (moved.made, moved.wanted) == (100, 100)
    assert moved.reused == 96  # its prompt is still in the prompt replica's cache
    assert moved.computed + moved.reused == 100 + 100 + 41


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("apart", [False, True])
def test_conservation_under_many_deaths(seed: int, apart: bool) -> None:
    """Every request ends with every token once, whatever dies when; and a run repeats itself."""
    dice = random.Random(seed)
    names = ("prefill", "decode") if apart else ("all",)
    failures = []
    for name in names:
        for replica in range(1, 3):
            down = dice.uniform(0.0, 3.0)
            failures.append(ReplicaFailure(name, replica, down, down + dice.uniform(0.01, 2.0)))
    pools = (
        (
            pool("prefill", replicas=3, first_only=True),
            pool("decode", replicas=3, remote=True, ranks=2),
        )
        if apart
        else (pool(replicas=3, ranks=2, groups=2),)
    )
    changes: dict[str, Any] = {"failures": tuple(failures), "failover": dice.choice((0.0, 0.3))}
    if apart:
        changes["transfer"] = lambda tokens: tokens * 1e-4
        changes["redraws"] = bool(seed % 2)
    load = work("poisson", 120, "uniform:1:120", rate=40.0)
    run, found = play(pools, load, seed, **changes)
    assert found.moved > 0
    assert found.output_tokens == sum(record.wanted for record in run.records)
    assert as_json(run, found, {}) == as_json(*play(pools, load, seed, **changes), {})


def rule(**changes: Any) -> Autoscaling:
    values: dict[str, Any] = {"pool": "all", "least": 1, "most": 4, "target": 4.0}
    return Autoscaling(
        **{**values, "interval": 1.0, "down_after": 5.0, "start_seconds": 2.0, **changes}
    )


def test_the_rule() -> None:
    scaler = Autoscaler(rule())
    assert scaler.replicas(0.0, 9, 1) == 3  # ceil(9 / 4)
    assert scaler.replicas(1.0, 13, 3) == 3  # 13 / 12 is within a tenth of 1
    assert scaler.replicas(2.0, 40, 3) == 4  # not more than most
    assert scaler.replicas(3.0, 2, 4) == 4  # four were wanted a second ago
    assert scaler.replicas(7.5, 2, 4) == 1  # and for more than five seconds not
    assert scaler.replicas(8.0, 0, 1) == 1


def test_replicas_follow_the_load() -> None:
    """Eight requests at once for 1 s; the second replica serves after 1 + 2 s, and goes when fewer
    have been enough for five seconds."""
    load = Workload(
        Arrivals("fixed", rate=8.0),
        LengthDistribution.parse("100"),
        LengthDistribution.parse("100"),
        requests=160,
    )
    run, found = play((pool(steps_in_flight=1),), load, autoscaling=(rule(),))
    texts = [one.text for one in run.incidents]
    assert texts[0] == "all from 1 to 2 replicas, 8 requests"
    second = run.replicas[0][1]
    assert second.since == pytest.approx(1.0)
    assert second.requests == 0
    assert 1.0 < found.gpus < 3.0
    held = sum(one.seconds(0.0, found.seconds) for one in run.replicas[0])
    assert found.gpus == pytest.approx(held / found.seconds)
    assert max(run.timelines[0].replicas) >= 2


def test_one_that_is_given_up_ends_what_it_has() -> None:
    """All requests come at once; as they end, replicas leave, and only when they are empty."""
    rules = (rule(down_after=0.0, least=1, target=4.0),)
    run, found = play(
        (pool(replicas=4, steps_in_flight=1),),
        work("at-once", 16, "uniform:50:500"),
        autoscaling=rules,
    )
    gone = [one for one in run.replicas[0] if one.gone is not None]
    assert gone
    assert found.moved == 0
    assert found.gpus < 4
    assert all(one.gone is not None and one.gone <= found.seconds for one in gone)


def test_a_rule_replaces_what_died() -> None:
    failures = (ReplicaFailure("all", 0, 1.5),)
    run, found = play(
        (pool(),),
        work("fixed", 40, rate=8.0),
        failures=failures,
        autoscaling=(rule(most=2),),
    )
    assert found.requests == 40
    assert [one.up for one in run.replicas[0]][:2] == [False, True]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3@60-120", ReplicaFailure("all", 3, 60.0, 120.0)),
        ("decode:0@1.5", ReplicaFailure("decode", 0, 1.5)),
    ],
)
def test_a_failure_as_it_is_written(text: str, wanted: ReplicaFailure) -> None:
    assert ReplicaFailure.parse(text, "all") == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"failures": (ReplicaFailure("all", 2, 1.0),)},
            "pool all has no replica 2; they count",
        ),
        (
            {"failures": (ReplicaFailure("decode", 0, 1.0),)},
            "pool 'decode' is not there; accepted",
        ),
        ({"autoscaling": (rule(least=3),)}, "all=3:4: it starts with 2 replicas"),
        ({"autoscaling": (rule(), rule())}, "a pool has one rule at most"),
        ({"failover": -1.0}, "failover=-1.0 s must be at least 0"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Deployment((pool(replicas=2),), **changes)
    for text in ("60", "x@1", "1@5-3", "1@1e"):
        with pytest.raises(ConfigError, match="fail="):
            ReplicaFailure.parse(text, "all")
    for text in ("4", "a=1", "1-4"):
        with pytest.raises(ConfigError, match="autoscale="):
            Autoscaling.sizes(text, "all")
    with pytest.raises(ConfigError, match="at least 1 replica"):
        rule(least=0)
