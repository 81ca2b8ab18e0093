"""When an expert server may write over weights while callers' steps are computed from a device's
queue, which the host does not follow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rorqual.errors import CapacityError

TRY_SECONDS = 0.05


class StepGate:
    """Steps come in and go out; `between` holds back new ones until there are none.

    A step here may need another server to compute the same caller's, and that one may be holding it
    back for a caller that this one holds back. So no step is held back for longer than TRY_SECONDS,
    and then it is tried again.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.steps = 0
        self.held_back = False

    def enter(self, seconds: float) -> bool:
        """Whether a step may begin; where it is held back, after so many seconds at most. Who
        waits must see to the end of earlier steps meanwhile."""
        with self.changed:
            if not self.changed.wait_for(lambda: not self.held_back, seconds):
                return False
            self.steps += 1
            return True

    def leave(self) -> None:
        with self.changed:
            self.steps -= 1
            self.changed.notify_all()

    @contextmanager
    def between(self, seconds: float) -> Iterator[None]:
        """No step is in flight inside. Raises CapacityError where that does not come about in so
        many seconds."""
        deadline = time.monotonic() + seconds
        while not self._hold_back():
            if time.monotonic() > deadline:
                raise CapacityError(f"callers' steps have not ended in {seconds:g} s")
            time.sleep(TRY_SECONDS / 10)
        try:
            yield
        finally:
            self._let_in()

    def _hold_back(self) -> bool:
        with self.changed:
            self.held_back = True
            if self.changed.wait_for(lambda: not self.steps, TRY_SECONDS):
                return True
            self.held_back = False
            self.changed.notify_all()
            return False

    def _let_in(self) -> None:
        with self.changed:
            self.held_back = False
            self.changed.notify_all()
