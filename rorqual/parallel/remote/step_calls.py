"""Calls to expert servers by kernels of the device, and how servers learn of them: each call is
announced before its kernels are launched, and a captured graph's calls all at once before it is
replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.parallel.remote.wire import SharedCall, Step
from rorqual.platforms.base import Platform


@dataclass
class CapturedExpertCalls:
    """(lane, call) of a step that is being captured, in order."""

    calls: list[tuple[int, SharedCall]] = field(default_factory=list)

    def step(self) -> Step:
        found: dict[int, list[SharedCall]] = {}
        for lane, call in self.calls:
            found.setdefault(lane, []).append(call)
        return {lane: tuple(calls) for lane, calls in found.items()}


class StepCalls:
    """One rank's, made by its engine's thread; transports derive from it. on: whether calls go this
    way. sent: [n, m] on the device; its first element is `word` of `check` at the end of a step."""

    sent: Tensor
    on: bool

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.capturing: CapturedExpertCalls | None = None
        self.compiling = False

    @property
    def device(self) -> torch.device:
        return self.platform.device

    # ---- a transport's own

    def begin(self, before_change: Callable[[], object] | None = None) -> int:
        """Before a step: the number of its epoch. before_change: launches the rest of the step
        before this one, which goes by the servers' numbers of now."""
        raise NotImplementedError

    def check(self, epoch: int, word: int = 0) -> None:
        """A step that began in that epoch is done on the device. Raises ExpertsMissing where its
        result is not valid."""
        raise NotImplementedError

    def ended(self) -> None:
        """A step is done on the device, and all ranks know whether its result is valid."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Steps are given up, perhaps between their announcement and their launch."""
        raise NotImplementedError

    def _send_step(self, step: Step) -> None:
        """To every server."""
        raise NotImplementedError

    # ---- announcements

    def announce(self, lane: int, layer: int, rows: int) -> None:
        """Kernels of this call are launched next."""
        if self.compiling:
            return
        call = SharedCall(layer, rows)
        if self._captures():
            assert self.capturing is not None, "calls are captured outside of capture_calls"
            self.capturing.calls.append((lane, call))
            return
        self._send_step({lane: (call,)})

    def _captures(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def announce_step(self, step: Step) -> None:
        """A graph with these calls is replayed next."""
        if step:
            self._send_step(step)

    @contextmanager
    def only_compiled(self) -> Iterator[None]:
        """Kernels are compiled inside, and not run: calls are not announced."""
        self.compiling = True
        try:
            yield
        finally:
            self.compiling = False

    @contextmanager
    def capture_calls(self) -> Iterator[CapturedExpertCalls]:
        """While a graph is captured: the calls that are in it."""
        self.capturing = CapturedExpertCalls()
        try:
            yield self.capturing
        finally:
            self.capturing = None

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture device work; the result announces its calls and replays it."""
        with self.capture_calls() as found:
            graph = self.platform.capture(work)
        step = found.step()

        def replay() -> Tensor:
            self.announce_step(step)
            return graph()

        return replay
