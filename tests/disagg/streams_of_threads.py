"""What stands in place of torch.cuda where an expert server launches steps: a stream is a thread,
which does what is launched on it in order, and a captured step is computed anew."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rorqual.disagg.experts import lane_streams, steps_in_flight
from rorqual.disagg.experts.steps_in_flight import Calls, LaneQueue, StepLauncher

current = threading.local()


class ThreadStream:
    """A failure ends it: nothing that comes later is done. ended: what was launched and is done."""

    made = 0

    def __init__(self, device: torch.device, priority: int = 0):
        ThreadStream.made += 1
        self.cuda_stream = ThreadStream.made
        self.device = device
        self.work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.failure: Exception | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self.work.get()
            try:
                work()
            except Exception as error:
                self.failure = error

    def synchronize(self) -> None:
        done = threading.Event()
        self.work.put(done.set)
        done.wait()

    def query(self) -> bool:
        return self.work.empty()


class ThreadEvent:
    def __init__(self) -> None:
        self.done = threading.Event()

    def record(self) -> None:
        current.stream.work.put(self.done.set)

    def query(self) -> bool:
        return self.done.is_set()


@contextmanager
def stream(chosen: ThreadStream) -> Iterator[None]:
    before = getattr(current, "stream", None)
    current.stream = chosen
    try:
        yield
    finally:
        current.stream = before


class Replay:
    def __init__(self, work: Callable[[], None]):
        self.replay = work


def put_in_place(patch: pytest.MonkeyPatch) -> list[str]:
    """Notes what is captured and warmed up in the result."""
    noted: list[str] = []
    plain = StepLauncher.__init__

    def init(self: StepLauncher, *given: Any) -> None:
        *rest, warm_up, compute = given

        def launch(number: int, calls: Calls) -> None:
            def work() -> None:
                if chosen.failure is None:
                    with torch.inference_mode():
                        compute(number, calls)

            chosen = current.stream
            chosen.work.put(work)

        def warm(number: int, calls: Calls) -> None:
            noted.append(f"warm up {len(calls)}")
            warm_up(number, calls)

        plain(self, *rest, warm, launch)

    def graph(
        self: LaneQueue,
        calls: Calls,
        warm_up: Callable[[Calls], None],
        compute: Callable[[Calls], None],
    ) -> Replay:
        if calls not in self.graphs:
            noted.append("capture")
            warm_up(tuple(dict.fromkeys(calls)))
            self.graphs[calls] = Replay(lambda: compute(calls))  # type: ignore[assignment]
        return self.graphs[calls]  # type: ignore[return-value]

    patch.setattr(StepLauncher, "__init__", init)
    patch.setattr(LaneQueue, "graph", graph)
    patch.setattr(torch.cuda, "Stream", ThreadStream)
    patch.setattr(torch.cuda, "Event", ThreadEvent)
    patch.setattr(torch.cuda, "stream", stream)
    patch.setattr(torch.cuda, "graph_pool_handle", object)
    streams = lane_streams.LaneStreams()
    patch.setattr(lane_streams, "STREAMS", streams)
    patch.setattr(steps_in_flight, "STREAMS", streams)
    return noted
