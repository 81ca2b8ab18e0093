"""One client's 400 requests of 1,000 tokens, and another client's single requests beside them: how
long these wait for their first token, and what that costs all of them.

    python tests/serve/fairness.py [--pairs 10] [--seconds 6]

Throughput is compared in turns on one server with the crowd on it all the time: for some seconds
the single client asks under a key of its own, so that a row is made free for it again and again;
for as many it asks under the crowd's key, and waits its turn behind all the others, as without
shares. Tokens are counted by the second of the clock and by the engine's processor second, which
other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.serve.load import cpu
from tests.serve.running import Running, start_server

CROWD = 400
ANSWER = 1000
ROWS = 64
CROWD_KEY = "crowd"
SINGLE_KEY = "single"


def serving() -> Running:
    options = {
        "--dtype": "float32",
        "--max-num-seqs": str(ROWS),
        "--max-model-len": str(ANSWER + 100),
        "--api-key": f"{CROWD_KEY},{SINGLE_KEY}",
    }
    return start_server(*(word for pair in options.items() for word in pair))


async def ask(port: int, key: str, tokens: int, **more: Any) -> float:
    """Seconds to the first token; returns when the answer has ended. Nothing is parsed, so that
    the crowd costs this process little."""
    body = {"prompt": "In the beginning", "max_tokens": tokens, "ignore_eos": True, **more}
    data = json.dumps(body).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        "host: x",
        "connection: close",
        "content-type: application/json",
        f"authorization: Bearer {key}",
        f"content-length: {len(data)}",
    )
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        answer = b""
        first = 0.0
        while part := await reader.read(1 << 16):
            answer = answer or part
            first = first or (time.perf_counter() - start if b"data: " in part else 0.0)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        return first
    finally:
        writer.close()


async def first_tokens(port: int, count: int) -> list[float]:
    """Of so many single requests, one after the other."""
    return [await ask(port, SINGLE_KEY, 8, stream=True) for _ in range(count)]


@asynccontextmanager
async def crowd(server: Running, users: bool = False) -> AsyncIterator[None]:
    """CROWD requests are open all the time: who has an answer asks again. users: each invents a
    name of its own."""

    async def member(number: int) -> None:
        more = {"user": f"user {number}"} if users else {}
        while True:
            await ask(server.port, CROWD_KEY, ANSWER, **more)

    members = [asyncio.create_task(member(i)) for i in range(CROWD)]
    try:
        while (found := await load(server))[0] < ROWS or found[1] < CROWD - ROWS:
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in members), "a request of the crowd failed"
        yield
    finally:
        for task in members:
            task.cancel()
        await asyncio.gather(*members, return_exceptions=True)


def stats(server: Running) -> dict[str, Any]:
    status, found = server.request("GET", "/stats", authorization=f"Bearer {SINGLE_KEY}")
    assert status == 200
    return found["engines"][0]


async def load(server: Running) -> tuple[int, int]:
    """(sequences that run, that wait)"""
    found = await asyncio.to_thread(stats, server)
    return found["running"], found["waiting"]


async def window(server: Running, key: str, seconds: float, engine: int) -> tuple[float, float]:
    """(tokens a second, tokens a processor second) while single requests come by `key`."""

    async def singles() -> None:
        while True:
            await ask(server.port, key, 8, stream=True)
            await asyncio.sleep(0.2)

    task = asyncio.create_task(singles())
    await asyncio.sleep(0.5)
    try:
        clock, used, tokens = time.perf_counter(), cpu(engine), await counted(server)
        await asyncio.sleep(seconds)
        made = await counted(server) - tokens
        return made / (time.perf_counter() - clock), made / (cpu(engine) - used)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def counted(server: Running) -> int:
    return (await asyncio.to_thread(stats, server))["output_tokens"]


async def compare(server: Running, pairs: int, seconds: float) -> None:
    headers = {"authorization": f"Bearer {SINGLE_KEY}"}
    engine = server.request("GET", "/server_info", **headers)[1]["engines"][0]["pid"]
    await first_tokens(server.port, 3)
    alone = statistics.median(await first_tokens(server.port, 9))
    found: dict[str, list[tuple[float, float]]] = {CROWD_KEY: [], SINGLE_KEY: []}
    async with crowd(server):
        beside = statistics.median(await first_tokens(server.port, 9))
        for turn in range(pairs):
            order = (CROWD_KEY, SINGLE_KEY) if turn % 2 else (SINGLE_KEY, CROWD_KEY)
            for key in order:
                found[key].append(await window(server, key, seconds, engine))
    print(f"first token: alone {1e3 * alone:.1f} ms, beside {CROWD}: {1e3 * beside:.1f} ms")
    for place, unit in enumerate(("second", "processor second")):
        fair, plain = ([one[place] for one in found[key]] for key in (SINGLE_KEY, CROWD_KEY))
        ratios = sorted(a / b for a, b in zip(fair, plain, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"tokens a {unit}: shares {statistics.median(fair):.0f}, plain order "
            f"{statistics.median(plain):.0f}; ratio {statistics.median(ratios):.3f} "
            f"(quartiles {low:.3f} to {high:.3f}, {pairs} pairs)"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6.0)
    given = parser.parse_args()
    with serving() as server:
        asyncio.run(compare(server, given.pairs, given.seconds))


if __name__ == "__main__":
    main()
