"""Times steps of a GPU that bring a chunk of prompt beside requests that decode (or none), launched
operation by operation and captured in pieces, with attention launched, with that of the requests
that decode captured too, and with that of prompts as well. The three kinds of pieces take turns.

    python demo/mixed_steps.py qwen3-30b-a3b

The model has random weights. One step at a time, none in flight beside it: the launch counts.
The same prompts then go through an engine of eager steps and one of pieces, whose log probabilities
are compared.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from rorqual import LLM, SamplingParams
from rorqual.models.hub import model_folder
from rorqual.request import CompletionOutput, Request

SIZES = (64, 200, 500, 1000, 2048, 4000)


class Engine:
    """One way of launching, and what was measured of it."""

    def __init__(self, asked: argparse.Namespace, piecewise_tokens: int):
        options: dict[str, Any] = {
            "max_model_len": 16384,
            "max_num_seqs": 64,
            "cudagraph_capture_sizes": (max(1, asked.decoding),),
            "piecewise_tokens": piecewise_tokens,
        }
        self.llm = LLM(
            str(model_folder(asked.model)),
            weights="random",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            **options,
        )
        self.random = np.random.default_rng(asked.seed)
        self.asked = asked
        self.count = 0
        self.ways: list[Callable[[], None]] = [lambda: None]
        if piecewise_tokens:
            pieces = self.llm.engine.worker.runner.pieces
            assert pieces is not None
            attention = pieces.attention
            assert attention.decodes, "nothing was captured"
            assert attention.prompts, "nothing was captured"
            kept = (attention.decodes, attention.prompts)

            def take(decodes: bool, prompts: bool) -> None:
                attention.decodes = kept[0] if decodes else {}
                attention.prompts = kept[1] if prompts else []

            ways = ((False, False), (True, False), (True, True))
            self.ways = [partial(take, *way) for way in ways]

    def add(self, length: int, output: int) -> None:
        ids = tuple(self.random.integers(10, 4000, length).tolist())
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        self.count += 1
        self.llm.engine.add(Request(f"step-{self.count}", ids, params))

    def times(self) -> dict[int, list[tuple[float, float]]]:
        """By tokens of prompt and way: milliseconds of a step, and of its launch."""
        engine = self.llm.engine
        for _ in range(self.asked.decoding):
            self.add(1000, 9000)
        while engine.scheduler.num_decoding < self.asked.decoding:
            engine.step()
        found = {}
        for size in SIZES if not self.asked.decoding else (0, *SIZES):
            found[size] = self.medians(size)
        for name in list(engine.scheduler.sequences):
            engine.abort(name)
        while engine.has_work:
            engine.step()
        return found

    def medians(self, size: int) -> list[tuple[float, float]]:
        steps: list[list[float]] = [[] for _ in self.ways]
        launches: list[list[float]] = [[] for _ in self.ways]
        for repeat in range(-2, self.asked.repeats):
            for way, take in enumerate(self.ways):
                take()
                step, launch = self.step(size)
                if repeat >= 0:
                    steps[way].append(step)
                    launches[way].append(launch)
        medians = (map(statistics.median, found) for found in (steps, launches))
        return list(zip(*medians, strict=True))

    def step(self, size: int) -> tuple[float, float]:
        engine = self.llm.engine
        if size:
            self.add(size, 1)
        while engine.in_flight:
            engine.collect()
        engine.platform.synchronize()
        began = time.perf_counter()
        engine.launch()
        launched = time.perf_counter()
        engine.collect()
        return 1e3 * (time.perf_counter() - began), 1e3 * (launched - began)

    def answers(self) -> list[CompletionOutput]:
        random = np.random.default_rng(7)
        lengths = random.integers(20, 1500, 64)
        prompts = [random.integers(10, 4000, length).tolist() for length in lengths]
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=20, ignore_eos=True)
        return [out.outputs[0] for out in self.llm.generate(prompts, params)]

    def close(self) -> None:
        self.llm.engine.close()
        self.llm.engine.worker.runner.drop_captured()
        del self.llm
        gc.collect()
        torch.cuda.empty_cache()


def compare(eager: list[CompletionOutput], pieces: list[CompletionOutput]) -> None:
    differences = []
    for one, other in zip(eager, pieces, strict=True):
        before = (one.logprobs or [{}])[0]
        after = (other.logprobs or [{}])[0]
        common = before.keys() & after.keys()
        differences += [abs(before[t].logprob - after[t].logprob) for t in common]
    same = sum(a.token_ids == b.token_ids for a, b in zip(eager, pieces, strict=True))
    print(
        f"{same} of {len(eager)} answers have the same tokens; log probabilities of the first: "
        f"largest difference {max(differences):.5f} of {len(differences)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a shape, or a folder with a config.json")
    parser.add_argument("--decoding", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    times = []
    answers = []
    for piecewise_tokens in (0, max(SIZES)):
        engine = Engine(asked, piecewise_tokens)
        times.append(engine.times())
        answers.append(engine.answers())
        engine.close()
    print(f"{torch.cuda.get_device_name()}, {asked.decoding} requests decode")
    names = ("eager ms", "pieces ms", "decoding ms", "prompts ms")
    print(f"{'prompt tokens':>14}" + "".join(f"{name:>13}{'launch':>8}" for name in names))
    for size in times[0]:
        pairs = (pair for found in times for pair in found[size])
        print(f"{size:14}" + "".join(f"{step:13.2f}{launch:8.2f}" for step, launch in pairs))
    compare(*answers)


if __name__ == "__main__":
    main()
