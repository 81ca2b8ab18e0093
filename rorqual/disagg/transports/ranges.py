"""Ranges of staging memory of any size, for pages that stay there until they are placed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rorqual.cache.written_layers import Mark

ALIGNED = 512  # bytes


@dataclass(eq=False)
class HeldRange:
    """A range at `offset` bytes of the staging memory; bytes: [size] uint8. marks: of what may
    still read it for its previous holder; a writer calls them before it launches its write."""

    offset: int
    bytes: Tensor
    marks: tuple[Mark, ...] = ()

    @property
    def stop(self) -> int:
        return self.offset + self.bytes.numel()


@dataclass(frozen=True)
class PendingReads:
    """The mark of a released range: what may still read it."""

    offset: int
    stop: int
    mark: Mark


@dataclass
class StagingRanges:
    """Allocator over `memory` [bytes] uint8, `size` bytes from `offset` on. First fit."""

    memory: Tensor
    offset: int
    size: int
    held: list[HeldRange] = field(default_factory=list)  # in order
    aside: list[HeldRange] = field(default_factory=list)  # a read may still write to these
    left: list[PendingReads] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, size: int, patience: float) -> HeldRange | None:
        """A free range; None after `patience` seconds, or at once where `size` can never be
        allocated."""
        deadline = time.monotonic() + patience
        with self.changed:
            while (start := self._room(size)) is None:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or size > self.size:
                    return None
                self.changed.wait(remaining)
            stop = start + size
            before = [one for one in self.left if one.offset < stop and start < one.stop]
            self.left = [one for one in self.left if one not in before]
            # the parts of them outside this range are for later holders to wait for
            for one in before:
                self._leave(one.offset, start, one.mark)
                self._leave(stop, one.stop, one.mark)
            found = HeldRange(start, self.memory[start:stop], tuple(one.mark for one in before))
            self.held.append(found)
            self.held.sort(key=lambda held: held.offset)
            return found

    def _room(self, size: int) -> int | None:
        start = -(-self.offset // ALIGNED) * ALIGNED
        for held in self.held:
            if start + size <= held.offset:
                return start
            start = -(-held.stop // ALIGNED) * ALIGNED
        return start if start + size <= self.offset + self.size else None

    def _leave(self, start: int, stop: int, mark: Mark) -> None:
        if start < stop:
            self.left.append(PendingReads(start, stop, mark))

    def release(self, held: HeldRange, mark: Mark | None = None) -> None:
        """Free a range. mark: of what may still read it (Platform.mark)."""
        with self.changed:
            if held not in self.held or held in self.aside:
                return
            self.held.remove(held)
            if mark is not None:
                self._leave(held.offset, held.stop, mark)
            self.changed.notify_all()

    def set_aside(self, held: HeldRange) -> None:
        """A read may still write to it: keep it unused until `recover`."""
        with self.changed:
            if held not in self.aside:
                self.aside.append(held)

    def unusable(self) -> list[HeldRange]:
        with self.changed:
            return list(self.aside)

    def recover(self, ranges: Sequence[HeldRange]) -> None:
        """Nothing writes to these any more: free them."""
        with self.changed:
            self.aside = [held for held in self.aside if held not in ranges]
        for held in ranges:
            self.release(held)
