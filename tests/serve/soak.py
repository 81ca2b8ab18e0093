"""Requests of every kind at once, for minutes or hours: completions and chats, streams, grammars,
tools, clients that leave, malformed bodies, readers that dawdle.

    python tests/serve/soak.py [--minutes 60] [--concurrency 48] [server options]

The load comes in rounds. After each the server must come to rest: no page held, no sequence open.
Its memory and open files at rest are fitted by a line over the run's second half; what that line
gains must stay within GROWTH and FILES. No answer may be a 5xx or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.serve.footprint import MIB, Footprint, settle
from tests.serve.running import Running, start_server
from tests.serve.soak_requests import BROKEN, Ask, ask, learn, wrong

# shares of the requests
LEAVE = 0.3
MALFORMED = 0.1
SLOW = 0.05
ROUNDS = 12
CONCURRENCY = 48
GROWTH = 24 * MIB  # of a process's resident memory
FILES = 3.0
OPTIONS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "32")


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


async def one(port: int, chance: random.Random, seen: Counter[str], learned: list[Ask]) -> None:
    asked = ask(chance, learned)
    kind = chance.random()
    malformed = kind < MALFORMED
    leaves = MALFORMED <= kind < MALFORMED + LEAVE
    slow = MALFORMED + LEAVE <= kind < MALFORMED + LEAVE + SLOW
    data = chance.choice(BROKEN) if malformed else json.dumps(asked.body).encode()
    # some leave before their body is complete
    cut = len(data) // 2 if leaves and chance.random() < 0.2 else len(data)
    reader, writer = await send(port, asked.path, data, cut)
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
        if (status == "200") == malformed:
            seen[f"unexpected: {data[:80]!r} {answer[-300:]!r}"] += 1
        elif status == "200":
            seen[asked.kind] += 1
            if said := wrong(asked, answer):
                seen[f"unexpected: {said}"] += 1
    except ConnectionError as error:
        seen[f"unexpected: {error!r}"] += 1
    finally:
        writer.close()


async def run(
    port: int,
    requests: int,
    concurrency: int,
    seed: int = 1,
    learned: list[Ask] | None = None,
    seconds: float = float("inf"),
) -> Counter[str]:
    """What came back and how often: statuses, kinds of requests answered by 200, and whatever
    should not have been. Ends after so many requests, or seconds."""
    seen: Counter[str] = Counter()
    todo = iter(range(requests))
    end = time.monotonic() + seconds

    async def worker() -> None:
        for i in todo:
            await one(port, random.Random(seed * 1_000_003 + i), seen, learned or [])
            if time.monotonic() > end:
                return

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return seen


def problems(server: Running, seen: Counter[str]) -> list[str]:
    """What should not have happened."""
    found = [
        f"{name}: {count}" for name, count in seen.items() if name.startswith(("5", "unexpected"))
    ]
    return found + settle(server, 10)


@dataclass
class Watch:
    """The server at rest, after each round."""

    times: list[float] = field(default_factory=list)
    rests: list[Footprint] = field(default_factory=list)

    def note(self, now: float, rest: Footprint) -> None:
        self.times.append(now)
        self.rests.append(rest)

    def gain(self, values: list[float]) -> float:
        """Of the straight line through the second half of the values, from its beginning to its
        end."""
        half = len(values) // 2
        times, values = self.times[half:], values[half:]
        middle, mean = sum(times) / len(times), sum(values) / len(values)
        spread = sum((time - middle) ** 2 for time in times)
        pairs = zip(times, values, strict=True)
        slope = sum((time - middle) * (value - mean) for time, value in pairs) / spread
        return slope * (times[-1] - times[0])

    def leaks(self) -> list[str]:
        found = []
        for name in self.rests[0].memory:
            memory = self.gain([rest.memory[name] for rest in self.rests])
            files = self.gain([rest.files[name] for rest in self.rests])
            if memory > GROWTH:
                found.append(f"{name} gains {memory / MIB:.1f} MiB over the run's second half")
            if files > FILES:
                found.append(f"{name} gains {files:.1f} open files over the run's second half")
        return found

    def report(self) -> list[str]:
        lines = []
        for name in self.rests[0].memory:
            sizes = [rest.memory[name] // MIB for rest in self.rests]
            files = [rest.files[name] for rest in self.rests]
            lines += [f"{name}: resident MiB at rest {sizes}", f"{name}: open files {files}"]
        return lines


def soak(server: Running, minutes: float, concurrency: int = CONCURRENCY) -> list[str]:
    """What is wrong after so many minutes."""
    learned = learn(server)
    assert learned, "no greedy answer to compare with"
    watch = Watch()
    seen: Counter[str] = Counter()
    found: list[str] = []
    start = time.monotonic()
    for turn in range(ROUNDS):
        left = minutes * 60 * (turn + 1) / ROUNDS - (time.monotonic() - start)
        here = asyncio.run(run(server.port, 1 << 40, concurrency, turn, learned, left))
        found += problems(server, here)
        seen += here
        watch.note(time.monotonic() - start, Footprint.of(server))
        counts = sum(count for name, count in here.items() if name.isdigit() or name == "left")
        print(f"round {turn + 1} of {ROUNDS}: {counts} requests, {len(found)} faults", flush=True)
    print(f"{time.monotonic() - start:.0f} s:", dict(seen), *watch.report(), sep="\n")
    missing = {"greedy", "regex", "choice", "json", "tools", "chat", "completion"} - {*seen}
    found += [f"no {kind} was answered" for kind in sorted(missing)]
    return found + watch.leaks()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    given, options = parser.parse_known_args()
    with start_server(*OPTIONS, *options) as server:
        found = soak(server, given.minutes, given.concurrency)
    print(*(found or ["nothing is wrong"]), sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
