"""Steps of an engine in this process, timed: for the simulator's constants, and its test."""

from __future__ import annotations

import random
import time

from rorqual.engine.engine import Engine
from rorqual.request import Request, SamplingParams


class StepDriver:
    def __init__(self, engine: Engine):
        self.engine = engine
        self.random = random.Random(0)
        self.count = 0

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(10, 4000) for _ in range(length))

    def add(self, length: int, output: int) -> None:
        """A request of `length` random tokens, answered with `output`."""
        self.queue(self.prompt(length), output)

    def queue(self, tokens: tuple[int, ...], output: int) -> None:
        self.count += 1
        params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        self.engine.add(Request(f"r{self.count}", tokens, params))

    def step(self) -> float:
        """Of processor time, which other programs of the machine change little."""
        start = time.process_time()
        self.engine.step()
        return time.process_time() - start
