"""Steps of one caller that an expert server has launched on a device's queues, and how what a step
calls is captured there once and replayed."""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from rorqual.disagg.experts.step_gate import StepGate
from rorqual.parallel.remote.link import readable
from rorqual.parallel.remote.wire import SharedCall

MOST_GRAPHS = 256  # of a lane; the one that was not used for longest goes
LOOK_SECONDS = 0.002  # between two looks at whether a step is done
WITHOUT_GRAPHS = 1  # calls of a lane at a time that are launched as they come
Calls = tuple[SharedCall, ...]


class StepsUnderWay:
    """In the order of their launches; each is in the gate until it is done. events: of each, those
    behind its lanes' work; none where it is computed at once."""

    def __init__(self, gate: StepGate):
        self.gate = gate
        self.events: list[list[Any]] = []

    def enter(self) -> None:
        """Through the gate, with looks at what is done: who holds it back waits for that."""
        while not self.gate.enter(LOOK_SECONDS):
            self.leave_done()

    def begin(self) -> list[Any]:
        """A step that has entered is launched: the list that its events are to come into."""
        self.events.append([])
        return self.events[-1]

    def await_message(self, sock: socket.socket) -> None:
        """While steps are under way, with looks at whether they are done."""
        while self.events and not readable(sock, LOOK_SECONDS):
            self.leave_done()
        self.leave_done()

    def leave_done(self) -> None:
        done = 0
        while done < len(self.events) and all(event.query() for event in self.events[done]):
            done += 1
        self._leave(done)

    def leave_all(self) -> None:
        """The device is through with all of them."""
        self._leave(len(self.events))

    def _leave(self, count: int) -> None:
        for _ in range(count):
            self.events.pop(0)
            self.gate.leave()


class LaneGraphs:
    """Of one lane, by the calls of a step. On a stream and in memory of its own, for lanes are
    replayed side by side."""

    def __init__(self, stream: Any):
        self.stream = stream
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: OrderedDict[Calls, Any] = OrderedDict()

    def of(
        self, calls: Calls, practise: Callable[[Calls], None], work: Callable[[Calls], None]
    ) -> Any:
        """practise: computes as `work` will, on another stream, and waits for nobody: kernels
        compile, and libraries make their workspaces. work: is captured."""
        if calls not in self.graphs:
            self.graphs[calls] = self._capture(calls, practise, work)
            if len(self.graphs) > MOST_GRAPHS and self.stream.query():  # none of them runs
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(calls)
        return self.graphs[calls]

    def _capture(
        self, calls: Calls, practise: Callable[[Calls], None], work: Callable[[Calls], None]
    ) -> Any:
        practice = torch.cuda.Stream(self.stream.device)
        with on_stream(practice):
            practise(tuple(dict.fromkeys(calls)))
            practice.synchronize()
        with on_stream(self.stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work(calls)
            finally:
                graph.capture_end()
        return graph


@contextmanager
def on_stream(stream: Any) -> Iterator[Any]:
    """The stream, if there is one."""
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        yield stream
