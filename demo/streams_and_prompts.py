"""How streams and prompts disturb each other: some requests decode, and every second or so a long
prompt comes that asks for one token.

For each `--itl-ms` a server is started, as a user starts it, and measured over HTTP: the times
between a stream's chunks, and the prompts' times to their first token, alone and beside streams.

    python demo/streams_and_prompts.py
    python demo/streams_and_prompts.py --input-len 2000 --warm 3 -- SHAPE --weights random

What stands after `--` goes to `rorqual serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rorqual.bench.serving.client import Client, RequestRecord, ServerTarget
from rorqual.bench.serving.launched_server import launched_server
from rorqual.bench.serving.prompts import Prompt

ALONE = 7  # prompts before the streams begin


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Scene:
    """One server under both loads."""

    def __init__(self, client: Client, asked: argparse.Namespace, vocabulary: int):
        self.client = client
        self.asked = asked
        self.vocabulary = vocabulary
        self.random = np.random.default_rng(asked.seed)

    async def send(self, tokens: int, output: int) -> RequestRecord:
        """Prompts of random ids: no prefix is found again."""
        ids = self.random.integers(10, self.vocabulary, tokens, dtype=np.int32)
        body = self.client.target.body(Prompt(ids, tokens, output))
        record = await self.client.send(body, RequestRecord(tokens, output, 0.0))
        if record.error:
            raise SystemExit(f"a request failed: {record.error}")
        return record

    async def run(self) -> dict[str, Any]:
        asked = self.asked
        for _ in range(asked.warm):
            await self.send(asked.input_len, 8)
        alone = [await self.send(asked.input_len, 1) for _ in range(ALONE)]
        streams = [
            asyncio.create_task(self.send(asked.stream_input_len, asked.stream_output_len))
            for _ in range(asked.streams)
        ]
        await asyncio.sleep(1.0)
        prompts = []
        while not any(stream.done() for stream in streams):
            prompts.append(asyncio.create_task(self.send(asked.input_len, 1)))
            await asyncio.sleep(asked.every)
        beside = list(await asyncio.gather(*prompts))
        said = list(await asyncio.gather(*streams))
        return self._figures(alone, beside[: -2 or None], said)

    def _figures(
        self, alone: list[RequestRecord], beside: list[RequestRecord], said: list[RequestRecord]
    ) -> dict[str, Any]:
        """Gaps from a second after the last stream began until the first one ends."""
        begin = max(record.chunks[0] for record in said) + 1.0
        end = min(record.chunks[-1] for record in said)
        gaps = [
            after - before
            for record in said
            for before, after in zip(record.chunks, record.chunks[1:], strict=False)
            if begin <= before and after <= end
        ]
        first = [record.ttft or 0.0 for record in beside]
        usual = statistics.median(record.ttft or 0.0 for record in alone)
        p50 = statistics.median(gaps)
        return {
            "seconds": end - begin,
            "gaps": len(gaps),
            "p50": 1e3 * p50,
            "p99": 1e3 * percentile(gaps, 0.99),
            "longest": 1e3 * max(gaps),
            "p99/p50": percentile(gaps, 0.99) / p50,
            "longest/p50": max(gaps) / p50,
            "prompts": len(first),
            "TTFT alone": 1e3 * usual,
            "TTFT beside": 1e3 * statistics.median(first),
            "TTFT ratio": statistics.median(first) / usual,
            "TTFT p99": 1e3 * percentile(first, 0.99),
        }


async def measure(url: str, asked: argparse.Namespace) -> dict[str, Any]:
    async with Client(ServerTarget(url)) as client:
        return await Scene(client, asked, asked.vocabulary).run()


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--itl-ms", default="off,auto", help="settings to compare, commas between")
    parser.add_argument("--base-url", help="a server that runs already, instead of those")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-input-len", type=int, default=16)
    parser.add_argument("--stream-output-len", type=int, default=4000)
    parser.add_argument("--input-len", type=int, default=1000)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between prompts")
    parser.add_argument("--warm", type=int, default=3, help="prompts before all others")
    parser.add_argument("--vocabulary", type=int, default=4000, help="token ids of prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="also write the figures to this file")
    asked = parser.parse_args(sys.argv[1:split])
    asked.itl_ms = "" if asked.base_url else asked.itl_ms
    rows: list[dict[str, Any]] = []
    for setting in asked.itl_ms.split(","):
        if asked.base_url:
            rows.append({"itl_ms": "as it is", **asyncio.run(measure(asked.base_url, asked))})
        else:
            with launched_server([*sys.argv[split + 1 :], "--itl-ms", setting]) as server:
                found = asyncio.run(measure(server.url, asked))
            rows.append({"itl_ms": setting, "ready": server.ready_seconds, **found})
        if len(rows) == 1:  # the heading
            print("".join(f"{name:>13}" for name in rows[0]), flush=True)
        values = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in rows[-1].values())
        print("".join(f"{value:>13}" for value in values), flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
