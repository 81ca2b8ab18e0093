"""Expert load, summed over an engine's ranks without making any of them wait.

Rank 0 sends a request between two steps. Every rank copies its counts after the steps it had
launched by then, so that all count the same steps, and responds once its device has computed them;
rank 0 continues meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rorqual.engine.distributed.codec import number_of, numbered
from rorqual.engine.distributed.worker_handle import WorkerHandle

INT = "<i8"
Counts = list[list[int]]  # by MoE layer and expert


def encode_load(load: Tensor) -> bytes:
    """[layers, experts] int64, on the host."""
    return load.numpy().astype(INT).tobytes()


def decode_load(data: bytes, experts: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, INT).astype(np.int64)).view(-1, experts)


class ExpertLoad:
    """Rank 0's side. `stage`: how many ranks hold the same layers. `newest`: the sums over all
    ranks of the last complete request, empty before the first."""

    def __init__(self, members: list[WorkerHandle], stage: int, experts: int):
        self.workers = members
        self.stage = stage
        self.experts = experts
        self.newest: Counts = []
        self.newest_step = 0  # the last step that they count
        self.asked_step = 0
        self.request = 0
        self.own: Callable[[], Tensor] | None = None  # until all ranks have responded

    def ask(self, send: Callable[[bytes], None], own: Callable[[], Tensor], step: int) -> None:
        """Request the counts of all ranks. own: fetches rank 0's; step: the newest launched
        step."""
        self.request += 1
        self.asked_step = step
        send(numbered(self.request, b""))
        self.own = own

    def read(self) -> None:
        """Process the responses, once all ranks have sent theirs."""
        responses = [number_of(member.load) for member in self.workers if member.load is not None]
        missing = len(responses) < len(self.workers)
        if self.own is None or missing or any(number != self.request for number, _ in responses):
            return
        loads = [self.own(), *(decode_load(data, self.experts) for _, data in responses)]
        self.newest = self._summed(loads)
        self.newest_step = self.asked_step
        self.own = None

    def _summed(self, loads: list[Tensor]) -> Counts:
        """Ranks of a stage count their own tokens in the same layers; stages are in layer order."""
        found: Counts = []
        for first in range(0, len(loads), self.stage):
            found += torch.stack(loads[first : first + self.stage]).sum(0).tolist()
        return found
