"""Times decode steps that sample in a graph of their own, after that of the forward pass, as the
engine does it, and steps that are one graph, in turns on the same engine; and compares the tokens
of both.

    python demo/sampling_graphs.py deepseek-v2-lite
    python demo/sampling_graphs.py qwen3-30b-a3b --requests 1,8 --variants plain

The model has random weights, and prompts are random token ids. `greedy` is one graph both ways: how
far its two times are apart is what the others' mean little of. Also printed: the seconds that
capturing took. A CPU has no graphs: there both ways compute the same operations one by one, which
compares tokens, but no time worth reporting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rorqual import LLM, SamplingParams
from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.engine.execution.cuda_graphs import CAPTURED, DecodeGraphs
from rorqual.models.hub import BUNDLED, model_folder
from rorqual.platforms.base import Uncaptured

PROMPT = 16
WARM = 4  # steps before those that are timed
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


class Ways:
    """An engine with its graphs, and with others in which every variant is one graph."""

    def __init__(self, asked: argparse.Namespace):
        self.asked = asked
        most = max(asked.requests)
        # while all are there, and until the last of them is
        self.tokens = 64 + most + 2 * asked.turns * (asked.steps + 2 * WARM)
        self.llm = LLM(
            str(model_folder(asked.model, weights=False)),
            weights="random",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=most,
            max_model_len=PROMPT + max(self.tokens, TOKENS),
            num_layers=asked.layers,
            device=asked.device,
            exe_mode="eager" if asked.device == "cpu" else "auto",
        )
        self.engine = self.llm.engine
        self.runner = self.engine.worker.runner
        platform = self.runner.platform
        self.captured = self.runner.graphs is not None
        of = platform if self.captured else Uncaptured(platform)
        body = self.runner._decode_body
        padding = self.runner.rows.padding
        self.one = DecodeGraphs(body, of, padding, padding)
        self.two = DecodeGraphs(body, of, padding, padding, self.runner._sample_body)
        self.seconds = {True: self._capture(self.two), False: self._capture(self.one)}

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
        random = np.random.default_rng(count)
        vocab = self.engine.model.config.vocab_size
        prompts = [random.integers(0, vocab, PROMPT).tolist() for _ in range(count)]
        options = {**VARIANTS[variant], "ignore_eos": True}
        drawn = []
        for graphs in (self.two, self.one):
            self.use(graphs)
            params = [SamplingParams(max_tokens=TOKENS, seed=i, **options) for i in range(count)]
            made = self.llm.generate(prompts, params)
            drawn.append([one.outputs[0].token_ids for one in made])
        times: dict[bool, list[float]] = {True: [], False: []}
        params = SamplingParams(max_tokens=self.tokens, **options)
        with steady_state_steps(self.engine, prompts, params):
            for _ in range(self.asked.turns):
                for both, found in times.items():
                    self.use(self.two if both else self.one)
                    found.append(self.step_seconds())
        ms = (1e3 * statistics.median(found) for found in times.values())
        return Row(variant, count, *ms, drawn[0] == drawn[1])

    def use(self, graphs: DecodeGraphs) -> None:
        while self.engine.in_flight:
            self.engine.collect()
        self.engine.platform.synchronize()
        self.runner.graphs = graphs

    def step_seconds(self) -> float:
        for _ in range(WARM):
            self.engine.step()
        begin = time.perf_counter()
        for _ in range(self.asked.steps):
            self.engine.step()
        return (time.perf_counter() - begin) / self.asked.steps


def names(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(VARIANTS):
        raise ValueError
    return found


def main(words: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default=BUNDLED, help="a shape, or a folder")
    parser.add_argument("--requests", default="1,8,64", help="numbers, comma-separated")
    parser.add_argument("--variants", type=names, default=list(VARIANTS))
    parser.add_argument("--layers", type=int, help="of the model's; all by default")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(words)
    asked.requests = [int(part) for part in asked.requests.split(",")]
    ways = Ways(asked)
    print(f"{ways.engine.platform.describe()}: {asked.model}, ms a step")
    print(f"captured in {ways.seconds[True]:.2f} s, in one graph each {ways.seconds[False]:.2f} s")
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
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    ways.engine.close()
    return found


if __name__ == "__main__":
    main()
