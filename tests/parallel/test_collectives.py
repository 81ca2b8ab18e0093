"""Each call of an axis over gloo, with uneven and with no rows; and the axis of one rank, on
which nothing happens."""

from __future__ import annotations

import itertools
import threading
from unittest.mock import Mock

import pytest
import torch

from rorqual.config.parallel import ParallelConfig
from rorqual.parallel.collectives import NullAxis
from rorqual.parallel.group_axis import GroupAxis
from rorqual.parallel.mesh import AXES, Mesh, members
from tests.parallel.pool import RankPool


@pytest.mark.parametrize("world", [2, 4])
def test_every_call(pool: RankPool, world: int) -> None:
    for rank, results in enumerate(pool.run("collectives", world, sizes={"tp": world})):
        assert all(results.values()), (rank, results)


@pytest.mark.parametrize("failing", [[], [1], [0, 1, 2, 3]])
def test_what_one_rank_cannot_do_none_does(pool: RankPool, failing: list[int]) -> None:
    found = pool.run("refused", 4, sizes={"tp": 4}, failing=failing)
    others = f"refused on {len(failing)} of 4 ranks" if failing else ""
    assert found == ["no permission" if rank in failing else others for rank in range(4)]


def test_one_rank_is_the_identity() -> None:
    axis = NullAxis("tp")
    x = torch.ones(2, 2)
    same = (
        axis.all_reduce(x),
        axis.reduce_scatter(x, [2]),
        axis.all_gather(x, [2]),
        axis.all_gather_columns(x, [2]),
        axis.start_broadcast(x, 0).wait(),
    )
    assert all(
        y is x
        for y in (
            *same,
            axis.all_to_all(x, [2], [2]),
            axis.all_to_all_fixed(x),
            axis.start_all_gather(x).wait(),
        )
    )
    assert axis.traffic.total == 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 4, "dp": 2, "pp": 2, "ep": 4, "dense_tp": 2, "embed_tp": 8, "head_tp": 1},
        {"tp": 2, "dp": 4, "ep": 8, "dense_tp": 4, "embed_tp": 2, "head_tp": 8},
        {"dp": 6, "ep": 3, "dense_tp": 3, "head_tp": 6},
    ],
)
def test_groups_partition_the_ranks(sizes: dict[str, int]) -> None:
    """Every axis cuts the world into groups of one size that all their members agree on."""
    config = ParallelConfig(**sizes)
    for axis in AXES:
        groups = {members(config, rank, axis) for rank in range(config.world)}
        assert sorted(rank for group in groups for rank in group) == list(range(config.world)), axis
        assert all(rank in members(config, rank, axis) for rank in range(config.world)), axis
        assert len({len(group) for group in groups}) == 1, axis


def test_groups_of_an_example() -> None:
    """Two stages of two attention groups of two: rank 5 is stage 1, data-parallel rank 0, place
    1."""
    sizes = ParallelConfig(tp=2, dp=2, pp=2, ep=2, dense_tp=4)
    want = {
        "tp": (4, 5),
        "dp": (5, 7),
        "stage": (4, 5, 6, 7),
        "dense": (4, 5, 6, 7),
        "dense_dp": (5, 7),
    }
    want |= {"expert_tp": (4, 5), "ep": (5, 7), "pp": (1, 5), "head": (4, 5), "head_dp": (5,)}
    assert {axis: members(sizes, 5, axis) for axis in want} == want


class Reluctant(GroupAxis):
    """Over a group whose end takes until `recorded` is over, as NCCL's does."""

    def __init__(self, recorded: threading.Event):
        self.group = Mock()
        self.recorded = recorded
        self.aborting = threading.Event()

    def abort(self) -> None:
        self.aborting.set()
        self.recorded.wait(30)


def test_no_group_that_is_given_up_waits_for_another() -> None:
    recorded = threading.Event()
    axes = [Reluctant(recorded) for _ in range(3)]
    twin = Reluctant(recorded)
    twin.group = axes[0].group
    mesh = Mesh(
        ParallelConfig(tp=2),
        0,
        dict(zip(AXES, itertools.chain(axes, itertools.repeat(twin)), strict=False)),
    )
    mesh.abort()
    assert all(axis.aborting.wait(60) for axis in [*axes[1:], twin])
    assert not axes[0].aborting.is_set(), "one group is given up once"
    assert not mesh.wait_aborted(0.05)
    recorded.set()
    assert mesh.wait_aborted(5)
