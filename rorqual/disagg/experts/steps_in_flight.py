"""Steps of one caller that an expert server has launched on a GPU: each lane's calls on a stream of
its own, captured once and replayed.

Callers may be ranks of one engine, so what one lane waits for may wait for another lane's sums.
Nothing that a launch needs may therefore wait for a lane: lanes share no streams (lane_streams.py)
and no hardware queues, and kernels are loaded before a lane waits, since loading one may wait for
all that runs on the GPU.
"""

from __future__ import annotations

import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rorqual.disagg.experts.lane_streams import STREAMS
from rorqual.disagg.experts.shard import LOADED_ROWS
from rorqual.disagg.experts.step_gate import StepGate
from rorqual.parallel.remote.link import readable
from rorqual.parallel.remote.wire import SharedCall, Step
from rorqual.platforms.base import Platform

MAX_GRAPHS = 256  # of a lane; the least recently used is dropped
POLL_SECONDS = 0.002  # between two queries of whether a step is done
WITHOUT_GRAPHS = 1  # calls of a lane at a time that are launched without a graph
Calls = tuple[SharedCall, ...]


class StepsInFlight:
    """In the order of their launches; each is in the gate until it is done. events: of each, those
    behind its lanes' work; none where it is computed at once."""

    def __init__(self, gate: StepGate):
        self.gate = gate
        self.events: list[list[Any]] = []

    def enter(self) -> None:
        """Through the gate. Steps that are done leave it meanwhile: its holder waits."""
        while not self.gate.enter(POLL_SECONDS):
            self.leave_done()

    def begin(self) -> list[Any]:
        """A step that has entered is launched: the list that its events are to be added to."""
        self.events.append([])
        return self.events[-1]

    def await_message(self, sock: socket.socket) -> None:
        """Steps that are done leave the gate meanwhile."""
        while self.events and not readable(sock, POLL_SECONDS):
            self.leave_done()
        self.leave_done()

    def leave_done(self) -> None:
        done = 0
        while done < len(self.events) and all(event.query() for event in self.events[done]):
            done += 1
        self._leave(done)

    def leave_all(self) -> None:
        """The device has finished all of them."""
        self._leave(len(self.events))

    def _leave(self, count: int) -> None:
        for _ in range(count):
            self.events.pop(0)
            self.gate.leave()


@dataclass(eq=False)
class LaneQueue:
    """Of one lane: its stream, and its captured steps by their calls, in memory of their own, since
    lanes are replayed side by side."""

    stream: torch.cuda.Stream
    pool: Any
    graphs: OrderedDict[Calls, torch.cuda.CUDAGraph] = field(default_factory=OrderedDict)

    def graph(
        self, calls: Calls, warm_up: Callable[[Calls], None], compute: Callable[[Calls], None]
    ) -> torch.cuda.CUDAGraph:
        """warm_up: computes as `compute` will, without waiting for the caller, on another stream:
        kernels are compiled, and libraries make their workspaces. compute: is captured."""
        if calls not in self.graphs:
            self.graphs[calls] = self._capture(calls, warm_up, compute)
            if len(self.graphs) > MAX_GRAPHS and self.stream.query():  # none of them runs
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(calls)
        return self.graphs[calls]

    def _capture(
        self, calls: Calls, warm_up: Callable[[Calls], None], compute: Callable[[Calls], None]
    ) -> torch.cuda.CUDAGraph:
        side = STREAMS.warm_up(self.stream.device)
        with torch.cuda.stream(side):
            warm_up(tuple(dict.fromkeys(calls)))
            side.synchronize()
        with torch.cuda.stream(self.stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                compute(calls)
            finally:
                graph.capture_end()
        return graph


class StepLauncher:
    """Of one caller, on a GPU. computing: held while anything is launched, as two threads would
    compile one kernel at once. warm_up, compute: launch calls of a lane on the current stream, the
    first without waiting for the caller. Raises LinkError where no stream is left."""

    def __init__(
        self,
        platform: Platform,
        steps: StepsInFlight,
        computing: threading.Lock,
        lanes: int,
        warm_up: Callable[[int, Calls], None],
        compute: Callable[[int, Calls], None],
    ):
        self.platform = platform
        self.steps = steps
        self.computing = computing
        self.warm_up = warm_up
        self.compute = compute
        self.lanes: list[LaneQueue] = []
        try:
            for _ in range(lanes):
                self.lanes.append(
                    LaneQueue(STREAMS.take(platform.device), torch.cuda.graph_pool_handle())
                )
        except BaseException:
            self.close()
            raise

    def load_kernels(self, layer: int, rows: int) -> None:
        """Of calls of up to so many rows. None of this caller's lanes waits yet."""
        side = STREAMS.warm_up(self.platform.device)
        with (
            self.computing,
            torch.inference_mode(),
            self.platform.stream(),
            torch.cuda.stream(side),
        ):
            for count in LOADED_ROWS:
                if count <= rows:
                    self.warm_up(0, (SharedCall(layer, count),))
            side.synchronize()

    def launch(self, step: Step) -> None:
        self.steps.enter()
        events = self.steps.begin()
        with self.computing, torch.inference_mode(), self.platform.stream():
            # all are captured before any is launched: a lane that waits for its caller may wait
            # for another lane of the same step
            works = {number: self._work(number, calls) for number, calls in step.items()}
            for number, work in works.items():
                with torch.cuda.stream(self.lanes[number].stream):
                    work()
                    event = torch.cuda.Event()
                    event.record()
                    events.append(event)

    def _work(self, number: int, calls: Calls) -> Callable[[], None]:
        if len(calls) <= WITHOUT_GRAPHS:
            return lambda: self.compute(number, calls)
        graph = self.lanes[number].graph(
            calls,
            lambda distinct: self.warm_up(number, distinct),
            lambda captured: self.compute(number, captured),
        )
        replay: Callable[[], None] = graph.replay
        return replay

    def synchronize(self) -> None:
        """Wait until the lanes are done."""
        with self.platform.stream():
            for lane in self.lanes:
                lane.stream.synchronize()

    def close(self) -> None:
        """The lanes are done: their graphs are destroyed, their streams are free for others."""
        lanes, self.lanes = self.lanes, []
        with self.platform.stream():
            for lane in lanes:
                lane.graphs.clear()
                STREAMS.give_back(lane.stream)
