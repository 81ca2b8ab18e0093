"""A platform that captures steps and 'replays' them by calling again, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rorqual.platforms.base import Pieces, Replay, T
from rorqual.platforms.cpu import CpuPlatform


class ReplayingPlatform(CpuPlatform):
    """Takes the reference ops, as its name has none of its own; `capture` warms up as a GPU does
    and keeps one output tensor."""

    name = "replaying"
    has_graphs = True
    steps_in_flight = 2

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.replays = self.pieces = self.warmed = self.replayed_between = 0

    def warm_up(self, work: Callable[[], object]) -> None:
        self.warmed += 1
        work()

    def capture(self, work: Callable[[], Tensor], warm: bool = True) -> Callable[[], Tensor]:
        if warm:
            self.warm_up(work)
        out = work().clone()

        def replay() -> Tensor:
            self.replays += 1
            return out.copy_(work())

        return replay

    def capture_pieces(
        self, work: Callable[[Callable[[T], None]], Tensor], warm: bool = True
    ) -> Pieces[T]:
        if warm:
            self.warm_up(lambda: work(lambda what: None))
        out = work(lambda what: None).clone()

        def replay(between: Callable[[T], None]) -> Tensor:
            self.pieces += 1
            return out.copy_(work(between))

        return replay

    def capture_each(
        self, works: Sequence[Callable[[], None]], warm: bool = True, use: str = "between pieces"
    ) -> list[Replay]:
        def counted(work: Callable[[], None]) -> None:
            self.replayed_between += 1
            work()

        if warm:
            self.warm_up(lambda: [work() for work in works])
        return [partial(counted, work) for work in works]

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        copied = tensor.clone()  # as on a GPU: before the next replay overwrites its source
        return lambda: copied


class CompilingPlatform(ReplayingPlatform):
    """As if kernels were compiled."""

    compiles = True
    free = 1 << 40

    def available_memory(self) -> int:
        return self.free
