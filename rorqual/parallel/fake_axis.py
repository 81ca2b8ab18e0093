"""An axis of several ranks of which only this one exists: the others are taken to hold what it
holds, and nothing is sent.

It shows what one rank of a layout computes, on the one device at hand. Sums lack the others' parts,
so tokens mean nothing. Copies are made as large as what would arrive; of rows that differ from rank
to rank (their experts, above all) a gather brings copies of this rank's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rorqual.parallel.collectives import NullAxis, PendingCollective, Ready
from rorqual.parallel.shard import Shard


class FakeAxis(NullAxis):
    def __init__(self, name: str, shard: Shard):
        super().__init__(name)
        self.shard = shard
        self.rank = shard.index
        self.size = shard.count

    def reduce_scatter(self, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        lengths = counts if counts is not None else [x.shape[0] // self.size] * self.size
        start = sum(lengths[: self.rank])
        return x[start : start + lengths[self.rank]]

    def start_reduce_scatter(
        self, x: Tensor, counts: Sequence[int] | None = None
    ) -> PendingCollective:
        return Ready(self.reduce_scatter(x, counts))

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        lengths = counts if counts is not None else [x.shape[0]] * self.size
        return torch.cat([_resized(x, length) for length in lengths])

    def start_all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> PendingCollective:
        return Ready(self.all_gather(x, counts))

    def all_gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        # as what arrives is
        return self.all_gather(x.transpose(0, 1), widths).transpose(0, 1).contiguous()

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        parts = x.split(list(send))
        return torch.cat(
            [_resized(part, length) for part, length in zip(parts, receive, strict=True)]
        )

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> PendingCollective:
        return Ready(self.all_to_all(x, send, receive))


def _resized(x: Tensor, rows: int) -> Tensor:
    """x, again and again, until there are `rows` rows; rows of zeros where x has none."""
    if rows <= x.shape[0]:
        return x[:rows]
    if not x.shape[0]:
        return x.new_zeros(rows, *x.shape[1:])
    return x.repeat(-(-rows // x.shape[0]), *[1] * (x.dim() - 1))[:rows]
