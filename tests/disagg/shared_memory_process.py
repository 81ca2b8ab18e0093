"""`rorqual` on a CPU with kernels in Triton's interpreter, and memory files in place of a GPU's: an
expert server whose memory callers share, and what a caller's process needs for that."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import tests.emulation.triton_interpreter  # noqa: F401  asks for the interpreter before kernels are defined
from rorqual.cli.main import main
from rorqual.disagg.experts.lanes import CallerLanes
from rorqual.disagg.experts.steps_in_flight import POLL_SECONDS
from rorqual.parallel import cuda_ipc
from rorqual.parallel.remote import handles
from rorqual.parallel.remote.handles import HandleCalls
from rorqual.parallel.remote.wire import SharedCall, Step
from rorqual.platforms.base import Pieces, Replay, T
from rorqual.platforms.cpu import CpuPlatform
from tests.parallel.memfd_driver import MemfdDriver, no_device

WHOLE_STEPS = "RORQUAL_TESTS_TELL_WHOLE_STEPS"  # set: other ranks do as `whole_steps` has it


def put_in_place() -> None:
    driver = MemfdDriver()
    cuda_ipc.driver = lambda: driver  # type: ignore[assignment]
    cuda_ipc.on_device = no_device
    handles.DEVICES = ("cpu",)


def compute_what_has_come(self: CallerLanes, step: Step) -> None:
    """In place of CallerLanes.launch: as on streams of a GPU no call waits in front of another
    lane's or another caller's. Interpreted kernels of several threads must not run at once."""
    self.steps.enter()
    self.steps.begin()
    left = {number: deque(calls) for number, calls in step.items()}
    while left:
        for number, calls in list(left.items()):
            lane = self.lanes[number].lane
            came, before = lane.inbox[:8].view(torch.int32).tolist()
            if came - before < calls[0].rows and not int(self.words[0]):
                continue
            with self.computing, torch.inference_mode():
                self._compute(lane, (calls.popleft(),))
            if not calls:
                del left[number]
        time.sleep(POLL_SECONDS / 10)
    self.steps.leave_all()


def whole_steps() -> list[tuple[type, str, Any]]:
    """(of what, name, what to put there) so that steps are told whole before they are replayed, as
    with captured graphs: what records nothing, and computes anew."""
    replaying: list[bool] = []

    def announce(self: HandleCalls, lane: int, layer: int, rows: int) -> None:
        if replaying or self.compiling:
            return
        if self.capturing is not None:
            self.capturing.calls.append((lane, SharedCall(layer, rows)))
        self._send_step({lane: (SharedCall(layer, rows),)})

    def capture(
        self: CpuPlatform, work: Callable[[], Tensor], warm: bool = True
    ) -> Callable[[], Tensor]:
        work()

        def replay() -> Tensor:
            replaying.append(True)
            try:
                return work()
            finally:
                replaying.pop()

        return replay

    def capture_pieces(
        self: CpuPlatform, work: Callable[[Callable[[T], None]], Tensor], warm: bool = True
    ) -> Pieces[T]:
        work(lambda what: None)

        def replay(between: Callable[[T], None]) -> Tensor:
            replaying.append(True)
            try:
                return work(between)
            finally:
                replaying.pop()

        return replay

    def capture_each(
        self: CpuPlatform, works: Sequence[Callable[[], None]], warm: bool = True, use: str = ""
    ) -> list[Replay]:
        return list(works)

    return [
        (HandleCalls, "announce", announce),
        (CpuPlatform, "capture", capture),
        (CpuPlatform, "capture_pieces", capture_pieces),
        (CpuPlatform, "capture_each", capture_each),
        (CpuPlatform, "has_graphs", True),
    ]


if __name__ == "__main__":
    put_in_place()
    CallerLanes.launch = compute_what_has_come  # type: ignore[method-assign]
    main()
