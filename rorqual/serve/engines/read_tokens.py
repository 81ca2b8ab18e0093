"""Tokens of requests with stop strings, counted as they are read. Only the API process knows which
token completes a stop string; the engine samples a few more until it is told. No torch."""

from __future__ import annotations

from itertools import groupby

from rorqual.serve.engines.histogram import BOUNDS, Histogram
from rorqual.serve.messages import RequestPhase, Snapshot

GAPS = "inter_token_latency_seconds"


class ReadTokens:
    """The tokens of one sequence that belong to its answer: how many there are, when the first and
    the last of them left the engine, and when the request arrived."""

    __slots__ = ("arrival", "count", "first", "last")

    def __init__(self, arrival: float):
        self.arrival = arrival
        self.count = 0
        self.first = 0.0
        self.last = 0.0

    def decode_phase(self, name: str) -> RequestPhase:
        """Of a traced request; the engine does not report it, since it cannot know its end."""
        details: dict[str, str | int | float] = {"gen_ai.usage.output_tokens": self.count}
        return RequestPhase(name, "decode", self.arrival, self.first, self.last, details)


class ReadFigures:
    """Figures of all such sequences of one engine, which its snapshots lack."""

    def __init__(self) -> None:
        self.tokens = 0
        self.gaps = Histogram(BOUNDS[GAPS])

    def add(self, read: ReadTokens, times: list[float], count: int) -> None:
        """times: when each new token left the engine, equal for those of one step. The first
        `count` of them belong to the answer."""
        self.tokens += count
        for at, step in groupby(times):
            if not count:
                return
            size = len(list(step))
            counted = min(size, count)
            if read.count:
                self.gaps.add((at - read.last) / size, counted)
            else:
                read.first = at
            read.count += counted
            read.last = at
            count -= counted

    def add_to(self, snapshot: Snapshot) -> None:
        snapshot.output_tokens += self.tokens
        state = snapshot.histograms.get(GAPS)
        if state is not None:
            pairs = zip(state.counts, self.gaps.counts, strict=True)
            state.counts = [ours + read for ours, read in pairs]
            state.total += self.gaps.total
