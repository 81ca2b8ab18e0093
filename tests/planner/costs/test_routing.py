"""Expected experts and loads against drawn routings."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rorqual.errors import ConfigError
from rorqual.planner.costs.costs import expected_experts
from rorqual.planner.costs.routing import (
    Routing,
    distinct_experts,
    expected_maximum,
    probabilities,
    rank_load,
)

UNIFORM = Routing()


def draw(chances: tuple[float, ...], tokens: int, seed: int) -> list[int]:
    """Loads of the experts when each token chooses each expert by itself."""
    source = random.Random(seed)
    return [sum(source.random() < chance for _ in range(tokens)) for chance in chances]


def test_uniform_is_the_closed_form() -> None:
    for tokens in (1, 8, 64, 1024):
        assert distinct_experts(UNIFORM, 256, 8, tokens) == pytest.approx(
            expected_experts(256, 8, tokens)
        )


@pytest.mark.parametrize(
    "routing", [UNIFORM, Routing("zipf", 1.0), Routing("recorded", counts=tuple(range(1, 33)))]
)
def test_distinct_experts_of_drawn_routings(routing: Routing) -> None:
    chances = probabilities(routing, 32, 4)
    assert sum(chances) == pytest.approx(4)
    drawn = [sum(load > 0 for load in draw(chances, 12, seed)) for seed in range(300)]
    assert distinct_experts(routing, 32, 4, 12) == pytest.approx(sum(drawn) / len(drawn), rel=0.03)


def test_skew_needs_fewer_experts() -> None:
    found = [
        distinct_experts(Routing("zipf", exponent), 256, 8, 64) for exponent in (0.0, 0.5, 1.0, 1.5)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(expected_experts(256, 8, 64))


@pytest.mark.parametrize("balance", ["none", "placed"])
def test_the_fullest_rank_of_drawn_routings(balance: str) -> None:
    routing = Routing("zipf", 0.8, balance=balance)
    chances = probabilities(routing, 32, 4)
    if balance == "none":
        held = [range(rank * 8, rank * 8 + 8) for rank in range(4)]
        drawn = []
        for seed in range(200):
            loads = draw(chances, 64, seed)
            drawn.append(max(sum(loads[expert] for expert in rank) for rank in held))
        assert rank_load(routing, 32, 4, 64, 4).pairs == pytest.approx(
            sum(drawn) / len(drawn), rel=0.03
        )
    else:
        assert (
            rank_load(routing, 32, 4, 64, 4).pairs
            < rank_load(Routing("zipf", 0.8), 32, 4, 64, 4).pairs
        )


def test_perfect_balance_is_the_mean() -> None:
    load = rank_load(Routing(balance="perfect"), 256, 8, 1024, 8)
    assert load.pairs == 1024
    assert load.distinct == pytest.approx(32)
    assert rank_load(UNIFORM, 256, 8, 1024, 8).pairs > 1024
    assert rank_load(UNIFORM, 256, 8, 5, 1).pairs == 40


def test_expected_maximum() -> None:
    assert expected_maximum([3.0, 5.0], [0.0, 0.0]) == 5.0
    source = random.Random(0)
    drawn = [max(source.gauss(0, 1) for _ in range(8)) for _ in range(4000)]
    assert expected_maximum([0.0] * 8, [1.0] * 8) == pytest.approx(
        sum(drawn) / len(drawn), abs=0.04
    )


def test_recorded_counts(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text("[[1, 2, 3, 4], [1, 2, 3, 4]]")
    assert Routing.parse(f"recorded:{path}/placed") == Routing(
        "recorded", counts=(2, 4, 6, 8), balance="placed"
    )
    path.write_text("[5, 5, 5, 5]")
    assert probabilities(Routing.parse(f"recorded:{path}"), 4, 2) == (0.5,) * 4
    for text in ("{", "[[1], [1, 2]]", '"x"'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="wanted a JSON list of counts"):
            Routing.parse(f"recorded:{path}")
    with pytest.raises(ConfigError, match="wanted a JSON list of counts"):
        Routing.parse("recorded:/nowhere.json")


def test_mistakes_are_named() -> None:
    assert Routing.parse("zipf:0.7/placed") == Routing("zipf", 0.7, balance="placed")
    for text, message in (
        ("even", "kind='even'"),
        ("zipf:x", "'x' is no number"),
        ("uniform/some", "kind='uniform/some'"),
        ("zipf:-1", "at least 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Routing.parse(text)
    with pytest.raises(ConfigError, match="3 counts; the model has 4"):
        probabilities(Routing("recorded", counts=(1, 2, 3)), 4, 2)
    with pytest.raises(ConfigError, match="uses 1 experts; a token chooses 2"):
        probabilities(Routing("recorded", counts=(0, 0, 3)), 3, 2)
