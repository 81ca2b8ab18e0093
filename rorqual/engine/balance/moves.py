"""A move of experts between ranks, and a rank's result of it, as plain data. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rorqual.parallel.eplb.movement import parts


@dataclass(frozen=True)
class Move:
    """layers: (number of the layer, its new placement)."""

    number: int
    layers: tuple[tuple[int, tuple[int, ...]], ...]

    def encode(self) -> bytes:
        return json.dumps([self.number, self.layers], separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> Move:
        number, layers = json.loads(data)
        return Move(number, tuple((layer, tuple(slots)) for layer, slots in layers))


@dataclass(frozen=True)
class MoveResult:
    """One rank's result of a move: its incoming experts are staged, or `error` says why not. slots:
    number of incoming experts. broken: the process group for experts is unusable."""

    number: int
    slots: int = 0
    seconds: float = 0.0
    error: str = ""
    broken: bool = False

    def encode(self) -> bytes:
        values = [self.number, self.slots, self.seconds, self.error, self.broken]
        return json.dumps(values).encode()

    @staticmethod
    def decode(data: bytes) -> MoveResult:
        return MoveResult(*json.loads(data))


def changed_slots(old: Sequence[int], new: Sequence[int], ranks: int) -> list[int]:
    """The number of changed slots of each rank."""
    each = len(old) // ranks
    found = [0] * ranks
    for slot, (before, after) in enumerate(zip(old, new, strict=True)):
        found[slot // each] += before != after
    return found


def moves(
    present: dict[int, Sequence[int]],
    wanted: Sequence[tuple[int, Sequence[int]]],
    ranks: int,
    most: int,
    first: int,
) -> Iterator[Move]:
    """Moves that lead from `present` to the wanted placements, layer by layer in the given order. A
    move changes at most `most` slots of any rank, and covers several layers where they fit."""
    batch: dict[int, tuple[int, ...]] = {}
    used = [0] * ranks
    number = first
    for layer, target in wanted:
        now = present[layer]
        for part in parts(now, target, ranks, most):
            need = changed_slots(now, part, ranks)
            if batch and (
                layer in batch or any(u + n > most for u, n in zip(used, need, strict=True))
            ):
                yield Move(number, tuple(batch.items()))
                number += 1
                batch = {}
                used = [0] * ranks
            batch[layer] = tuple(part)
            used = [u + n for u, n in zip(used, need, strict=True)]
            now = part
    if batch:
        yield Move(number, tuple(batch.items()))
