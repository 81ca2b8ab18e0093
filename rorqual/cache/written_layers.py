"""How far a step has come with the pages that it writes: for those who read them layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable

Mark = Callable[[], None]


class WrittenLayers:
    """Of one step on one rank. layers: that this rank's cache has. mark: see Platform. changed:
    told after each layer. `marks` has one for each layer that is written once its mark is reached:
    who reads it calls that first, where it launches its copy."""

    def __init__(self, layers: int, mark: Callable[[], Mark], changed: threading.Condition):
        self.layers = layers
        self.mark = mark
        self.changed = changed
        self.marks: list[Mark] = []

    def layer(self) -> None:
        """One more was launched; on the engine's thread."""
        self._reach(len(self.marks) + 1)

    def whole(self) -> None:
        """So was the step."""
        self._reach(self.layers)

    def _reach(self, count: int) -> None:
        assert count <= self.layers, "a layer writes its pages once in a step"
        mark = self.mark()
        with self.changed:
            self.marks += [mark] * (count - len(self.marks))
            self.changed.notify_all()
