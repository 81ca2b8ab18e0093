"""A platform that captures operations as a GPU does, on a CPU: a replay runs the recorded torch
operations again on the same memory, and no Python of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rorqual.platforms.base import Pieces, T
from tests.engine.execution.replaying import ReplayingPlatform


class Recording(TorchDispatchMode):
    """What was computed, in order; its memory is never used for anything else."""

    current: ClassVar[Recording | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.inside = False  # an operation that is recorded as one call
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        self.collectives += "c10d" in str(func)
        found = func(*args, **kwargs)
        given = _storages((args, kwargs))
        made = [one for one in _tensors(found) if not _storages(one) & given]
        self.calls.append((func, args, kwargs, made))
        return found

    def __enter__(self) -> Recording:
        Recording.current = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Recording.current = None
        super().__exit__(*error)

    def whole(self, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        self.inside = True
        found = func(*args, **kwargs)
        self.inside = False
        self.calls.append((func, args, kwargs, [found]))
        return found

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            found = func(*args, **kwargs)
            if made:
                for old, new in zip(made, _tensors(found), strict=True):
                    old.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _storages(tree: Any) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in _tensors(tree)}


def as_one_call(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`func`, recorded as one call: for reference ops that look at the values of tensors."""

    def called(*args: Any, **kwargs: Any) -> Tensor:
        recording = Recording.current
        if recording is None or recording.inside:
            return func(*args, **kwargs)
        return recording.whole(func, args, kwargs)

    return called


# of class Ops
LOOKING = ("experts",)


class RecordingPlatform(ReplayingPlatform):
    """Passes in pieces are recorded, unless a piece has a collective: those are called again, as
    steps are that are captured whole."""

    name = "recording"  # it takes the reference ops, as this name has none of its own

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.replayed = 0  # recorded passes
        self.gaps: list[Any] = []  # of the last one

    def capture_pieces(
        self, work: Callable[[Callable[[T], None]], Tensor], warm: bool = True
    ) -> Pieces[T]:
        if warm:
            self.warm_up(lambda: work(lambda what: None))
        pieces = [Recording()]
        gaps: list[T] = []

        def gap(what: T) -> None:
            pieces[-1].__exit__(None, None, None)
            gaps.append(what)
            pieces.append(Recording())
            pieces[-1].__enter__()

        pieces[-1].__enter__()
        try:
            out = work(gap)
        finally:
            pieces[-1].__exit__(None, None, None)
        if any(piece.collectives for piece in pieces):
            return super().capture_pieces(work, warm=False)

        def replay(between: Callable[[T], None]) -> Tensor:
            self.replayed += 1
            self.gaps = list(gaps)
            for piece, what in zip(pieces, gaps, strict=False):
                piece.replay()
                between(what)
            pieces[-1].replay()
            return out

        return replay
