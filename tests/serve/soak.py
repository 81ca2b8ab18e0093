"""Many requests of every kind at once: good ones, clients that leave, malformed bodies, readers
that dawdle.

    python tests/serve/soak.py [--requests 10000] [--concurrency 64] [server options]

Afterwards no page may be held, no answer may have been a 5xx, and memory must not have grown over
the run's second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.serve.running import Running, start_server

# shares of the requests
LEAVE = 0.3
MALFORMED = 0.1
SLOW = 0.05
GROWTH = 24 << 20  # bytes of resident memory a process may gain over the second half
BROKEN = [
    b"{",
    b"[]",
    b"null",
    b'{"prompt": 1}',
    b'{"prompt": "a", "n": -1}',
    b'{"prompt": "a", "use_beam_search": true}',
    b"\xff\xfe",
    b'{"messages": []}',
]
BROKEN += [
    b'{"prompt": "a", "guided_regex": "["}',
    b'{"prompt": [99999]}',
    b'{"prompt": "a", "max_tokens": 1.5}',
    b"[" * 2000,
]


def good_body(chance: random.Random) -> tuple[str, dict[str, Any]]:
    common: dict[str, Any] = {
        "max_tokens": chance.randint(1, 24),
        "stream": chance.random() < 0.6,
        "temperature": chance.choice([0, 0.8]),
    }
    if chance.random() < 0.2:
        common["stop"] = chance.sample([" the", "and", "\n", "e"], 2)
    if chance.random() < 0.1:
        common["n"] = chance.randint(2, 4)
    if chance.random() < 0.1:
        common["guided_regex"] = f"[a-f]{{1,{chance.randint(2, 6)}}}"
    words = " ".join(
        chance.choice(["whale", "sea", "ship", "captain", "night"])
        for _ in range(chance.randint(1, 60))
    )
    if chance.random() < 0.4:
        return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": words}]}
    return "/v1/completions", {
        **common,
        "prompt": words,
        **({"logprobs": 3} if chance.random() < 0.2 else {}),
    }


async def send(
    port: int, path: str, data: bytes, cut: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: "
        f"application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data[:cut])
    return reader, writer


async def one(port: int, chance: random.Random, seen: Counter[str]) -> None:
    path, body = good_body(chance)
    kind = chance.random()
    malformed = kind < MALFORMED
    leaves = MALFORMED <= kind < MALFORMED + LEAVE
    slow = MALFORMED + LEAVE <= kind < MALFORMED + LEAVE + SLOW
    data = chance.choice(BROKEN) if malformed else json.dumps(body).encode()
    # some leave before their body is complete
    cut = len(data) // 2 if leaves and chance.random() < 0.2 else len(data)
    reader, writer = await send(port, path, data, cut)
    try:
        if leaves:
            await asyncio.sleep(chance.random() * 0.15)
            writer.transport.abort()
            seen["left"] += 1
            return
        answer = b""
        while part := await reader.read(256 if slow else 1 << 16):
            answer += part
            if slow:
                await asyncio.sleep(0.005)
        status = answer[9:12].decode()
        seen[status] += 1
        if (status == "200") == malformed or (status == "200" and b'"error"' in answer):
            seen[f"unexpected: {data[:80]!r} {answer[-300:]!r}"] += 1
    except ConnectionError as error:
        seen[f"unexpected: {error!r}"] += 1
    finally:
        writer.close()


async def run(
    port: int, requests: int, concurrency: int, seed: int = 1, halfway: Any = None
) -> Counter[str]:
    """Statuses and how often; `halfway` is called once half of the requests are done."""
    seen: Counter[str] = Counter()
    todo = iter(range(requests))

    async def worker() -> None:
        for i in todo:
            if i == requests // 2 and halfway is not None:
                halfway()
            await one(port, random.Random(seed * 1_000_003 + i), seen)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return seen


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def problems(server: Running, seen: Counter[str]) -> list[str]:
    """What should not have happened."""
    found = [
        f"{name}: {count}" for name, count in seen.items() if name.startswith(("5", "unexpected"))
    ]
    deadline = time.monotonic() + 10
    while server.held_pages() and time.monotonic() < deadline:
        time.sleep(0.05)
    for engine in server.get("/stats")["engines"]:
        if engine["kv"]["used"] or engine["running"] or engine["waiting"] or engine["open"]:
            found.append(f"still held: {engine}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    given, options = parser.parse_known_args()
    with start_server("--dtype", "float32", "--max-model-len", "512", *options) as server:
        pids = {
            "api": server.pid,
            **{f"engine {i}": pid for i, pid in enumerate(server.engine_pids())},
        }
        memory: dict[str, list[int]] = {name: [resident(pid)] for name, pid in pids.items()}

        def note() -> None:
            for name, pid in pids.items():
                memory[name].append(resident(pid))

        start = time.monotonic()
        seen = asyncio.run(run(server.port, given.requests, given.concurrency, halfway=note))
        seconds = time.monotonic() - start
        note()
        found = problems(server, seen)
        print(f"{given.requests} requests in {seconds:.1f} s:", dict(seen))
        for name, sizes in memory.items():
            print(
                f"{name}: resident MiB at the start, half-way, at the end:",
                [size >> 20 for size in sizes],
            )
            if sizes[2] - sizes[1] > GROWTH:
                found.append(
                    f"{name} grew by {(sizes[2] - sizes[1]) >> 20} MiB over the second half"
                )
    print(*(found or ["nothing is wrong"]), sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
