"""What a caller and one expert server share: memory, and a socket on which steps are announced."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.parallel.remote.link import shut
from rorqual.parallel.shared.shared_block import SharedBlock
from rorqual.platforms.base import Platform

POLL_SECONDS = 0.001
PRIORITY = -1  # of no other stream here: its hardware queue is not behind one that waits


class LaneHeads:
    """Reads the heads of a caller's buffers, heads [lanes, 2] int32 on the device: rows that the
    server has answered, and rows that it is to answer.

    By copies alone, into pinned memory and on a stream of its own, whatever the device waits for: a
    kernel may have to be loaded at its first launch, and that may wait for all that runs.
    """

    def __init__(self, heads: Tensor, platform: Platform):
        self.heads = heads
        self.platform = platform
        self.host = platform.host_empty(tuple(heads.shape), heads.dtype)
        on_gpu = heads.device.type == "cuda"
        self.stream = torch.cuda.Stream(heads.device, PRIORITY) if on_gpu else None

    def read(self, seconds: float) -> list[list[int]] | None:
        """(answered, to be answered) of each lane; None where the device does not copy them in so
        many seconds."""
        if self.stream is None:
            found: list[list[int]] = self.heads.tolist()
            return found
        with torch.cuda.stream(self.stream):
            for into, head in zip(self.host, self.heads, strict=True):  # each is contiguous
                into.copy_(head, non_blocking=True)
            copied = self.platform.finished()
        deadline = time.monotonic() + seconds
        while not copied():
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        found = self.host.tolist()
        return found


@dataclass(eq=False)
class HandleLink:
    """inboxes: the server's memory for rows, homes: this process's for sums; of all lanes.
    announced: rows of the calls that the server was sent, by lane. late: why a server that lives is
    to be left out, or nothing."""

    sock: socket.socket
    inboxes: SharedBlock
    homes: SharedBlock
    announced: list[int]
    heads: LaneHeads
    late: Callable[[HandleLink], str] = lambda link: ""

    def why_late(self) -> str:
        return self.late(self)

    def close(self) -> None:
        shut(self.sock)
        self.sock.close()
