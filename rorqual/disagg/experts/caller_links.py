"""The links over which an expert server computes for its callers, whatever carries the rows."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from rorqual.disagg.experts.shard import ExpertShard
from rorqual.disagg.experts.step_gate import StepGate
from rorqual.parallel.remote.link import shut


class Lanes(Protocol):
    def stop(self) -> None:
        """End what they wait for. Any thread."""


L = TypeVar("L", bound=Lanes)


class CallerLinks(Generic[L]):
    """Of an expert server: its callers' control links, and their lanes with the links of these.
    lock: of both. Any thread."""

    def __init__(self, shard: ExpertShard, gate: StepGate, computing: threading.Lock):
        self.shard = shard
        self.gate = gate
        self.computing = computing
        self.lock = threading.Lock()
        self.controls: dict[str, socket.socket] = {}
        self.lanes: dict[str, tuple[L, socket.socket]] = {}

    @contextmanager
    def controlled(self, caller: str, sock: socket.socket) -> Iterator[None]:
        """While a caller's control link lives. With it its lanes end."""
        if caller:
            with self.lock:
                self.controls[caller] = sock
        try:
            yield
        finally:
            with self.lock:
                if caller and self.controls.get(caller) is sock:
                    del self.controls[caller]
                    if caller in self.lanes:
                        lanes, link = self.lanes[caller]
                        lanes.stop()
                        shut(link)
