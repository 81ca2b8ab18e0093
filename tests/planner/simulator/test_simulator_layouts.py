"""Simulated steps of real layouts: they cost what the cost model says, overlap what can overlap,
and are drawn as they were played."""

from __future__ import annotations

import itertools
import json
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rorqual.cli.app import app
from rorqual.config.hardware import load_device
from rorqual.config.hf import read_config_file
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.models.hub import model_folder
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.costs.routing import Routing
from rorqual.planner.simulator import gantt, pools
from rorqual.planner.simulator.cost_runner import IDLE, StepLoad
from rorqual.planner.simulator.layout_costs import ModelCosts, SplitCosts, coarse, rounded, shared
from rorqual.planner.simulator.micro_batches import Stage, makespan, play
from rorqual.planner.simulator.results import Outcome, outcome
from rorqual.planner.simulator.settings import SimulationSettings
from rorqual.planner.simulator.simulator import Deployment, Simulation
from rorqual.planner.simulator.workload import Arrivals, LengthDistribution, Workload
from rorqual.planner.timing.page_times import PageTimes
from rorqual.planner.timing.profiles import load_profile
from rorqual.planner.timing.roofline import StepModel
from rorqual.planner.timing.split import split_step
from rorqual.platforms.cuda import CudaPlatform
from rorqual.platforms.npu import NpuPlatform

pytestmark = pytest.mark.exhaustive

R1 = read_config_file(model_folder("deepseek-v3", weights=False))
WIDE = ParallelConfig(dp=32, ep=32)


def model(sizes: ParallelConfig = WIDE, profile: str = "rorqual", **changes: Any) -> StepModel:
    return StepModel(R1, sizes, load_device("h200"), load_profile(profile), **changes)


def simulated(
    deployment: Deployment, rate: float, seconds: float = 10.0, **lengths: str
) -> tuple[Simulation, Outcome]:
    prompt = LengthDistribution.parse(lengths.get("prompt", "1000"))
    output = LengthDistribution.parse(lengths.get("output", "100"))
    run = Simulation(
        deployment, Workload(Arrivals("poisson", rate), prompt, output, seconds=seconds), 1
    ).run()
    return run, outcome(run)


def engine(**changes: Any) -> pools.PoolSettings:
    return pools.PoolSettings(
        **{"context": 1100, "max_model_len": 1200, "max_num_batched_tokens": 2048, **changes}
    )


# ---- micro-batches


def test_two_chains_take_turns_on_two_resources() -> None:
    chain = [Stage("compute", "a", 2.0), Stage("network", "b", 2.0), Stage("compute", "c", 1.0)]
    assert makespan([chain]) == 5.0
    tasks = play([chain, chain])
    # compute: a0 0-2, a1 2-4, c0 4-5, c1 6-7; network: b0 2-4, b1 4-6
    assert max(task.end for task in tasks) == 7.0
    for resource in ("compute", "network"):
        spans = sorted((task.start, task.end) for task in tasks if task.resource == resource)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), (
            "one at a time"
        )


@pytest.mark.parametrize("load", [StepLoad(64, 1500), StepLoad(24, 1200, 1, 1000, 0)])
def test_one_batch_in_flight_costs_what_the_cost_model_says(load: StepLoad) -> None:
    costs = ModelCosts(model(), exact=True)
    one = model()
    decode = BatchShape.decode(load.rows, load.context)
    prefill = (BatchShape(1, 1000, 0),) if load.prompts else ()
    whole = one.step(GroupWork(decode, prefill, stage_tokens=32 * load.tokens(0)))
    found = costs.step([load] * 32, 0)
    assert found.seconds == whole.seconds
    assert found.stage == whole.stage
    assert max(task.end for task in costs.tasks([load] * 32, 0)) == pytest.approx(
        sum(item.seconds for item in whole.items)
    )
    assert 0 < max(found.busy) <= found.seconds


def test_two_batches_in_flight_hide_the_network() -> None:
    """Never faster than either resource alone, nor slower than one after the other."""
    loads = [StepLoad(256, 1500)] * 32
    costs = ModelCosts(model(), micro_batches=2)
    tasks = costs.tasks(loads, 0)
    busy = {
        name: sum(task.end - task.start for task in tasks if task.resource == name)
        for name in ("compute", "network")
    }
    assert max(busy.values()) <= costs.step(loads, 0).seconds < 0.95 * sum(busy.values())
    assert {task.batch for task in tasks} == {0, 1}


def test_micro_batches_share_the_work() -> None:
    assert shared(StepLoad(5, 100), 2) == [StepLoad(2, 100), StepLoad(3, 100)]
    assert shared(StepLoad(1, 100, 2, 10, 30), 2) == [
        StepLoad(0, 0, 1, 10, 30),
        StepLoad(1, 100, 1, 10, 35),
    ]
    assert sum(piece.tokens(0) for piece in shared(StepLoad(7, 9, 3, 11, 0), 4)) == 7 + 33


@pytest.mark.parametrize("placement", ["experts", "layers"])
def test_experts_apart_take_as_long_as_the_planner_says(placement: str) -> None:
    """Equal micro-batches of even loads; the same tasks are drawn."""
    one = model(ParallelConfig(), "roofline")
    gpus = (32, 32, placement)
    shares = []
    for batches in (1, 2, 4):
        costs = SplitCosts(one, *gpus, micro_batches=batches)
        loads = [StepLoad(16 * batches, 1536)] * 32
        found = costs.step(loads, 0)
        planned = split_step(one, GroupWork(BatchShape.decode(16, 1536)), *gpus, batches)
        assert found.seconds == pytest.approx(planned.seconds)
        assert [busy / found.seconds for busy in found.busy] == pytest.approx(planned.schedule.busy)
        tasks = costs.tasks(loads, 0)
        assert max(task.end for task in tasks) == pytest.approx(found.seconds)
        assert {task.batch for task in tasks} == set(range(batches))
        shares.append(max(found.busy) / found.seconds)
    assert shares == sorted(shares), "more micro-batches leave the busiest less idle"
    assert shares[-1] > 1.2 * shares[0]


# ---- rounding, stragglers, imbalance, network


def test_rounding() -> None:
    for value in range(17):
        assert rounded(value, 4) == value
    for value in range(17, 5000, 7):
        assert abs(rounded(value, 5) / value - 1) <= 1 / 32
        assert abs(rounded(value, 4) / value - 1) <= 1 / 16
    assert coarse(IDLE) == IDLE


def test_rounding_costs_little() -> None:
    """Against every step asked for as it is."""
    figures = []
    for exact in (False, True):
        deployment = pools.together(model(ParallelConfig(tp=8)), engine(), 1)
        pool = replace(
            deployment.pools[0], costs=ModelCosts(model(ParallelConfig(tp=8)), exact=exact)
        )
        figures.append(
            simulated(replace(deployment, pools=(pool,)), 4.0, 4.0, prompt="uniform:300:1000")[1]
        )
    for name in ("ttft", "tpot", "e2e"):
        assert getattr(figures[0], name).mean == pytest.approx(
            getattr(figures[1], name).mean, rel=0.02
        )


def test_a_slow_rank_holds_up_the_others() -> None:
    """All of its time but the messages' grows by the factor, for every rank of its replica."""
    loads = [StepLoad(64, 1500)] * 32
    one = model()
    sent = one.step(GroupWork(BatchShape.decode(64, 1536), stage_tokens=2048)).by("limiter")[
        "network"
    ]
    plain = ModelCosts(one).step(loads, 0).seconds
    slow = ModelCosts(one, slow={5: 1.5}).step(loads, 0).seconds
    assert slow == pytest.approx(sent + 1.5 * (plain - sent))
    assert ModelCosts(one, slow={40: 2.0}).step(loads, 0).seconds == plain, "no such rank"
    tasks = ModelCosts(one, slow={5: 1.5}).tasks(loads, 0)
    assert max(task.end for task in tasks) == pytest.approx(slow, rel=0.01)


def test_uneven_experts_make_steps_longer() -> None:
    counts = tuple(float(1 + (expert < 8) * 40) for expert in range(256))
    seconds = [
        ModelCosts(model(routing=routing)).step([StepLoad(64, 1500)] * 32, 0).seconds
        for routing in (Routing(), Routing("zipf", 0.6), Routing("recorded", counts=counts))
    ]
    assert seconds == sorted(seconds)
    assert seconds[2] > 1.05 * seconds[0]


def test_a_slower_network_makes_steps_longer() -> None:
    device = load_device("h200")
    slow = replace(device, network=replace(device.network, bandwidth=device.network.bandwidth / 8))
    one = model(profile="roofline")
    loads = [StepLoad(256, 1500)] * 32
    plain, longer = (ModelCosts(replace(one, device=c)).step(loads, 0) for c in (device, slow))
    assert longer.seconds > plain.seconds
    assert longer.busy[2] > 4 * plain.busy[2]


# ---- deployments


def test_deployments_of_every_kind() -> None:
    small = engine(max_num_seqs=64)
    eight = model(ParallelConfig(tp=8))
    kinds = {
        "together": pools.together(eight, small, 2),
        "pipeline": pools.together(model(ParallelConfig(tp=8, pp=2)), small, 1),
        "wide": pools.together(model(ParallelConfig(dp=16, ep=16)), small, 1),
        "drafts": pools.together(eight, replace(small, acceptance=(0.85,)), 2),
        "apart": pools.disaggregated(eight, eight, small, (1, 1)),
        "measured": pools.disaggregated(
            eight, eight, small, (1, 1), page_times=PageTimes(0.01, 1e-11)
        ),
        "split": pools.split(
            model(ParallelConfig(), "roofline"), replace(small, micro_batches=3), 8, 8, "experts", 1
        ),
    }
    found = {
        name: simulated(deployment, 20.0, 4.0, output="40")[1] for name, deployment in kinds.items()
    }
    assert {outcome.gpus for outcome in found.values()} == {16}
    assert {outcome.output_tokens for outcome in found.values()} == {
        found["together"].output_tokens
    }
    tpot = {name: outcome.tpot.mean for name, outcome in found.items() if outcome.tpot}
    assert tpot["drafts"] < tpot["together"], "speculation"
    itl = {name: outcome.itl.p99 for name, outcome in found.items() if outcome.itl}
    assert itl["apart"] < itl["together"], "no prompts between tokens"
    ttft = {name: outcome.ttft.mean for name, outcome in found.items()}
    assert ttft["measured"] > ttft["apart"] + 0.01, "the first token waits for its pages"


def test_a_step_has_as_many_tokens_as_the_engine_takes() -> None:
    default = SimulationSettings.max_num_batched_tokens
    assert default == pools.PoolSettings(1000).max_num_batched_tokens
    assert default == CudaPlatform.default_batched_tokens == NpuPlatform.default_batched_tokens


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError):
        pools.together(model(ParallelConfig(tp=4)), engine(), 1)
    with pytest.raises(ConfigError, match="expert GPU"):
        pools.split(model(ParallelConfig(), "roofline"), engine(), 8, 2, "experts", 1)
    with pytest.raises(ConfigError, match="less than one request"):
        pools.together(model(), engine(num_pages=4), 1)


def test_a_minute_of_sixty_four_gpus_takes_seconds() -> None:
    """50 requests/s at 1000/300 tokens; ten minutes must stay below two minutes of this
    processor."""
    start = time.process_time()
    _, found = simulated(
        pools.together(model(ParallelConfig(tp=8)), engine(context=1300, max_model_len=1301), 8),
        50.0,
        60.0,
        output="300",
    )
    assert found.gpus == 64
    assert found.requests > 2500
    assert time.process_time() - start < 12


# ---- drawing, and the command


def watched(batches: int) -> gantt.GanttChart:
    deployment = pools.together(model(), engine(micro_batches=batches, max_num_seqs=64), 1)
    work = Workload(
        Arrivals("at-once"), LengthDistribution(mean=100), LengthDistribution(mean=8), requests=320
    )
    return gantt.gantt(Simulation(deployment, work, watch=(0.0, 2)).run(), "a <title>")


@pytest.mark.parametrize("ending", [".html", ".svg"])
def test_a_chart_needs_nothing_but_itself(ending: str, tmp_path: Path) -> None:
    chart = watched(2)
    assert chart.lanes == ["compute", "network"]
    assert len(chart.begins) == 2
    gantt.write(chart, tmp_path / f"steps{ending}")
    text = (tmp_path / f"steps{ending}").read_text()
    assert text.count("http") == 1
    assert 'xmlns="http://www.w3.org/2000/svg"' in text
    picture = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    rectangles = [item for item in picture.iter() if item.tag.endswith("rect")]
    assert len(rectangles) == len(chart.bars) + len(chart.names)


def test_a_png_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gantt.write(watched(1), tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigError, match=r"accepted: \.html, \.svg, \.png"):
        gantt.write(watched(1), tmp_path / "steps.gif")


def test_a_trace_for_perfetto(tmp_path: Path) -> None:
    """Complete events with the bars' times in microseconds, on threads named after the lanes."""
    chart = watched(2)
    gantt.write(chart, tmp_path / "steps.json")
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert list(names.values()) == chart.lanes
    whole = [event for event in events if event["ph"] == "X"]
    assert [(names[e["tid"]], e["name"], e["args"]["micro_batch"]) for e in whole] == [
        (bar.lane, bar.name, bar.batch) for bar in chart.bars
    ]
    for event, bar in zip(whole, chart.bars, strict=True):
        assert event["ts"] == pytest.approx(bar.start * 1e6)
        assert event["dur"] == pytest.approx((bar.end - bar.start) * 1e6)
    assert [event["ts"] for event in events if event["ph"] == "i"] == [
        pytest.approx(begin * 1e6) for begin in chart.begins
    ]


def test_a_chart_in_the_terminal() -> None:
    """Half of a lane for one batch, a quarter idle, a quarter for the other batch."""
    bars = (
        gantt.Bar("compute", "experts", 0, 0.0, 0.002),
        gantt.Bar("compute", "experts", 1, 0.003, 0.004),
        gantt.Bar("network", "dispatch", 0, 0.002, 0.004),
    )
    chart = gantt.GanttChart("steps", bars, (0.0,))
    lines = gantt.in_terminal(chart, width=8 + 40).plain.splitlines()
    assert lines[1] == "compute " + "A" * 20 + "." * 10 + "a" * 10
    assert lines[2] == "network " + "." * 20 + "B" * 20
    assert lines[3].endswith("4 ms")
    assert lines[4].strip() == "A experts, B dispatch"


def command(*options: str) -> Any:
    return CliRunner().invoke(app, ["simulate", "deepseek-ai/DeepSeek-R1", *options])


def test_the_command_writes_all_it_takes_to_repeat_a_run(tmp_path: Path) -> None:
    options = [
        "--layout",
        "tp=8",
        "--rate",
        "3",
        "--seconds",
        "4",
        "--output-len",
        "30",
        "--seed",
        "7",
        "--interval",
        "0.5",
    ]
    texts = []
    for name in ("a", "b"):
        done = command(
            *options,
            "--json",
            str(tmp_path / "run.json"),
            "--gantt",
            str(tmp_path / "g.html"),
            "--gantt-at",
            "1",
        )
        assert done.exit_code == 0, done.output
        assert "TTFT" in done.output, name
        assert "tokens of cache" in done.output, name
        texts.append((tmp_path / "run.json").read_text())
    assert texts[0] == texts[1]
    found = json.loads(texts[0])
    assert found["settings"]["seed"] == 7
    assert found["settings"]["layout"] == "tp=8"
    assert found["settings"]["workload"]["seconds"] == 4
    assert found["figures"]["output_tokens"] == 30 * found["figures"]["requests"]
    assert len(found["over_time"]["all"]["seconds"]) > 4
    assert (tmp_path / "g.html").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--layout", "tp8"], "accepted: tp, dp"),
        (["--slow", "1"], "RANK=FACTOR"),
        (["--attention", "8"], "go together"),
        (["--layout", "tp=3"], "does not divide"),
        (["--arrivals", "at-once"], "need a number of requests"),
        (["--routing", "none.json"], "none.json"),
        (["--acceptance", "1.5"], "acceptance"),
    ],
)
def test_mistakes_are_named(options: list[str], text: str) -> None:
    done = command("--seconds", "1", *options)
    assert isinstance(done.exception, ConfigError)
    assert text in str(done.exception)
