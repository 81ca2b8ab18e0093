"""Prefixes in host memory: the time to the first token of a long prompt that is computed, found in
the device's cache, and copied from host memory, in turns in one run, beside a plain copy of as many
bytes; then the gaps between tokens of requests that decode while such prompts come. The cache is so
small that one prompt pushes out another.

    python demo/host_memory_cache.py
    python demo/host_memory_cache.py --model qwen3-30b-a3b --weights random --prompt-len 8000 \\
        --page-size 64 --kv-host-memory 8 --streams 16

The first takes the bundled checkpoint; on a shared machine look at the ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch

from rorqual import LLM, SamplingParams
from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.models.hub import model_folder
from rorqual.request import Request

WAYS = ("computed", "device", "host memory")
MAX_COPIES = 1.3  # first token from host memory over a plain copy, as it is wanted
MAX_GAP = 1.1  # p99 of gaps with copies over those with prompts found in the cache
WARM_STEPS = 8


@dataclass
class Found:
    """Seconds: medians of the first token by way, of a plain copy of its `bytes`; and by what comes
    meanwhile p50, p99 and longest gap between tokens."""

    prompt_len: int
    first_token: dict[str, float]
    bytes: int
    copy: float
    gaps: dict[str, tuple[float, float, float]]


class Prompts:
    """An engine with room for `streams` requests and one long prompt, and a little more."""

    def __init__(self, asked: argparse.Namespace):
        page = asked.page_size
        self.asked = asked
        self.pages = -(-asked.prompt_len // page) + 1
        self.tokens = asked.steps * 4 + WARM_STEPS * 32  # of an answer
        each = -(-(asked.stream_len + self.tokens) // page) + 1
        given = model_folder(asked.model) if asked.model else None
        self.llm = LLM(
            None if given is None else str(given),
            weights=asked.weights,
            device=asked.device,
            max_num_seqs=asked.streams + 4,
            max_model_len=max(asked.prompt_len, each * page) + page,
            page_size=page,
            num_pages=self.pages + 8 + asked.streams * each,
            kv_host_memory=asked.kv_host_memory,
            threads=asked.threads,
        )
        self.engine = self.llm.engine
        self.draw = random.Random(0)
        self.count = 0

    def fresh(self, tokens: int) -> list[int]:
        vocab = self.engine.model_config.vocab_size
        return [self.draw.randrange(vocab // 2) for _ in range(tokens)]

    def add(self, prompt: list[int]) -> None:
        self.count += 1
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add(Request(f"comes-{self.count}", tuple(prompt), params))

    def first_token(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        self.add(prompt)
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - start

    # ---- the first token

    def first_tokens(self) -> dict[str, float]:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        self.first_token(self.fresh(self.asked.prompt_len))
        for _ in range(self.asked.turns):
            prompt = self.fresh(self.asked.prompt_len)
            for way in WAYS:
                if way == "host memory":
                    self.push_out()
                before = self.engine.scheduler.usage()
                took = self.first_token(prompt)
                after = self.engine.scheduler.usage()
                seconds[way].append(took)
                found = after.prefix_hits - before.prefix_hits
                copied = after.host_hits - before.host_hits
                expected = 0 if way == "computed" else len(prompt) - self.asked.page_size
                assert found >= expected, f"{way}: {found} tokens were cached"
                assert (copied > 0) == (way == "host memory"), f"{way}: {copied} tokens were copied"
        return {way: statistics.median(found) for way, found in seconds.items()}

    def push_out(self) -> None:
        """Compute other prompts until nothing of earlier ones is left in the device's cache."""
        total = self.engine.scheduler.usage().pages
        for _ in range(-(-total // self.pages) + 1):
            self.first_token(self.fresh(self.asked.prompt_len))

    def copied(self) -> tuple[int, float]:
        """Bytes of the pages of a prompt that are copied, and seconds of one copy of as many."""
        platform = self.engine.platform
        pool = self.engine.worker.runner.pool
        page = sum(plane[0].nbytes for layer in pool.layers for plane in layer.values())
        size = page * ((self.asked.prompt_len - 1) // self.asked.page_size)
        host = platform.host_empty((size,), torch.uint8).fill_(1)
        device = torch.empty(size, dtype=torch.uint8, device=platform.device)
        seconds = []
        for _ in range(7):
            platform.synchronize()
            start = time.perf_counter()
            device.copy_(host, non_blocking=True)
            platform.synchronize()
            seconds.append(time.perf_counter() - start)
        return size, statistics.median(seconds)

    # ---- those that decode meanwhile

    def gaps(self) -> dict[str, tuple[float, float, float]]:
        """Steps in which nothing comes, a prompt that is found in the cache, and prompts that push
        out one another, since the cache has no room for all of them."""
        asked = self.asked
        kept: dict[str, list[float]] = {"nothing": [], "from the cache": [], "host memory": []}
        params = SamplingParams(
            max_tokens=self.tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        streams = [self.fresh(asked.stream_len) for _ in range(asked.streams)]
        count = self.engine.scheduler.usage().pages // self.pages + 2
        prompts = [self.fresh(asked.prompt_len) for _ in range(count)]
        comes = {"nothing": [], "from the cache": prompts[-1:], "host memory": prompts}
        with steady_state_steps(self.engine, streams, params):
            for prompt in prompts:
                self.add(prompt)
                self._steps(WARM_STEPS, [])
            for kind, found in kept.items():
                before = self.engine.scheduler.usage().host_hits
                found += self._steps(asked.steps, comes[kind])
                copied = self.engine.scheduler.usage().host_hits - before
                assert (copied > 0) == (kind == "host memory"), f"{kind}: {copied} were copied"
        return {
            kind: tuple(float(np.percentile(found, q)) for q in (50, 99, 100))  # type: ignore[misc]
            for kind, found in kept.items()
        }

    def _steps(self, count: int, coming: list[list[int]]) -> list[float]:
        """Seconds of so many steps; every few of them one of `coming` comes, in turn."""
        seconds = []
        for index in range(count):
            if coming and index % self.asked.every == 0:
                self.add(coming[index // self.asked.every % len(coming)])
            start = time.perf_counter()
            self.engine.step()
            seconds.append(time.perf_counter() - start)
        return seconds


def main(words: list[str] | None = None) -> Found:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=None, help="a shape's name, a folder or an id")
    parser.add_argument("--weights", default="checkpoint", choices=("checkpoint", "random"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt-len", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--kv-host-memory", type=float, default=1.0)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--streams", type=int, default=0, help="requests that decode; 0: no gaps")
    parser.add_argument("--stream-len", type=int, default=500)
    parser.add_argument("--steps", type=int, default=400, help="of each kind")
    parser.add_argument("--every", type=int, default=20, help="steps from one prompt to the next")
    parser.add_argument("--json", default=None)
    asked = parser.parse_args(words)
    prompts = Prompts(asked)
    first = prompts.first_tokens()
    size, copy = prompts.copied()
    print(f"{prompts.engine.platform.describe()}: prompts of {asked.prompt_len} tokens")
    for way, median in first.items():
        print(f"{way:14} {1e3 * median:8.1f} ms  {median / first['computed']:6.3f} of computing")
    print(
        f"plain copy     {1e3 * copy:8.1f} ms of {size / 1e6:.0f} MB; from host memory "
        f"{first['host memory'] / copy:.2f} times as long (wanted: {MAX_COPIES}), "
        f"{(first['host memory'] - first['device']) / copy:.2f} more than from the device"
    )
    gaps = prompts.gaps() if asked.streams else {}
    for kind, (p50, p99, most) in gaps.items():
        print(
            f"{kind:14} comes beside {asked.streams} streams: gaps p50 {1e3 * p50:.2f}, p99 "
            f"{1e3 * p99:.2f}, longest {1e3 * most:.2f} ms"
        )
    if gaps:
        ratio = gaps["host memory"][1] / gaps["from the cache"][1]
        print(f"p99 with copies over p99 without: {ratio:.2f} (wanted: {MAX_GAP})")
    found = Found(asked.prompt_len, first, size, copy, gaps)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(asdict(found), file)
    return found


if __name__ == "__main__":
    main()
