"""One client's 400 requests of 1,000 tokens, and another client's single requests beside them: how
long these wait for their first token, and what that costs all of them.

    python tests/serve/fairness.py [--pairs 40] [--steps 40]

Throughput is compared in turns on one engine with the crowd on it all the time: for some steps
the single client asks under a name of its own, so that a row is made free for it again and again;
for as many it asks under the crowd's, and waits its turn behind all the others, as without shares.
Tokens are counted by the processor second, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

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
        while (found := await at_work(server))[0] < ROWS or found[1] < CROWD - ROWS:
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


async def at_work(server: Running) -> tuple[int, int]:
    """(sequences that run, that wait)"""
    found = await asyncio.to_thread(stats, server)
    return found["running"], found["waiting"]


class Engines:
    """The crowd on an engine in this process, so that nothing but its steps is timed."""

    def __init__(self) -> None:
        from rorqual import LLM

        sizes = {"max_num_seqs": ROWS, "max_model_len": ANSWER + 100}
        self.engine = LLM(dtype="float32", threads=1, skip_tokenizer_init=True, **sizes).engine
        self.chance = random.Random(1)
        self.count = 0
        for _ in range(CROWD):
            # at all places of their answers, as after hours of it
            self.add(CROWD_KEY, self.chance.randint(1, ANSWER))

    def add(self, client: str, tokens: int) -> None:
        from rorqual.request import Request, SamplingParams

        self.count += 1
        prompt = tuple(self.chance.randrange(3, 4000) for _ in range(16))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.engine.add(Request(f"{client} {self.count}", prompt, params, client=client))

    def steps(self, single: str, count: int) -> float:
        """Tokens of prompts and answers a processor second over so many steps; every twentieth
        brings a single request of the client `single`. What is computed twice counts once."""
        tokens = 0
        start = time.process_time()
        for number in range(count):
            if number % 20 == 0:
                self.add(single, 8)
            for out in self.engine.step():
                sequence = out.sequence
                tokens += 1 if len(sequence.outputs) > 1 else 1 + sequence.prompt_len
                if out.finish is not None and sequence.request.params.max_tokens != 8:
                    self.add(CROWD_KEY, ANSWER)
        return tokens / (time.process_time() - start)


def compare(pairs: int, steps: int) -> float:
    """Throughput with shares beside that in plain order: the median of so many pairs."""
    load = Engines()
    load.steps(SINGLE_KEY, 100)
    found: dict[str, list[float]] = {CROWD_KEY: [], SINGLE_KEY: []}
    for turn in range(pairs):
        for key in (CROWD_KEY, SINGLE_KEY) if turn % 2 else (SINGLE_KEY, CROWD_KEY):
            found[key].append(load.steps(key, steps))
    ratios = sorted(a / b for a, b in zip(found[SINGLE_KEY], found[CROWD_KEY], strict=True))
    low, middle, high = (ratios[round(part * (pairs - 1))] for part in (0.25, 0.5, 0.75))
    shares, plain = (statistics.median(found[key]) for key in (SINGLE_KEY, CROWD_KEY))
    print(
        f"tokens a processor second: shares {shares:.0f}, plain order {plain:.0f}; ratio "
        f"{middle:.3f} (quartiles {low:.3f} to {high:.3f}, {pairs} pairs)"
    )
    return middle


async def latency(server: Running, users: bool = False, count: int = 7) -> tuple[float, float, int]:
    """Seconds to the first token of a single request, alone and beside the crowd, and how many of
    the crowd still waited then."""
    await first_tokens(server.port, 2)
    alone = statistics.median(await first_tokens(server.port, count))
    async with crowd(server, users):
        beside = statistics.median(await first_tokens(server.port, count))
        _, waiting = await at_work(server)
    print(f"first token: alone {1e3 * alone:.1f} ms, beside {CROWD}: {1e3 * beside:.1f} ms")
    return alone, beside, waiting


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    with serving() as server:
        asyncio.run(latency(server))
    compare(given.pairs, given.steps)


if __name__ == "__main__":
    main()
