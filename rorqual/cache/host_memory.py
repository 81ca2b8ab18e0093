"""Host memory for pages evicted from the device's cache. Each rank has its part of each page."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from rorqual.cache.host_tier import PageCopy
from rorqual.cache.pool import KVPool
from rorqual.errors import CapacityError, ConfigError
from rorqual.platforms.base import Platform

BLOCK_BYTES = 2**30  # pinned at a time: libraries round pinned sizes up to a power of two


class HostMemory:
    """`slots` pages as bytes: layer after layer, of each its planes in order. Pages are staged in
    one piece of device memory, so that a page is one copy between device and host. Raises
    ConfigError where the host's memory does not suffice."""

    def __init__(self, pool: KVPool, platform: Platform, slots: int):
        self.platform = platform
        self.planes = [plane for layer in pool.layers for plane in layer.values()]
        self.size = sum(plane[0].nbytes for plane in self.planes)
        self.rows = max(1, BLOCK_BYTES // self.size)  # of a block
        counts = [min(self.rows, slots - start) for start in range(0, slots, self.rows)]
        try:
            self.blocks = [platform.host_empty((count, self.size), torch.uint8) for count in counts]
        except (CapacityError, RuntimeError, MemoryError) as error:
            wanted = slots * self.size / 2**30
            raise ConfigError(f"kv_host_memory: no {wanted:.2f} GiB can be had: {error}") from error
        self.staged = torch.empty(
            (max(1, min(slots, platform.host_step_bytes // self.size)), self.size),
            dtype=torch.uint8,
            device=platform.device,
        )
        self.running: deque[Callable[[], None]] = deque()  # waits for one `start` each

    def start(self, copies: Sequence[PageCopy]) -> None:
        """Start copies, in order: after everything launched so far, concurrently with what is
        launched next."""
        if copies:
            self.running.append(self.platform.beside(lambda: self._copy(copies)))

    def settle(self, but: int = 0) -> None:
        """Make later launches wait for all copies but those of the last `but` calls of `start`."""
        wait = None
        while len(self.running) > but:
            wait = self.running.popleft()
        if wait is not None:
            wait()

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        most = self.staged.shape[0]
        for to_host, run in groupby(copies, key=lambda copy: copy.to_host):
            found = list(run)
            for start in range(0, len(found), most):
                part = found[start : start + most]
                pages = self.platform.to_device(torch.tensor([copy.page for copy in part]))
                (self._out if to_host else self._in)(pages, [copy.slot for copy in part])

    def _out(self, pages: Tensor, slots: list[int]) -> None:
        for flat, staged in self._parts(len(slots)):
            staged.copy_(flat.index_select(0, pages))
        for place, slot in enumerate(slots):
            self._row(slot).copy_(self.staged[place], non_blocking=True)

    def _in(self, pages: Tensor, slots: list[int]) -> None:
        for place, slot in enumerate(slots):
            self.staged[place].copy_(self._row(slot), non_blocking=True)
        for flat, staged in self._parts(len(slots)):
            flat.index_copy_(0, pages, staged)

    def _parts(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each plane: its pages as bytes, and its columns of the staging memory."""
        start = 0
        for plane in self.planes:
            flat = plane.view(plane.shape[0], -1).view(torch.uint8)
            stop = start + flat.shape[1]
            yield flat, self.staged[:count, start:stop]
            start = stop

    def _row(self, slot: int) -> Tensor:
        return self.blocks[slot // self.rows][slot % self.rows]
