"""Loads of one shape on a running layout: the closed loop that finds its peak, and Poisson arrivals
at a share of the replicas' peak. Also greedy answers, to compare layouts by.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpu_layouts import Running
from served_load import made_prompts, play

from rorqual.bench import provenance
from rorqual.bench.serving.client import RequestRecord, ServerTarget
from rorqual.bench.serving.load import ArrivalLoad, Run
from rorqual.bench.serving.metrics import GoodputLimits, causes, figures
from rorqual.errors import TargetError

MAX_STREAMS = 64
MIN_STREAMS = 8
TOKENS_IN_FLIGHT = 128_000  # of prompts in the closed loop, which limits its streams
WARM_UPS = 8
WARM_UP_TOKENS = 16  # of each answer
ASKED = 4  # prompts whose greedy answers are compared
ASKED_IN = 256  # tokens of each, at most
ASKED_OUT = 24
RAMP = 0.25  # of a closed loop's time, over which its streams begin
MIN_ITL = 0.002  # seconds, for the number of prompts that a closed loop may need
KEPT = (
    *("completed", "failed", "duration", "request_throughput", "client_cpu_cores"),
    *("token_source", "short_outputs", "input_length_mismatches", "total_cached_tokens"),
)


@dataclass(frozen=True)
class Shape:
    """Tokens of each prompt and answer; streams: open requests of the closed loop."""

    input: int
    output: int
    streams: int

    @staticmethod
    def parse(text: str) -> Shape:
        """INxOUT or INxOUT@STREAMS; without STREAMS as many as TOKENS_IN_FLIGHT allow."""
        lengths, _, streams = text.partition("@")
        first, _, second = lengths.partition("x")
        try:
            found = [int(part) for part in (first, second, streams or "1")]
        except ValueError:
            found = [0]
        if min(found) < 1 or len(found) < 3:
            raise argparse.ArgumentTypeError(f"{text!r}; accepted: INxOUT or INxOUT@STREAMS")
        most = max(MIN_STREAMS, min(MAX_STREAMS, TOKENS_IN_FLIGHT // found[0]))
        return Shape(found[0], found[1], found[2] if streams else most)

    @property
    def label(self) -> str:
        return f"{self.input}x{self.output}@{self.streams}"

    def seed(self, *more: int) -> list[int]:
        return [self.input, self.output, *more]


@dataclass(frozen=True)
class Cell:
    """share: of the replicas' peak, as Poisson arrivals; None: the closed loop."""

    layout: str
    shape: Shape
    share: float | None = None

    @property
    def key(self) -> list[Any]:
        return [self.layout, self.shape.label, self.share]


def greedy_answers(url: str, shapes: Sequence[Shape], seconds: float) -> list[str]:
    """Raises TargetError where one fails."""
    length = min(ASKED_IN, *(shape.input for shape in shapes))
    prompts = made_prompts(ASKED, (length, ASKED_OUT), 1)
    load = ArrivalLoad(run_seconds=seconds)
    run = play(ServerTarget(url, temperature=0.0, keep_text=True), prompts, load)
    refuse_failures(run)
    return ["".join(record.text) for record in run.records]


def warm_up(where: Running, shapes: Sequence[Shape], seconds: float) -> None:
    """Raises TargetError where a request fails."""
    end = time.monotonic() + seconds
    before = where.pages()
    for shape in shapes:
        lengths = (shape.input, min(shape.output, WARM_UP_TOKENS))
        load = ArrivalLoad(run_seconds=max(1.0, end - time.monotonic()))
        prompts = made_prompts(WARM_UPS, lengths, shape.seed(2))
        refuse_failures(play(ServerTarget(where.url), prompts, load))
    where.pages_since(before, WARM_UPS * len(shapes))  # so that a cell's counts are its own


def refuse_failures(run: Run) -> None:
    failed = causes(run.records)
    if failed:
        raise TargetError(f"{sum(failed.values())} requests failed: {next(iter(failed))}")


def load_of(
    cell: Cell, run_seconds: float, most_seconds: float, peak: float | None
) -> tuple[ArrivalLoad, int]:
    """And how many prompts it may need."""
    if cell.share is None:
        load = ArrivalLoad(
            cell.shape.streams,
            send_seconds=run_seconds,
            ramp_seconds=RAMP * run_seconds,
            run_seconds=most_seconds,
        )
        turns = math.ceil(run_seconds / (cell.shape.output * MIN_ITL))
        return load, cell.shape.streams * (1 + turns)
    assert peak is not None
    rate = cell.share * peak / cell.shape.output
    return ArrivalLoad(rate=rate, run_seconds=most_seconds), max(1, round(rate * run_seconds))


def steady_rate(records: Sequence[RequestRecord], begin: float, end: float) -> float:
    """tokens/s between two times of time.perf_counter. A chunk counts for its share of its
    request's tokens."""
    tokens = sum(
        record.output_tokens * sum(begin <= at < end for at in record.chunks) / len(record.chunks)
        for record in records
        if record.error is None and record.chunks
    )
    return tokens / (end - begin)


def measure(
    cell: Cell, where: Running, run_seconds: float, most_seconds: float, peak: float | None
) -> dict[str, Any]:
    """One cell, as it stands in the file. Raises TargetError where a server has ended, or the
    closed loop had too few prompts."""
    load, count = load_of(cell, run_seconds, most_seconds, peak)
    percent = 0 if cell.share is None else round(100 * cell.share)
    seed = cell.shape.seed(3, percent)
    lengths = (cell.shape.input, cell.shape.output)
    prompts = made_prompts(count, lengths, seed)
    before = where.pages()
    moved = where.moved()
    began = time.monotonic()
    run = play(ServerTarget(where.url), prompts, load, seed)
    seconds = time.monotonic() - began
    where.check()
    pages = where.pages_since(before, len(run.records))
    if cell.share is None and len(run.records) == count:
        raise TargetError(f"{count} requests were too few for {run_seconds:g} s")
    found = figures(run, GoodputLimits(), (50.0, 99.0))
    rate = found["output_throughput"]
    if cell.share is None:
        rate = steady_rate(run.records, run.start + RAMP * run_seconds, run.start + run_seconds)
    return {
        "key": cell.key,
        "shape": asdict(cell.shape),
        "requests_s": None if cell.share is None else load.rate,
        "tokens_s": rate,
        **{f"{name}_p50": found[f"median_{name}_ms"] for name in ("ttft", "itl", "tpot")},
        **{f"{name}_p99": found[f"p99_{name}_ms"] for name in ("ttft", "itl", "tpot")},
        **{name: found[name] for name in KEPT},
        "failures": dict(causes(run.records)),
        "pages": pages,
        "moved": round(where.moved() - moved),
        "computed_by_decode": computed_by_decode(pages, len(run.records)),
        "seconds": seconds,
        "load_of_machine": os.getloadavg()[0],
        "commit": provenance.git_commit(),
    }


def computed_by_decode(pages: Mapping[str, float], requests: int) -> int:
    """Prompts that the decode server computed itself: the prefill server did not take them, or not
    all of their pages came."""
    if not pages:
        return 0
    return round(max(0.0, requests - (pages["fetched"] - pages["failures"])))
