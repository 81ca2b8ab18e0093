"""Experts under a load that drifts: what the fullest rank costs, and the engine's rule at work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rorqual.cli.app import app
from rorqual.errors import ConfigError
from rorqual.parallel.eplb.placement import Floats, balancedness
from rorqual.planner.costs.routing import Routing, rank_load
from rorqual.planner.simulator.expert_drift import ExpertDrift, ReplicaBalance
from rorqual.planner.simulator.from_settings import (
    counted,
    deployment_of,
    longest_requests,
    workload_of,
)
from rorqual.planner.simulator.results import Outcome, outcome
from rorqual.planner.simulator.settings import SimulationSettings
from rorqual.planner.simulator.simulator import Simulation


def loads(seed: int, layers: int = 4, experts: int = 64) -> Floats:
    """Some experts get many more tokens than others."""
    found: Floats = np.random.default_rng(seed).lognormal(0.0, 1.0, (layers, experts))
    return found


def drift(**changes: Any) -> ExpertDrift:
    values: dict[str, Any] = {"top_k": 6, "ranks": 8, "period": 10.0, "window": 10}
    return ExpertDrift((loads(1), loads(2)), **{**values, **changes})


def walk(balance: ReplicaBalance, seconds: float, tokens: int = 4096) -> list[float]:
    """Balancedness after each step of 20 ms."""
    found = []
    for step in range(int(seconds / 0.02)):
        balance.step(step * 0.02, tokens, 0.02)
        found.append(balance.balance)
    return found


def test_a_load_between_two_workloads() -> None:
    one = drift()
    first, second = (one.at(at) for at in (0.0, 10.0))
    np.testing.assert_allclose(first.sum(1), 1.0)
    np.testing.assert_allclose(one.at(2.5), 0.75 * first + 0.25 * second)
    np.testing.assert_array_equal(one.at(1000.0), second)


def test_the_fullest_rank_has_what_was_measured() -> None:
    """At many tokens chance is nothing, and it has exactly so many times the mean."""
    many = rank_load(Routing(fullest=1.5), 64, 6, 1_000_000, 8)
    assert many.pairs == pytest.approx(1.5 * 1_000_000 * 6 / 8, rel=0.01)
    assert many.distinct == 8
    even = rank_load(Routing(), 64, 6, 100, 8)
    assert rank_load(Routing(fullest=1.0), 64, 6, 100, 8).pairs == pytest.approx(
        even.pairs, rel=0.02
    )
    with pytest.raises(ConfigError, match="must be at least 1"):
        Routing(fullest=0.5)


def test_the_rule_follows_the_load() -> None:
    """Placed for the first workload with copies, it is out of balance under the second; where
    experts move it is back over the threshold, and stays there."""
    still = ReplicaBalance(drift(redundant=16), 0, "")
    left = walk(still, 30)
    assert left[0] > 0.95
    assert left[-1] < 0.85
    assert still.stats.rebalances == 0
    moving = ReplicaBalance(drift(redundant=16, moves=True), 0, "")
    kept = walk(moving, 40)
    assert kept[-1] > 0.9
    assert moving.stats.rebalances > 0
    assert moving.stats.slots > 0
    moves = moving.stats.moves
    for step in range(2000, 3000):
        moving.step(step * 0.02, 4096, 0.02)
    assert moving.stats.moves == moves, "nothing moves under a constant load"
    assert moving.balance == pytest.approx(
        balancedness(moving.policy.placement, moving.drift.at(60.0), 8)
    )


def test_steps_take_longer_while_experts_travel() -> None:
    one = ReplicaBalance(drift(moves=True), 0, "")
    factors = set()
    for step in range(2000):
        one.step(step * 0.02, 4096, 0.02)
        factors.add(one.factor(step * 0.02))
    assert factors == {1.0, 1.1}


def test_replicas_draw_for_themselves_and_runs_repeat() -> None:
    first, again, other = (
        walk(ReplicaBalance(drift(moves=True), 0, name), 20, 64) for name in ("0", "0", "1")
    )
    assert first == again
    assert first != other


def write(folder: Path, name: str, seed: int) -> Path:
    rows = [[0] * 256] * 3 + (1e4 * loads(seed, 58, 256)).astype(int).tolist()
    path = folder / name
    path.write_text(json.dumps({"logical_count": rows}))
    return path


def play(files: tuple[Path, ...], **changes: Any) -> Outcome:
    settings = {
        "model": "deepseek-ai/DeepSeek-R1",
        **vars(SimulationSettings()),
        "layout": "dp=8,ep=8",
        "profile": "roofline",
        "rate": 60.0,
        "seconds": 24.0,
        "expert_load": files,
        "expert_load_seconds": 4.0,
        "eplb_window": 20,
        **changes,
    }
    given = counted(settings)
    work = workload_of(given)
    deployment = deployment_of(given, longest_requests(given, work))
    return outcome(Simulation(deployment, work, 0).run(), warm_up=16.0)


@pytest.mark.longest
@pytest.mark.exhaustive
def test_uneven_experts_cost_time_and_moving_them_saves_it(tmp_path: Path) -> None:
    """Of requests that come when the load is the second one for good, and the moves are over."""
    files = (write(tmp_path, "one.json", 3), write(tmp_path, "two.json", 4))
    left = play(files, redundant_experts=16)
    moved = play(files, redundant_experts=16, enable_eplb=True)
    even = play(())
    assert left.balance[0].balancedness < 0.85
    assert moved.balance[0].balancedness > 0.9
    assert left.tpot is not None
    assert moved.tpot is not None
    assert even.tpot is not None
    assert even.tpot.p50 < moved.tpot.p50 < left.tpot.p50


def test_the_command(tmp_path: Path) -> None:
    """One screen: balancedness, and what happened."""
    file = write(tmp_path, "one.json", 3)
    options = (
        "--layout dp=8,ep=8 --replicas 2 --requests 40 --rate 20 --fail 0@0.5-1.5 "
        "--autoscale 1:3 --profile roofline --output-len 50"
    )
    arguments = ["simulate", "deepseek-ai/DeepSeek-R1", *options.split()]
    done = CliRunner().invoke(app, [*arguments, "--expert-load", str(file)])
    assert done.exit_code == 0, done.output
    assert "experts: balancedness at the end 0." in done.output
    assert "all 0 died with" in done.output
    assert "times a request went on elsewhere after a death" in done.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": "tp=16"}, "expert_load goes with a layout whose experts lie on ranks"),
        ({"expert_load_seconds": 0.0}, "expert_load_seconds=0.0 must be above 0"),
        ({"eplb_window": 0}, "eplb_window=0 must be at least 1"),
        ({"eplb_threshold": 1.5}, "eplb_threshold=1.5 must lie between 0 and 1"),
        ({"files": (), "enable_eplb": True}, "enable_eplb needs expert_load"),
        ({"redundant_experts": 3}, "ep=8 must divide the 259 slots"),
    ],
)
def test_mistakes_with_loads_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    files = (write(tmp_path, "one.json", 3),)
    with pytest.raises(ConfigError, match=words):
        play(**{"files": files, **changes})
