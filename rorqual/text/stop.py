"""Stop strings over a stream of text pieces: found across token boundaries, and never shown in
part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back any tail that could still become a stop string.

    push(text) returns what is safe to show; once `found` is set, nothing more comes. flush()
    returns the held tail.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self.stops = tuple(stops)
        self.include = include
        self.tail = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        if self.found is not None:
            return ""
        if not self.stops:
            return text
        self.tail += text
        hit = self._earliest()
        if hit is not None:
            start, self.found = hit
            shown = self.tail[: start + (len(self.found) if self.include else 0)]
            self.tail = ""
            return shown
        keep = max(overlap(self.tail, stop) for stop in self.stops)
        shown = self.tail[: len(self.tail) - keep]
        self.tail = self.tail[len(self.tail) - keep :]
        return shown

    def flush(self) -> str:
        rest = self.tail
        self.tail = ""
        return rest

    def _earliest(self) -> tuple[int, str] | None:
        """The stop string that is complete first; of those complete at the same place, the
        longest."""
        hits = [
            (self.tail.find(stop) + len(stop), -len(stop), stop)
            for stop in self.stops
            if stop in self.tail
        ]
        if not hits:
            return None
        end, _, stop = min(hits)
        return end - len(stop), stop


def overlap(text: str, stop: str) -> int:
    """Length of the longest tail of text that begins stop, short of all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
