"""Decode steps recorded once and replayed: the whole step, from reading the device rows to writing the sampled tokens back.
Where some row needs the host's word (Variant.FULL), the forward pass alone.

One recording a batch bucket, sampling variant and number of drafts, made before serving, or, for batch sizes that `graph_sizes` leaves
out, when one is first needed. A smaller batch is padded with a row whose block table is all null pages: it writes nowhere that is read.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rorqual.engine.scheduling.scheduler_output import Common, Variant
from rorqual.platforms.base import Platform

Body = Callable[[Tensor, Variant, int], Tensor]
RECORDED = tuple(Variant)


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, every 64 beyond."""
    sizes = {1, 2, 4, most, *range(8, 65, 8), *range(64, 257, 16), *range(256, most + 1, 64)}
    return sorted(size for size in sizes if size <= most)


class DecodeGraphs:
    """`body(slots, variant, next_n)` computes one decode step of the rows `slots` [bucket] and
    returns what it drew, [bucket, ...]; of Variant.FULL the forward pass, and its hidden states."""

    def __init__(self, body: Body, platform: Platform, most: int, padding_slot: int):
        self.body, self.platform, self.padding = body, platform, padding_slot
        self.buckets = bucket_sizes(most)
        self.slots = torch.full((most,), padding_slot, dtype=torch.int64, device=platform.device)
        self.graphs: dict[tuple[int, Variant, int], Callable[[], Tensor]] = {}
        self.shown: list[int] = []

    def record(self, variants: tuple[Variant, ...] = RECORDED, next_ns: Iterable[int] = (0,), sizes: Sequence[int] | None = None) -> None:
        """Record every bucket, or those that batches of `sizes` use; the largest first so that the others fit into its memory."""
        for key in self._wanted(variants, next_ns, sizes):
            self._record(*key)

    def rehearse(self, variants: tuple[Variant, ...] = RECORDED, next_ns: Iterable[int] = (0,), sizes: Sequence[int] | None = None) -> None:
        """Every step that `record` would compute, once."""
        for size, variant, next_n in self._wanted(variants, next_ns, sizes):
            self.body(self._padding(size), variant, next_n)

    def _wanted(
        self, variants: tuple[Variant, ...], next_ns: Iterable[int], sizes: Sequence[int] | None
    ) -> Iterator[tuple[int, Variant, int]]:
        wanted = self.buckets if sizes is None else {self.bucket(size) for size in sizes if size <= self.buckets[-1]}
        for next_n, variant in itertools.product(next_ns, variants):
            yield from ((size, variant, next_n) for size in sorted(wanted, reverse=True))

    def bucket(self, size: int) -> int:
        return self.buckets[bisect_left(self.buckets, size)]

    def _record(self, size: int, variant: Variant, next_n: int) -> Callable[[], Tensor]:
        slots = self._padding(size)
        graph = self.graphs[size, variant, next_n] = self.platform.record(lambda: self.body(slots, variant, next_n))
        return graph

    def _padding(self, size: int) -> Tensor:
        """Recording computes a step a few times, and no request may move on by that."""
        self.shown = []
        return self.slots[:size].fill_(self.padding)

    def run(self, slots: list[int], common: Common) -> Tensor:
        """What the body returned for these slots; valid until the next run, in stream order. Ranks
        replay the same recording, that of the rank with the most rows; and what one lacks all lack,
        since all were asked for the same ones: so all record it, and its collectives meet."""
        size = self.bucket(max(common.sampled))
        key = (size, common.variant, common.next_n)
        graph = self.graphs.get(key) or self._record(*key)
        padded = slots + [self.padding] * (size - len(slots))
        if padded != self.shown[:size]:
            self.shown = []  # should the copy, or what comes before the next line, fail
            rows = self.platform.to_device(torch.tensor(padded))
            self.slots[:size].copy_(rows, non_blocking=True)
            self.shown = padded
        return graph()[: len(slots)]
