"""What expert servers are told of a step's calls before these are launched: each by itself, or,
where they are in a captured graph, all of them whenever it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.parallel.remote.wire import SharedCall, Step
from rorqual.platforms.base import Platform


@dataclass
class Recording:
    """The calls of a step that is captured, in order."""

    calls: list[tuple[int, SharedCall]] = field(default_factory=list)

    def step(self) -> Step:
        found: dict[int, list[SharedCall]] = {}
        for lane, call in self.calls:
            found.setdefault(lane, []).append(call)
        return {lane: tuple(calls) for lane, calls in found.items()}


class ToldCalls:
    """Of one rank, by its engine's thread; `_tell` is a transport's own."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.recording: Recording | None = None
        self.compiling = False

    @property
    def device(self) -> torch.device:
        return self.platform.device

    def call(self, lane: int, layer: int, rows: int) -> None:
        """Kernels of this call are launched next."""
        if self.compiling:
            return
        told = SharedCall(layer, rows)
        if self._captures():
            assert self.recording is not None, "a graph whose calls nobody could tell"
            self.recording.calls.append((lane, told))
            return
        self._tell({lane: (told,)})

    def _captures(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def only_compiled(self) -> Iterator[None]:
        """Kernels are compiled inside, and not run: nobody is told of calls."""
        self.compiling = True
        try:
            yield
        finally:
            self.compiling = False

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """While a graph is captured: the calls that are in it."""
        self.recording = Recording()
        try:
            yield self.recording
        finally:
            self.recording = None

    def captured(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Captured on the device; the result replays it, and tells its calls before."""
        with self.record() as found:
            graph = self.platform.capture(work)
        step = found.step()

        def replay() -> Tensor:
            self.replay(step)
            return graph()

        return replay

    def replay(self, step: Step) -> None:
        """A graph with these calls is launched next."""
        if step:
            self._tell(step)

    def _tell(self, step: Step) -> None:
        raise NotImplementedError
