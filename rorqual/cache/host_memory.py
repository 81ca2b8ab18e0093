"""Host memory for pages evicted from the device's cache. Each rank has its part of each page."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from rorqual.cache.host_tier import PageCopy
from rorqual.cache.page_memory import page_mover
from rorqual.cache.pool import KVPool
from rorqual.errors import CapacityError, ConfigError
from rorqual.platforms.base import Platform

LAYER_GROUPS = 8  # in which pages come where a step reads them layer by layer
BLOCK_BYTES = 2**30  # pinned at a time: libraries round pinned sizes up to a power of two
MOST_RUNNING = 16  # calls of `start` that nothing waits for; older ones are waited for


@dataclass(frozen=True)
class Places:
    """Pages and slots that copies use."""

    pages: frozenset[int]
    slots: frozenset[int]

    @staticmethod
    def of(copies: Sequence[PageCopy]) -> Places:
        return Places(
            frozenset(copy.page for copy in copies), frozenset(copy.slot for copy in copies)
        )

    def meet(self, others: Places) -> bool:
        return not (self.pages.isdisjoint(others.pages) and self.slots.isdisjoint(others.slots))


@dataclass(frozen=True)
class CopyRun:
    """Copies of one direction that were started together."""

    places: Places
    wait: Callable[[], None]


class LayersToCome:
    """Pages that are being copied in and that a step reads: each layer waits for its own part.
    groups: of copies started together, (the first layer, wait), in order of the layers."""

    def __init__(self) -> None:
        self.groups: list[deque[tuple[int, Callable[[], None]]]] = []

    def layer(self, index: int) -> None:
        """Later launches wait for this layer."""
        for groups in self.groups:
            wait: Callable[[], None] | None = None
            while groups and groups[0][0] <= index:
                wait = groups.popleft()[1]
            if wait is not None:
                wait()


class HostMemory:
    """`slots` pages as bytes: layer after layer, of each its planes in order. Pages are staged in
    one piece of device memory, so that a page is one copy between device and host, except where a
    step reads pages while they come. Copies of the two directions run concurrently. Raises
    ConfigError where the host's memory does not suffice."""

    def __init__(self, pool: KVPool, platform: Platform, slots: int):
        self.platform = platform
        planes = [plane for layer in pool.layers for plane in layer.values()]
        self.first_planes = [*accumulate((len(layer) for layer in pool.layers), initial=0)]
        self.size = sum(plane[0].nbytes for plane in planes)
        platform.copies_pages = True
        platform.fetch(torch.zeros(1, device=platform.device))()  # compiles, if there is a kernel
        self.rows = max(1, BLOCK_BYTES // self.size)  # of a block
        counts = [min(self.rows, slots - start) for start in range(0, slots, self.rows)]
        try:
            self.blocks = [platform.host_empty((count, self.size), torch.uint8) for count in counts]
        except (CapacityError, RuntimeError, MemoryError) as error:
            wanted = slots * self.size / 2**30
            raise ConfigError(f"kv_host_memory: no {wanted:.2f} GiB can be had: {error}") from error
        self.starts = [block.data_ptr() for block in self.blocks]
        rows = max(1, min(slots, platform.host_step_bytes // self.size))
        self.staged = {
            to_host: torch.empty((rows, self.size), dtype=torch.uint8, device=platform.device)
            for to_host in (False, True)
        }
        self.mover = page_mover(planes)
        null = torch.zeros(1, dtype=torch.int64, device=platform.device)
        self.mover.gather(null, self.staged[True][:1])  # compiles, and so does the way back
        self.mover.scatter(self.staged[True][:1], null)
        if self.mover.reads_host:
            self.mover.read_host(null[:0], null[:0], range(1))
        # by direction: of one `start` each, oldest first
        self.running: dict[bool, deque[list[CopyRun]]] = {False: deque(), True: deque()}

    def start(self, copies: Sequence[PageCopy], by_layer: bool = False) -> LayersToCome:
        """Start copies: after everything launched so far, concurrently with what is launched next.
        Those that use the same page or slot are in order. by_layer: what is launched next reads
        pages that are copied in, and waits for each layer of them."""
        coming = LayersToCome()
        if not copies:
            return coming
        self.settle(MOST_RUNNING, MOST_RUNNING)
        started: set[bool] = set()
        for to_host, found in groupby(copies, key=lambda copy: copy.to_host):
            run = list(found)
            places = Places.of(run)
            before = self._before(to_host, places)
            work = partial(self._copy, to_host, run, before)
            groups: deque[tuple[int, Callable[[], None]]] = deque()
            read = by_layer and not to_host
            if read and self.mover.reads_host:
                work = partial(self._read_layers, run, before, groups)
            wait = self._begin(work, to_host, places, to_host not in started)
            started.add(to_host)
            if read:
                coming.groups.append(groups or deque([(0, wait)]))
        return coming

    def _begin(
        self, work: Callable[[], None], to_host: bool, places: Places, first: bool
    ) -> Callable[[], None]:
        """Start a run and note it, also one that an interrupt leaves half started. first: of its
        direction in this call of `start`. Returns the wait for its end."""
        wait: Callable[[], None] | None = None
        try:
            wait = self.platform.beside(work, int(to_host))
        finally:
            end = self.platform.beside(lambda: None, int(to_host)) if wait is None else wait
            run = CopyRun(places, end)
            if first:
                self.running[to_host].append([run])
            else:
                self.running[to_host][-1].append(run)
        return wait

    def _before(self, to_host: bool, places: Places) -> Callable[[], None] | None:
        """A wait for the last run of the other direction that copies of these must follow."""
        others = [run for runs in self.running[not to_host] for run in runs]
        return next((run.wait for run in reversed(others) if run.places.meet(places)), None)

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
        self.mover.gather(pages, staged)
        for rows, held in self._runs(slots):
            held.copy_(staged[rows], non_blocking=True)

    def _in(self, pages: Tensor, slots: list[int], staged: Tensor) -> None:
        for rows, held in self._runs(slots):
            staged[rows].copy_(held, non_blocking=True)
        self.mover.scatter(staged, pages)

    def _read_layers(
        self,
        copies: Sequence[PageCopy],
        before: Callable[[], None] | None,
        groups: deque[tuple[int, Callable[[], None]]],
    ) -> None:
        """Copies in, layer after layer, by a kernel that reads the host's memory: copies of layers
        would be too small for the copy engine, behind which a step's other data would queue."""
        if before is not None:
            before()
        where = [copy.page for copy in copies] + [self._address(copy.slot) for copy in copies]
        places = torch.from_numpy(np.array(where, np.int64).reshape(2, -1))
        pages, addresses = self.platform.to_device(places)
        layers = len(self.first_planes) - 1
        cuts = range(0, layers, -(-layers // LAYER_GROUPS))
        for first, end in pairwise([*cuts, layers]):
            planes = range(self.first_planes[first], self.first_planes[end])
            self.mover.read_host(addresses, pages, planes)
            groups.append((first, self.platform.mark()))

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
        """Slots whose memory is in one piece: their places in the list, and their rows."""
        start = 0
        for stop in range(1, len(slots) + 1):
            more = stop < len(slots) and slots[stop] == slots[stop - 1] + 1
            if not more or slots[stop] % self.rows == 0:
                block, first = divmod(slots[start], self.rows)
                yield slice(start, stop), self.blocks[block][first : first + stop - start]
                start = stop

    def _address(self, slot: int) -> int:
        return self.starts[slot // self.rows] + slot % self.rows * self.size
