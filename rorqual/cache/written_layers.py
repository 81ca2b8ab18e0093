"""Which layers of its pages a step has written, for layer-by-layer transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable

Mark = Callable[[], None]


class WrittenLayers:
    """Progress of one step on one rank. layers: number in this rank's cache. mark: see Platform.
    changed: notified after each layer. `marks` has one entry per launched layer, which is written
    once its mark is reached: a reader calls the mark before it launches its copy."""

    def __init__(self, layers: int, mark: Callable[[], Mark], changed: threading.Condition):
        self.layers = layers
        self.mark = mark
        self.changed = changed
        self.marks: list[Mark] = []

    def layer(self) -> None:
        """One more layer was launched; on the engine's thread."""
        self._reach(len(self.marks) + 1)

    def whole(self) -> None:
        """The whole step was launched."""
        self._reach(self.layers)

    def _reach(self, count: int) -> None:
        assert count <= self.layers, "a layer writes its pages once in a step"
        mark = self.mark()
        with self.changed:
            self.marks += [mark] * (count - len(self.marks))
            self.changed.notify_all()
