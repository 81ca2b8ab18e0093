"""An axis of several ranks over torch.distributed, with gloo or NCCL. collectives.py defines its
calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from rorqual.ops.activation import Activation
from rorqual.parallel.collectives import (
    AddNormFn,
    CollectiveRecorder,
    FusedAddNorm,
    P2PDispatch,
    PendingCollective,
    Ready,
)
from rorqual.parallel.comm_counters import Traffic, bytes_sent
from rorqual.parallel.shard import Shard

# torch 2.13 renames these two and warns about the old names
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Arriving(Protocol):
    def wait(self) -> Any:
        """Order the current stream after it."""


class Carrier(Protocol):
    """An imitated link (shared/slow_link.py)."""

    def carry(
        self,
        send: Callable[[], Arriving],
        count: int,
        axis: str = "",
        ready: Tensor | None = None,
    ) -> Arriving: ...


class Started:
    """A collective in flight; `finish` makes the result from the received data. On a GPU, waiting
    orders streams and does not block the host."""

    def __init__(self, work: Arriving, finish: Callable[[], Tensor]):
        self.work = work
        self.finish = finish

    def wait(self) -> Tensor:
        self.work.wait()
        return self.finish()


@dataclass(eq=False)
class Launch:
    """CollectiveLaunch over a process group. message: as in GroupAxis.count."""

    axis: GroupAxis
    call: str
    message: int
    collective: Callable[[Tensor, Tensor], dist.Work]
    since: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        return self.axis.name, self.call, self.message

    def count(self) -> None:
        self.axis.count(self.call, self.message)

    def ready(self, at: Callable[[], Tensor]) -> None:
        if self.axis.link is not None:
            from rorqual.ops.triton.comm.delay import stamp

            self.since = at()
            stamp(self.since)

    def __call__(self, out: Tensor, x: Tensor) -> Arriving:
        return self.axis.launch(
            self.call, self.message, lambda: self.collective(out, x), ready=self.since
        )


class GroupAxis:
    """An axis over a process group. `ranks`: its global ranks in order. `last_call`: the latest
    collective, for diagnostics of a hang."""

    def __init__(self, name: str, group: dist.ProcessGroup, ranks: Sequence[int]):
        self.name = name
        self.group = group
        self.group_name = group.group_name
        self.backend = dist.get_backend(group)  # `abort` may come when the group is gone already
        self.ranks = tuple(ranks)
        self.size, self.rank = len(self.ranks), self.ranks.index(dist.get_rank())
        self.shard = Shard(self.rank, self.size)
        self.traffic = Traffic()
        self.fused: FusedAddNorm | None = None
        self.p2p_dispatch: P2PDispatch | None = None
        self.last_call = ""
        self.sent: list[tuple[dist.Work, Tensor]] = []
        self.watched: list[Arriving] | None = None
        self.link: Carrier | None = None
        self.recorder: CollectiveRecorder | None = None  # of a pass that is being captured

    @property
    def shares_memory(self) -> bool:
        """Whether some of its messages go through memory that GPUs share."""
        return self.fused is not None or self.p2p_dispatch is not None

    def _started(self, work: Arriving, finish: Callable[[], Tensor]) -> Started:
        if self.watched is not None:
            self.watched.append(work)
        return Started(work, finish)

    def _start(
        self,
        call: str,
        message: int,
        collective: Callable[[Tensor, Tensor], dist.Work],
        x: Tensor,
        shape: Sequence[int],
        finish: Callable[[Tensor], Tensor],
    ) -> PendingCollective:
        """Start `collective(out, x)`, out of this shape, whose result `finish(out)` is. message: as
        in `count`."""
        launch = Launch(self, call, message, collective)
        if self.recorder is not None:
            return self.recorder.start(launch, x, shape, finish)
        launch.count()
        out = x.new_empty(*shape)
        return self._started(launch(out, x), partial(finish, out))

    def settle(self) -> None:
        """Wait for the collectives started since the previous `settle`; their results must still be
        waited for. The first call only starts the tracking, `watched` = None ends it."""
        for work in self.watched or ():
            work.wait()
        self.watched = []

    def count(self, call: str, message: int) -> None:
        """Not while tracing: a compiled step would count once, and the counter would be one of its
        guards."""
        if torch.compiler.is_compiling():
            return
        self.last_call = call
        self.traffic.count(call, message, self.size)

    def counted(self, call: str, message: int, send: Callable[[], dist.Work]) -> Arriving:
        """Count a collective and launch it, by `send`."""
        self.count(call, message)
        return self.launch(call, message, send)

    def launch(
        self,
        call: str,
        message: int,
        send: Callable[[], dist.Work],
        ready: Tensor | None = None,
    ) -> Arriving:
        """As `counted`, without counting. ready: see SlowLink.carry."""
        if self.link is None:
            return send()
        axis = "" if call in ("send", "broadcast") else self.name
        return self.link.carry(send, bytes_sent(call, message, self.size), axis, ready)

    def abort(self) -> None:
        """Abort NCCL collectives. A gloo call ends by itself when a peer exits, or at its
        timeout."""
        if self.backend == "nccl":
            self.group.abort()

    def launch_recorded(self) -> None:
        if self.recorder is not None:
            self.recorder.flush()

    # ---- sums

    def all_reduce(self, x: Tensor) -> Tensor:
        # not counted while tracing: a compiled step would count once, and sizes are unknown
        if torch.compiler.is_compiling():
            return functional.all_reduce(x.contiguous(), "sum", self.group_name)
        if not x.numel():
            return x
        x = x.contiguous()
        if self.recorder is not None:
            launch = Launch(self, "all_reduce", x.nbytes, self._reduced)
            return self.recorder.start(launch, x, None, _as_it_is).wait()
        if self.link is None:
            self.count("all_reduce", x.nbytes)
            dist.all_reduce(x, group=self.group)
        else:
            self.counted("all_reduce", x.nbytes, lambda: self._reduced(x, x)).wait()
        return x

    def _reduced(self, out: Tensor, x: Tensor) -> dist.Work:
        return _ours(dist.all_reduce(out, group=self.group, async_op=True))

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plain: AddNormFn
    ) -> tuple[Activation, Tensor]:
        traced = torch.compiler.is_compiling()
        if not traced and self.fused is not None and self.fused.takes(x, residual):
            self.count("all_reduce", x.nbytes)
            return self.fused.add_norm(x, residual, weight, eps)
        return plain(self.all_reduce(x), residual, weight, eps)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        return self.start_reduce_scatter(x, counts).wait()

    def start_reduce_scatter(
        self, x: Tensor, counts: Sequence[int] | None = None
    ) -> PendingCollective:
        most, even = self._longest(counts, x.shape[0] // self.size)
        assert counts is None or sum(counts) == x.shape[0], (counts, x.shape)
        if most == 0:
            return Ready(x)
        own = most if counts is None else counts[self.rank]
        padded = x.contiguous() if even or counts is None else _padded(x, counts, most)
        if torch.compiler.is_compiling():
            traced = functional.reduce_scatter_tensor(padded, "sum", 0, self.group_name)
            return Ready(traced if own == most else traced[:own])
        return self._start(
            "reduce_scatter",
            padded.nbytes,
            lambda out, x: _scatter(out, x, group=self.group, async_op=True),
            padded,
            (most, *x.shape[1:]),
            lambda out: out if own == most else out[:own],
        )

    def _longest(self, counts: Sequence[int] | None, each: int) -> tuple[int, bool]:
        """(rows of the longest rank, whether all have as many); `each` if counts is None."""
        return (each, True) if counts is None else (max(counts), min(counts) == max(counts))

    # ---- copies

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        return self.start_all_gather(x, counts).wait()

    def start_all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> PendingCollective:
        most, even = self._longest(counts, x.shape[0])
        assert counts is None or counts[self.rank] == x.shape[0], (counts, self.rank, x.shape)
        if most == 0:
            return Ready(x)
        own = _longer(x, most).contiguous()
        if torch.compiler.is_compiling():
            traced = functional.all_gather_tensor(own, 0, self.group_name)
            return Ready(traced if even or counts is None else _trimmed(traced, counts, most))
        return self._start(
            "all_gather",
            self.size * own.nbytes,
            lambda out, x: _gather(_bits(out), _bits(x), group=self.group, async_op=True),
            own,
            (self.size * most, *x.shape[1:]),
            lambda out: out if even or counts is None else _trimmed(out, counts, most),
        )

    def all_gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        columns = _longer(x.transpose(0, 1), max(widths))
        rows = self.all_gather(columns.contiguous())
        even = min(widths) == max(widths)
        return (rows if even else _trimmed(rows, widths, max(widths))).transpose(0, 1).contiguous()

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return self.start_all_to_all(x, send, receive).wait()

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> PendingCollective:
        assert sum(send) == x.shape[0], (tuple(send), x.shape)
        row = x[:1].nbytes if x.shape[0] else 0
        out = x.new_empty(sum(receive), *x.shape[1:])
        bits = _bits(x.contiguous())
        work = self.counted(
            "all_to_all",
            (x.shape[0] - send[self.rank]) * row,
            lambda: dist.all_to_all_single(
                _bits(out), bits, list(receive), list(send), group=self.group, async_op=True
            ),
        )
        return self._started(work, lambda: out)

    def all_to_all_fixed(self, x: Tensor) -> Tensor:
        return self.start_all_to_all_fixed(x).wait()

    def start_all_to_all_fixed(self, x: Tensor) -> PendingCollective:
        assert x.shape[0] == self.size, x.shape
        if x.numel() == 0:
            return Ready(x)
        if torch.compiler.is_compiling():
            return Ready(functional.all_to_all_single(x.contiguous(), None, None, self.group_name))
        return self._start(
            "all_to_all",
            x.nbytes * (self.size - 1) // self.size,
            lambda out, x: dist.all_to_all_single(
                _bits(out), _bits(x), group=self.group, async_op=True
            ),
            x.contiguous(),
            x.shape,
            _as_it_is,
        )

    def start_broadcast(self, x: Tensor, root: int) -> PendingCollective:
        work = self.counted(
            "broadcast",
            x.nbytes,
            lambda: _ours(
                dist.broadcast(_bits(x), self.ranks[root], group=self.group, async_op=True)
            ),
        )
        return self._started(work, lambda: x)

    # ---- neighbours

    def send(self, x: Tensor, to: int) -> None:
        if not x.numel():
            return
        x = x.contiguous()
        # the event of a send during capture cannot be queried
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.sent = [(work, tensor) for work, tensor in self.sent if not work.is_completed()]

        def send() -> dist.Work:
            work = _ours(dist.isend(x, self.ranks[to], group=self.group))
            self.sent.append((work, x))  # x must live until the send is done
            return work

        self.counted("send", x.nbytes, send)

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int
    ) -> PendingCollective:
        out = torch.empty(*shape, dtype=dtype, device=device)
        if not out.numel():
            return Ready(out)
        work = _ours(dist.irecv(out, self.ranks[source], group=self.group))
        return self._started(work, lambda: out)

    def flush(self) -> None:
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


def _ours(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is part of the group"
    return work


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _bits(x: Tensor) -> Tensor:
    """fp8 as uint8: backends do not support fp8."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _longer(x: Tensor, rows: int) -> Tensor:
    """x padded with zero rows to `rows`."""
    if x.shape[0] == rows:
        return x
    out = x.new_zeros(rows, *x.shape[1:])
    out[: x.shape[0]] = x
    return out


def _padded(x: Tensor, counts: Sequence[int], most: int) -> Tensor:
    """Pad each rank's rows to `most`."""
    return torch.cat([_longer(part, most) for part in x.split(list(counts))])


def _trimmed(x: Tensor, counts: Sequence[int], most: int) -> Tensor:
    """The inverse of `_padded`."""
    return torch.cat([part[:count] for part, count in zip(x.split(most), counts, strict=True)])
