"""What demos that compare deployments behind a router share: prompts, one load, and the router's
process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import numpy as np

from rorqual.bench.peers.server_process import RunningServer, last_lines, started_server
from rorqual.bench.serving.client import Client, ServerTarget
from rorqual.bench.serving.load import ArrivalLoad, Run, drive
from rorqual.bench.serving.prompts import Prompt
from rorqual.errors import TargetError

FIRST_ID = 10  # special tokens come before
LAST_ID = 4000  # every model here has more
LOOK_SECONDS = 0.1


def made_prompts(count: int, shape: tuple[int, int], seed: int | Sequence[int]) -> list[Prompt]:
    """Token ids; shape: tokens in and out."""
    draw = np.random.default_rng(seed)
    length, output = shape
    return [
        Prompt(draw.integers(FIRST_ID, LAST_ID, length, dtype=np.int32), length, output)
        for _ in range(count)
    ]


def play(
    target: ServerTarget,
    prompts: Sequence[Prompt],
    load: ArrivalLoad,
    seed: int | Sequence[int] = 0,
) -> Run:
    """One load; `seed` is of its arrivals. Failed requests are in the result."""

    async def run() -> Run:
        arrivals = load.arrivals(np.random.default_rng(seed), len(prompts))
        async with Client(target) as client:
            return await drive(client, prompts, load, arrivals)

    return asyncio.run(run())


@contextmanager
def running_router(log: Path, servers: int, seconds: float, *given: str) -> Iterator[RunningServer]:
    """`rorqual route` with these options, once it has found that many servers ready. Raises
    TargetError if that takes more than `seconds`."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "rorqual", "route", "--port", str(port), *given]

    with started_server(command, log) as started:
        router = started.wait_ready(seconds)
        while (found := counted(router.url, "rorqual_router_server_ready")) < servers:
            if time.monotonic() > started.began + seconds:
                raise TargetError(
                    f"the router finds {found:.0f} of {servers} servers ready:\n{last_lines(log)}"
                )
            time.sleep(LOOK_SECONDS)
        yield router


def counted(url: str, name: str, label: str = "") -> float:
    """The sum of a metric's series whose labels contain `label`; 0 where there are none."""
    with urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    series = [line.rpartition(" ") for line in lines if line.startswith(name)]
    return sum(
        float(value)
        for labelled, _, value in series
        if labelled.partition("{")[0] == name and label in labelled
    )
