"""Placement of experts on expert servers of different capacity: where they should be, and which
changes can be made at once. No torch.

Everything is for one layer. held [servers, experts]: which server holds which expert. room
[servers]: how many experts a server has memory for. load [experts]: number of tokens routed to each
expert. Servers that hold the same expert share its load evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rorqual.parallel.eplb.placement import Bools, Floats, Ints, replicated

IDLE = 1e-3  # load assumed for an expert without any, as a fraction of the mean load
WORTH = 0.02  # balancedness that a new plan must gain
TRIED = 8  # changes between two servers that are evaluated in full


def server_loads(held: Bools, load: Any) -> Floats:
    """[servers]"""
    share = np.asarray(load, np.float64) / np.maximum(held.sum(0), 1)
    found: Floats = (held * share).sum(1)
    return found


def server_balancedness(held: Bools, load: Any) -> float:
    """Mean over max of the servers' loads; 1 if there is no load."""
    loads = server_loads(held, load)
    most = float(loads.max(initial=0.0))
    return float(loads.mean()) / most if most else 1.0


def place_on_servers(held: Bools, load: Any, room: Ints, enough: float = 0.99) -> Bools:
    """The wanted placement, with few changes from `held`. First every expert gets a server, if
    there is room; then one expert at a time is changed between the most loaded server and another,
    until the balancedness is `enough` or no change helps. No server exceeds its room. If anything
    is to move, one slot is kept or made free: without it servers could not swap experts that only
    they hold (next_changes). So nothing moves if the room is exactly one slot per expert."""
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
    """Give each expert without a server one, the heaviest first, in place."""
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
    """A plan from scratch: replicas of the most loaded experts, heaviest first to the least loaded
    server; then servers are permuted so that most experts are in place already."""
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
    """The plan with servers permuted so that they hold much of it already."""
    common = (plan[:, None] & held[None]).sum(2)
    common[plan.sum(1)[:, None] > room[None]] = -1
    found = np.zeros_like(plan)
    for _ in range(len(plan)):
        new, old = np.unravel_index(common.argmax(), common.shape)
        if common[new, old] < 0:
            return plan  # the remaining servers do not fit
        found[old] = plan[new]
        common[new] = -2
        common[:, old] = -2
    return found


def _give_up_a_copy(held: Bools, weight: Floats) -> None:
    """Drop the replica whose loss increases loads least, in place."""
    loads = server_loads(held, weight)
    counts = held.sum(0)
    spare = held & (counts > 1)
    after = loads[:, None] + weight / np.maximum(counts * (counts - 1), 1)
    server, expert = np.unravel_index(np.where(spare, after, np.inf).argmin(), held.shape)
    held[server, expert] = False


def _improved(held: Bools, weight: Floats, room: Ints) -> Bools | None:
    """`held` after the best change between the most loaded server and the first other with which
    one helps; None if no change helps."""
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
    """Loads, largest first; smaller is better. Rounded, so that rounding errors cause no changes
    back and forth."""
    loads = server_loads(held, weight)
    found: list[float] = np.sort(np.round(loads / loads.mean(), 9))[::-1].tolist()
    return found


def _changes(
    held: Bools, weight: Floats, loads: Floats, hot: int, cold: int, room: Ints
) -> Iterator[Bools]:
    """The most promising changes: an expert of the hot server is copied or moved to the cold one,
    into a free slot, in place of an expert with other replicas, or in a swap."""
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
    """Rows and columns of the smallest scores."""
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
    """(loads, drops) [servers, experts]: changes towards `wanted` that can be made at once, in any
    order of the servers. A server drops an expert only if another one holds and keeps it, and has
    room for what it loads. Empty if nothing can be done."""
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
    """Drop unwanted experts once nothing more is to be loaded, or can be."""
    for server, expert in np.argwhere(held & ~wanted & ~drops):
        if keepers[expert] > 1:
            keepers[expert] -= 1
            drops[server, expert] = True


def _step_aside(held: Bools, wanted: Bools, room: Ints, loads: Bools) -> None:
    """For servers that are full of experts that only they hold: load one of these into a free slot
    of another server, so that its slot can be freed."""
    free = np.flatnonzero(held.sum(1) < room)
    waiting = np.flatnonzero((wanted & ~held).any(1))
    for server in waiting:
        for expert in np.flatnonzero(held[server] & ~wanted[server]):
            other = [place for place in free if not held[place, expert]]
            if other:
                loads[other[0], expert] = True
                return
