"""Collectives over one named axis of the mesh.

`NullAxis` is an axis of one rank: every call is the identity, so layers need no branches;
group_axis.py has the axis of several ranks. Rows are the first dimension. `counts`: rows of each
rank, the same tuple on all ranks; None: equally many. All ranks of an axis make the same calls in
the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.ops.activation import Activation
from rorqual.ops.padded_rows import PaddedRows
from rorqual.parallel.comm_counters import Traffic
from rorqual.parallel.shard import Shard

AddNormFn = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Activation, Tensor]]


class PendingCollective(Protocol):
    """A collective in flight."""

    def wait(self) -> Tensor: ...


class Ready:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def wait(self) -> Tensor:
        return self.tensor


class CollectiveLaunch(Protocol):
    """launch(out, x) starts a collective and returns what to wait for. kind: which, and of how many
    bytes; launches of one kind between the same tensors are alike."""

    @property
    def kind(self) -> tuple[object, ...]: ...

    def count(self) -> None:
        """Count it as sent."""

    def ready(self, at: Callable[[], Tensor]) -> None:
        """What is launched now comes when x is complete. at: gives memory, [1] int64, that nothing
        else uses until the message arrived."""

    def __call__(self, out: Tensor, x: Tensor) -> Any: ...


class CollectiveRecorder(Protocol):
    """Of a pass that is captured in pieces: its collectives are launched between them."""

    def start(
        self,
        launch: CollectiveLaunch,
        x: Tensor,
        shape: Sequence[int] | None,
        finish: Callable[[Tensor], Tensor],
    ) -> PendingCollective:
        """At each replay `launch(out, x)` is repeated and counted. out is of this shape; None: x is
        overwritten. The result is `finish(out)`, for the layer that asks for it."""
        ...

    def flush(self) -> None:
        """Launch here what was started and has not been launched."""


class FusedAddNorm(Protocol):
    """All-reduce, residual addition and RMSNorm in one kernel, for messages that `takes` accepts
    (parallel/p2p_memory.py)."""

    def takes(self, x: Tensor, residual: Tensor | None) -> bool: ...

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


class P2PDispatch(Protocol):
    """Dispatch and combine through memory that the ranks of an axis share
    (parallel/p2p_dispatch.py)."""

    def takes(self, x: Tensor, capacity: int, top_k: int) -> bool: ...

    def dispatch(
        self,
        x: Tensor,
        slots: Tensor,
        weights: Tensor,
        capacity: int,
        place: Any,
        fp8: bool = False,
        padded: PaddedRows | None = None,
        ue8m0: bool = False,
    ) -> Any: ...

    def recv_dispatch(self, flight: Any) -> tuple[Sequence[Tensor], Tensor, Tensor]: ...

    def send_combine(self, flight: Any, y: Tensor) -> None: ...

    def combine(self, flight: Any, base: Tensor | None = None) -> Tensor: ...


class Axis(Protocol):
    """A group of ranks, for layers and exchanges. `shard`: this rank's part of a dimension that is
    split over the group."""

    name: str
    size: int
    rank: int
    shard: Shard
    traffic: Traffic
    p2p_dispatch: P2PDispatch | None

    def count(self, call: str, message: int) -> None:
        """Add a call with a message of `message` bytes to `traffic` (comm_counters.py)."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks; x may be overwritten."""
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plain: AddNormFn
    ) -> tuple[Activation, Tensor]:
        """(norm(sum of x over ranks + residual), that sum + residual). `plain`: the op on one
        rank."""
        ...

    def reduce_scatter(self, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """x [sum of counts, ...] is summed; each rank keeps its own rows."""
        ...

    def start_reduce_scatter(
        self, x: Tensor, counts: Sequence[int] | None = None
    ) -> PendingCollective: ...

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """x [own rows, ...] to [sum of counts, ...], in the order of ranks."""
        ...

    def start_all_gather(
        self, x: Tensor, counts: Sequence[int] | None = None
    ) -> PendingCollective: ...

    def all_gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [N, own width] to [N, sum of widths]."""
        ...

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """x has send[r] rows for each rank r, in order; returns receive[r] rows from each rank r.
        The host knows all lengths."""
        ...

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> PendingCollective: ...

    def all_to_all_fixed(self, x: Tensor) -> Tensor:
        """x [size, rows, ...]: block r goes to rank r; returns the blocks received. Sizes are
        static, so a graph can capture it."""
        ...

    def start_all_to_all_fixed(self, x: Tensor) -> PendingCollective: ...

    def launch_recorded(self) -> None:
        """Where a pass is captured in pieces, launch here what was started: it would otherwise be
        launched at the next hand-over between micro-batches."""
        ...

    def start_broadcast(self, x: Tensor, root: int) -> PendingCollective:
        """Rank `root`'s x on every rank, written in place; do not use x before the wait."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Start sending to rank `to`; `flush` waits for all sends. Empty tensors are neither sent
        nor received."""
        ...

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int
    ) -> PendingCollective: ...

    def flush(self) -> None: ...


class NullAxis:
    """An axis of one rank."""

    size = 1
    rank = 0
    shard = Shard()
    p2p_dispatch: P2PDispatch | None = None

    def __init__(self, name: str):
        self.name = name
        self.traffic = Traffic()  # stays empty

    def count(self, call: str, message: int) -> None: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plain: AddNormFn
    ) -> tuple[Activation, Tensor]:
        return plain(x, residual, weight, eps)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        return x

    def start_reduce_scatter(
        self, x: Tensor, counts: Sequence[int] | None = None
    ) -> PendingCollective:
        return Ready(x)

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        return x

    def start_all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> PendingCollective:
        return Ready(x)

    def all_gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return x

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> PendingCollective:
        return Ready(x)

    def all_to_all_fixed(self, x: Tensor) -> Tensor:
        return x

    def start_all_to_all_fixed(self, x: Tensor) -> PendingCollective:
        return Ready(x)

    def launch_recorded(self) -> None: ...

    def start_broadcast(self, x: Tensor, root: int) -> PendingCollective:
        return Ready(x)

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError(f"axis {self.name} has one rank: there is none to send to")

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int
    ) -> PendingCollective:
        raise AssertionError(f"axis {self.name} has one rank: there is none to receive from")

    def flush(self) -> None: ...


def gather_texts(axis: Axis, text: str, device: torch.device) -> list[str]:
    """The texts of all ranks, in their order. Collective."""
    data = text.encode()
    sizes = axis.all_gather(torch.tensor([len(data)], device=device)).tolist()
    if not max(sizes):
        return [""] * axis.size
    row = torch.zeros(1, max(sizes), dtype=torch.uint8)
    row[0, : len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = axis.all_gather(row.to(device)).cpu()
    return [bytes(one[:size].tolist()).decode() for one, size in zip(rows, sizes, strict=True)]
