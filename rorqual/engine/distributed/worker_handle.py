"""Rank 0's view of another rank: its connection, its messages, and whether it is alive. No
torch."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rorqual.engine.distributed.channel import Channel, FrameError, FrameKind

EXIT_STATUS_SECONDS = 1.0  # from a child's disconnect until its exit status must be known


@dataclass(frozen=True)
class ConnectedWorker:
    """A rank that has been started and connected. process: where this process started it; host:
    empty on this one. device_index: of its host's devices, None where the rank decides itself."""

    channel: Channel
    pid: int
    host: str = ""
    process: subprocess.Popen[bytes] | None = None
    device_index: int | None = None


class WorkerHandle:
    """`listen` runs on its own thread and fills `results`, heartbeats and the other fields."""

    def __init__(self, number: int, name: str, connected: ConnectedWorker):
        self.number = number
        self.connected = connected
        self.name = f"{name} on {connected.host}" if connected.host else name
        self.channel = connected.channel
        self.process = connected.process
        self.pid = connected.pid
        self.results: queue.Queue[bytes] = queue.Queue()
        self.load: bytes | None = None  # the newest response
        self.move_result: bytes | None = None  # likewise
        self.trace_result: bytes | None = None  # result of the newest trace
        self.on_message: Callable[[bytes], None] | None = None  # receives its service's messages
        self.ready = threading.Event()
        self.ended = threading.Event()
        self.last_received = time.monotonic()
        self.failure: str | None = None
        self.killed = False  # by this process

    def send_config(self, hello: dict[str, Any]) -> None:
        """Send its configuration; the rank starts loading."""
        message = {**hello, "rank": self.number, "device_index": self.connected.device_index}
        self.channel.send(FrameKind.HELLO, json.dumps(message).encode())

    def listen(self) -> None:
        """Receive until the connection ends."""
        try:
            while (frame := self.channel.receive()) is not None:
                self._handle(*frame)
        except FrameError as error:
            self.failure = str(error)
        self.last_received = time.monotonic()
        self.ended.set()

    def _handle(self, kind: FrameKind, data: bytes) -> None:
        self.last_received = time.monotonic()
        if kind is FrameKind.READY:
            self.ready.set()
        elif kind is FrameKind.RESULT:
            self.results.put(data)
        elif kind is FrameKind.LOAD:
            self.load = data
        elif kind is FrameKind.TRACE:
            self.trace_result = data
        elif kind is FrameKind.MOVE:
            self.move_result = data
        elif kind is FrameKind.SERVICE and self.on_message is not None:
            self.on_message(data)
        elif kind is FrameKind.FAILED:
            self.failure = data.decode(errors="replace")

    def liveness_error(self, max_silence: float) -> str | None:
        """A message if this rank has died or hangs, else None. max_silence: seconds without a
        frame. None for a rank that reported a failure, which says more than its exit."""
        if self.failure:
            return None
        silent = time.monotonic() - self.last_received
        status = self.process.poll() if self.process else None
        if status is not None:
            return f"{self.name} ended with status {status}"
        if self.ended.is_set() and (self.process is None or silent > EXIT_STATUS_SECONDS):
            return (
                f"{self.name} has closed its link: its process has ended, or its host is out "
                "of reach"
            )
        if silent > max_silence and not self.ended.is_set():
            return f"{self.name} has given no sign of life for {silent:.0f} s"
        return None

    def reported_failure(self) -> str | None:
        """A message if this rank reported a failure, else None."""
        return f"{self.name} failed: {self.failure}" if self.failure else None

    def kill(self) -> None:
        """Kill a child at once; a process elsewhere ends itself as its connection closes."""
        if self.process is not None and self.process.poll() is None:
            self.killed = True
            self.process.kill()
        self.channel.shut()

    def wait_stopped(self, deadline: float) -> str | None:
        """After STOP: wait until it has ended, or kill it. Returns a message if a child ended with
        a failure, else None; the exit of a process started elsewhere is not known."""
        if not self.ended.wait(max(0.1, deadline - time.monotonic())):
            self.kill()
        if self.process is not None:
            try:
                self.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill()
                self.process.wait()
        self.channel.close()
        if self.killed:
            return f"{self.name} did not end in time when it was told to stop, and was killed"
        status = self.process.returncode if self.process else 0
        if not status:
            return None
        cause = f"by {signal_name(-status)}" if status < 0 else f"with status {status}"
        why = f" ({self.failure})" if self.failure else ""
        return f"{self.name} ended {cause} when it was told to stop{why}"


def signal_name(number: int) -> str:
    """Such as SIGKILL; real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
