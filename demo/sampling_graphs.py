"""Times decode steps that sample in a graph of their own, after that of the forward pass, as the
engine does it, and steps that are one graph, in turns on the same engine; and compares the tokens
of both.

    python demo/sampling_graphs.py deepseek-v2-lite
    python demo/sampling_graphs.py qwen3-30b-a3b --requests 1,8 --variants plain

The model has random weights, and prompts are random token ids. `greedy` of up to 8 requests is one
graph both ways, so its two times differ by chance alone. Also printed: the seconds that capturing
took. A CPU has no graphs: there both ways compute the same operations one by one, which compares
tokens, but no time worth reporting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from graphs_in_turns import WARM, GraphsInTurns, keep, options

from rorqual import SamplingParams
from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.engine.execution.cuda_graphs import CAPTURED, DecodeGraphs
from rorqual.platforms.base import Uncaptured

TOKENS = 24  # of a request whose tokens are compared
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
}


@dataclass
class Row:
    """ms: of a step in two graphs, and in one. equal: their tokens."""

    variant: str
    requests: int
    ms: float
    one_graph_ms: float
    equal: bool


class Ways(GraphsInTurns):
    """An engine with its graphs, and with others in which every variant is one graph."""

    def __init__(self, asked: argparse.Namespace):
        most = max(asked.requests)
        # while all are there, and until the last of them is
        tokens = 64 + most + 2 * asked.turns * (asked.steps + 2 * WARM)
        super().__init__(asked, most, max(tokens, TOKENS))
        platform = self.runner.platform
        self.captured = self.runner.graphs is not None
        of = platform if self.captured else Uncaptured(platform)
        body = self.runner._decode_body
        padding = self.runner.rows.padding
        self.one = DecodeGraphs(body, of, padding, padding)
        self.two = DecodeGraphs(body, of, padding, padding, self.runner._sample_body)
        self.capture_seconds = {True: self._capture(self.two), False: self._capture(self.one)}

    def _capture(self, graphs: DecodeGraphs) -> float:
        """Seconds; kernels have been loaded by the engine's own capture."""
        self.runner.graphs = graphs
        graphs.loaded = self.captured
        begin = time.perf_counter()
        with torch.inference_mode(), self.runner.platform.stream():
            graphs.capture(CAPTURED)
        self.engine.platform.synchronize()
        return time.perf_counter() - begin

    def measure(self, variant: str, count: int) -> Row:
        prompts = self.prompts(count)
        sampling = {**VARIANTS[variant], "ignore_eos": True}
        drawn = []
        for graphs in (self.two, self.one):
            self.use(graphs)
            params = [SamplingParams(max_tokens=TOKENS, seed=i, **sampling) for i in range(count)]
            made = self.llm.generate(prompts, params)
            drawn.append([one.outputs[0].token_ids for one in made])
        times: dict[bool, list[float]] = {True: [], False: []}
        params = SamplingParams(max_tokens=self.tokens, **sampling)
        with steady_state_steps(self.engine, prompts, params):
            for _ in range(self.asked.turns):
                for both, found in times.items():
                    self.use(self.two if both else self.one)
                    found.append(self.seconds())
        ms = (1e3 * statistics.median(found) for found in times.values())
        return Row(variant, count, *ms, drawn[0] == drawn[1])


def names(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(VARIANTS):
        raise ValueError
    return found


def main(words: list[str] | None = None) -> list[Row]:
    parser = options(__doc__.split("\n\n")[0], "1,8,64")
    parser.add_argument("--variants", type=names, default=list(VARIANTS))
    asked = parser.parse_args(words)
    ways = Ways(asked)
    print(f"{ways.engine.platform.describe()}: {asked.model}, ms a step")
    seconds = [ways.capture_seconds[both] for both in (True, False)]
    print("captured in {:.2f} s, in one graph each {:.2f} s".format(*seconds))
    print(f"{'sampling':>9}{'requests':>9}{'ms':>9}{'one graph':>11}{'ratio':>8}  tokens")
    found = []
    for variant in asked.variants:
        for count in asked.requests:
            row = ways.measure(variant, count)
            found.append(row)
            print(
                f"{row.variant:>9}{row.requests:9}{row.ms:9.3f}{row.one_graph_ms:11.3f}"
                f"{row.ms / row.one_graph_ms:8.3f}  {'equal' if row.equal else 'DIFFERENT'}",
                flush=True,
            )
    keep(asked, found)
    ways.engine.close()
    return found


if __name__ == "__main__":
    main()
