"""Stop strings in a stream of text pieces: matched across token boundaries, and never partly
shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from weakref import WeakValueDictionary

CHARS = 0x110000


class StopAutomaton:
    """Aho-Corasick automaton: a state for every prefix of a stop string, so that a character of
    text costs one step on average, however many and long the stops are.

    depth[state]: length of that prefix, the longest that is a suffix of the text so far.
    complete[state]: index of the longest stop that is complete there, -1 if none is.
    """

    def __init__(self, stops: Sequence[str]):
        self.edges: dict[int, int] = {}  # state * CHARS + character -> state
        self.depth = [0]
        self.complete = [-1]
        self.shorter = [0]  # failure links: the next shorter prefix that is a suffix of the text
        children: list[list[int]] = [[]]
        for index, stop in enumerate(stops):
            self._insert(stop, index, children)
        self._link(children)

    def _insert(self, stop: str, index: int, children: list[list[int]]) -> None:
        state = 0
        for char in map(ord, stop):
            key = state * CHARS + char
            after = self.edges.get(key)
            if after is None:
                after = self.edges[key] = len(self.depth)
                children[state].append(char)
                children.append([])
                self.depth.append(self.depth[state] + 1)
                self.complete.append(-1)
                self.shorter.append(0)
            state = after
        self.complete[state] = index

    def _link(self, children: list[list[int]]) -> None:
        """By depth: a state's failure link is known before its children need it."""
        waiting = deque((0,))
        while waiting:
            state = waiting.popleft()
            for char in children[state]:
                after = self.edges[state * CHARS + char]
                if state:
                    self.shorter[after] = self.step(self.shorter[state], char)
                if self.complete[after] < 0:
                    self.complete[after] = self.complete[self.shorter[after]]
                waiting.append(after)

    def step(self, state: int, char: int) -> int:
        while True:
            after = self.edges.get(state * CHARS + char)
            if after is not None:
                return after
            if not state:
                return 0
            state = self.shorter[state]


# Cached while in use: choices of one request share theirs.
_made: WeakValueDictionary[tuple[str, ...], StopAutomaton] = WeakValueDictionary()


def automaton_of(stops: tuple[str, ...]) -> StopAutomaton:
    found = _made.get(stops)
    if found is None:
        found = _made[stops] = StopAutomaton(stops)
    return found


class StopStrings:
    """Holds back any tail that could still become a stop string.

    push(text) returns what is safe to show; nothing more after `found` is set. flush() returns the
    held tail. The stop string that is complete first counts; of those complete at the same
    position, the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self.stops = tuple(stops)
        self.include = include
        self.automaton = automaton_of(self.stops) if self.stops else None
        self.state = 0
        self.tail = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        if self.found is not None:
            return ""
        if self.automaton is None:
            return text
        step = self.automaton.step
        complete = self.automaton.complete
        state = self.state
        for place, char in enumerate(map(ord, text)):
            state = step(state, char)
            if complete[state] >= 0:
                self.found = self.stops[complete[state]]
                return self._last(self.tail + text[: place + 1], self.found)
        self.state = state
        seen = self.tail + text
        shown = len(seen) - self.automaton.depth[state]
        self.tail = seen[shown:]
        return seen[:shown]

    def _last(self, seen: str, found: str) -> str:
        self.tail = ""
        return seen if self.include else seen[: len(seen) - len(found)]

    def flush(self) -> str:
        rest = self.tail
        self.tail = ""
        self.state = 0
        return rest


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of text that is a proper prefix of stop."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
