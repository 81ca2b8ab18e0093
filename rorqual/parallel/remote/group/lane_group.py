"""The process group of one lane: the caller, rank 0, and all servers. NCCL on GPUs, gloo on a CPU.

Rank 0 alone speaks with each of the others, by messages whose sizes both sides know. They are
batched: with NCCL one group call sends to all servers, and another receives from all. Both are
never in one, for what a server sends depends on what it has received, and NCCL may do the parts of
one call in any order.

Neither library can take a member out. A group that has lost one is ended by `abort`, on a thread
of its own: NCCL's abort returns only when the last captured graph with the communicator's calls is
destroyed. Until then it holds a lock that every launch takes, so no launch may begin after it: a
thread that waits for that lock destroys no graphs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rorqual.config.model import nccl_unwatched, nccl_without_registration
from rorqual.parallel.remote.link import LinkError

TAG = 0
ABORT_TAG = 1  # of a message that never comes
HALF = 32  # bytes of a token that are sent in each direction
FOREVER = timedelta(days=1)
LAST_ERROR = "Last error:"
LAUNCH_SECONDS = 1.0  # for a launch to return before NCCL's abort begins
Message = tuple[int, Tensor]  # the other rank, and bytes


class Flight:
    """Messages in flight."""

    def __init__(self, works: Sequence[Any], messages: Sequence[Message], timed: bool):
        self.works = works
        self.messages = messages  # whose memory is in use
        self.timed = timed

    def wait(self, seconds: float) -> None:
        """What is launched next comes behind them; on a CPU, wait for so long at most. May be
        called again where it was interrupted. Raises LinkError."""
        try:
            for work in self.works:
                if not self.timed:
                    work.wait()
                elif not work.is_completed():
                    work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise LinkError(f"its group failed: {_reason(error)}") from None


class LaneGroup:
    """store: that all lanes and ranks share. address: of this host, where gloo listens. seconds:
    until all have connected. Raises LinkError."""

    def __init__(
        self,
        backend: str,
        store: dist.Store,
        lane: int,
        rank: int,
        size: int,
        device: torch.device,
        address: str,
        seconds: float,
    ):
        self.backend = backend
        self.shared = store  # torch keeps no hold of the Python object
        self.store = dist.PrefixStore(f"lane {lane}", store)
        self.rank = rank
        self.size = size
        self.device = device
        self.aborting = threading.Lock()
        self.aborted = False
        self.launching = False
        make = self._nccl if backend == "nccl" else self._gloo
        try:
            self.group: Any = make(address, timedelta(seconds=seconds))
        except (RuntimeError, ValueError) as error:
            raise LinkError(f"a group cannot be formed: {_reason(error)}") from None

    @property
    def early(self) -> bool:
        """Whether receives are posted as early as possible: gloo's senders wait until they are.
        NCCL's receives occupy the GPU."""
        return self.backend == "gloo"

    @property
    def others(self) -> range:
        """Ranks that this one speaks with."""
        return range(1, self.size) if self.rank == 0 else range(1)

    def _gloo(self, address: str, seconds: timedelta) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = seconds
        options._threads = 1
        return dist.ProcessGroupGloo(self.store, self.rank, self.size, options)

    def _nccl(self, address: str, seconds: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER  # after which torch would end the process
        nccl_without_registration()
        with nccl_unwatched():
            group = dist.ProcessGroupNCCL(self.store, self.rank, self.size, options)
        group.eager_connect_single_device(self.device)
        return group

    # ---- messages

    def send(self, messages: Sequence[Message]) -> Flight:
        """Raises LinkError."""
        return self._launch(self.group.send, messages)

    def receive(self, messages: Sequence[Message]) -> Flight:
        """Raises LinkError."""
        return self._launch(self.group.recv, messages)

    def _launch(self, operation: Callable[..., Any], messages: Sequence[Message]) -> Flight:
        self.launching = True  # before `aborted` is read: `abort` sets that, and then reads this
        try:
            if self.aborted:
                raise LinkError("its group has ended")
            if self.backend == "gloo":
                works = [operation([data], rank, TAG) for rank, data in messages]
                return Flight(works, messages, timed=True)
            self.group._start_coalescing()
            try:
                for rank, data in messages:
                    operation([data], rank, TAG)
            finally:
                work = self.group._end_coalescing()
            return Flight([work], messages, timed=False)
        except RuntimeError as error:
            raise LinkError(f"its group failed: {_reason(error)}") from None
        finally:
            self.launching = False

    def prove(self, tokens: dict[int, bytes], seconds: float) -> None:
        """tokens: of each of `others`, known to both sides from an authenticated link. Raises
        LinkError where another process answers."""
        shown = 0 if self.rank == 0 else HALF
        awaited = HALF - shown
        out = {rank: self._bytes(token[shown : shown + HALF]) for rank, token in tokens.items()}
        back = {rank: torch.zeros_like(data) for rank, data in out.items()}
        steps = [lambda: self.send([*out.items()]), lambda: self.receive([*back.items()])]
        for step in steps if self.rank == 0 else reversed(steps):
            step().wait(seconds)
        for rank, token in tokens.items():
            if bytes(back[rank].cpu().tolist()) != token[awaited : awaited + HALF]:
                raise LinkError(f"rank {rank} of the group is another process")

    def _bytes(self, data: bytes) -> Tensor:
        return torch.tensor(list(data), dtype=torch.uint8, device=self.device)

    # ---- its end, on any thread

    def abort(self) -> None:
        """Ends what is in flight; what is launched later raises LinkError."""
        with self.aborting:
            if self.aborted:
                return
            self.aborted = True
        with suppress(RuntimeError):
            if self.backend == "nccl":
                self._await_launch()
                self.group.abort()
            else:
                # a receive that is out of time closes every connection, and so ends every wait
                spare = torch.zeros(1, dtype=torch.uint8)
                work = self.group.recv([spare], self.others[0], ABORT_TAG)
                work.wait(timedelta(milliseconds=1))

    def _await_launch(self) -> None:
        """A launch that takes longer waits for the device, which the abort ends."""
        deadline = time.monotonic() + LAUNCH_SECONDS
        while self.launching and time.monotonic() < deadline:
            time.sleep(LAUNCH_SECONDS / 1000)


def _reason(error: Exception) -> str:
    """The first line of the library's message, and what NCCL says was its last error."""
    text = str(error).strip()
    first = next(iter(text.splitlines()), type(error).__name__)
    last = text.partition(LAST_ERROR)[2].strip()
    return f"{first}: {last.splitlines()[0]}" if last else first
