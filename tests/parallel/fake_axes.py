"""Meshes for what only asks where a rank stands: building, loading, and the form of what runs
between collectives."""

from __future__ import annotations

from rorqual.config.parallel import ParallelConfig
from rorqual.parallel.collectives import NullAxis
from rorqual.parallel.mesh import AXES, Mesh, members
from rorqual.parallel.shard import Shard


class Pretended(NullAxis):
    """A rank's place in an axis, for what only asks where it stands."""

    def __init__(self, name: str, cut: Shard):
        super().__init__(name)
        self.shard = cut
        self.rank = cut.index
        self.size = cut.count


def place(sizes: ParallelConfig, rank: int) -> Mesh:
    groups = {axis: members(sizes, rank, axis) for axis in AXES}
    return Mesh(
        sizes,
        rank,
        {
            axis: Pretended(axis, Shard(group.index(rank), len(group)))
            for axis, group in groups.items()
        },
    )
