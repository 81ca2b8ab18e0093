"""What an event costs the router: a server that sends as fast as it may, a client that reads.

    python tests/route/cost.py [--streams 64] [--events 400] [--pause 0.02]

Prints the router's processor time an event, and what it adds to the time of an event that comes
alone. Three processes on this machine: the server's and the client's time is not the router's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import aiohttp
from aiohttp import web

from tests.processor_time import processor_seconds
from tests.route.running import start_router

HEAD = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1795427833,"model":"m","choices":'
)
EVENT = b": rorqual 0 290\n" + HEAD + b'[{"index":0,"text":" word","finish_reason":null}]}\n\n'
END = b"data: [DONE]\n\n"


def serve(events: int, pause: float, port: Any) -> None:
    """Streams of so many events, `pause` seconds apart."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(events):
            await response.write(EVENT)
            await asyncio.sleep(pause)
        await response.write(END)
        return response

    async def healthy(request: web.Request) -> web.Response:
        return web.Response()

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        app.router.add_get("/health", healthy)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


async def read(url: str, streams: int) -> float:
    """Events a second over all streams."""

    async def one(session: aiohttp.ClientSession) -> int:
        body = {"prompt": "abc", "stream": True}
        count = 0
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            async for data in answer.content.iter_any():
                count += data.count(b"\n\n")
        return count

    start = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        counts = await asyncio.gather(*(one(session) for _ in range(streams)))
    return sum(counts) / (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--events", type=int, default=400)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    server = context.Process(
        target=serve, args=(options.events, options.pause, theirs), daemon=True
    )
    server.start()
    url = f"http://127.0.0.1:{mine.recv()}"
    with start_router("--replica", url) as router:
        router.wait_until(router.healthy)
        costs = []
        rates = []
        asyncio.run(read(router.url, options.streams))  # connections, code paths
        for _ in range(options.repeats):
            before = processor_seconds(str(router.pid))
            rates.append(asyncio.run(read(router.url, options.streams)))
            spent = processor_seconds(str(router.pid)) - before
            costs.append(spent / (options.streams * options.events) * 1e6)
        direct = asyncio.run(read(url, options.streams))
    server.kill()
    print(
        f"{options.streams} streams, {statistics.median(rates):,.0f} events/s "
        f"({direct:,.0f} without the router): {statistics.median(costs):.1f} us of the router's "
        f"processor time an event ({min(costs):.1f} to {max(costs):.1f})"
    )


if __name__ == "__main__":
    main()
