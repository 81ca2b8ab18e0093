"""Adapt the current placement to new loads by moving few experts. No torch.

First, swaps of two experts between the most loaded rank and another. If these do not bring a layer
near the balance of a new plan, the numbers of replicas change; if that is not enough either, the
new plan is used, with its ranks permuted to match the current placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rorqual.parallel.eplb.placement import (
    Bools,
    Floats,
    Ints,
    balancedness_by_layer,
    by_rank,
    copies,
    held_by,
    moved,
    place,
    speeds_of,
)

WITHIN = 0.01  # accepted difference to a new plan's balancedness
SEARCHED = 72  # slots of other ranks compared with one rank's slots at a time


def rebalance(
    present: Ints,
    loads: Any,
    ranks: int,
    speeds: Sequence[float] | None = None,
    within: float = WITHIN,
) -> Ints:
    """A placement as balanced as a new plan, up to `within`, with few slots different from
    `present`; layers that are balanced enough already are unchanged."""
    weight = np.asarray(loads, np.float64)
    layers, slots = present.shape
    plan = place(weight, slots, ranks, speeds=speeds)
    wanted = balancedness_by_layer(plan, weight, ranks, speeds) * (1 - within)
    found = match_placement(plan, present, ranks) if speeds is None else plan
    fewest = moved(present, found, ranks)
    left = np.arange(layers)
    spare = slots - weight.shape[1]
    for changes in dict.fromkeys((0, min(2, spare), min(8, spare), spare)):
        start = _recopied(present[left], weight[left], changes, ranks)
        tried = _exchanged(start, weight[left], wanted[left], ranks, speeds_of(speeds, ranks))
        reached = balancedness_by_layer(tried, weight[left], ranks, speeds) >= wanted[left]
        fewer = reached & (moved(present[left], tried, ranks) <= fewest[left])
        found[left[fewer]] = tried[fewer]
        left = left[~reached]
        if not len(left):
            break
    return found


# ---- exchanges


def _exchanged(placement: Ints, weight: Floats, wanted: Floats, ranks: int, speeds: Floats) -> Ints:
    """Swap two experts at a time until a layer reaches the wanted balance or no swap helps."""
    placement = placement.copy()
    counts = np.maximum(copies(placement, weight.shape[1]), 1)
    share = np.take_along_axis(weight / counts, placement, 1)
    held = held_by(placement, weight.shape[1], ranks)
    even = weight.sum(1) / speeds.sum()
    active = np.arange(len(placement))
    for _ in range(placement.shape[1]):
        times = by_rank(share[active], ranks).sum(-1) / speeds
        active = active[even[active] < wanted[active] * times.max(1)]
        if not len(active):
            break
        first, second, helps = _best_exchange(
            placement[active], share[active], held[active], ranks, speeds
        )
        active, first, second = active[helps], first[helps], second[helps]
        _swap(placement, share, held, active, first, second, ranks)
    return placement


def _best_exchange(
    placement: Ints, share: Floats, held: Bools, ranks: int, speeds: Floats
) -> tuple[Ints, Ints, Bools]:
    """(slot on the slowest rank, slot on another, whether swapping them helps), by layer. Only the
    fastest ranks are considered."""
    layers, slots = placement.shape
    each = slots // ranks
    every = np.arange(layers)
    loads = by_rank(share, ranks).sum(-1)
    order = np.argsort(loads / speeds, axis=1, kind="stable")
    hot = order[:, -1]
    others = order[:, : max(1, min(ranks - 1, SEARCHED // each))]
    hot_slots = hot[:, None] * each + np.arange(each)
    cold_slots = (others[..., None] * each + np.arange(each)).reshape(layers, -1)
    gain = (
        np.take_along_axis(share, hot_slots, 1)[:, :, None]
        - np.take_along_axis(share, cold_slots, 1)[:, None]
    )
    cold_rank = np.repeat(others, each, 1)
    hot_after = (loads[every, hot][:, None, None] - gain) / speeds[hot][:, None, None]
    cold_after = (np.take_along_axis(loads, cold_rank, 1)[:, None] + gain) / speeds[cold_rank][
        :, None
    ]
    after = np.maximum(hot_after, cold_after)
    hot_experts = np.take_along_axis(placement, hot_slots, 1)
    cold_experts = np.take_along_axis(placement, cold_slots, 1)
    there = held[every[:, None, None], cold_rank[:, None], hot_experts[:, :, None]]
    here = held[every[:, None], hot[:, None], cold_experts]
    after[there | here[:, None]] = np.inf
    best = after.reshape(layers, -1).argmin(1)
    row, column = np.divmod(best, cold_slots.shape[1])
    now = loads[every, hot] / speeds[hot]
    helps = after.reshape(layers, -1)[every, best] < now * (1 - 1e-9)
    return hot_slots[every, row], cold_slots[every, column], helps


def _swap(
    placement: Ints,
    share: Floats,
    held: Bools,
    layers: Ints,
    first: Ints,
    second: Ints,
    ranks: int,
) -> None:
    each = placement.shape[1] // ranks
    for one, other in ((first, second), (second, first)):
        held[layers, one // each, placement[layers, one]] = False
        held[layers, one // each, placement[layers, other]] = True
    for array in (placement, share):
        kept = array[layers, first].copy()
        array[layers, first] = array[layers, second]
        array[layers, second] = kept


# ---- numbers of copies


def _recopied(placement: Ints, weight: Floats, changes: int, ranks: int) -> Ints:
    """Reassign up to `changes` slots of each layer from experts that lose least by having one
    replica fewer to those that gain most."""
    placement = placement.copy()
    layers, slots = placement.shape
    every = np.arange(layers)
    experts = weight.shape[1]
    counts = copies(placement, experts)
    held = held_by(placement, experts, ranks)
    for _ in range(changes):
        wants = np.where(counts < ranks, weight / counts, -1.0)
        spares = np.where(counts > 1, weight / np.maximum(counts - 1, 1), np.inf)
        gets, gives = wants.argmax(1), spares.argmin(1)
        share = np.take_along_axis(weight / counts, placement, 1)
        loads = by_rank(share, ranks).sum(-1)
        free = held[every, :, gives] & ~held[every, :, gets]
        helps = (spares[every, gives] < wants[every, gets]) & free.any(1)
        rank = np.where(free, loads, np.inf).argmin(1)
        inside = by_rank(placement, ranks)[every, rank] == gives[:, None]
        slot = rank * (slots // ranks) + inside.argmax(1)
        at = every[helps]
        placement[at, slot[helps]] = gets[helps]
        held[at, rank[helps], gives[helps]] = False
        held[at, rank[helps], gets[helps]] = True
        counts[at, gives[helps]] -= 1
        counts[at, gets[helps]] += 1
    return placement


# ---- permute another plan's ranks and slots to match the current placement


def match_placement(plan: Ints, present: Ints, ranks: int) -> Ints:
    """`plan` with ranks, and slots within a rank, permuted so that most experts stay where they
    are. Ranks must be equally fast."""
    layers = len(plan)
    every = np.arange(layers)
    experts = int(max(plan.max(), present.max())) + 1
    held = held_by(present, experts, ranks)
    # by our rank: how many of each new rank's experts are there
    there = held[every[:, None, None], :, by_rank(plan, ranks)]
    common = there.sum(2)
    source = np.zeros((layers, ranks), np.int64)
    for _ in range(ranks):
        best = common.reshape(layers, -1).argmax(1)
        theirs, ours = np.divmod(best, ranks)
        source[every, ours] = theirs
        common[every, theirs] = -1
        common[every, :, ours] = -1
    chosen = np.take_along_axis(by_rank(plan, ranks), source[..., None], 1)
    return keep_slots(chosen.reshape(plan.shape), present, ranks)


def keep_slots(placement: Ints, present: Ints, ranks: int) -> Ints:
    """Permute slots within each rank so that experts it already has stay in their slots."""
    new, old = by_rank(placement, ranks), by_rank(present, ranks)
    experts = int(max(new.max(), old.max())) + 1
    stays = np.take_along_axis(held_by(placement, experts, ranks), old, 2)
    comes = ~np.take_along_axis(held_by(present, experts, ranks), new, 2)
    found = old.copy()
    # each rank gains as many experts as it loses; match them in slot order
    found[~stays] = new[comes]
    return found.reshape(placement.shape)


# ---- in steps


def parts(
    present: Sequence[int], wanted: Sequence[int], ranks: int, most: int
) -> Iterator[list[int]]:
    """Intermediate placements of one layer from `present` to `wanted`. Each changes at most `most`
    (at least 2) slots of any rank, and every expert has a slot in all of them."""
    assert most >= 2
    now = list(present)
    before = list(now)
    each = len(now) // ranks
    while now != list(wanted):
        step = _one_change(now, wanted)
        after = [step.get(slot, expert) for slot, expert in enumerate(now)]
        changed = [0] * ranks
        for slot, (old, new) in enumerate(zip(before, after, strict=True)):
            changed[slot // each] += old != new
        if max(changed) > most:
            yield now
            before = list(now)
        now = after
    if now != before:
        yield now


def _one_change(now: list[int], wanted: Sequence[int]) -> dict[int, int]:
    """{slot: expert} that gives one wrong slot its wanted expert: it replaces an expert with other
    slots, or is swapped with a slot that is not to keep that expert. One always exists: an expert
    with a single slot, at the wrong place, is wanted in another slot that is still wrong."""
    for slot, expert in enumerate(wanted):
        if now[slot] == expert:
            continue
        if now.count(now[slot]) > 1:
            return {slot: expert}
        for other, held in enumerate(now):
            if held == expert and wanted[other] != expert:
                return {slot: expert, other: now[slot]}
    raise AssertionError("some slot can be changed")
