"""Host memory for pages evicted from the device's cache. Each rank has its part of each page."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from rorqual.cache.host_tier import PageCopy
from rorqual.cache.pool import KVPool
from rorqual.errors import CapacityError, ConfigError
from rorqual.platforms.base import Platform

BLOCK_BYTES = 2**30  # pinned at a time: libraries round pinned sizes up to a power of two
MOST_RUNNING = 16  # calls of `start` that nothing waits for; older ones are waited for


@dataclass(frozen=True)
class CopyRun:
    """Copies of one direction that were started together."""

    pages: frozenset[int]
    slots: frozenset[int]
    wait: Callable[[], None]

    def precedes(self, other: Sequence[PageCopy]) -> bool:
        """Whether one of the others uses a page or slot of these."""
        return any(copy.page in self.pages or copy.slot in self.slots for copy in other)


class HostMemory:
    """`slots` pages as bytes: layer after layer, of each its planes in order. Pages are staged in
    one piece of device memory, so that a page is one copy between device and host. Copies of the
    two directions run concurrently. Raises ConfigError where the host's memory does not suffice."""

    def __init__(self, pool: KVPool, platform: Platform, slots: int):
        self.platform = platform
        self.planes = [plane for layer in pool.layers for plane in layer.values()]
        self.size = sum(plane[0].nbytes for plane in self.planes)
        platform.copies_pages = True
        platform.fetch(torch.zeros(1, device=platform.device))()  # compiles, if there is a kernel
        self.rows = max(1, BLOCK_BYTES // self.size)  # of a block
        counts = [min(self.rows, slots - start) for start in range(0, slots, self.rows)]
        try:
            self.blocks = [platform.host_empty((count, self.size), torch.uint8) for count in counts]
        except (CapacityError, RuntimeError, MemoryError) as error:
            wanted = slots * self.size / 2**30
            raise ConfigError(f"kv_host_memory: no {wanted:.2f} GiB can be had: {error}") from error
        rows = max(1, min(slots, platform.host_step_bytes // self.size))
        self.staged = {
            to_host: torch.empty((rows, self.size), dtype=torch.uint8, device=platform.device)
            for to_host in (False, True)
        }
        # by direction: of one `start` each, oldest first
        self.running: dict[bool, deque[list[CopyRun]]] = {False: deque(), True: deque()}

    def start(self, copies: Sequence[PageCopy]) -> None:
        """Start copies: after everything launched so far, concurrently with what is launched next.
        Those that use the same page or slot are in order."""
        if not copies:
            return
        self.settle(MOST_RUNNING, MOST_RUNNING)
        started: set[bool] = set()
        for to_host, found in groupby(copies, key=lambda copy: copy.to_host):
            run = list(found)
            before = self._before(to_host, run)
            wait = self.platform.beside(partial(self._copy, to_host, run, before), int(to_host))
            pages = frozenset(copy.page for copy in run)
            if to_host not in started:
                self.running[to_host].append([])
                started.add(to_host)
            slots = frozenset(copy.slot for copy in run)
            self.running[to_host][-1].append(CopyRun(pages, slots, wait))

    def _before(self, to_host: bool, copies: Sequence[PageCopy]) -> Callable[[], None] | None:
        """A wait for the last run of the other direction that these must follow."""
        others = [run for runs in self.running[not to_host] for run in runs]
        return next((run.wait for run in reversed(others) if run.precedes(copies)), None)

    def settle(self, ins: int | None = 0, outs: int | None = 0) -> None:
        """Make later launches wait for copies, except of the last `ins` calls of `start` that had
        copies in, and the last `outs` that had copies out; None: for none."""
        for to_host, but in ((False, ins), (True, outs)):
            running = self.running[to_host]
            last: CopyRun | None = None
            while but is not None and len(running) > but:
                last = running.popleft()[-1]
            if last is not None:
                last.wait()

    def _copy(
        self, to_host: bool, copies: Sequence[PageCopy], before: Callable[[], None] | None
    ) -> None:
        if before is not None:
            before()
        staged = self.staged[to_host]
        most = staged.shape[0]
        for start in range(0, len(copies), most):
            part = copies[start : start + most]
            pages = self.platform.to_device(torch.tensor([copy.page for copy in part]))
            slots = [copy.slot for copy in part]
            (self._out if to_host else self._in)(pages, slots, staged[: len(part)])

    def _out(self, pages: Tensor, slots: list[int], staged: Tensor) -> None:
        for flat, columns in self._parts(staged):
            columns.copy_(flat.index_select(0, pages))
        for row, slot in zip(staged, slots, strict=True):
            self._row(slot).copy_(row, non_blocking=True)

    def _in(self, pages: Tensor, slots: list[int], staged: Tensor) -> None:
        for row, slot in zip(staged, slots, strict=True):
            row.copy_(self._row(slot), non_blocking=True)
        for flat, columns in self._parts(staged):
            flat.index_copy_(0, pages, columns)

    def _parts(self, staged: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each plane: its pages as bytes, and its columns of the staging memory."""
        start = 0
        for plane in self.planes:
            flat = plane.view(plane.shape[0], -1).view(torch.uint8)
            stop = start + flat.shape[1]
            yield flat, staged[:, start:stop]
            start = stop

    def _row(self, slot: int) -> Tensor:
        return self.blocks[slot // self.rows][slot % self.rows]
