"""Pages of a cache as bytes: layer after layer, of each its planes in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.platforms.base import Platform


class PageMemory:
    def __init__(self, pool: KVPool, platform: Platform):
        self.pool = pool
        self.platform = platform
        self.size = sum(plane[0].nbytes for plane in self._planes())  # bytes of a page

    def _planes(self) -> Iterator[Tensor]:
        for layer in self.pool.layers:
            yield from layer.values()

    def rows(self, count: int) -> Tensor:
        """Host memory for so many pages, [count, size] uint8."""
        return self.platform.host_empty((count, self.size), torch.uint8)

    def read(self, page: int, into: Tensor) -> None:
        """Copy a page to `into` [size], beside the steps: on any thread."""
        with self.platform.background() as wait:
            start = 0
            for plane in self._planes():
                data = plane[page].view(-1).view(torch.uint8)
                into[start : start + data.numel()].copy_(data, non_blocking=True)
                start += data.numel()
            wait()

    def write(self, pages: Sequence[int], data: Tensor) -> None:
        """Fill pages with rows [n, size] of host memory, in the order of the steps: on the
        engine's thread. The rows must stay until the device has copied them."""
        with self.platform.stream():
            where = self.platform.to_device(torch.tensor(pages))
            start = 0
            for plane in self._planes():
                width = plane[0].nbytes
                part = data[:, start : start + width].to(plane.device, non_blocking=True)
                shape = (len(pages), *plane.shape[1:])
                plane.index_copy_(0, where, part.contiguous().view(plane.dtype).view(shape))
                start += width
