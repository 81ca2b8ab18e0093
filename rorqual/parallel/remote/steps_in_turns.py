"""Two steps in flight in one process: while the rows of one are at expert servers, the other
computes, across the ends of steps as well.

A step that is launched is interleaved with the one before: both advance by one hand-over in turn,
the older first, until that one has sampled its tokens. The newer then stays where it is, its last
call in flight, until the next is launched or its result is needed. So a step's first layers overlap
the last layers of the step before, where micro-batches of one step would all wait.

The older step is ahead by a hand-over at least in every layer, so what it writes to the cache is
there before the newer one reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from torch import Tensor

Forward = Generator[None, None, Tensor]


class BegunStep:
    """forward: comes to the step's hidden states. end: draws from them."""

    def __init__(self, forward: Forward, end: Callable[[Tensor], None]):
        self.forward = forward
        self.end = end
        self.over = False

    def advance(self) -> None:
        """To the next hand-over, or the end."""
        try:
            next(self.forward)
        except StopIteration as stop:
            self.over = True
            self.end(stop.value)


class StepsInTurns:
    """begun: the newest step, if it is not over."""

    def __init__(self) -> None:
        self.begun: BegunStep | None = None

    def launch(self, forward: Forward, end: Callable[[Tensor], None]) -> BegunStep:
        """Begin a step, and end the one before."""
        before = self.begun
        self.begun = None  # whatever is raised from here on, neither goes on
        new = BegunStep(forward, end)
        new_alone = before is None or before.over
        while before is not None and not before.over:
            before.advance()
            if not new.over:
                new.advance()
        if new_alone:
            new.advance()
        if not new.over:
            self.begun = new
        return new

    def finish(self, step: BegunStep | None) -> None:
        """End a step, if it is not over, alone."""
        if step is None or step is not self.begun:
            return
        self.begun = None
        while not step.over:
            step.advance()

    def abandon(self) -> None:
        """The step in flight is given up, and must write nothing from here on."""
        step = self.begun
        self.begun = None
        if step is not None:
            step.forward.close()
