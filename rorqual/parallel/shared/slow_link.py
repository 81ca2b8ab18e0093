"""An imitated slow link between GPUs, for benchmarks of overlap."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rorqual.parallel.group_axis import Arriving, GroupAxis
from rorqual.parallel.p2p_memory import P2PMemory

LEAST_SECONDS = 5e-6  # shorter delays are added to the next message's: each takes a launch


class LinkArrival:
    """Of what a stream has before it now. kept: is kept until it is waited for, as the tensors of a
    message must be."""

    def __init__(self, stream: torch.cuda.Stream, kept: object = None):
        self.event = stream.record_event()
        self.kept = kept

    def wait(self) -> None:
        torch.cuda.current_stream(self.event.device).wait_event(self.event)
        self.kept = None


class MeetingPlace:
    """Where the ranks of an axis wait for one another, on their GPUs. memory: P2PMemory of 4 *
    axis.size bytes."""

    def __init__(self, rank: int, memory: P2PMemory, device: torch.device):
        self.rank = rank
        self.memory = memory
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)

    def meet(self, free: Tensor, ready: Tensor, seconds: float) -> None:
        """See delay.meet."""
        from rorqual.ops.triton.comm.delay import meet

        meet(self.memory.table, self.epoch, self.rank, free, ready, seconds)


class SlowLink:
    """What leaves this rank takes the time that its bytes would take on such a link, one message
    after the other. gbits: Gbit/s of what leaves this rank. All of its axes share the link.

    Collectives begin when their rows are ready, and end with the last bytes of all ranks, like
    NCCL's, whose programs copy a message piece by piece while the link carries it. They keep their
    multiprocessors for all of that time. What one rank sends to others alone is begun late."""

    def __init__(self, gbits: float, device: torch.device):
        self.seconds = 8e-9 / gbits  # of a byte
        self.stream = torch.cuda.Stream(device)
        self.device = device
        self.owed = 0.0
        # the device's time in ns: from when on the link is free, and when the message came to it
        self.free = torch.zeros(1, dtype=torch.int64, device=device)
        self.came = torch.zeros(1, dtype=torch.int64, device=device)
        self.places: dict[str, MeetingPlace] = {}

    def join(self, axis: GroupAxis, stop: Callable[[torch.device], Tensor]) -> None:
        """An axis sends over the link. stop: gives the word of P2PMemory.of. Collective over the
        axis; raises RuntimeError on all ranks if GPUs cannot share memory."""
        memory = P2PMemory.of(axis, 4 * axis.size, self.device, stop(self.device))
        self.places[axis.name] = MeetingPlace(axis.rank, memory, self.device)

    def carry(
        self,
        send: Callable[[], Arriving],
        count: int,
        axis: str = "",
        ready: Tensor | None = None,
    ) -> Arriving:
        """`send` launches a message, of which `count` bytes leave this rank. axis: whose ranks all
        send; none if some only receive. ready: see `delay.book`; it is given where this stream
        waits for earlier messages, for which the link would not."""
        from rorqual.ops.triton.comm.delay import book, hold, stamp

        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            captured = torch.cuda.is_current_stream_capturing()
            # what earlier ones owe is not added to each replay
            owed = count * self.seconds + (0.0 if captured else self.owed)
            delayed = captured or owed >= LEAST_SECONDS
            if not captured:
                self.owed = 0.0 if delayed else owed
            if ready is None:
                ready = self.came
                stamp(ready)
            message = (self.free, ready, owed if delayed else 0.0)
            place = self.places.get(axis)
            if place is None:
                if delayed:
                    hold(*message)
                    book(*message)
                return send()
            send().wait()
            if delayed:
                hold(*message)
            place.meet(*message)
        return LinkArrival(self.stream, send)
