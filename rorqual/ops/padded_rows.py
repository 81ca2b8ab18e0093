"""Which rows of a captured step are padding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """A step is captured for a fixed number of rows; those after its requests' rows are padding.
    Only the device knows how many at a replay.

    requests: [1] int64 on the device, set before each replay. each: rows of a request. first: rows
    of the step before the first one that this object is about, as on other ranks or in earlier
    micro-batches."""

    requests: Tensor
    each: int
    first: int = 0

    def after(self, rows: int) -> PaddedRows:
        """The same for the rows from number `rows` on."""
        return replace(self, first=self.first + rows)

    def without_experts(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [T, K] with -1, and weights [T, K] with 0, for padding."""
        padding = self.is_real(ids.shape[0])[:, None] == 0
        return ids.masked_fill(padding, -1), weights.masked_fill(padding, 0)

    def is_real(self, rows: int) -> Tensor:
        """[rows] int64: 1, or 0 for padding."""
        row = torch.arange(self.first, self.first + rows, device=self.requests.device)
        return (row < self.requests * self.each).long()
