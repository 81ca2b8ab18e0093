"""Experts on servers that may hold different numbers of them: where they should be, and which
changes can be made at once. No torch.

All is of one layer: held [servers, experts] says who holds what, room [servers] how many experts a
server has memory for, load [experts] how often each was picked. Holders of an expert share its load
evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rorqual.parallel.eplb.placement import Bools, Floats, Ints, replicated

IDLE = 1e-3  # of the mean load: what an expert counts for that nobody picked
WORTH = 0.02  # of balancedness, that a new plan must be better by
TRIED = 8  # changes between two servers that are worked out in full


def server_loads(held: Bools, load: Any) -> Floats:
    """[servers]"""
    share = np.asarray(load, np.float64) / np.maximum(held.sum(0), 1)
    found: Floats = (held * share).sum(1)
    return found


def server_balancedness(held: Bools, load: Any) -> float:
    """Mean over max of the servers' loads; 1 where there is none."""
    loads = server_loads(held, load)
    most = float(loads.max(initial=0.0))
    return float(loads.mean()) / most if most else 1.0


def place_on_servers(held: Bools, load: Any, room: Ints, enough: float = 0.99) -> Bools:
    """Who should hold what, from who holds what, by few changes: every expert somewhere, while
    there is room at all, then changes between the most loaded server and another, one expert at a
    time, until the balancedness is `enough` or no change helps. Nobody comes to hold more than its
    room. One slot stays free, or becomes free, where anything is to move: without it servers could
    not exchange what only they hold (next_changes), and so nothing moves where the room is that
    of one copy of each expert."""
    weight = np.asarray(load, np.float64)
    weight = weight + IDLE * max(float(weight.mean()), 1e-9)
    found = held.copy()
    _cover(found, weight, room)
    most = int(room.sum())
    if server_balancedness(found, weight) >= enough or most <= int(found.any(0).sum()):
        return found
    if found.sum() == most:
        _give_up_a_copy(found, weight)
    for _ in range(2 * most):
        if server_balancedness(found, weight) >= enough:
            return found
        better = _improved(found, weight, room)
        if better is None:
            break
        found = better
    new = _new_plan(held, weight, room)
    gain = server_balancedness(new, weight) - server_balancedness(found, weight)
    return new if gain > WORTH else found


def _cover(held: Bools, weight: Floats, room: Ints) -> None:
    """A holder for each expert that has none, the heaviest first, in place."""
    missing = np.flatnonzero(~held.any(0))
    for expert in missing[np.argsort(-weight[missing], kind="stable")]:
        loads = server_loads(held, weight)
        free = held.sum(1) < room
        if free.any():
            held[np.where(free, loads, np.inf).argmin(), expert] = True
            continue
        spare = held & (held.sum(0) > 1)
        if not spare.any():
            return
        after = loads[:, None] - weight / np.maximum(held.sum(0), 1)
        server, other = np.unravel_index(np.where(spare, after, np.inf).argmin(), held.shape)
        held[server, other] = False
        held[server, expert] = True


def _new_plan(held: Bools, weight: Floats, room: Ints) -> Bools:
    """From nothing: copies of what is picked most, the heaviest first to whoever has least to do;
    servers then exchange roles, so that most is where it should be."""
    servers, experts = held.shape
    copies = min(int(room.sum()) - 1, experts * int((room > 0).sum()))
    logical, counts = replicated(weight[None], copies, int((room > 0).sum()))
    share = (weight / counts[0])[logical[0]]
    found = np.zeros_like(held)
    loads = np.zeros(servers)
    placed = np.zeros(experts, bool)
    order = np.argsort(-share, kind="stable")
    for expert in logical[0][order]:
        free = (found.sum(1) < room) & ~found[:, expert]
        if free.any():
            server = np.where(free, loads, np.inf).argmin()
            found[server, expert] = placed[expert] = True
            loads[server] += weight[expert] / counts[0, expert]
    assert placed.all(), "there is a slot for each expert"
    return _renamed(found, held, room)


def _renamed(plan: Bools, held: Bools, room: Ints) -> Bools:
    """Its servers in another order, so that they have much of what they are to hold."""
    common = (plan[:, None] & held[None]).sum(2)
    common[plan.sum(1)[:, None] > room[None]] = -1
    found = np.zeros_like(plan)
    for _ in range(len(plan)):
        new, old = np.unravel_index(common.argmax(), common.shape)
        if common[new, old] < 0:
            return plan  # what is left does not fit
        found[old] = plan[new]
        common[new] = -2
        common[:, old] = -2
    return found


def _give_up_a_copy(held: Bools, weight: Floats) -> None:
    """That whose loss the servers feel least, in place."""
    loads = server_loads(held, weight)
    counts = held.sum(0)
    spare = held & (counts > 1)
    after = loads[:, None] + weight / np.maximum(counts * (counts - 1), 1)
    server, expert = np.unravel_index(np.where(spare, after, np.inf).argmin(), held.shape)
    held[server, expert] = False


def _improved(held: Bools, weight: Floats, room: Ints) -> Bools | None:
    """After the best change between the most loaded server and the first other with which there is
    one that helps; None where there is none."""
    loads = server_loads(held, weight)
    order = np.argsort(loads, kind="stable")
    hot = int(order[-1])
    for cold in order[:-1].tolist():
        tried = list(_changes(held, weight, loads, hot, cold, room))
        if not tried:
            continue
        best = min(tried, key=lambda after: _ranked(after, weight))
        if _ranked(best, weight) < _ranked(held, weight):
            return best
    return None


def _ranked(held: Bools, weight: Floats) -> list[float]:
    """Loads, the largest first: less is better. Rounded, so that no change is made and taken back
    for a last digit."""
    loads = server_loads(held, weight)
    found: list[float] = np.sort(np.round(loads / loads.mean(), 9))[::-1].tolist()
    return found


def _changes(
    held: Bools, weight: Floats, loads: Floats, hot: int, cold: int, room: Ints
) -> Iterator[Bools]:
    """The most promising: an expert of the hot server is copied, or moved, to the cold one, there
    into a free slot, or one of a copy that others hold too, or in exchange."""
    counts = np.maximum(held.sum(0), 1)
    share = weight / counts
    comes = np.flatnonzero(held[hot] & ~held[cold])
    if not comes.size:
        return
    copied = weight[comes] / (counts[comes] + 1)
    hot_copied, hot_moved = loads[hot] - share[comes] + copied, loads[hot] - share[comes]
    if held[cold].sum() < room[cold]:
        ways = [(True, hot_moved, share[comes])]
        if held.sum() + 1 < room.sum():
            ways.append((False, hot_copied, copied))
        for gone, left, more in ways:
            score = np.maximum(left, loads[cold] + more)
            for place in np.argsort(score, kind="stable")[:TRIED]:
                yield _changed(held, hot, cold, comes[place], gone)
        return
    leaves = np.flatnonzero(held[cold] & (counts > 1))
    score = np.maximum(hot_copied[:, None], loads[cold] + copied[:, None] - share[leaves])
    for place, other in _best(score):
        yield _changed(held, hot, cold, comes[place], False, leaves[other])
    swaps = np.flatnonzero(held[cold] & ~held[hot])
    gain = share[comes][:, None] - share[swaps]
    for place, other in _best(np.maximum(loads[hot] - gain, loads[cold] + gain)):
        after = _changed(held, hot, cold, comes[place], True, swaps[other])
        after[hot, swaps[other]] = True
        yield after


def _best(score: Floats) -> Iterator[tuple[int, int]]:
    """Rows and columns of the least."""
    for number in np.argsort(score, axis=None, kind="stable")[:TRIED].tolist():
        yield divmod(number, score.shape[1])


def _changed(
    held: Bools, hot: int, cold: int, expert: int, gone: bool, leaves: int | None = None
) -> Bools:
    after = held.copy()
    after[cold, expert] = True
    after[hot, expert] = not gone
    if leaves is not None:
        after[cold, leaves] = False
    return after


# ---- in steps


def next_changes(held: Bools, wanted: Bools, room: Ints) -> tuple[Bools, Bools]:
    """(loads, drops) [servers, experts] that can be made at once on the way from `held` to
    `wanted`, whoever of the servers is ready first: a server drops only what another holds that
    keeps it, and has room for what it loads. Nothing where nothing can be done."""
    loads = np.zeros_like(held)
    drops = np.zeros_like(held)
    keepers = held.sum(0)
    for server in range(len(held)):
        needs = np.flatnonzero(wanted[server] & ~held[server])
        spare = room[server] - held[server].sum()
        for expert in np.flatnonzero(held[server] & ~wanted[server]):
            if spare >= len(needs):
                break
            if keepers[expert] > 1:
                keepers[expert] -= 1
                drops[server, expert] = True
                spare += 1
        loads[server, needs[: max(spare, 0)]] = True
    if loads.any():
        return loads, drops
    _drop_unwanted(held, wanted, keepers, drops)
    if not drops.any() and (held != wanted).any():
        _step_aside(held, wanted, room, loads)
    return loads, drops


def _drop_unwanted(held: Bools, wanted: Bools, keepers: Ints, drops: Bools) -> None:
    """Once nothing is to be loaded any more, or can be: what is one too many."""
    for server, expert in np.argwhere(held & ~wanted & ~drops):
        if keepers[expert] > 1:
            keepers[expert] -= 1
            drops[server, expert] = True


def _step_aside(held: Bools, wanted: Bools, room: Ints, loads: Bools) -> None:
    """Servers are full of what only they hold: one expert goes where there is a free slot, so that
    its slot can be given up."""
    free = np.flatnonzero(held.sum(1) < room)
    waiting = np.flatnonzero((wanted & ~held).any(1))
    for server in waiting:
        for expert in np.flatnonzero(held[server] & ~wanted[server]):
            other = [place for place in free if not held[place, expert]]
            if other:
                loads[other[0], expert] = True
                return
