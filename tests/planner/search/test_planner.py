"""The search: what it offers fits and meets the goal, the front is one, and what is refused says
why."""

from __future__ import annotations

import csv
import math
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rorqual.config.hardware import load_device
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.planner.costs import costs
from rorqual.planner.costs.catalog import IDS, published, shape_of, with_quant
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.search import chart, report
from rorqual.planner.search.deployments import (
    Goal,
    Option,
    Question,
    aggregated,
    balanced,
    disaggregated,
    prompt_seconds,
)
from rorqual.planner.search.from_settings import question_of
from rorqual.planner.search.planner import DeploymentPlan, distinct_best, search
from rorqual.planner.search.settings import PlanSettings
from rorqual.planner.timing.profiles import load_profile
from rorqual.planner.timing.split import split_memory, split_step
from rorqual.planner.timing.split_schedule import SplitStep

R1 = published("deepseek-ai/DeepSeek-R1")


def question(
    device: str = "h200", count: int = 8, profile: str = "sglang", **changes: object
) -> Question:
    return Question(R1, load_device(device), count, load_profile(profile), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def node() -> DeploymentPlan:
    return search(
        question(goal=Goal(1024, 1024, ttft=1.0, tpot=0.05), num_speculative_tokens=(0, 1))
    )


def test_what_is_offered_fits_and_meets_the_goal(node: DeploymentPlan) -> None:
    assert node.options
    for option in node.options:
        assert option.ttft <= 1.0
        assert option.tpot <= 0.05
        assert option.batch * 2048 <= option.cache_tokens
        assert option.weight_bytes < 0.9 * node.question.device.memory
        assert option.sizes.world * option.replicas <= 8
    assert [option.per_gpu for option in node.options] == sorted(
        (option.per_gpu for option in node.options), reverse=True
    )
    assert all(option.ttft > 1.0 or option.tpot > 0.05 for option in node.missed)


def test_tokens_a_gpu_are_the_cycle(node: DeploymentPlan) -> None:
    """A group's requests in turn: every answer's steps and every prompt once."""
    option = next(
        option
        for option in node.options
        if option.kind == "aggregated" and option.num_speculative_tokens == 0
    )
    model = node.question.model(option.sizes)
    step = model.step(GroupWork(BatchShape.decode(option.batch, 1024 + 512))).seconds
    cycle = 1024 * step + option.batch * prompt_seconds(node.question, model)
    assert option.throughput == pytest.approx(
        option.replicas * option.sizes.dp * option.batch * 1024 / cycle
    )


def test_the_front_is_a_front(node: DeploymentPlan) -> None:
    front = node.pareto()
    every = (*node.options, *node.missed)
    assert front
    for point in front:
        assert not [
            other
            for other in every
            if other.per_user > point.per_user and other.per_gpu > point.per_gpu
        ]
    assert sorted(point.per_gpu for point in front) == [point.per_gpu for point in front]


def test_all_ratios_balance() -> None:
    """Prefill instances are loaded to 80 % at most, and more of them never serve less."""
    asked = question(count=24)
    found = list(disaggregated(asked, ParallelConfig(tp=8), ParallelConfig(tp=8)))
    assert {option.prefill_replicas + option.replicas for option in found} == {3}
    for option in found:
        prompts = option.throughput / 1024
        able = option.prefill_replicas / prompt_seconds(asked, asked.model(ParallelConfig(tp=8)))
        assert prompts <= 0.8 * able + 1e-9


def test_drafts_that_are_taken_help() -> None:
    plain, drafted = (
        next(iter(aggregated(question(num_speculative_tokens=(drafts,)), ParallelConfig(tp=8))))
        for drafts in (0, 1)
    )
    assert drafted.tpot < plain.tpot
    never = next(
        iter(
            aggregated(question(num_speculative_tokens=(1,), acceptance=0.0), ParallelConfig(tp=8))
        )
    )
    assert never.tpot > plain.tpot


def test_home_cluster() -> None:
    """32 RTX 4090: four stages fit by a hair, the first of 16 layers with the dense ones, the
    others of 15; so do whole layers on 29 devices with attention on the rest."""
    found = search(question("rtx4090", 32, "roofline"))
    assert {option.sizes.pp for option in found.options if option.kind == "aggregated"} == {4}
    tight = found.question.model(ParallelConfig(tp=8, pp=4))
    assert 0 < tight.device.memory * tight.utilization - tight.weight_bytes < 1.2e9
    assert any(
        "3 attention : 29 expert GPUs (whole layers)" in option.detail for option in found.options
    )
    assert len(found.rejected) > 50
    assert found.rejected[0].short < 3e9
    assert any(
        "more than the 23.2 that may be used" in rejected.reason for rejected in found.rejected[:3]
    )
    assert costs.weight_bytes(R1).total < 32 * 0.9 * found.question.device.memory, (
        "together the GPUs would hold the weights"
    )


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="no kernel times for device ascend-a3"):
        question("ascend-a3")
    with pytest.raises(ConfigError, match="has no prediction module"):
        Question(
            published("qwen3-30b-a3b"),
            load_device("h200"),
            1,
            load_profile("rorqual"),
            num_speculative_tokens=(1,),
        )
    for changes, message in (
        ({"count": 0}, "count=0"),
        ({"acceptance": 2.0}, "acceptance=2.0"),
        ({"num_speculative_tokens": ()}, "num_speculative_tokens="),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(question(), **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prompt=0"):
        Goal(0)
    with pytest.raises(ConfigError, match="tpot=-1"):
        Goal(tpot=-1)


# ---- roles on devices of their own


def test_batches_in_flight_hide_what_is_elsewhere() -> None:
    """Tokens/s grow with the number of equal micro-batches until the busiest resource is full: the
    experts with few rows, the network with many. Where each expert device holds whole layers, at
    most two of them work at a time, as all micro-batches are in one layer or the next."""
    model = question("rtx4090", 32, "roofline").model(ParallelConfig())

    def steps(rows: int, attention: int, experts: int, placement: str) -> list[SplitStep]:
        work = GroupWork(BatchShape.decode(rows, 500))
        return [split_step(model, work, attention, experts, placement, n) for n in range(1, 9)]

    for rows, busiest in ((4, 1), (64, 2)):
        found = steps(rows, 16, 16, "experts")
        rates = [step.batches / step.seconds for step in found]
        assert rates == sorted(rates)
        busy = found[-1].schedule.busy
        assert busy[busiest] == max(busy) > 0.9 > 2 * max(found[0].schedule.busy)
        assert rates[-1] > 2 * rates[0]
    layers = steps(16, 3, 29, "layers")
    assert max(layers[-1].schedule.busy) < 0.2
    assert layers[-1].seconds > 8 * layers[-1].micro_batches[0].exclusive * 58 / 2


def test_experts_on_gpus_of_their_own() -> None:
    model = question("rtx4090", 32, "roofline").model(ParallelConfig())
    layers, spread = (
        split_step(model, GroupWork(BatchShape.decode(8, 500)), 3, gpus, kind)
        for kind, gpus in (("layers", 29), ("experts", 16))
    )
    assert layers.schedule.experts == pytest.approx(layers.experts * 2 / 58)
    assert spread.schedule.experts == pytest.approx(spread.experts)
    assert spread.experts < layers.experts, "a layer's experts are read by sixteen GPUs at once"
    memory = split_memory(model, 29, "layers")
    assert memory.experts == pytest.approx(costs.weight_bytes(R1).routed_experts * 2 / 58)
    host = split_memory(model, 29, "layers", host_embedding=True)
    assert memory.attention - host.attention == 129280 * 7168 * 2


# ---- what is printed and written


def test_files(node: DeploymentPlan, tmp_path: Path) -> None:
    report.write_csv(node, tmp_path / "all.csv")
    rows = list(csv.DictReader((tmp_path / "all.csv").open()))
    assert len(rows) == len(node.options) + len(node.missed)
    assert sum(int(row["pareto"]) for row in rows) == len(node.pareto())
    assert sum(int(row["meets_goal"]) for row in rows) == len(node.options)
    report.write_yaml(node, "m", tmp_path / "best.yaml")
    recipe = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert recipe["engine"]["max_num_seqs"] == node.options[0].batch
    with pytest.raises(ConfigError, match="nothing meets the goal"):
        report.write_yaml(replace(node, options=()), "m", tmp_path / "none.yaml")


def test_the_chart(node: DeploymentPlan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart.write_png(node, tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes()[:4] == b"\x89PNG"


def test_the_chart_in_the_terminal(node: DeploymentPlan) -> None:
    """The front falls from left to right, and its ends stand where their figures say."""
    text = chart.in_terminal(node, 100, 24).plain
    rows = [line[9:] for line in text.splitlines() if line[8:9] == "|"]
    assert len(rows) == 24
    marks = [(x, -y) for y, row in enumerate(rows) for x, mark in enumerate(row) if mark == "#"]
    assert len(marks) > 4
    heights = [y for _, y in sorted(marks, key=lambda mark: (mark[0], -mark[1]))]
    assert heights == sorted(heights, reverse=True)
    fastest = node.pareto()[0]
    assert f"{fastest.per_user:7.1f} a user {fastest.per_gpu:9,.1f} a GPU" in text
    assert "o aggregated" in text


def test_the_command_of_remote_experts(node: DeploymentPlan) -> None:
    option = replace(node.options[0], kind="attention:experts", detail="6 attention : 2 expert")
    lines = report.commands("deepseek-ai/DeepSeek-R1", node.question, option)
    assert "rorqual experts deepseek-ai/DeepSeek-R1" in lines[0]
    assert "--experts ADDRESSES" in lines[1]


def test_the_command(node: DeploymentPlan) -> None:
    option = next(
        option
        for option in node.options
        if option.sizes == ParallelConfig(tp=8) and option.kind == "aggregated"
    )
    text = report.commands("deepseek-ai/DeepSeek-R1", node.question, option)[0]
    assert text.strip().startswith(
        f"rorqual serve deepseek-ai/DeepSeek-R1 --tp 8 --max-num-seqs {option.batch}"
    )


def test_best_of_each_layout(node: DeploymentPlan) -> None:
    best: list[Option] = distinct_best(node.options, 4)
    assert best[0] is node.options[0]
    assert len({(option.kind, option.sizes, option.detail) for option in best}) == len(best)


# ---- published ids


def test_ids_need_no_network() -> None:
    for name in IDS:
        config = published(name)
        assert (config.quant is not None) == IDS[name][1], name
    assert shape_of("someone/else") is None
    assert published("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8").quant is not None
    shape = shape_of("deepseek-v3")
    assert shape
    assert with_quant(shape[0], "none").quant is None
    with pytest.raises(ConfigError, match="quant='int4'"):
        with_quant(shape[0], "int4")
    with pytest.raises(ConfigError, match="is no published shape"):
        published("someone/else")


def test_the_balance_of_prefill_and_decode_is_the_best_of_all() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        worlds = (draw.randint(1, 9), draw.randint(1, 9))
        count = draw.randint(sum(worlds), 200)
        able, wanted = draw.uniform(0.01, 3), draw.uniform(0.01, 3)
        rates = {
            instances: min(instances * able, (count - instances * worlds[0]) // worlds[1] * wanted)
            for instances in range(1, (count - worlds[1]) // worlds[0] + 1)
        }
        best = max(rates, key=lambda instances: (rates[instances], -instances))
        assert balanced(count, worlds, able, wanted) == (best, rates[best])


def test_many_devices_are_searched_in_seconds() -> None:
    """How long it takes depends on the layouts, not on the devices."""
    asked = PlanSettings(count=100_000, profile="roofline")
    began = time.process_time()
    found = search(question_of("deepseek-v2-lite", asked))
    assert time.process_time() - began < 60
    assert {"aggregated", "prefill:decode"} <= {option.kind for option in found.options}


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_goal_has_a_time_or_none(seconds: float) -> None:
    for name in ("ttft", "tpot"):
        with pytest.raises(ConfigError, match=f"{name}={seconds} seconds must be above 0"):
            Goal(**{name: seconds})
    assert Goal().tpot is None
