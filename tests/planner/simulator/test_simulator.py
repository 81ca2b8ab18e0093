"""The simulator's events: queueing theory, conservation, determinism, and every feature where
its answer can be worked out by hand."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import pytest

from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.engine.scheduling.sequence import Sequence
from rorqual.errors import ConfigError
from rorqual.planner.simulator import simulated_rank as rank_module
from rorqual.planner.simulator import sleeping_rows
from rorqual.planner.simulator.cost_runner import (
    ConstantCosts,
    HostTimes,
    MeasuredCosts,
    StepCost,
    StepLoad,
)
from rorqual.planner.simulator.micro_batches import Task
from rorqual.planner.simulator.results import Outcome, as_json, outcome, spread, weighted_spread
from rorqual.planner.simulator.simulator import Deployment, Pool, Simulation
from rorqual.planner.simulator.sleeping_rows import SleepingScheduler
from rorqual.planner.simulator.workload import (
    Arrival,
    Arrivals,
    LengthDistribution,
    SharedPrefix,
    Workload,
)


def config(**changes: Any) -> SchedulerConfig:
    values = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 600,
        "num_pages": 400,
        "page_size": 16,
    }
    return SchedulerConfig(**{**values, "max_waiting": 10**6, **changes})


def pool(costs: Any = None, **changes: Any) -> Pool:
    scheduler = changes.pop("scheduler", None) or config()
    return Pool("all", scheduler, costs or ConstantCosts(0.01), **changes)


@dataclass(frozen=True)
class Jobs(Workload):
    """Just these."""

    given: ReadOnly[Arrival] = ()

    def jobs(self, seed: int) -> Any:
        return iter(self.given)


def work(
    kind: str = "at-once",
    requests: int = 20,
    prompt: str = "100",
    output: str = "20",
    **changes: Any,
) -> Workload:
    arrivals = {
        name: changes.pop(name) for name in ("rate", "burstiness", "clients") if name in changes
    }
    return Workload(
        Arrivals(kind, **arrivals),
        LengthDistribution.parse(prompt),
        LengthDistribution.parse(output),
        requests=requests,
        **changes,
    )


def play(one: Pool, load: Workload, seed: int = 0, **changes: Any) -> tuple[Simulation, Outcome]:
    run = Simulation(Deployment((one,), **changes), load, seed).run()
    return run, outcome(run)


@dataclass(frozen=True)
class PerToken:
    """A second for each token of the rank with the most of them; `stage` is the part of it after
    which the next step may enter."""

    part: float = 1.0
    resources: ClassVar[tuple[str, ...]] = ("busy",)

    def step(self, loads: ReadOnly[StepLoad], num_speculative_tokens: int) -> StepCost:
        seconds = float(max(load.tokens(num_speculative_tokens) for load in loads))
        return StepCost(seconds, seconds * self.part, (seconds,))

    def tasks(self, loads: ReadOnly[StepLoad], num_speculative_tokens: int) -> list[Task]:
        return [Task("busy", "step", 0, 0.0, self.step(loads, num_speculative_tokens).seconds)]


# ---- queueing


def single_server() -> Pool:
    return pool(
        ConstantCosts(1.0),
        scheduler=config(
            max_num_seqs=1, max_num_batched_tokens=8, num_pages=40, prefix_caching=False
        ),
    )


@pytest.mark.longest
@pytest.mark.exhaustive
def test_one_server_of_constant_time_waits_as_an_m_d_1_queue() -> None:
    """rho / 2 (1 - rho) of a service (Pollaczek and Khinchine); other seeds of so many requests
    differ by about 1 %."""
    _, found = play(single_server(), work("poisson", 100_000, "4", "1", rate=0.5))
    assert found.queue.mean == pytest.approx(0.5 / (2 * (1 - 0.5)), rel=0.03)
    assert found.ttft.mean == pytest.approx(found.queue.mean + 1.0)


@pytest.mark.parametrize("load", [0.3, 0.7, 0.95])
def test_every_wait_follows_from_the_one_before(load: float) -> None:
    """Lindley's recursion: a request waits as long as the one before it waited and was served,
    less the time between the two."""
    run, _ = play(single_server(), work("poisson", 3000, "4", "1", rate=load))
    wait = 0.0
    before = run.records[0].arrival
    for record in run.records:
        wait = max(0.0, wait + 1.0 - (record.arrival - before)) if record.job.number else 0.0
        before = record.arrival
        assert (record.admitted or 0.0) - record.arrival == pytest.approx(wait, abs=1e-6)


def test_closed_loop_keeps_its_clients_busy() -> None:
    """Little's law: clients = rate x time in the system."""
    _, found = play(pool(), work("closed", 400, output="uniform:5:35", clients=6))
    assert found.requests / found.seconds * found.e2e.mean == pytest.approx(6, rel=0.02)
    run, _ = play(pool(), work("closed", 60, clients=3))
    assert max(run.timelines[0].running) <= 3


def test_fixed_arrivals_below_capacity_do_not_wait() -> None:
    run, found = play(pool(steps_in_flight=1), work("fixed", 10, rate=1.0))
    assert found.queue.p99 == 0
    assert found.ttft.mean == pytest.approx(0.01)
    assert found.e2e.mean == pytest.approx(0.2)
    assert [record.arrival for record in run.records] == [float(i) for i in range(10)]


def test_bursty_arrivals_wait_longer() -> None:
    one = pool(ConstantCosts(1.0), scheduler=config(max_num_seqs=1, max_num_batched_tokens=128))
    waits = [
        play(one, work("gamma", 4000, output="1", rate=0.5, burstiness=b))[1].queue.mean
        for b in (0.25, 1.0, 4.0)
    ]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 2 * waits[1]


# ---- what must hold in every run


def test_a_run_depends_on_its_seed_alone() -> None:
    one = pool(scheduler=config(num_speculative_tokens=1), acceptance=(0.6,))
    load = work(
        "poisson",
        60,
        "uniform:20:200",
        "lognormal:20:0.5",
        rate=20.0,
        prefix=SharedPrefix(3, 32, 1.0),
    )
    first, again, other = (json.dumps(as_json(*play(one, load, seed), {})) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("num_speculative_tokens", [0, 2])
@pytest.mark.parametrize("pages", [30, 400])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_counted_steps_change_nothing(
    num_speculative_tokens: int, pages: int, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step through plan and update comes out the same, with preemptions as well."""
    one = pool(
        MeasuredCosts({(0, 100): 0.02, (8, 0): 0.01, (8, 100): 0.03}),
        scheduler=config(
            num_pages=pages,
            max_model_len=300,
            num_speculative_tokens=num_speculative_tokens,
            chunked_prefill_size=64,
        ),
        acceptance=(0.7, 0.4)[:num_speculative_tokens],
        replicas=2,
        steps_in_flight=in_flight,
    )
    load = work(
        "poisson", 80, "uniform:20:110", "uniform:1:140", rate=60.0, prefix=SharedPrefix(4, 40)
    )
    fast = as_json(*play(one, load), {})
    counts = []
    monkeypatch.setattr(rank_module, "SLEEPING", False)
    assert num_speculative_tokens or fast == as_json(*play(one, load), {}), "counted in runs"
    monkeypatch.setattr(rank_module, "decode_run", lambda scheduler: counts.append(1) or 0)
    slow = as_json(*play(one, load), {})
    assert counts
    assert fast == slow
    assert (fast["figures"]["preemptions"] > 0) == (pages == 30)


def test_a_lost_token_or_page_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts, where runs are taken in one call, and without, where requests sleep."""
    drafting = pool(scheduler=config(num_speculative_tokens=1), acceptance=(0.5,))
    advance = rank_module.advance

    def twice(scheduler: Scheduler, count: int, tokens: Any, accepted: Any) -> None:
        advance(scheduler, count, tokens, accepted)
        scheduler.prefix.take()

    monkeypatch.setattr(rank_module, "advance", twice)
    with pytest.raises(AssertionError, match="pages are lost"):
        play(drafting, work())
    monkeypatch.setattr(rank_module, "advance", advance)

    def short(start: int, stop: int) -> list[int]:
        return list(range(start, max(start + 1, stop - 1)))

    for module in (rank_module, sleeping_rows):
        monkeypatch.setattr(module, "filler", short)
    for one in (drafting, pool()):
        with pytest.raises(AssertionError):
            play(one, work())
    monkeypatch.undo()
    wake = SleepingScheduler.wake

    def greedy(scheduler: SleepingScheduler, sequence: Sequence) -> None:
        wake(scheduler, sequence)
        scheduler.prefix.take()

    monkeypatch.setattr(SleepingScheduler, "wake", greedy)
    with pytest.raises(AssertionError, match="pages are lost"):
        play(pool(), work())


def test_preempted_requests_are_computed_again_and_still_complete() -> None:
    run, found = play(
        pool(scheduler=config(num_pages=30, max_model_len=300, prefix_caching=False)),
        work(output="120"),
    )
    assert found.preemptions > 0
    assert found.recomputed_tokens > 0
    assert found.output_tokens == 20 * 120
    assert found.itl is not None
    assert found.itl.p99 > found.itl.p50, "a preempted request waits between two tokens"
    assert sum(record.computed for record in run.records) == 20 * 100 + found.recomputed_tokens


def test_a_request_too_long_is_refused_and_the_others_served() -> None:
    _, found = play(
        pool(scheduler=config(max_model_len=150)),
        work("closed", 40, "uniform:100:200", "5", clients=2),
    )
    assert 0 < found.refused < 40
    assert found.requests + found.refused == 40
    with pytest.raises(ConfigError, match="could be served"):
        play(pool(scheduler=config(max_model_len=50)), work())


# ---- the scheduler's part


def test_shared_prefixes_are_computed_once() -> None:
    """Two prefixes of four full pages; only the first request of each computes its prefix."""
    load = work("fixed", 12, "30", "4", rate=1.0, prefix=SharedPrefix(2, 64))
    run, found = play(pool(), load)
    assert found.reused_tokens == 10 * 64
    assert sorted(record.computed for record in run.records) == [30] * 10 + [94] * 2
    assert play(pool(scheduler=config(prefix_caching=False)), load)[1].reused_tokens == 0


@pytest.mark.parametrize("num_speculative_tokens", [0, 1])
def test_a_prompt_whose_last_token_alone_is_new_begins_as_one_that_decodes(
    num_speculative_tokens: int,
) -> None:
    scheduler = config(num_speculative_tokens=num_speculative_tokens)
    rates = (0.5,) * num_speculative_tokens
    load = work("fixed", 12, "1", "9", rate=1.0, prefix=SharedPrefix(1, 64))
    run, found = play(pool(scheduler=scheduler, acceptance=rates), load)
    assert found.reused_tokens == 11 * 64
    assert [record.computed for record in run.records] == [65] + [1] * 11
    assert found.output_tokens == 12 * 9
    assert found.ttft.p99 == pytest.approx(0.01), "a step each"


def test_chunked_prefill_bounds_the_step() -> None:
    """Per token a second: nobody's step is longer than its budget."""
    _, whole = play(
        pool(PerToken(), scheduler=config(max_num_batched_tokens=512)),
        work(requests=4, prompt="400"),
    )
    _, cut = play(
        pool(PerToken(), scheduler=config(max_num_batched_tokens=32)),
        work(requests=4, prompt="400"),
    )
    assert whole.itl is not None
    assert cut.itl is not None
    assert cut.itl.p99 <= 33 < whole.itl.p99, (
        "two chunks of odd length count as two of the same length"
    )


def test_speculation_brings_as_many_tokens_as_its_rates_say() -> None:
    """The second draft counts only where the first is right: 1 + a + a b tokens a step."""
    one = pool(scheduler=config(num_speculative_tokens=2, max_num_seqs=16), acceptance=(0.8, 0.5))
    _, found = play(one, work(requests=200, output="200"))
    assert found.accepted == pytest.approx((0.8, 0.4), abs=0.01)
    assert found.tpot is not None
    assert found.tpot.mean == pytest.approx(0.01 / (1 + 0.8 + 0.4), rel=0.02)
    assert found.itl is not None
    assert found.itl.p50 == pytest.approx(0.01), "a step's tokens come together"


def test_with_two_steps_in_flight_a_request_joins_a_step_later() -> None:
    """The second request arrives during a step that ends at 4; a step that is planned already
    runs until 5 first."""
    scheduler = config(max_num_batched_tokens=512)
    load = Workload(
        Arrivals("fixed", 1 / 3.5),
        LengthDistribution(mean=10),
        LengthDistribution(mean=20),
        requests=2,
    )
    admitted = [
        play(pool(ConstantCosts(1.0), scheduler=scheduler, steps_in_flight=n), load)[0]
        .records[1]
        .admitted
        for n in (1, 2)
    ]
    assert admitted == [4.0, 5.0]


# ---- replicas, ranks and pools


def test_ranks_of_a_replica_step_together_and_replicas_do_not() -> None:
    """A prompt of 100 and one of 50 tokens: together both wait for the longer, apart each for
    itself."""
    scheduler = config(max_num_batched_tokens=512)
    load = Workload(
        Arrivals("at-once"),
        LengthDistribution("uniform", 75, 50, 100),
        LengthDistribution(mean=1),
        requests=2,
    )
    prompts = sorted(job.prompt for job in load.jobs(0))
    assert prompts[0] != prompts[1]
    together, _ = play(pool(PerToken(), scheduler=scheduler, ranks=2), load)
    apart, _ = play(pool(PerToken(), scheduler=scheduler, replicas=2), load)
    assert [record.last for record in together.records] == [prompts[1]] * 2
    assert sorted(record.last or 0 for record in apart.records) == prompts


def test_requests_go_where_fewest_tokens_live() -> None:
    load = work("poisson", 600, "uniform:10:400", "lognormal:50:1", rate=35.0)
    costs = MeasuredCosts({(0, 100): 0.02, (8, 0): 0.01, (8, 100): 0.03})
    times = {
        routing: play(pool(costs, replicas=4), load, routing=routing)[1].e2e.mean
        for routing in ("live-tokens", "round-robin")
    }
    assert times["live-tokens"] < 0.9 * times["round-robin"]


def test_a_pipeline_takes_a_group_at_a_time() -> None:
    """Two groups of a two-stage pipeline: the second enters when the first leaves the first
    stage, and both are through after 1.5 steps."""
    scheduler = config(max_num_batched_tokens=512)
    run, _ = play(pool(PerToken(0.5), scheduler=scheduler, groups=2), work(requests=2, output="1"))
    assert [record.last for record in run.records] == [100.0, 150.0]
    assert [record.admitted for record in run.records] == [0.0, 50.0]


def apart(seconds: float = 5.0, replicas: int = 1) -> Deployment:
    prefill = replace(pool(ConstantCosts(1.0), first_only=True, replicas=replicas), name="prefill")
    decode = replace(
        pool(
            ConstantCosts(0.1),
            remote=True,
            scheduler=config(max_num_batched_tokens=8000, prefix_caching=False),
        ),
        name="decode",
    )
    return Deployment((prefill, decode), lambda tokens: seconds * tokens / 100)


def test_prompts_and_decoding_on_cards_of_their_own() -> None:
    """1 s for the prompt, 5 s for its cache, 19 more tokens of 0.1 s; none of the prompt is
    computed twice."""
    run = Simulation(apart(), work(requests=1)).run()
    found = outcome(run)
    assert found.ttft.mean == pytest.approx(1.0)
    assert found.e2e.mean == pytest.approx(1 + 5 + 1.9)
    assert run.records[0].computed == 100
    assert run.records[0].received == 101
    assert found.itl is not None
    assert sum(run.timelines[1].gaps.values()) == 19
    assert max(run.timelines[1].gaps) == pytest.approx(5.1), (
        "the second token waits for the transfer"
    )
    one_token = outcome(Simulation(apart(), work(requests=1, output="1")).run())
    assert one_token.e2e.mean == pytest.approx(1.0), "nothing is left to decode"


@pytest.mark.parametrize("output", [1, 20])
def test_a_first_token_that_is_drawn_where_the_answer_is(output: int) -> None:
    """1 s for the prompt, 4.95 s for the cache of all but its last token, all tokens of 0.1 s."""
    deployment = replace(apart(), redraws=True)
    run = Simulation(deployment, work(requests=1, output=str(output))).run()
    found = outcome(run)
    assert found.output_tokens == output
    assert found.ttft.mean == pytest.approx(1 + 4.95 + 0.1)
    assert found.e2e.mean == pytest.approx(found.ttft.mean + 0.1 * (output - 1))
    assert sum(run.timelines[1].gaps.values()) == output - 1
    assert max(run.timelines[1].gaps, default=0.1) == pytest.approx(0.1)


def test_a_link_carries_one_cache_at_a_time() -> None:
    """Two prompts of one step: the second cache leaves after the first; from two replicas they
    go side by side."""
    ends = []
    for replicas in (1, 2):
        run = Simulation(apart(replicas=replicas), work(requests=2)).run()
        ends.append(sorted(record.last or 0 for record in run.records))
    assert ends[0] == pytest.approx([7.9, 12.9])
    assert ends[1] == pytest.approx([7.9, 7.9])


# ---- costs and figures


def chunked(itl_ms: str) -> list[tuple[int, int]]:
    """(rows, prompt tokens) of the steps while a prompt comes to a request that decodes."""
    loads: list[tuple[int, int]] = []

    class Watched(MeasuredCosts):
        def step(self, found: ReadOnly[StepLoad], drafts: int) -> StepCost:
            loads.extend((load.rows, load.prompts * load.new) for load in found)
            return super().step(found, drafts)

    table = {(r, p): 0.001 * r + 0.0001 * p for r in (0, 1) for p in (0, 256) if r or p}
    rows = [(0.0, 16, 60), (0.02, 256, 20)]
    jobs = [Arrival(number, *row) for number, row in enumerate(rows)]
    Simulation(
        Deployment((pool(Watched(table), itl_ms=itl_ms),)), Jobs(requests=9, given=jobs), 0
    ).run()
    return loads


def test_chunks_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt beside a request that decodes takes one step, or as many as the engine's rule has
    it take, which sees simulated seconds; sleeping requests are in its counts."""
    whole = chunked("off")
    assert [tokens for rows, tokens in whole if rows and tokens] == [255, 1]
    kept = chunked("5")
    together = [tokens for rows, tokens in kept if rows and tokens]
    assert sum(together) == 256
    assert len(together) > 5
    assert max(together) <= 50, "five milliseconds, a tenth of one a token"
    monkeypatch.setattr(rank_module, "SLEEPING", False)
    assert chunked("5") == kept
    assert chunked("off") == whole
    with pytest.raises(ConfigError, match="itl_ms='-1'; accepted: off, auto"):
        pool(itl_ms="-1")


def test_work_beside_the_steps_delays_the_next_one() -> None:
    """Steps of 10 ms: after each that brought a decoding request a token 3 ms and 2 for each, and
    5 ms for each request that comes while a step runs."""
    host = HostTimes(step=0.003, row=0.002, request=0.005, sent=0.1, received=0.1)
    jobs = [Arrival(0, 0.0, 16, 4), Arrival(1, 0.005, 16, 1)]
    run = Simulation(Deployment((pool(host=host),)), Jobs(requests=9, given=jobs), 0).run()
    first, second = run.records
    # prompt 0 to 10, work to 15, both to 25, work to 30, then 10 and 5 alternate
    assert first.first == pytest.approx(0.010)
    assert second.first == pytest.approx(0.025)
    assert first.last == pytest.approx(0.055)
    alone = Simulation(Deployment((pool(host=host),)), Jobs(requests=9, given=jobs[:1]), 0).run()
    assert alone.records[0].last == pytest.approx(0.010 + 3 * 0.010 + 2 * 0.005)
    with pytest.raises(ConfigError, match="sent=-1 s must be at least 0"):
        HostTimes(sent=-1)


def test_caches_take_time_of_both_servers() -> None:
    """Prompts of 10 ms one after another: 4 ms more for each whose cache is sent."""
    host = HostTimes(sent=0.004)
    pools = (
        replace(pool(first_only=True, host=host), name="prefill"),
        replace(pool(remote=True, host=HostTimes(received=0.02)), name="decode"),
    )
    one = replace(pools[0].scheduler, max_num_seqs=1)
    pools = (replace(pools[0], scheduler=one), pools[1])
    jobs = [Arrival(number, 0.0, 16, 3) for number in range(3)]
    run = Simulation(Deployment(pools, lambda tokens: 0.0), Jobs(requests=9, given=jobs), 0).run()
    assert [record.first for record in run.records] == pytest.approx([0.010, 0.024, 0.038])
    # its first decode step to 20, then what the pages took
    assert run.records[0].last == pytest.approx(0.050)


def test_measured_costs_are_linear_between_points() -> None:
    costs = MeasuredCosts({(0, 100): 2.0, (10, 0): 1.0, (10, 100): 4.0})
    assert costs.at(5, 0) == 0.5
    assert costs.at(0, 50) == 1.0
    assert costs.at(5, 50) == pytest.approx(1.75)
    assert costs.at(20, 0) == 2.0, "beyond the last point with its slope"
    assert costs.step([StepLoad(10, 40), StepLoad(0, 0, 2, 50, 0)], 0).seconds == 2.0, (
        "the slowest rank"
    )
    with pytest.raises(ConfigError, match=r"lack .*\(10, 100\)"):
        MeasuredCosts({(0, 100): 2.0, (10, 0): 1.0})


def test_percentiles() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == spread(range(1, 6))
    assert spread([1, 2, 3, 4, 5]).p90 == pytest.approx(4.6)
    from collections import Counter

    assert weighted_spread(Counter({1.0: 89, 2.0: 9, 7.0: 2})).p90 == 2.0
    assert weighted_spread(Counter({1.0: 89, 2.0: 9, 7.0: 2})).p99 == 7.0


def test_utilization_and_queues_over_time() -> None:
    """One request every 2 s that takes 1 s: half the time is spent in steps."""
    run = Simulation(
        Deployment((pool(ConstantCosts(1.0), steps_in_flight=1),)),
        work("fixed", 100, output="1", rate=0.5),
        0,
        10.0,
    ).run()
    found = outcome(run)
    assert found.utilization["all"]["steps"] == pytest.approx(0.5, rel=0.01)
    series = run.timelines[0].series()
    assert series["utilization"]["busy"][:19] == [0.5] * 19
    assert len(series["waiting"]) == len(series["seconds"])


def test_wrong_settings_are_named() -> None:
    for make, text in (
        (lambda: pool(replicas=0), "replicas=0"),
        (lambda: pool(steps_in_flight=3), "steps_in_flight=3"),
        (lambda: pool(acceptance=(0.5,)), "acceptance"),
        (lambda: Deployment((pool(),), routing="random"), "live-tokens, round-robin"),
        (
            lambda: outcome(Simulation(Deployment((pool(),)), work()).run(), warm_up=9.0),
            "warm_up=9.0",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            make()


@pytest.mark.exhaustive
def test_it_is_much_faster_than_the_real_thing() -> None:
    """Ten minutes of a busy rank in well under a second of this processor for each."""
    start = time.process_time()
    _run, found = play(
        pool(scheduler=config(max_num_seqs=64, num_pages=4000)),
        work("poisson", 3000, output="300", rate=5.0),
    )
    assert found.seconds > 500
    assert time.process_time() - start < 10


# ---- workloads


def test_traces(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2000, "input_length": 50, "output_length": 4, "hash_ids": [7, 8]},
        {"timestamp": 1000, "input_length": 48, "output_length": 3, "hash_ids": [7, 9]},
        {"timestamp": 4000, "input_length": 40, "output_length": 2, "hash_ids": []},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    load = Workload(trace=str(path), trace_block=32, speed=2.0)
    jobs = list(load.jobs(0))
    assert [(job.arrival, job.prompt, job.output) for job in jobs] == [
        (0.0, 48, 3),
        (0.5, 50, 4),
        (1.5, 40, 2),
    ]
    assert jobs[0].tokens()[:32] == jobs[1].tokens()[:32]
    assert jobs[0].tokens()[32] != jobs[1].tokens()[32]
    assert [len(job.tokens()) for job in jobs] == [48, 50, 40]
    run, _ = play(pool(), load)
    assert [record.reused for record in run.records] == [0, 32, 0]
    path.write_text('{"timestamp": 1, "input_length": 0, "output_length": 3}')
    with pytest.raises(ConfigError, match="line 1"):
        list(load.jobs(0))


def test_arrivals_and_lengths_have_their_means() -> None:
    for kind, burstiness in (("poisson", 1.0), ("gamma", 0.5), ("fixed", 1.0)):
        jobs = list(
            Workload(
                Arrivals(kind, 20.0, burstiness),
                LengthDistribution.parse("lognormal:200:0.8"),
                seconds=500,
            ).jobs(0)
        )
        assert len(jobs) == pytest.approx(10_000, rel=0.05)
        assert fmean(job.prompt for job in jobs) == pytest.approx(200, rel=0.05)
    drawn = {
        LengthDistribution.parse("uniform:3:5").draw(random.Random(seed)) for seed in range(50)
    }
    assert drawn == {3, 4, 5}
    for text in ("many", "uniform:5:3", "lognormal:10", "0", "beta:1:2"):
        with pytest.raises(ConfigError):
            LengthDistribution.parse(text)
    with pytest.raises(ConfigError, match="need a number of requests"):
        Workload(Arrivals("at-once"))
