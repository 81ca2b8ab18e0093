"""Staging memory: host memory registered with a transport's library, in windows of equal size.

A window has one holder at a time. Each holding has its own generation, and only the newest one can
read, offer or release the window: a previous holder has no effect.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.errors import ConfigError

WINDOW_BYTES = 32 * 2**20
OFFERED_SECONDS = 30.0  # after which an offered window may be reclaimed, if none is free


class StagingMemory:
    """Memory that a child process can map too: `handle` is its file descriptor. `bytes` [size]
    uint8."""

    def __init__(self, size: int):
        self.size = size
        self.handle = os.memfd_create("rorqual staging", os.MFD_CLOEXEC)
        os.ftruncate(self.handle, size)
        self.map = mmap.mmap(self.handle, size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def close(self) -> None:
        """The mapping stays while `bytes` is referenced."""
        os.close(self.handle)


@dataclass(eq=False)
class HeldWindow:
    """A window at `offset` bytes of the staging memory; bytes: [size] uint8. offered_at: 0 while
    its holder fills it."""

    place: int
    offset: int
    bytes: Tensor
    generation: int
    offered_at: float = 0.0


class StagingWindows:
    """revoke: called with a window's number and generation before it becomes free after it has been
    offered, as its reader may still read."""

    def __init__(self, memory: Tensor, offset: int, size: int, count: int):
        """Of `memory` [bytes] uint8, from `offset` on, `count` windows of `size` bytes."""
        self.memory = memory
        self.offset = offset
        self.size = size
        self.count = count
        self.free = list(range(count))
        self.held: dict[int, HeldWindow] = {}
        self.aside: list[HeldWindow] = []
        self.generation = 0
        self.changed = threading.Condition()
        self.revoke: Callable[[int, int], None] | None = None

    def take(self, patience: float) -> HeldWindow | None:
        """A free window; None after `patience` seconds."""
        deadline = time.monotonic() + patience
        with self.changed:
            while not self.free:
                self._reclaim()
                left = deadline - time.monotonic()
                if self.free or left <= 0:
                    break
                self.changed.wait(min(left, 1.0))
            return self._taken() if self.free else None

    def take_spare(self) -> HeldWindow | None:
        """A window if more than half are free."""
        with self.changed:
            return self._taken() if 2 * len(self.free) > self.count else None

    def _taken(self) -> HeldWindow:
        place = self.free.pop()
        self.generation += 1
        offset = self.offset + place * self.size
        data = self.memory[offset : offset + self.size]
        found = self.held[place] = HeldWindow(place, offset, data, self.generation)
        return found

    def _reclaim(self) -> None:
        late = time.monotonic() - OFFERED_SECONDS
        for window in list(self.held.values()):
            if 0 < window.offered_at < late:
                self._free(window)
                return

    def _free(self, window: HeldWindow) -> None:
        if window.offered_at and self.revoke is not None:
            self.revoke(window.place, window.generation)
        del self.held[window.place]
        self.free.append(window.place)

    def offer(self, window: HeldWindow) -> None:
        """The window is filled, and a peer may read it."""
        with self.changed:
            window.offered_at = time.monotonic()

    def is_held(self, window: HeldWindow) -> bool:
        """Whether it still belongs to this holder, and so holds what it was filled with."""
        with self.changed:
            return self.held.get(window.place) is window

    def release(self, window: HeldWindow) -> None:
        with self.changed:
            if self.held.get(window.place) is window:
                self._free(window)
                self.changed.notify()

    def set_aside(self, window: HeldWindow) -> None:
        """A library may still write to it: keep it unused until `recover`."""
        with self.changed:
            self.aside.append(window)

    def unusable(self) -> list[HeldWindow]:
        with self.changed:
            return list(self.aside)

    def recover(self, windows: Sequence[HeldWindow]) -> None:
        """Nothing writes to these any more: free them."""
        with self.changed:
            self.aside = [window for window in self.aside if window not in windows]
        for window in windows:
            self.release(window)


def window_size(page: int, most: int = WINDOW_BYTES) -> int:
    """Bytes of a window: whole pages, one at least."""
    return max(1, most // page) * page


def window_count(megabytes: int, page: int, sides: int, most: int = WINDOW_BYTES) -> int:
    """Windows for each of `sides` (1 or 2: reading, serving). Raises ConfigError."""
    size = window_size(page, most)
    count = megabytes * 2**20 // size // sides
    if count < 1:
        least = -(-size * sides // 2**20)
        raise ConfigError(
            f"kv_staging_mb={megabytes} has no room for a window of {size} bytes (a page has "
            f"{page}); accepted: at least {least}"
        )
    return count
