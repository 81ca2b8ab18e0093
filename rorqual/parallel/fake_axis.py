"""An axis of several ranks of which only this one exists. Nothing is sent; the others are assumed
to hold the same data.

It benchmarks what one rank of a layout computes, on a single device. Sums lack the other ranks'
parts, so tokens are meaningless. Results have the size of the real ones, and are written as
received data are: a gather repeats this rank's rows in place of the others', and an all-to-all
repeats what this rank sends to itself, since that is what a rank with the same data would send
here. So rows arrive for this rank's experts, as many as its share of the expert load.
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
        # contiguous, as the real result is
        return self.all_gather(x.transpose(0, 1), widths).transpose(0, 1).contiguous()

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        own = x.split(list(send))[self.rank]
        return torch.cat([_resized(own, length) for length in receive])

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> PendingCollective:
        return Ready(self.all_to_all(x, send, receive))

    def all_to_all_fixed(self, x: Tensor) -> Tensor:
        return x[self.rank].expand_as(x).contiguous()

    def start_all_to_all_fixed(self, x: Tensor) -> PendingCollective:
        return Ready(self.all_to_all_fixed(x))


def _resized(x: Tensor, rows: int) -> Tensor:
    """x repeated to `rows` rows; zeros if x has no rows."""
    if rows <= x.shape[0]:
        return x[:rows]
    if not x.shape[0]:
        return x.new_zeros(rows, *x.shape[1:])
    return x.repeat(-(-rows // x.shape[0]), *[1] * (x.dim() - 1))[:rows]
