"""Experts on servers of different sizes: everything has a holder, before, on the way and after."""

from __future__ import annotations

import numpy as np
import pytest

from rorqual.parallel.eplb.placement import balancedness, place
from rorqual.parallel.eplb.servers import (
    next_changes,
    place_on_servers,
    server_balancedness,
    server_loads,
)

SIZES = [
    (16, [9, 9]),
    (16, [12, 4, 3]),
    (16, [5, 4, 4, 4]),
    (16, [16, 16, 0]),
    (64, [20] * 4),
    (256, [33] + [32] * 7),
]


def drawn(
    rng: np.random.Generator, experts: int, room: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Experts somewhere, some of them twice where there is room, and a skewed load."""
    held = np.zeros((len(room), experts), bool)
    for expert in [*range(experts), *rng.integers(0, experts, int(rng.integers(0, 4)))]:
        free = np.flatnonzero((held.sum(1) < room) & ~held[:, expert])
        if free.size:
            held[rng.choice(free), expert] = True
    return held, rng.zipf(1.5, experts).clip(max=1000).astype(float)


@pytest.mark.parametrize(("experts", "sizes"), SIZES)
def test_a_plan_fits_is_better_and_is_reached_without_losing_an_expert(
    experts: int, sizes: list[int]
) -> None:
    room = np.array(sizes)
    rng = np.random.default_rng(experts + len(sizes))
    for _ in range(5):
        held, load = drawn(rng, experts, room)
        wanted = place_on_servers(held, load, room, 0.95)
        assert wanted.any(0).all()
        assert (wanted.sum(1) <= room).all()
        assert server_balancedness(wanted, load) >= server_balancedness(held, load) - 1e-6
        now = held.copy()
        while (now != wanted).any():
            loads, drops = next_changes(now, wanted, room)
            assert loads.any() or drops.any()
            assert not (loads & now).any()
            assert not (drops & ~now).any()
            for server in rng.permutation(len(room)):  # whoever is ready first
                now[server] &= ~drops[server]
                assert now.any(0).all()
                now[server] |= loads[server]
                assert now[server].sum() <= room[server]


def test_what_has_no_holder_gets_one_also_in_place_of_a_copy() -> None:
    held = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], bool)
    load = np.array([4.0, 1.0, 1.0, 1.0])
    free = place_on_servers(held, load, np.array([3, 3]), 0.0)
    assert free.tolist() == [[True, True, True, False], [True, False, False, True]]
    full = place_on_servers(held, load, np.array([3, 1]), 0.0)
    assert full.any(0).all()
    assert full.sum(1).tolist() == [3, 1]
    alone = np.array([[1, 1, 0, 0]], bool)
    assert place_on_servers(alone, load, np.array([2]), 0.0).tolist() == alone.tolist()


def test_full_servers_that_each_hold_what_no_other_does_stay_as_they_are() -> None:
    held = np.zeros((2, 16), bool)
    held[0, :8] = held[1, 8:] = True
    load = np.array([10.0] * 8 + [1.0] * 8)
    assert (place_on_servers(held, load, np.array([8, 8])) == held).all()


def test_a_plan_is_nearly_as_even_as_a_new_one() -> None:
    rng = np.random.default_rng(2)
    for servers, experts, each, most in ((8, 256, 36, 32), (4, 64, 20, 64)):
        load = rng.zipf(1.5, experts).clip(max=1000).astype(float)
        held = np.zeros((servers, experts), bool)
        held[np.arange(experts) // (experts // servers), np.arange(experts)] = True
        found = place_on_servers(held, load, np.full(servers, each))
        new = balancedness(place(load[None], servers * each, servers), load[None], servers)
        assert server_balancedness(found, load) > 0.98 * new
        assert (found & ~held).sum() <= most


def test_loads_of_idle_and_homeless_experts() -> None:
    held = np.array([[1, 0, 0], [1, 1, 0]], bool)
    assert server_loads(held, [2.0, 3.0, 5.0]).tolist() == [1.0, 4.0]
    assert server_balancedness(held, np.zeros(3)) == 1.0
