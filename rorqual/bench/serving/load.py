"""When requests are sent: at a rate, under a cap on how many are open at a time, by a trace's
timestamps, or several of these."""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from rorqual.bench.serving.client import Client, RequestRecord
from rorqual.bench.serving.prompts import Prompt
from rorqual.config.process import loaded_frozen
from rorqual.errors import ConfigError

DESCRIPTORS = 65536


@dataclass(frozen=True)
class ArrivalLoad:
    """`rate`: requests/s, infinite sends all at once; `burstiness`: shape of the gamma
    distribution of the intervals (1 is a Poisson process, below 1 burstier, above 1 more even);
    `concurrency`: most open requests at a time (None: no limit); `send_seconds`: requests due later
    than this after the start are not sent; `ramp_seconds`: without a rate, the first `concurrency`
    requests are spread over this time; `run_seconds`: requests still open then are aborted and
    count as failed."""

    concurrency: int | None = None
    rate: float = math.inf
    burstiness: float = 1.0
    send_seconds: float = math.inf
    ramp_seconds: float = 0.0
    run_seconds: float = math.inf

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"max_concurrency={self.concurrency}; must be at least 1")
        if not self.rate > 0:
            raise ConfigError(
                f"request_rate={self.rate}; must be above 0 requests/s (inf sends all at once)"
            )
        if not self.burstiness > 0:
            raise ConfigError(
                f"burstiness={self.burstiness}; must be above 0 (1 is a Poisson process)"
            )
        if not (self.send_seconds > 0 and self.run_seconds > 0 and self.ramp_seconds >= 0):
            raise ConfigError(
                f"send_seconds={self.send_seconds}, run_seconds={self.run_seconds}: above 0; "
                f"ramp_seconds={self.ramp_seconds}: at least 0"
            )

    def arrivals(self, rng: np.random.Generator, count: int) -> list[float]:
        """Seconds after the start, sorted. Intervals are gamma distributed with shape
        `burstiness` and mean 1/rate, then scaled so that the last request comes at count/rate,
        as in vLLM's benchmark: seeds then differ in the pattern, not in the rate."""
        if math.isinf(self.rate):
            first = self.concurrency or count
            return [self.ramp_seconds * min(i, first) / first for i in range(count)]
        if math.isinf(self.burstiness):
            return [(i + 1) / self.rate for i in range(count)]
        times = np.cumsum(rng.gamma(self.burstiness, 1 / (self.rate * self.burstiness), size=count))
        return (
            (times * (count / self.rate / times[-1])).tolist()
            if count and times[-1] > 0
            else [0.0] * count
        )


@dataclass(frozen=True)
class Run:
    """Every request of a run, and what the client itself spent on it (seconds of wall time and
    of CPU in this process)."""

    records: list[RequestRecord]
    start: float
    wall: float
    cpu: float


async def drive(
    client: Client,
    prompts: Sequence[Prompt],
    load: ArrivalLoad,
    arrivals: Sequence[float],
    seen: Callable[[RequestRecord], None] = lambda _: None,
) -> Run:
    """Send every prompt at its time and wait for all responses. Requests above the concurrency
    limit wait here, in order, and their clock starts when they are sent. `seen` is called with each
    record when it is sent and again when it is complete (its `end` is then set)."""
    _raise_descriptor_limit()
    bodies = [client.target.body(prompt) for prompt in prompts]
    gate = asyncio.Semaphore(load.concurrency or max(1, len(prompts)))

    async def one(body: bytes, record: RequestRecord) -> None:
        try:
            seen(record)
            await client.send(body, record)
            seen(record)
        finally:
            gate.release()

    with loaded_frozen():  # the prompts too
        before = _cpu_seconds()
        start = time.perf_counter()
        records = [
            RequestRecord(prompt.input_len, prompt.output_len, start + at)
            for prompt, at in zip(prompts, arrivals, strict=True)
        ]
        sent = 0
        limit = None if math.isinf(load.run_seconds) else load.run_seconds
        with suppress(TimeoutError):  # those that were open are found below
            async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
                for body, record in zip(bodies, records, strict=True):
                    if (wait := record.due - time.perf_counter()) > 0:
                        await asyncio.sleep(wait)
                    await gate.acquire()
                    if sent and time.perf_counter() - start > load.send_seconds:
                        break
                    group.create_task(one(body, record))
                    sent += 1
        for record in records[:sent]:
            if record.finish is None and record.error is None:
                record.error = f"not done when the run had taken {limit:g} s"
                record.end = time.perf_counter()
        wall = time.perf_counter() - start
        cpu = _cpu_seconds() - before
    return Run(records[:sent], start, wall, cpu)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _raise_descriptor_limit() -> None:
    """A connection a request is open at a time; the soft limit is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
