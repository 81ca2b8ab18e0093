"""What wakes the engine's loop, and how it waits while its requests wait for other engines."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("zmq")

import zmq

from rorqual.serve.engines.engine_process import BLOCKED_POLL_MS, EngineProcess
from rorqual.serve.engines.sockets import EngineSockets

PIPE = 65_536  # bytes that a pipe holds


@pytest.fixture
def link(tmp_path: Path) -> Iterator[EngineSockets]:
    context: Any = zmq.Context.instance()
    bound = []
    for kind in (zmq.PUSH, zmq.PULL):
        socket = context.socket(kind)
        socket.bind(f"ipc://{tmp_path}/{len(bound)}")
        bound.append(socket)
    made = EngineSockets(*(f"ipc://{tmp_path}/{i}" for i in range(2)))
    try:
        yield made
    finally:
        made.close()
        for socket in bound:
            socket.close()


def test_wakes_of_a_busy_loop_do_not_block(link: EngineSockets) -> None:
    """It waits for nothing while it has work, so nobody reads what wakes it."""

    def wake() -> None:
        for _ in range(PIPE + 100):
            link.wake()

    waker = threading.Thread(target=wake, daemon=True)
    waker.start()
    waker.join(20)
    assert not waker.is_alive()
    began = time.monotonic()
    link.wait(10_000)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("launched", "in_flight", "outs", "waits"),
    [
        (0, [], [], True),
        (1, [], [], False),
        (0, ["a step"], [], False),
        (0, [], ["a token"], False),
    ],
)
def test_a_loop_that_can_launch_nothing_does_not_spin(
    launched: int, in_flight: list[str], outs: list[str], waits: bool
) -> None:
    waited: list[int] = []
    process: Any = EngineProcess.__new__(EngineProcess)
    stats = SimpleNamespace(steps=7)

    def step() -> list[str]:
        stats.steps += launched
        return outs

    process.engine = SimpleNamespace(stats=stats, step=step, in_flight=in_flight)
    process.link = SimpleNamespace(wait=waited.append, send=lambda message: None)
    process.transfers = None
    process.unstarted = {}
    process.next_snapshot = math.inf
    process._outputs = lambda outs, now: []
    process._step()
    assert waited == ([BLOCKED_POLL_MS] if waits else [])
