"""A server over an engine of several ranks: one of them is killed, or freezes, under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import httpx
import pytest

from tests.serve.http.test_api_faults import LONG, SMALL, gone
from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive

WATCHDOG = 6.0
SLACK = 8.0  # a busy machine notices late


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def ranks(server: Running) -> list[int]:
    """The processes of ranks other than 0: children of the engine's."""
    (engine,) = server.engine_pids()
    return [
        pid
        for pid in children(engine)
        if b"rorqual.engine.distributed.worker_process" in open(f"/proc/{pid}/cmdline", "rb").read()
    ]


async def struck_under_load(
    server: Running, victim: int, blow: signal.Signals
) -> list[tuple[float, str]]:
    """Seconds from the blow to the end of each request under way, and what its client was told."""
    start = asyncio.Event()
    struck = 0.0
    ends: list[tuple[float, str]] = []

    async def one(client: httpx.AsyncClient, stream: bool) -> None:
        async with client.stream(
            "POST", "/v1/completions", json={**LONG, "stream": stream}
        ) as answer:
            text = "".join([part async for part in answer.aiter_text()])
        ends.append((time.monotonic() - struck, text))

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        tasks = [asyncio.create_task(one(client, i % 2 == 0)) for i in range(4)]
        await asyncio.to_thread(server.wait_until, lambda: server.held_pages() > 8)
        os.kill(victim, blow)
        struck = time.monotonic()
        start.set()
        await asyncio.gather(*tasks)
    return ends


@pytest.mark.longest
@pytest.mark.parametrize(
    ("blow", "words"), [(signal.SIGKILL, "status -9"), (signal.SIGSTOP, "no sign of life")]
)
def test_every_request_ends_the_log_names_the_rank_and_no_process_stays(
    blow: signal.Signals, words: str
):
    with start_server(*SMALL, "--tp", "2", "--set", f"watchdog_seconds={WATCHDOG}") as server:
        (victim,) = ranks(server)
        (engine,) = server.engine_pids()
        ends = asyncio.run(struck_under_load(server, victim, blow))
        assert len(ends) == 4
        assert max(after for after, _ in ends) < WATCHDOG + SLACK
        assert all("engine_dead" in text for _, text in ends)
        assert re.search(rf"engine 0 ended: .*rank 1 \(pp 0, dp 0, tp 1\).* {words}", server.text())
        assert server.request("GET", "/health")[0] == 503
        assert server.process.wait(60) == 1
        deadline = time.monotonic() + 60
        while not (gone(victim) and gone(engine)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
