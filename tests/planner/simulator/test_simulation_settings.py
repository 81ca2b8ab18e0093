"""Numbers of `rorqual simulate` that would never end, or do nothing, are refused by a sentence."""

from __future__ import annotations

import math
import random
from typing import Any, get_type_hints

import pytest
from typer.testing import CliRunner

from rorqual.cli.app import app
from rorqual.config.option import options_of
from rorqual.errors import ConfigError
from rorqual.planner.simulator.cost_runner import StepCost
from rorqual.planner.simulator.expert_drift import ExpertDrift
from rorqual.planner.simulator.incidents import Autoscaling
from rorqual.planner.simulator.settings import MOST_REQUESTS, SimulationSettings
from rorqual.planner.simulator.simulator import Deployment
from rorqual.planner.simulator.timeline import MOST_POINTS, Timeline
from rorqual.planner.simulator.workload import (
    Arrivals,
    LengthDistribution,
    SharedPrefix,
    Workload,
)
from tests.planner.simulator.test_simulator import config, pool

SHORT = "--requests 3 --input-len 64 --output-len 4 --layout dp=2,ep=2"


def simulate(text: str) -> Any:
    words = ["simulate", "deepseek-v2-lite", *SHORT.split(), *text.split()]
    return CliRunner().invoke(app, words, catch_exceptions=False)


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as found:
        simulate(text)
    said = str(found.value)
    assert "\n" not in said
    assert "(kind=" not in said
    return said


HINTS = get_type_hints(SimulationSettings)
NUMBERS = [name for name in options_of(SimulationSettings) if HINTS[name] in (float, float | None)]
# checked with what they belong to, which names no flag
ELSEWHERE = {"eplb_threshold"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in ELSEWHERE])
def test_no_setting_is_infinite_or_below_0(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}={value} is "):
        SimulationSettings(**{name: value})


@pytest.mark.parametrize(
    "name",
    ["rate", "burstiness", "seconds", "speed", "interval", "scale_interval", "target_requests"],
)
def test_some_are_above_0(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}=0.0 is out of range"):
        SimulationSettings(**{name: 0.0})


@pytest.mark.parametrize(
    "given",
    [
        {"clients": 1_000_001},
        {"requests": MOST_REQUESTS + 1},
        {"prefix_groups": 1_000_001},
        {"micro_batches": 0},
        {"micro_batches": 65},
        {"max_num_seqs": 0},
        {"max_num_seqs": 1_000_001},
        {"max_num_batched_tokens": 0},
        {"max_model_len": 0},
        {"page_size": 0},
        {"num_pages": 0},
        {"gantt_steps": 0},
        {"gantt_steps": 1001},
        {"memory_utilization": 0.0},
        {"memory_utilization": 1.5},
    ],
)
def test_counts_have_bounds(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}={value} is out of range"):
        SimulationSettings(**given)


def test_time_that_does_not_end_and_requests_that_do_not() -> None:
    with pytest.raises(ConfigError, match="seconds=inf must be above 0 and finite"):
        Workload(Arrivals(rate=5), seconds=math.inf)
    with pytest.raises(ConfigError, match="makes 5,000,000,000 requests; accepted: 10,000,000"):
        Workload(Arrivals(rate=5), seconds=1e9)
    assert Workload(Arrivals(rate=5), seconds=1e9, requests=3).requests == 3
    for name in ("seconds", "speed"):
        with pytest.raises(ConfigError, match=f"{name}=nan must be above 0"):
            Workload(requests=1, **{name: math.nan})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("uniform:100:50", "lengths from 100 to 50 are out of range"),
        ("uniform:0:5", "lengths from 0 to 5 are out of range"),
        ("uniform:nan:5", "'uniform:nan:5' are not understood; accepted: N, uniform:LOW:HIGH"),
        ("uniform:1:inf", "'uniform:1:inf' are not understood"),
        ("lognormal:nan:1", "lengths of nan tokens with a spread of 1 are out of range"),
        ("lognormal:inf:1", "lengths of inf tokens"),
        ("lognormal:50:nan", "with a spread of nan"),
        ("lognormal:50:-1", "with a spread of -1"),
        ("0", "lengths of 0 tokens"),
        ("normal:1:2", "'normal:1:2' are not understood"),
    ],
)
def test_lengths_are_said_in_words(text: str, said: str) -> None:
    assert said in refused(f"--input-len {text}")
    with pytest.raises(ConfigError, match="lengths of kind 'beta' are not known"):
        LengthDistribution("beta")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((2, 0), "2 shared prefixes of 0 tokens: prefix_groups and prefix_len go together"),
        ((-1, 2), "groups=-1 must be at least 0"),
        ((2, 2, math.nan), "exponent=nan must be at least 0"),
    ],
)
def test_prefixes_are_said_in_words(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SharedPrefix(*given)


def test_prefixes_are_drawn_by_their_popularity() -> None:
    """Each draw alone, as many as there are would take long to add up every time."""
    load = Workload(prefix=SharedPrefix(100, 8, 1.2), requests=50)
    found = [job.blocks[0][0] for job in load.jobs(7)]
    draw = random.Random("7 prefixes")
    weights = [(group + 1) ** -1.2 for group in range(100)]
    assert [block & 0xFFFFF for block in found] == [
        draw.choices(range(100), weights)[0] for _ in found
    ]


# ---- ranks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2=2", "a replica has no such rank; .* count from 0 to 1"),
        ("7=2", "a replica has no such rank"),
        ("-1=2", "ranks count from 0"),
        ("0=nan", "a slow rank's factor is 1 to 1,000,000"),
        ("0=inf", "a slow rank's factor is 1 to 1,000,000"),
        ("0=0.5", "a slow rank's factor is 1 to 1,000,000"),
    ],
)
def test_a_slow_rank_is_there(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^slow='{text}': .*{said}"):
        simulate(f"--slow {text}")


def test_slow_ranks_of_either_pool() -> None:
    apart = "--prefill-replicas 1 --prefill-layout tp=1 --replicas 1"
    assert simulate(f"{apart} --slow 1=2").exit_code == 0
    assert "count from 0 to 1" in refused(f"{apart} --slow 2=2")


# ---- size and length of a run


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--replicas 1000000000", "all replicas have 2,000,000,000 ranks; accepted: 8,192"),
        ("--count 2000000", "all replicas have 2,000,000 ranks"),
        ("--autoscale 1:100000000", "all replicas have 200,000,000 ranks"),
        ("--num-pages 100000000", "the caches of all ranks have 200,000,000 pages"),
    ],
)
def test_a_deployment_fits_in_memory(text: str, said: str) -> None:
    assert said in refused(text)


def test_a_run_has_an_end() -> None:
    for text in ("--rate 1e-300", "--interval 1e-300"):
        assert "the run has more than 1,000,000 points of interval=" in refused(text)
    timeline = Timeline(("GPU",), 0.5)
    timeline.sample(100.0, 0, 0, 0, 1)
    assert len(timeline.waiting) == 201
    cost = StepCost(1.0, 1.0, (1.0,))
    for later in (MOST_POINTS / 2, math.nan, math.inf):
        with pytest.raises(ConfigError, match="the run has more than"):
            timeline.sample(later, 0, 0, 0, 1)
        with pytest.raises(ConfigError, match="the run has more than"):
            timeline.step(later, cost, ())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rules_and_loads_have_finite_times(value: float) -> None:
    for name in ("target", "interval", "down_after", "start_seconds"):
        given = {"target": 1.0, name: value}
        with pytest.raises(ConfigError, match=f"autoscaling's {name}={value} must be"):
            Autoscaling("all", 1, 2, **given)
    with pytest.raises(ConfigError, match=f"failover={value} s must be at least 0"):
        Deployment((pool(scheduler=config()),), failover=value)
    with pytest.raises(ConfigError, match=f"expert_load_seconds={value} must be above 0"):
        ExpertDrift((), 2, 2, period=value)
