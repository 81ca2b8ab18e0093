"""Ranks agree on the steps that they launch ahead for their kernels."""

from __future__ import annotations

from math import prod

import pytest

from tests.parallel.pool import RankPool


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "ep": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_ranks_launch_what_is_kept_where_all_keep_the_same(
    sizes: dict[str, int], pool: RankPool
) -> None:
    world = prod(sizes.get(name, 1) for name in ("tp", "dp"))
    names = ["pieces 64", "größer", "eager 640, 2 decode with 0 drafts"]
    for others, alike in ((names[::-1], True), (names[:2], False), (None, False), ([], False)):
        given = [names, *[others] * (world - 1)]
        found = pool.run("kept_names", world, sizes=sizes, names=given)
        assert found[:world] == [(alike, sorted({*names, *(others or ())}))] * world
    nothing = pool.run("kept_names", world, sizes=sizes, names=[None] * world)
    assert nothing[:world] == [(False, [])] * world
    found = pool.run("kept_names", world, sizes=sizes, names=[[f"{r}"] for r in range(world)])
    assert found[:world] == [(False, [str(rank) for rank in range(world)])] * world
