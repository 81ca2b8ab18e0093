"""Assigns ranks to reserved places, given the host of each. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def assign(nodes: Sequence[str], tp: int) -> list[int]:
    """The place of each rank: a permutation of range(len(nodes)), place 0 being rank 0's.

    Attention groups of `tp` neighbouring ranks, which communicate most, are placed on one node
    where one has room for a whole group, the first on rank 0's; consecutive groups fill a node
    before the next. The remaining groups are split among nodes."""
    free = Counter(nodes[1:])
    groups = len(nodes) // tp
    here = nodes[0]
    chosen: list[list[str] | None] = []
    for group in range(groups):
        need = tp - (group == 0)
        fits = (
            [here]
            if free[here] >= need
            else sorted(node for node in free if free[node] >= tp and group)
        )
        node = fits[0] if fits else None
        if node is not None:
            free[node] -= need
            here = node
        chosen.append(None if node is None else [node] * need)
    rest = sorted(free.elements(), key=lambda node: (node != nodes[0], -free[node], node))
    order = [
        node
        for group, found in enumerate(chosen)
        for node in (found or [rest.pop(0) for _ in range(tp - (group == 0))])
    ]
    return _places(nodes, order)


def _places(nodes: Sequence[str], order: list[str]) -> list[int]:
    """The lowest free place on each node, in turn."""
    left: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        if place:
            left.setdefault(node, []).append(place)
    return [0, *(left[node].pop(0) for node in order)]
