"""Times decode steps of requests that share prefixes, with each prefix read once for all of its
requests, as the engine does from 32 requests and 512 tokens on, and once for each of them; and
steps in which nothing is shared, where looking for prefixes is in vain.

    python demo/prefixes_read_once.py qwen3-30b-a3b
    python demo/prefixes_read_once.py qwen3-30b-a3b --requests 64,128 --own 700 --json prefixes.json

The model has random weights, and prompts are random token ids. Two sets of captured graphs are
replayed in turns. A CPU has no graphs and no such kernel: there both ways are the same.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import numpy as np
from graphs_in_turns import DEPTH, WARM, GraphsInTurns, keep, options

from rorqual import SamplingParams
from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.engine.execution.cuda_graphs import DecodeGraphs
from rorqual.errors import ConfigError


@dataclass
class Compared:
    """ms: of a step that reads shared pages once, and that reads them for each request."""

    case: str
    requests: int
    once_ms: float
    each_ms: float


class Steps(GraphsInTurns):
    def __init__(self, asked: argparse.Namespace):
        most = max(asked.requests)
        tokens = most + 4 + 2 * asked.turns * (asked.steps + WARM + DEPTH)
        super().__init__(asked, most, tokens, asked.prefix + asked.own, prefix_caching=True)
        once = self.runner.graphs
        runner = self.runner
        padding = runner.rows.padding
        each = once and DecodeGraphs(runner._decode_body, runner.platform, padding, padding)
        self.sets = {True: once, False: each}
        self.random = np.random.default_rng(0)

    def drawn(self, tokens: int) -> list[int]:
        vocab = self.engine.model.config.vocab_size
        return self.random.integers(0, vocab, tokens).tolist()

    def cases(self, count: int) -> dict[str, list[list[int]]]:
        asked = self.asked
        prefixes = [self.drawn(asked.prefix) for _ in range(asked.prefixes)]
        # cached before the requests come, which would else compute them side by side
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        self.llm.generate([prefix + self.drawn(1) for prefix in prefixes], one)
        own = [self.drawn(asked.own) for _ in range(count)]
        return {
            f"{asked.prefixes} prefixes": [
                prefixes[i % asked.prefixes] + tail for i, tail in enumerate(own)
            ],
            "one prefix": [prefixes[0] + tail for tail in own],
            "nothing shared": [self.drawn(asked.prefix) + tail for tail in own],
            "short, nothing shared": own,
        }

    def measure(self, case: str, prompts: list[list[int]]) -> Compared:
        params = SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True)
        times: dict[bool, list[float]] = {True: [], False: []}
        with steady_state_steps(self.engine, prompts, params):
            for _ in range(self.asked.turns):
                for once, found in times.items():
                    self.use(self.sets[once])
                    self.runner.shares_prefixes = once  # where a set has no graph yet
                    found.append(self.seconds())
            self.use(self.sets[True])
            self.runner.shares_prefixes = True
        ms = (1e3 * statistics.median(found) for found in times.values())
        return Compared(case, len(prompts), *ms)


def main(words: list[str] | None = None) -> list[Compared]:
    parser = options(__doc__.split("\n\n")[0], "64")
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=4000, help="tokens of a prefix")
    parser.add_argument("--own", type=int, default=200, help="tokens behind it")
    asked = parser.parse_args(words)
    steps = Steps(asked)
    print(f"{steps.engine.platform.describe()}: {asked.model}, ms a step")
    print(f"{'requests':>9}  {'prompts':24}{'read once':>10}{'for each':>10}{'ratio':>8}")
    found = []
    for count in asked.requests:
        for case, prompts in steps.cases(count).items():
            try:
                row = steps.measure(case, prompts)
            except ConfigError as error:  # for one, the cache has no room for all of them
                print(f"{count:9}  {case:24}  not measured: {error}", flush=True)
                continue
            found.append(row)
            print(
                f"{row.requests:9}  {row.case:24}{row.once_ms:10.3f}{row.each_ms:10.3f}"
                f"{row.once_ms / row.each_ms:8.3f}",
                flush=True,
            )
    keep(asked, found)
    return found


if __name__ == "__main__":
    main()
