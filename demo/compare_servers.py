"""Compares two checkouts of this project as servers: streamed tokens a second, and processor time a
token of the API process and of the engine.

Each side is one `rorqual serve` started from its own folder; the two take turns, so that a machine
that drifts drifts for both, and swap who goes first from pair to pair.

    git worktree add ../old COMMIT
    python demo/compare_servers.py --before ../old --after . --concurrency 64

What stands after `--` goes to both servers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rorqual.bench.serving.client import Client, RequestRecord, ServerTarget
from rorqual.bench.serving.launched_server import LaunchedServer, launched_server
from rorqual.bench.serving.prompts import Prompt

TICK = os.sysconf("SC_CLK_TCK")
MARK = "rorqual.serve.engines.engine_"


@dataclass
class Side:
    """api, engine: process ids."""

    name: str
    server: LaunchedServer
    api: int
    engine: int


@dataclass
class Round:
    """Of one repetition: tokens a second, and microseconds of processor time a token."""

    rate: float
    api_us: float
    engine_us: float


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def engine_of(api: int) -> int:
    """The child process that computes."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_text(encoding="utf-8")
        except (OSError, IndexError, ValueError):
            continue  # it ended meanwhile
        if parent == api and MARK in command:
            return int(path.name)
    raise SystemExit(f"process {api} has no engine")


async def stream(side: Side, asked: argparse.Namespace, seed: int) -> Round:
    random = np.random.default_rng(seed)
    target = ServerTarget(side.server.url)
    records = [
        RequestRecord(asked.input_len, asked.output_len, 0.0) for _ in range(asked.concurrency)
    ]
    bodies = []
    for _ in records:
        ids = random.integers(10, 4000, asked.input_len, dtype=np.int32)
        bodies.append(target.body(Prompt(ids, asked.input_len, asked.output_len)))
    async with Client(target) as client:
        spent = processor_seconds(side.api), processor_seconds(side.engine)
        began = time.perf_counter()
        pairs = zip(bodies, records, strict=True)
        await asyncio.gather(*(client.send(body, record) for body, record in pairs))
        seconds = time.perf_counter() - began
    wrong = next((record.error for record in records if record.error), None)
    if wrong:
        raise SystemExit(f"{side.name}: a request failed: {wrong}")
    tokens = sum(record.output_tokens for record in records)
    api = processor_seconds(side.api) - spent[0]
    engine = processor_seconds(side.engine) - spent[1]
    return Round(tokens / seconds, 1e6 * api / tokens, 1e6 * engine / tokens)


def report(found: dict[str, list[Round]]) -> None:
    before, after = found.values()
    print(f"{'':22}{'before':>10}{'after':>10}{'ratio of medians':>18}{'median ratio':>14}")
    for label, name in (
        ("tokens/s", "rate"),
        ("API, us a token", "api_us"),
        ("engine, us a token", "engine_us"),
    ):
        old = [getattr(item, name) for item in before]
        new = [getattr(item, name) for item in after]
        medians = statistics.median(old), statistics.median(new)
        pairs = statistics.median(b / a for a, b in zip(old, new, strict=True))
        print(
            f"{label:22}{medians[0]:10.1f}{medians[1]:10.1f}{medians[1] / medians[0]:18.3f}"
            f"{pairs:14.3f}"
        )


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout's folder")
    parser.add_argument("--after", type=Path, default=Path())
    parser.add_argument("--after-options", default="", help="that the first commit lacks")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=9)
    asked = parser.parse_args(sys.argv[1:split])
    options = sys.argv[split + 1 :]
    with ExitStack() as stack:
        sides = []
        for name in ("before", "after"):
            folder = getattr(asked, name).resolve()
            own = asked.after_options.split() if name == "after" else []
            server = stack.enter_context(launched_server([*options, *own], folder=folder))
            sides.append(Side(name, server, server.pid, engine_of(server.pid)))
        found: dict[str, list[Round]] = {"before": [], "after": []}
        for pair in range(-1, asked.pairs):
            for side in sides if pair % 2 else sides[::-1]:
                got = asyncio.run(stream(side, asked, pair + 1))
                if pair >= 0:  # the first warms up
                    found[side.name].append(got)
    report(found)


if __name__ == "__main__":
    main()
