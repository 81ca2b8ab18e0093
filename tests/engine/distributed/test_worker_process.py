"""A rank other than 0 launches a step while its device still computes the one before."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rorqual import LLM
from rorqual.engine.distributed import worker_process
from rorqual.engine.distributed.channel import FrameKind
from rorqual.engine.distributed.worker_process import WorkerProcess
from rorqual.engine.execution.sampler import PendingStep
from tests.engine.distributed.starting import ROOT
from tests.engine.mixed_batch import COMMON, TEXTS, everything

SOON = 20.0
SITE = Path(__file__).parent / "late_site"


class Device:
    """Steps end when a test says so."""

    asynchronous = True

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.ended: set[int] = set()
        self.asked = 0

    def stream(self) -> Any:
        return nullcontext()

    def finished(self) -> Any:
        newest = len(self.launched)

        def ended() -> bool:
            self.asked += 1
            return newest in self.ended

        return ended


class Rank:
    """A WorkerProcess whose steps are numbers. begun: collecting starts the rest of a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, begun: bool = False):
        self.device = Device()
        self.collected: list[int] = []
        self.begun = begun
        monkeypatch.setattr(worker_process, "decode_output", lambda data: self._output())
        monkeypatch.setattr(worker_process, "encode_result", lambda result: b"")
        rank = self.rank = object.__new__(WorkerProcess)
        rank.inbox = SimpleNamespace(work=queue.SimpleQueue())  # type: ignore[assignment]
        rank.pending = deque()
        rank.launched = 0
        rank.sends_results = False
        rank.service = None
        rank.grammars = SimpleNamespace(used=lambda structures: None)  # type: ignore[assignment]
        rank.trace = SimpleNamespace(drop=lambda: None)  # type: ignore[assignment]
        rank.worker = SimpleNamespace(  # type: ignore[assignment]
            platform=self.device,
            mesh=SimpleNamespace(dp_rank=0),
            runner=SimpleNamespace(launch=self._launch, collect=self._collect),
        )
        self.thread = threading.Thread(target=rank.run, daemon=True)
        self.thread.start()

    def _output(self) -> Any:
        return SimpleNamespace(host=False, parts=[None], structures=(), metadata=lambda: None)

    def _launch(self, part: Any, metadata: Any) -> PendingStep:
        self.device.launched.append(len(self.device.launched) + 1)
        begun: Any = object() if self.begun else None
        return PendingStep(begun=begun)

    def _collect(self, pending: PendingStep) -> None:
        self.collected.append(len(self.collected) + 1)

    def step(self, number: int) -> None:
        self.rank.inbox.work.put((FrameKind.STEP, worker_process.numbered(number, b"")))

    def stop(self) -> None:
        self.rank.inbox.work.put((FrameKind.STOP, b""))
        self.thread.join(SOON)
        assert not self.thread.is_alive()


def until(true: Any) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_steps_are_launched_before_the_device_ends_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    rank.step(1)
    until(lambda: rank.device.asked > 2)  # no frame is there, so it looks at the device
    assert rank.collected == []
    rank.step(2)
    until(lambda: rank.device.launched == [1, 2])
    assert rank.collected == []
    rank.device.ended.add(2)  # results are sent in order
    time.sleep(0.01)
    assert rank.collected == []
    rank.device.ended.add(1)
    until(lambda: rank.collected == [1, 2])
    rank.stop()


def test_what_only_begins_at_its_end_is_not_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, begun=True)
    rank.step(1)
    until(lambda: rank.collected == [1])
    assert not rank.device.ended
    rank.stop()


def test_a_rank_stops_while_its_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes."""
    rank = Rank(monkeypatch)
    rank.step(1)
    until(lambda: rank.device.launched == [1])
    rank.stop()
    assert rank.collected == []


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "ep": 2, "num_speculative_tokens": 1},
        {"pp": 2, "num_speculative_tokens": 2},
        {"tp": 2, "chunked_prefill_size": 3},
        {"dp": 2, "ep": 2, "redundant_experts": 2, "record_expert_load": True},
    ],
    ids=lambda layout: "-".join(map(str, layout)),
)
def test_tokens_are_those_of_one_process_however_late_results_come(
    layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = everything(LLM(**COMMON), TEXTS)
    monkeypatch.setenv("PYTHONPATH", f"{SITE}{os.pathsep}{ROOT}")
    monkeypatch.setenv("LATE_RANKS", str(tmp_path))
    llm = LLM(**COMMON, **layout, steps_in_flight=2)
    try:
        assert everything(llm, TEXTS) == expected
    finally:
        llm.engine.close()
    assert len(list(tmp_path.iterdir())) == 1, "the other rank"
