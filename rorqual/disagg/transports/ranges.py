"""Ranges of staging memory of any size, for pages that stay where they came until they are
placed."""

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
    """Of `offset` bytes on in the staging memory; bytes: [size] uint8. marks: of what may still
    read it for its holder before; who writes to it calls them first, where it launches that."""

    offset: int
    bytes: Tensor
    marks: tuple[Mark, ...] = ()

    @property
    def stop(self) -> int:
        return self.offset + self.bytes.numel()


@dataclass(frozen=True)
class LeftBehind:
    """What was launched when a range was given back."""

    offset: int
    stop: int
    mark: Mark


@dataclass
class StagingRanges:
    """Of `memory` [bytes] uint8, `size` bytes from `offset` on. The first room that is large enough
    is taken."""

    memory: Tensor
    offset: int
    size: int
    held: list[HeldRange] = field(default_factory=list)  # in order
    aside: list[HeldRange] = field(default_factory=list)  # of these: a read may still write there
    left: list[LeftBehind] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, size: int, patience: float) -> HeldRange | None:
        """Waits so many seconds at most; not at all for what can never be had."""
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
            # what of them lies beside this range is for the next holder to wait for
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
            self.left.append(LeftBehind(start, stop, mark))

    def release(self, held: HeldRange, mark: Mark | None = None) -> None:
        """mark: of what may still read it (Platform.mark)."""
        with self.changed:
            if held not in self.held or held in self.aside:
                return
            self.held.remove(held)
            if mark is not None:
                self._leave(held.offset, held.stop, mark)
            self.changed.notify_all()

    def set_aside(self, held: HeldRange) -> None:
        """A read may write into it yet: it is not to be used before `recover`."""
        with self.changed:
            if held not in self.aside:
                self.aside.append(held)

    def unusable(self) -> list[HeldRange]:
        with self.changed:
            return list(self.aside)

    def recover(self, ranges: Sequence[HeldRange]) -> None:
        """Nothing writes into these any more."""
        with self.changed:
            self.aside = [held for held in self.aside if held not in ranges]
        for held in ranges:
            self.release(held)
