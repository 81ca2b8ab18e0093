"""Exchanges over shared memory between real processes: their buffers are shared files, and
Triton's interpreter runs the kernels on each, waits included. What they return is compared, bit
for bit, with the same exchange over collectives of a process group."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rorqual.config.parallel import ParallelConfig
from tests.emulation.triton_interpreter import DEVICE, needs_triton
from tests.parallel.pool import RankPool
from tests.parallel.test_exchange import REPLICAS, name_of

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE != "cpu", reason="runs in the interpreter"),
    pytest.mark.exhaustive,
]

LOW_LATENCY: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2, "exchange": "low_latency"},
    {"dp": 4, "ep": 4, "exchange": "low_latency"},
    {"dp": 4, "ep": 2, "exchange": "low_latency"},
    {"tp": 2, "dp": 2, "ep": 2, "exchange": "low_latency"},
    {"dp": 2, "ep": 2, "exchange": "low_latency", "fp8_dispatch": True},
]
GATHERS: list[dict[str, Any]] = [
    {"dp": 2, "exchange": "allgather_tp"},
    {"dp": 4, "ep": 2, "exchange": "allgather_ep"},
    {"tp": 2, "dp": 2, "ep": 4, "exchange": "allgather_ep"},
    {"tp": 2, "dp": 2, "ep": 2, "exchange": "allgather_ep"},
]


def counts(dp: int, calls: int, most: int = 4) -> list[list[int]]:
    """Rows of each rank in each call: uneven, some with none, some calls without any at all,
    capacities that come and go."""
    dice = random.Random(dp)
    fixed = [[most] * dp, [0] * dp, [most] + [0] * (dp - 1), [0] * (dp - 1) + [1]]
    return (
        fixed
        + [[min(dice.choice((0, 1, 1, 2, most)), most) for _ in range(dp)] for _ in range(calls)]
    )[:calls]


def go(
    pool: RankPool, folder: Path, sizes: dict[str, Any], tokens: list[list[int]], **changes: Any
) -> list[dict[str, Any]]:
    arguments = {
        "dtype": "float32",
        "slots": None,
        "at_once": 1,
        "start": 0,
        "rows": 4,
        "late": -1,
        "slow": -1,
        **changes,
    }
    return pool.run(
        "peer_exchange",
        ParallelConfig(**sizes).world,
        sizes=sizes,
        folder=str(folder),
        tokens=tokens,
        **arguments,
    )


def check(results: list[dict[str, Any]], sizes: dict[str, Any], tokens: list[list[int]]) -> None:
    # all-gathers leave tokens on all ranks of tp
    each = 1 if sizes["exchange"] == "low_latency" else sizes.get("tp", 1)
    assert sum(result["rows"] for result in results) == each * sum(map(sum, tokens))
    assert all(result["traffic"] for result in results), "counted as the process group counts"
    assert not any(result["busy"] for result in results)
    ways = [
        f"{sizes['exchange']} ({why})"
        for why in ("process group: cpu has no symmetric memory", "process group: as configured")
    ]
    assert all(
        result["ways"][:2] == ways and "memory shared by the GPUs" in result["ways"][2]
        for result in results
    )


@pytest.mark.parametrize("sizes", LOW_LATENCY, ids=name_of)
def test_the_bits_of_the_process_group(
    pool: RankPool, tmp_path: Path, sizes: dict[str, Any]
) -> None:
    tokens = counts(sizes["dp"], 9)
    results = go(pool, tmp_path, sizes, tokens)
    check(results, sizes, tokens)
    assert all(all(result["equal"]) for result in results), [result["equal"] for result in results]
    assert {result["taken"] for result in results} == {
        sum(-(-max(rows) // sizes.get("tp", 1)) for rows in tokens)
    }, "all calls took that way"


@pytest.mark.parametrize("world", [2, 4])
def test_many_calls_without_a_barrier(pool: RankPool, tmp_path: Path, world: int) -> None:
    """Ranks dawdle at random; replicas; counters that pass 2^31 on the way; bf16."""
    sizes = {"dp": world, "ep": world, "exchange": "low_latency"}
    tokens = counts(world, 52, most=3 - world // 2)
    results = go(
        pool, tmp_path, sizes, tokens, dtype="bfloat16", slots=REPLICAS, start=2**31 - 20, rows=2
    )
    check(results, sizes, tokens)
    assert all(all(result["equal"]) for result in results), [result["equal"] for result in results]


@pytest.mark.parametrize("world", [2, 4])
def test_two_exchanges_under_way(pool: RankPool, tmp_path: Path, world: int) -> None:
    sizes = {"dp": world, "ep": world, "exchange": "low_latency"}
    tokens = counts(world, 12, most=3)
    results = go(pool, tmp_path, sizes, tokens, at_once=2)
    check(results, sizes, tokens)
    assert all(all(result["equal"]) for result in results), [result["equal"] for result in results]


@pytest.mark.parametrize("sizes", GATHERS, ids=name_of)
def test_sums_of_an_all_gather(pool: RankPool, tmp_path: Path, sizes: dict[str, Any]) -> None:
    """A process group adds in its own order, so sums differ in their last bits."""
    tokens = counts(sizes["dp"], 7)
    results = go(pool, tmp_path, sizes, tokens)
    check(results, sizes, tokens)
    assert all(result["worst"] <= 1e-6 * result["largest"] for result in results)
    assert {result["taken"] for result in results} == {sum(map(max, tokens))}


def test_a_rank_without_rows_waits_for_one_that_still_reads(pool: RankPool, tmp_path: Path) -> None:
    """Were it to go on, its next rows would come over those that the other's experts have not
    read yet: blocks are longer then."""
    sizes = LOW_LATENCY[0]
    tokens = [[0, 1], [4, 0]] * 5
    results = go(pool, tmp_path, sizes, tokens, late=1)
    check(results, sizes, tokens)
    assert all(all(result["equal"]) for result in results), [result["equal"] for result in results]


def test_rows_given_back_late_are_those_of_their_call(pool: RankPool, tmp_path: Path) -> None:
    """Ranks that have their own rows back go on while the last one still gives back others'. The
    next blocks are longer, so that a rank's lie where those of several ranks were, and none of
    their rows are for the last rank's experts, as all of the call before are."""
    sizes = LOW_LATENCY[1]
    tokens = [[0] * 4] * 7 + [[1] * 4, [4] * 4]
    results = go(pool, tmp_path, sizes, tokens, slow=3)
    check(results, sizes, tokens)
    assert all(all(result["equal"]) for result in results), [result["equal"] for result in results]


def test_longer_steps_take_the_process_group(pool: RankPool, tmp_path: Path) -> None:
    sizes = LOW_LATENCY[0]
    tokens = [[3, 1], [5, 1], [2, 0], [0, 7], [4, 4]]
    results = go(pool, tmp_path, sizes, tokens)
    check(results, sizes, tokens)
    assert [result["taken"] for result in results] == [3 + 2 + 4] * 2
    assert all(all(result["equal"]) for result in results)
