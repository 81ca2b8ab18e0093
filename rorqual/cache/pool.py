"""The cache's memory: one tensor a plane and layer, [pages, page_size, *shape]. Page 0 takes the
writes of padded rows."""

from __future__ import annotations

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
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"no memory for {num_pages} cache pages of {spec.bytes_per_page} bytes"
            ) from error

    def _plane(self, dtype: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.zeros(
            self.num_pages, self.spec.page_size, *shape, dtype=getattr(torch, dtype), device=device
        )
