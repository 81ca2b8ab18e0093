"""Placements of experts: DeepSeek's worked example, balance, and few moves."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rorqual.cli.app import app
from rorqual.errors import ConfigError
from rorqual.parallel.eplb.load_file import (
    loads_by_layer,
    moe_layers_of,
    read_expert_load,
    write_expert_load,
)
from rorqual.parallel.eplb.movement import match_placement, parts, rebalance
from rorqual.parallel.eplb.placement import (
    Floats,
    Ints,
    balancedness,
    balancedness_by_layer,
    by_rank,
    combined_loads,
    copies,
    identity_placement,
    moved,
    place,
    rank_loads,
)


def skewed(seed: int, layers: int = 58, experts: int = 256) -> Floats:
    """The hottest expert of a layer has some eight times the mean, as those of DeepSeek-V3."""
    return np.random.default_rng(seed).lognormal(0, 0.8, (layers, experts)) * 1000


def drifted(load: Floats, seed: int) -> Floats:
    """The same experts under other prompts."""
    return load * np.random.default_rng(seed).lognormal(0, 0.4, load.shape)


def check(placement: Ints, experts: int, ranks: int) -> None:
    assert (copies(placement, experts) >= 1).all()
    assert all(
        len(set(rank)) == len(rank)
        for layer in by_rank(placement, ranks).tolist()
        for rank in layer
    ), "two copies of one expert on one rank"


def test_deepseeks_worked_example() -> None:
    """From the README of DeepSeek's repository EPLB."""
    load = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    found = place(load, 16, 8, groups=4, nodes=2)
    assert found.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert copies(found, 12).tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
    ]
    assert balancedness_by_layer(found, load, 8) == pytest.approx([0.828, 0.805], abs=5e-4)
    everywhere = place(load, 16, 8)
    check(everywhere, 12, 8)
    assert balancedness(everywhere, load, 8) > balancedness(found, load, 8)


@pytest.mark.parametrize(
    ("ranks", "redundant", "least"), [(8, 0, 0.99), (8, 32, 0.998), (32, 32, 0.98)]
)
def test_a_plan_is_balanced_and_quick(ranks: int, redundant: int, least: float) -> None:
    load = skewed(0)
    place(load[:1], 256 + redundant, ranks)
    start = time.process_time()
    found = place(load, 256 + redundant, ranks)
    seconds = time.process_time() - start
    check(found, 256, ranks)
    assert (
        balancedness(found, load, ranks)
        > least
        > balancedness(identity_placement(58, 256), load, ranks)
    )
    assert seconds < 0.2, "some 25 ms on a machine of its own"


def test_every_copy_has_a_rank_of_its_own_even_where_room_is_short() -> None:
    """Loads so uneven that the lightest rank with room often has the expert already."""
    generator = np.random.default_rng(1)
    for ranks, experts, slots in ((4, 6, 20), (3, 5, 12), (2, 4, 8), (4, 5, 16)):
        load = generator.pareto(0.5, (200, experts))
        found = place(load, slots, ranks)
        check(found, experts, ranks)
        check(place(np.zeros((2, experts)), slots, ranks), experts, ranks)


def test_slower_ranks_get_less() -> None:
    load = skewed(2, 4)
    speeds = [1.0] * 6 + [0.75, 0.5]
    found = place(load, 288, 8, speeds=speeds)
    assert balancedness(found, load, 8, speeds) > 0.98
    assert (rank_loads(found, load, 8)[:, 7] < 0.6 * rank_loads(found, load, 8)[:, 0]).all()
    moved_little = rebalance(found, drifted(load, 3), 8, speeds)
    assert balancedness(moved_little, drifted(load, 3), 8, speeds) > 0.97


@pytest.mark.parametrize(("ranks", "slots"), [(8, 256), (8, 288), (32, 288)])
def test_a_new_plan_near_the_present_one(ranks: int, slots: int) -> None:
    """As balanced as one from nothing, up to 1 %, in each layer, with a tenth of the moves."""
    load = skewed(4, 12)
    present = place(load, slots, ranks)
    later = drifted(load, 5)
    fresh = place(later, slots, ranks)
    found = rebalance(present, later, ranks)
    check(found, 256, ranks)
    reached = balancedness_by_layer(found, later, ranks)
    assert (reached >= 0.99 * balancedness_by_layer(fresh, later, ranks)).all()
    few = moved(present, found, ranks).sum()
    assert few < 0.3 * moved(present, match_placement(fresh, present, ranks), ranks).sum()
    assert few < 0.3 * moved(present, fresh, ranks).sum()
    assert rebalance(found, later, ranks).tolist() == found.tolist(), "balanced layers stay"


def test_several_workloads_beat_one_on_another() -> None:
    base = skewed(6, 20)
    loads = [drifted(base, seed) for seed in range(10, 16)]
    for ranks in (8, 32):
        left_out, *others = loads
        several = balancedness(place(combined_loads(others), 288, ranks), left_out, ranks)
        single = [balancedness(place(load, 288, ranks), left_out, ranks) for load in others]
        assert several > max(single)


def test_a_layer_in_parts() -> None:
    generator = np.random.default_rng(7)
    for ranks, experts, slots in ((4, 10, 12), (2, 6, 8), (4, 8, 8)):
        for _ in range(40):
            old, new = place(generator.pareto(1.0, (2, experts)), slots, ranks).tolist()
            steps = list(parts(old, new, ranks, 2))
            assert steps[-1] == new if old != new else not steps
            for before, after in zip([old, *steps], steps, strict=False):
                changed = (np.array(before) != after).reshape(ranks, -1).sum(1)
                assert 0 < changed.max() <= 2
                assert set(after) == set(range(experts))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((8, 10, 4), "10 slots .* cannot be dealt out to 4 ranks"),
        ((8, 36, 4), "28 redundant experts; accepted: 0 to 24"),
        ((8, 12, 4, 8, 3), "3 nodes do not divide 4 ranks"),
    ],
)
def test_sizes_that_cannot_be(sizes: tuple[int, ...], said: str) -> None:
    experts, *rest = sizes
    with pytest.raises(ConfigError, match=said):
        place(np.ones((1, experts)), *rest)


# ---- files and the command


def test_the_file_of_counts(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    write_expert_load(path, [[3, 1], [5, 0]], [1, 2], 3)
    assert json.loads(path.read_text()) == {"logical_count": [[0, 0], [3, 1], [5, 0]]}
    load = read_expert_load(path)
    assert moe_layers_of(load).tolist() == [[3, 1], [5, 0]]
    assert loads_by_layer(load, [1, 2], 2, path).tolist() == [[3, 1], [5, 0]]
    assert loads_by_layer(load, [1, 2, 3], 2, path).tolist() == [[3, 1], [5, 0], [1, 1]]
    assert loads_by_layer(load[1:], [3, 4], 2, path).tolist() == [[3, 1], [5, 0]], "MoE layers only"
    with pytest.raises(ConfigError, match="counts 2 experts, the model has 4"):
        loads_by_layer(load, [1, 2], 4, path)
    with pytest.raises(ConfigError, match="has 2 layers of experts, the model 1"):
        loads_by_layer(load[1:], [3], 2, path)


@pytest.mark.parametrize("text", ["[]", "{", '{"logical_count": [1]}', '{"logical_count": [[-1]]}',
                                  '{"logical_count": [[0, 0]]}'])  # fmt: skip
def test_files_that_hold_no_counts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "load.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"load\.json"):
        read_expert_load(path)


def test_a_file_that_nests_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text('{"logical_count": ' + 100_000 * "[")
    with pytest.raises(ConfigError, match=r"load\.json cannot be read as JSON: maximum recursion"):
        read_expert_load(path)


def test_the_command(tmp_path: Path) -> None:
    load = skewed(8, 4, 32)
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps({"logical_count": [[0] * 32, *load.tolist()]}))
    other.write_text(json.dumps({"logical_count": [[0] * 32, *drifted(load, 9).tolist()]}))

    def figures(*options: str) -> dict[str, float]:
        result = CliRunner().invoke(app, ["eplb", *options, "--json"])
        assert result.exit_code == 0, result.output
        found: dict[str, float] = json.loads(result.stdout)
        return found

    sizes = ["--ep", "4", "--redundant", "8"]
    same = figures(str(one), *sizes)
    judged = figures(str(one), *sizes, "--evaluate", str(other))
    both = figures(str(one), str(other), *sizes, "--evaluate", str(other))
    few = figures(str(other), *sizes, "--present", str(one), "--write", str(tmp_path / "map.json"))
    assert same["before"] < judged["after"] < both["after"] < same["after"]
    assert few["before"] == pytest.approx(judged["after"])
    assert few["after"] > 0.98
    assert 0 < few["moved"] < 40
    assert len(json.loads((tmp_path / "map.json").read_text())["physical_to_logical_map"]) == 4
    slow = figures(str(one), "--ep", "2", "--speed", "1,0.8")
    assert slow["after"] > 0.97 > slow["before"]
    refused = CliRunner().invoke(app, ["eplb", str(one), "--redundant", "-8"])
    assert "redundant=-8 is out of range" in str(refused.exception)
    for options, said in (
        ("--groups 3", "--groups=3: 32 experts are no such number of equal groups"),
        ("--groups 4 --nodes 8 --ep 8", "--groups=4: not as many on each of --nodes=8"),
        ("--ep 2 --speed 1,nan", "--speed=nan is not a finite number"),
    ):
        refused = CliRunner().invoke(app, ["eplb", str(one), *options.split()])
        assert said in str(refused.exception)
    grouped = figures(str(one), "--ep", "4", "--groups", "8", "--nodes", "2")
    assert grouped["after"] > grouped["before"]
    text = CliRunner().invoke(app, ["eplb", str(one), *sizes])
    assert "balancedness before 0." in text.stdout
