"""Pages of a cache as bytes: layer after layer, of each its planes in order; all that this rank
holds of a page, or a part of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rorqual.cache.page_parts import PagePart, whole_part
from rorqual.cache.pool import KVPool
from rorqual.cache.written_layers import Mark
from rorqual.platforms.base import Platform

MAX_PARTS = 256  # whose movers are cached


class PageMover(Protocol):
    """Copies pages [n] int64 to and from rows [n, bytes of a page's part] uint8, all on the device.
    far: the rows are a peer device's memory, mapped here. reads_host: whether `read_host` is there,
    which copies some planes of rows at these addresses in pinned memory."""

    @property
    def reads_host(self) -> bool: ...

    def gather(self, pages: Tensor, rows: Tensor) -> None: ...

    def scatter(self, rows: Tensor, pages: Tensor, far: bool = False) -> None: ...

    def read_host(self, addresses: Tensor, pages: Tensor, planes: range) -> None: ...


class PlaneMover:
    """A PageMover by torch calls, one per plane ([pages, page_size, ...])."""

    reads_host = False

    def __init__(self, planes: Sequence[Tensor]):
        self.planes = planes

    def _parts(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each plane, with its columns of the rows."""
        start = 0
        for plane in self.planes:
            stop = start + plane[0].numel() * plane.element_size()
            yield plane, rows[:, start:stop]
            start = stop

    def gather(self, pages: Tensor, rows: Tensor) -> None:
        for plane, columns in self._parts(rows):
            found = plane.index_select(0, pages).view(len(pages), -1)
            columns.copy_(found.view(torch.uint8))

    def scatter(self, rows: Tensor, pages: Tensor, far: bool = False) -> None:
        for plane, columns in self._parts(rows):
            came = columns.clone().view(plane.dtype)
            plane.index_copy_(0, pages, came.view(len(pages), *plane.shape[1:]))

    def read_host(self, addresses: Tensor, pages: Tensor, planes: range) -> None:
        raise AssertionError("copied by rows")


def page_mover(planes: Sequence[Tensor]) -> PageMover:
    """Of planes on one device, whole or some heads of them. Must be called in the context that
    launches the copies."""
    if planes[0].device.type != "cuda":
        return PlaneMover(planes)
    from rorqual.ops.triton.rowwise.page_bytes import PlaneTable

    return PlaneTable.of(planes)


class PageMemory:
    """held: the part of the model's pages in this pool; by default all of it."""

    def __init__(self, pool: KVPool, platform: Platform, held: PagePart | None = None):
        self.pool = pool
        self.platform = platform
        self.held = held or whole_part(pool.spec)
        self.sizes: dict[PagePart, int] = {}  # cached: each takes 0.25 ms to compute
        self.size = self.part_size(self.held)  # bytes of a page
        self.movers: dict[PagePart, PageMover] = {}
        self.lock = threading.Lock()

    def _planes(self, part: PagePart) -> Iterator[Tensor]:
        """Views [pages, page_size, *shape] of `part` of each plane."""
        held = self.held
        assert held.covers(part), "nobody reads or writes what is elsewhere"
        start = part.first_layer - held.first_layer
        stop = part.last_layer - held.first_layer
        heads = part.first_head - held.first_head, part.last_head - part.first_head
        layers = zip(self.pool.layers[start:stop], self.pool.spec.layers[start:stop], strict=True)
        for tensors, planes in layers:
            for plane in planes:
                tensor = tensors[plane.name]
                axis = plane.shard_axis
                yield tensor if axis is None else tensor.narrow(2 + axis, *heads)

    def part_size(self, part: PagePart, page_size: int | None = None) -> int:
        """Bytes of `part` of a page of `page_size` tokens (default: the pool's)."""
        own = self.sizes.get(part)
        if own is None:
            if len(self.sizes) >= MAX_PARTS:
                self.sizes.clear()
            own = sum(plane[0].numel() * plane.element_size() for plane in self._planes(part))
            self.sizes[part] = own
        return own // self.pool.spec.page_size * (page_size or self.pool.spec.page_size)

    def rows(self, count: int, size: int | None = None) -> Tensor:
        """Host memory for `count` pages, [count, size] uint8."""
        return self.platform.host_empty((count, size or self.size), torch.uint8)

    def read(
        self, page: int, into: Tensor, part: PagePart | None = None, after: Mark | None = None
    ) -> None:
        """Copy a page, or `part` of it, to `into` [size], concurrently with steps, on any thread.
        after: wait for this mark first (WrittenLayers)."""
        with self.platform.background() as wait:
            if after is not None:
                after()
            start = 0
            for plane in self._planes(part or self.held):
                data = plane[page].contiguous().view(-1).view(torch.uint8)
                into[start : start + data.numel()].copy_(data, non_blocking=True)
                start += data.numel()
            wait()

    @property
    def reads_together(self) -> bool:
        """Whether `read_together` works here: where the cache is host memory."""
        return self.platform.device.type == "cpu"

    def read_together(
        self, pages: Sequence[tuple[int, Mark | None]], into: Tensor, part: PagePart
    ) -> None:
        """Copy `part` of several pages to the rows of `into` [n, size], which may lie apart: as
        `read` of each, with a copy for each plane instead of one for each plane of each page."""
        assert self.reads_together, "rows in host memory cannot be gathered to from a device"
        self.gather(pages, into, part)()

    def _mover(self, part: PagePart) -> PageMover:
        """Must be called in the context that launches the copies."""
        with self.lock:
            found = self.movers.get(part)
            if found is None:
                if len(self.movers) >= MAX_PARTS:
                    self.movers.clear()
                found = self.movers[part] = page_mover(list(self._planes(part)))
            return found

    def numbers(self, pages: Sequence[tuple[int, Mark | None]]) -> Tensor:
        """Page numbers [n] int64 on the device, slices of which can be passed to `gather` as
        `where`."""
        with self.platform.background():
            return self.platform.to_device(torch.tensor([page for page, _ in pages]))

    def gather(
        self,
        pages: Sequence[tuple[int, Mark | None]],
        rows: Tensor,
        part: PagePart,
        where: Tensor | None = None,
    ) -> Callable[[], None]:
        """Start to copy `part` of pages to rows [n, size] of device memory, concurrently with
        steps, on any thread. The returned function waits for the copy, on any thread. Each page is
        copied after its mark, if it has one (WrittenLayers). where: their `numbers`."""
        with self.platform.background():
            for _, after in pages:
                if after is not None:
                    after()
            if where is None:
                where = self.platform.to_device(torch.tensor([page for page, _ in pages]))
            self._mover(part).gather(where, rows)
            return self.platform.reached()

    def placing(self, pages: Sequence[int], part: PagePart) -> Callable[[int, Tensor], None]:
        """Prepare, in the current context, to fill `part` of pages. The returned function, called
        in the same context, launches the copy of rows [n, size], in this device's memory or a
        peer's mapped here, to n of these pages from number `first` on."""
        where = self.platform.to_device(torch.tensor(pages))
        mover = self._mover(part)

        def place(first: int, rows: Tensor) -> None:
            mover.scatter(rows, where[first : first + len(rows)], far=True)

        return place

    def write(
        self,
        pages: Sequence[int],
        data: Tensor,
        part: PagePart | None = None,
        page_size: int | None = None,
        skipped: int = 0,
    ) -> None:
        """Fill pages, or `part` of them, with rows [n, size] in host or device memory, in the order
        of the steps, on the engine's thread. The rows must not change until the device has copied
        them.

        Rows may be pages of another page_size; `skipped` is the number of their tokens before the
        first page here. Where they end within the last page, its rest is zeroed."""
        size = self.pool.spec.page_size
        theirs = page_size or size
        wanted = len(pages) * size
        first = skipped // theirs
        data = data[first : -(-(skipped + wanted) // theirs)]
        skipped -= first * theirs
        with self.platform.stream():
            where = self.platform.to_device(torch.tensor(pages))
            alike = theirs == size and not skipped and len(data) >= len(pages)
            if alike and data.device == where.device and data.is_cuda:
                self._mover(part or self.held).scatter(data[: len(pages)], where)
                return
            start = 0
            for plane in self._planes(part or self.held):
                shape = plane.shape[2:]
                width = shape.numel() * plane.element_size() * theirs
                came = _aligned(data[:, start : start + width], plane)
                tokens = came.view(plane.dtype).view(-1, *shape)[skipped : skipped + wanted]
                missing = wanted - len(tokens)
                if missing:
                    tokens = torch.cat([tokens, tokens.new_zeros(missing, *shape)])
                plane.index_copy_(0, where, tokens.view(len(pages), size, *shape))
                start += width


def _aligned(data: Tensor, plane: Tensor) -> Tensor:
    """Bytes on the plane's device, aligned so that they can be viewed as its dtype."""
    data = data.to(plane.device, non_blocking=True).contiguous()
    return data.clone() if data.storage_offset() % plane.element_size() else data
