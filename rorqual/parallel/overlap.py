"""Interleave micro-batches at their hand-overs: one is plain execution, two are two-batch overlap,
more hide network latency."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")


def run(generators: Sequence[Generator[None, None, Result]]) -> list[Result]:
    """Advance the generators round-robin, one stage at a time, until all have returned. Results are
    in the order given."""
    results: dict[int, Any] = {}
    while len(results) < len(generators):
        for index, generator in enumerate(generators):
            if index not in results:
                try:
                    next(generator)
                except StopIteration as stop:
                    results[index] = stop.value
    return [results[index] for index in range(len(generators))]


def run_one(generator: Generator[None, None, Result]) -> Result:
    """Run one generator to its end, ignoring hand-overs."""
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value


def chain(generators: Sequence[Generator[None, None, Result]]) -> list[Result]:
    """Run every generator to its first hand-over, then each to its end in turn. For the
    micro-batches of a pipeline: all receives are posted before the first is waited for, and one
    micro-batch's sends overlap with the next one's computation."""
    first: dict[int, Any] = {}
    for index, generator in enumerate(generators):
        try:
            next(generator)
        except StopIteration as stop:
            first[index] = stop.value
    return [
        first[index] if index in first else run_one(generator)
        for index, generator in enumerate(generators)
    ]
