"""Streams of the lanes of an expert server's callers."""

from __future__ import annotations

import threading

import torch

from rorqual.parallel.remote.link import LinkError


class LaneStreams:
    """torch has 32 streams of a priority and hands them out round-robin. Two lanes on one would
    wait for each other, so one that is in use is not handed out again. Nothing else here has this
    priority."""

    PRIORITY = -1
    MOST = 32

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self.warming: dict[torch.device, torch.cuda.Stream] = {}
        self.lock = threading.Lock()

    def take(self, device: torch.device) -> torch.cuda.Stream:
        """Raises LinkError where none is left."""
        with self.lock:
            for _ in range(2 * self.MOST):
                stream = torch.cuda.Stream(device, self.PRIORITY)
                if stream.cuda_stream not in self.taken:
                    self.taken.add(stream.cuda_stream)
                    return stream
        raise LinkError(f"{self.MOST} lanes are in use, the maximum")

    def give_back(self, stream: torch.cuda.Stream) -> None:
        with self.lock:
            self.taken.discard(stream.cuda_stream)

    def warm_up(self, device: torch.device) -> torch.cuda.Stream:
        """One for all warm-ups. torch's allocator keeps freed memory by stream, so with a stream
        for each warm-up every stream would keep its own; and the next stream of the pool may be one
        that NCCL waits for a caller on."""
        with self.lock:
            if device not in self.warming:
                self.warming[device] = torch.cuda.Stream(device)
            return self.warming[device]


STREAMS = LaneStreams()
