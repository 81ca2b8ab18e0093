"""How an expert server launches a caller's steps on a GPU, by what stands in torch.cuda's place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rorqual.bench.comm.handle_hop import EchoExperts
from rorqual.disagg.experts import lane_streams, steps_in_flight
from rorqual.disagg.experts.lane_streams import LaneStreams
from rorqual.disagg.experts.step_gate import StepGate
from rorqual.disagg.experts.steps_in_flight import Calls, StepLauncher, StepsInFlight
from rorqual.parallel.remote.link import LinkError
from rorqual.parallel.remote.wire import SharedCall
from rorqual.platforms.cpu import CpuPlatform

CPU = torch.device("cpu")


class FakeCuda:
    """Notes what is done, and on which stream. done: what events say."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.dealt = {0: 0, -1: 0}
        self.current: list[Any] = []
        self.done = False
        fake = self

        class Stream:
            def __init__(self, device: torch.device, priority: int = 0):
                fake.dealt[priority] += 1
                self.device = device
                self.cuda_stream = (fake.dealt[priority] - 1) % 32 + 1000 * (priority + 1)

            def query(self) -> bool:
                return fake.done

            def synchronize(self) -> None:
                fake.noted.append(("synchronize", self.cuda_stream))

        class Event:
            def record(self) -> None:
                fake.noted.append(("event", fake.current[-1].cuda_stream))

            def query(self) -> bool:
                return fake.done

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                fake.noted.append("capture")

            def capture_end(self) -> None:
                fake.noted.append("captured")

            def replay(self) -> None:
                fake.noted.append(("replay", fake.current[-1].cuda_stream))

        self.Stream = Stream
        self.Event = Event
        self.CUDAGraph = Graph

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Stream", "Event", "CUDAGraph", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    streams = LaneStreams()
    monkeypatch.setattr(lane_streams, "STREAMS", streams)
    monkeypatch.setattr(steps_in_flight, "STREAMS", streams)
    return fake


def launcher(cuda: FakeCuda, gate: StepGate, lanes: int = 2) -> StepLauncher:
    def compute(number: int, calls: Calls) -> None:
        cuda.noted.append(("compute", number, calls, cuda.current[-1].cuda_stream))

    def warm_up(number: int, calls: Calls) -> None:
        cuda.noted.append(("warm up", number, calls, cuda.current[-1].cuda_stream))

    steps = StepsInFlight(gate)
    return StepLauncher(CpuPlatform(CPU), steps, threading.Lock(), lanes, warm_up, compute)


WHOLE: Calls = (SharedCall(1, 4), SharedCall(2, 4), SharedCall(1, 4))
ONE: Calls = (SharedCall(1, 4),)


def test_a_step_is_captured_whole_before_any_lane_of_it_runs(cuda: FakeCuda) -> None:
    gate = StepGate()
    made = launcher(cuda, gate)
    first, second = (lane.stream.cuda_stream for lane in made.lanes)
    side = 1000
    made.launch({0: WHOLE, 1: WHOLE})
    distinct = WHOLE[:2]
    assert cuda.noted == [
        *(("warm up", 0, distinct, side), ("synchronize", side)),
        *("capture", ("compute", 0, WHOLE, first), "captured"),
        *(("warm up", 1, distinct, side), ("synchronize", side)),
        *("capture", ("compute", 1, WHOLE, second), "captured"),
        *(("replay", first), ("event", first), ("replay", second), ("event", second)),
    ]
    cuda.noted.clear()
    made.launch({1: WHOLE, 0: ONE})
    assert cuda.noted == [
        *(("replay", second), ("event", second)),
        *(("compute", 0, ONE, first), ("event", first)),
    ]
    assert gate.steps == 2
    made.steps.leave_done()
    assert gate.steps == 2
    cuda.done = True
    made.steps.leave_done()
    assert gate.steps == 0


def test_warm_ups_have_one_stream_and_lanes_one_each(cuda: FakeCuda) -> None:
    callers = [launcher(cuda, StepGate(), lanes=8) for _ in range(4)]
    taken = {lane.stream.cuda_stream for caller in callers for lane in caller.lanes}
    assert len(taken) == 32
    with pytest.raises(LinkError, match="32 lanes are in use"):
        launcher(cuda, StepGate(), lanes=1)
    for number in range(50):
        callers[0].launch({0: (SharedCall(number, 1), SharedCall(number, 2))})
    assert cuda.dealt[0] == 1
    callers[1].close()
    callers[1].close()
    again = launcher(cuda, StepGate(), lanes=8)
    taken = {lane.stream.cuda_stream for caller in (*callers, again) for lane in caller.lanes}
    assert len(taken) == 32
    with pytest.raises(LinkError):
        launcher(cuda, StepGate(), lanes=1)


def test_streams_of_lanes_that_do_not_fit_are_free_again(cuda: FakeCuda) -> None:
    most = launcher(cuda, StepGate(), lanes=30)
    with pytest.raises(LinkError):
        launcher(cuda, StepGate(), lanes=3)
    assert len(launcher(cuda, StepGate(), lanes=2).lanes) == 2
    assert len(most.lanes) == 30


def test_a_capture_that_fails_leaves_the_gate(cuda: FakeCuda) -> None:
    gate = StepGate()
    made = launcher(cuda, gate)

    def fail(number: int, calls: Calls) -> None:
        raise LinkError("its group has ended")

    made.compute = fail
    with pytest.raises(LinkError, match="has ended"):
        made.launch({0: WHOLE})
    assert cuda.noted[-1] == "captured"
    assert not made.computing.locked()
    assert not made.lanes[0].graphs
    made.steps.leave_all()
    assert gate.steps == 0


@pytest.mark.parametrize("most", [1, 5, 64])
def test_kernels_are_loaded_up_to_the_rows_of_a_call(cuda: FakeCuda, most: int) -> None:
    made = launcher(cuda, StepGate())
    made.load_kernels(3, most)
    rows = [noted[2][0].rows for noted in cuda.noted if noted[0] == "warm up"]
    assert rows == [rows for rows in (1, 2, 4, 8, 16, 32, 64) if rows <= most]
    assert cuda.noted[-1] == ("synchronize", 1000)


def test_the_benchmark_s_experts_can_be_loaded() -> None:
    """As a server does on a GPU alone: for the first layer that there is."""
    experts = EchoExperts(CpuPlatform(CPU), 128, 8, [0, 1], 2)
    experts.room(4)
    layer = next(iter(experts.layers))
    slots = torch.full((4, 2), -1)
    y = experts.run(layer, slots, torch.zeros(4, 2), (torch.zeros(4, 128, dtype=experts.dtype),))
    assert y.shape == (4, 128)
    assert experts.places_of(layer).shape == (9,)
