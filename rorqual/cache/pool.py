"""The cache's memory: one tensor a plane and layer, [pages, page_size, *shape]. Page 0 takes the
writes of padded rows."""

from __future__ import annotations

import mmap
import sys
from math import prod

import torch
from torch import Tensor

from rorqual.cache.spec import KVSpec
from rorqual.errors import CapacityError

NULL_PAGE = 0


class KVPool:
    """`layers[i]` maps plane names to tensors. Zeroed, so that a masked position never
    multiplies a NaN into a sum."""

    def __init__(self, spec: KVSpec, num_pages: int, device: torch.device):
        self.spec = spec
        self.num_pages = num_pages
        try:
            self.layers = [
                {plane.name: self._plane(plane.dtype, plane.shape, device) for plane in layer}
                for layer in spec.layers
            ]
        except (RuntimeError, MemoryError, OSError) as error:
            raise CapacityError(
                f"no memory for {num_pages} cache pages of {spec.bytes_per_page} bytes"
            ) from error

    def _plane(self, dtype: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        sizes = (self.num_pages, self.spec.page_size, *shape)
        kind: torch.dtype = getattr(torch, dtype)
        if device.type == "cpu" and sys.platform.startswith("linux"):
            return _mapped_zeros(sizes, kind)
        return torch.zeros(sizes, dtype=kind, device=device)


def _mapped_zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Anonymous memory, which Linux zeroes on first access: writing zeros to gigabytes that few
    requests will use took seconds at start. Raises OSError where memory does not suffice."""
    size = prod(sizes) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size).view(dtype).view(sizes)
