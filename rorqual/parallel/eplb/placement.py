"""Load-balanced placements of experts: DeepSeek's algorithm (their repository EPLB). No torch.

A placement is an array [layers, slots] of logical experts; rank r of n has the r-th of n equal
runs of slots. Loads are [layers, experts]; replicas of an expert share its load evenly. No rank
gets two replicas of one expert. `speeds`: relative speeds of the ranks, if they differ; a rank's
load is then the time it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rorqual.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def check_slots(experts: int, slots: int, ranks: int, nodes: int = 1) -> None:
    """Raises ConfigError if `slots` slots cannot hold the experts evenly over the ranks."""
    if slots % ranks:
        raise ConfigError(
            f"{slots} slots ({experts} experts and {slots - experts} redundant ones) cannot be "
            f"dealt out to {ranks} ranks equally; accepted: multiples of {ranks}"
        )
    if not experts <= slots <= experts * ranks:
        raise ConfigError(
            f"{slots - experts} redundant experts; accepted: 0 to {experts * (ranks - 1)}, one "
            "copy of each expert a rank at most"
        )
    if ranks % nodes or slots % nodes:
        raise ConfigError(f"{nodes} nodes do not divide {ranks} ranks and {slots} slots")


def place(
    loads: Any,
    slots: int,
    ranks: int,
    groups: int = 1,
    nodes: int = 1,
    speeds: Sequence[float] | None = None,
) -> Ints:
    """A placement for these loads. If the experts' groups divide over several nodes, each group
    stays on one node (hierarchical); else replicas go where the load is least (global)."""
    weight = np.asarray(loads, np.float64)
    experts = weight.shape[1]
    check_slots(experts, slots, ranks, nodes)
    if nodes == 1 or groups % nodes or experts % groups or slots > experts // nodes * ranks:
        return _global(weight, slots, ranks, speeds_of(speeds, ranks))
    if speeds is not None:
        raise ConfigError("ranks of different speeds go with one node alone")
    layers = len(weight)
    size = experts // groups
    by_group = weight.reshape(layers, groups, size).sum(-1)
    node_groups = _packed(by_group, None, nodes, np.ones(nodes))
    inside = (node_groups[..., None] * size + np.arange(size)).reshape(layers * nodes, -1)
    held = np.take_along_axis(weight, inside.reshape(layers, -1), 1).reshape(inside.shape)
    each = ranks // nodes
    local = _global(held, slots // nodes, each, np.ones(each))
    return np.take_along_axis(inside, local, 1).reshape(layers, slots)


def speeds_of(speeds: Sequence[float] | None, ranks: int) -> Floats:
    found = np.ones(ranks) if speeds is None else np.asarray(speeds, np.float64)
    if found.shape != (ranks,) or not (found > 0).all():
        raise ConfigError(f"speeds {speeds}; accepted: {ranks} numbers above 0")
    return found


def _global(weight: Floats, slots: int, ranks: int, speeds: Floats) -> Ints:
    logical, counts = replicated(weight, slots, ranks)
    share = np.take_along_axis(weight / counts, logical, 1)
    order = _packed(share, logical, ranks, speeds)
    return np.take_along_axis(logical, order, 1)


def replicated(weight: Floats, slots: int, most: int) -> tuple[Ints, Ints]:
    """(logical expert of each slot, replicas of each expert): one slot each; each further slot is a
    replica of the then most loaded expert."""
    layers, experts = weight.shape
    every = np.arange(layers)
    counts = np.ones((layers, experts), np.int64)
    logical = np.tile(np.arange(slots), (layers, 1))
    for slot in range(experts, slots):
        heaviest = np.where(counts < most, weight / counts, -1.0).argmax(1)
        logical[:, slot] = heaviest
        counts[every, heaviest] += 1
    return logical, counts


def _packed(share: Floats, logical: Ints | None, packs: int, speeds: Floats) -> Ints:
    """Items by pack, [layers, items]. Greedy, heaviest first, into the lightest pack with room and
    without the same expert. With different speeds, into the pack with the most remaining load per
    free place, so that a slow rank does not start with heavy items."""
    layers, items = share.shape
    room = items // packs
    if room == 1 and logical is None:
        return np.tile(np.arange(items), (layers, 1))
    every = np.arange(layers)
    alike = (speeds == speeds[0]).all()
    due = None if alike else share.sum(1, keepdims=True) * speeds / speeds.sum()
    load = np.zeros((layers, packs))
    count = np.zeros((layers, packs), np.int64)
    packed = np.full((layers, packs, room), -1, np.int64)
    kinds = 0 if logical is None else int(logical.max()) + 1
    held = np.zeros((layers, kinds, packs), bool)
    for item in np.argsort(-share, axis=1, kind="stable").T:
        closed = count >= room
        if logical is not None:
            kind = logical[every, item]
            closed |= held[every, kind]
            for layer in np.flatnonzero(closed.all(1)):
                parts = packed[layer], count[layer], load[layer], held[layer]
                _make_room(*parts, item[layer], logical[layer], share[layer])
            closed = (count >= room) | held[every, kind]
        fill = load if due is None else (load - due) / np.maximum(room - count, 1)
        pack = np.where(closed, np.inf, fill).argmin(1)
        packed[every, pack, count[every, pack]] = item
        load[every, pack] += share[every, item]
        count[every, pack] += 1
        if logical is not None:
            held[every, kind, pack] = True
    return packed.reshape(layers, items)


def _make_room(
    packed: Ints, count: Ints, load: Floats, held: Bools, item: int, logical: Ints, share: Floats
) -> None:
    """For a layer in which every pack with room already has the item's expert: a full pack without
    it passes one of its items to a pack with room that lacks that item's expert. Such an item
    always exists, since the full pack has more items than the other."""
    room = packed.shape[1]
    free = int(np.where(count < room, load, np.inf).argmin())
    full = int(np.where(held[logical[item]], np.inf, load).argmin())
    kinds = logical[packed[full]]
    place = int(np.flatnonzero(~held[kinds, free])[-1])  # the lightest of them
    moved = packed[full, place]
    packed[full, place:-1] = packed[full, place + 1 :].copy()
    packed[free, count[free]] = moved
    count[free] += 1
    count[full] -= 1
    load[free] += share[moved]
    load[full] -= share[moved]
    held[logical[moved], free] = True
    held[logical[moved], full] = False


def identity_placement(layers: int, experts: int) -> Ints:
    """Every expert once, in order."""
    return np.tile(np.arange(experts), (layers, 1))


# ---- evaluation


def copies(placement: Ints, experts: int) -> Ints:
    """[layers, experts]: number of slots of each expert."""
    layers = len(placement)
    shifted = placement + np.arange(layers)[:, None] * experts
    return np.bincount(shifted.ravel(), minlength=layers * experts).reshape(layers, experts)


def rank_loads(
    placement: Ints, loads: Any, ranks: int, speeds: Sequence[float] | None = None
) -> Floats:
    """[layers, ranks]"""
    weight = np.asarray(loads, np.float64)
    counts = np.maximum(copies(placement, weight.shape[1]), 1)
    share = np.take_along_axis(weight / counts, placement, 1)
    times: Floats = by_rank(share, ranks).sum(-1) / speeds_of(speeds, ranks)
    return times


def balancedness_by_layer(
    placement: Ints, loads: Any, ranks: int, speeds: Sequence[float] | None = None
) -> Floats:
    """Mean over max of the ranks' loads; 1 if there is no load. With speeds: the time if all ranks
    took equally long, over that of the slowest."""
    times = rank_loads(placement, loads, ranks, speeds)
    even = np.asarray(loads, np.float64).sum(1) / speeds_of(speeds, ranks).sum()
    most = times.max(1)
    found: Floats = np.where(most > 0, even / np.where(most > 0, most, 1), 1.0)
    return found


def balancedness(
    placement: Ints, loads: Any, ranks: int, speeds: Sequence[float] | None = None
) -> float:
    """`balancedness_by_layer`, mean over layers."""
    return float(balancedness_by_layer(placement, loads, ranks, speeds).mean())


def moved(old: Ints, new: Ints, ranks: int) -> Ints:
    """[layers]: number of slots whose new expert is not on their rank yet."""
    layers = len(old)
    experts = int(max(old.max(), new.max())) + 1
    there = np.take_along_axis(held_by(old, experts, ranks), by_rank(new, ranks), 2)
    found: Ints = (~there).reshape(layers, -1).sum(1)
    return found


def by_rank(placement: Any, ranks: int) -> Any:
    """[layers, slots] to [layers, ranks, slots per rank]."""
    layers, slots = placement.shape
    return placement.reshape(layers, ranks, slots // ranks)


def held_by(placement: Ints, experts: int, ranks: int) -> Bools:
    """[layers, ranks, experts]"""
    found = np.zeros((len(placement), ranks, experts), bool)
    np.put_along_axis(found, by_rank(placement, ranks), True, 2)
    return found


def combined_loads(loads: Sequence[Any]) -> Floats:
    """Combine the loads of several workloads, with equal weight in each layer for any number of
    tokens."""
    parts = []
    for load in loads:
        weight = np.asarray(load, np.float64)
        if weight.shape != np.asarray(loads[0]).shape:
            raise ConfigError(
                f"loads of {list(weight.shape)} and of {list(np.asarray(loads[0]).shape)} [layers, "
                "experts] are not of one model"
            )
        total = weight.sum(1, keepdims=True)
        parts.append(weight / np.where(total > 0, total, 1))
    return np.mean(parts, 0)
