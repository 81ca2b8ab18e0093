"""Times steps of a GPU that bring a chunk of prompt beside requests that decode, launched operation
by operation and captured in pieces, with attention of the requests that decode launched and
captured too.

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
from typing import Any

import numpy as np
import torch

from rorqual import LLM, SamplingParams
from rorqual.models.hub import model_folder
from rorqual.request import CompletionOutput, Request

SIZES = (128, 256, 512, 1024, 2048, 4096)
REPEATS = 5


class Engine:
    """One way of launching, and what was measured of it."""

    def __init__(self, asked: argparse.Namespace, piecewise_tokens: int):
        options: dict[str, Any] = {
            "max_model_len": 16384,
            "max_num_seqs": 64,
            "cudagraph_capture_sizes": (asked.decoding,),
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

    def add(self, length: int, output: int) -> None:
        ids = tuple(self.random.integers(10, 4000, length).tolist())
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        self.count += 1
        self.llm.engine.add(Request(f"step-{self.count}", ids, params))

    def times(self) -> dict[int, tuple[float, float]]:
        """By tokens of prompt: milliseconds of a step, and of its launch."""
        engine = self.llm.engine
        for _ in range(self.asked.decoding):
            self.add(1000, 9000)
        while engine.scheduler.num_decoding < self.asked.decoding:
            engine.step()
        found = {0: self.median(0)}
        for size in SIZES:
            found[size] = self.median(size)
        for name in list(engine.scheduler.sequences):
            engine.abort(name)
        while engine.has_work:
            engine.step()
        return found

    def median(self, size: int) -> tuple[float, float]:
        engine = self.llm.engine
        steps = []
        launches = []
        for repeat in range(-2, REPEATS):
            if size:
                self.add(size, 1)
            while engine.in_flight:
                engine.collect()
            engine.platform.synchronize()
            began = time.perf_counter()
            engine.launch()
            launched = time.perf_counter()
            engine.collect()
            if repeat >= 0:
                steps.append(1e3 * (time.perf_counter() - began))
                launches.append(1e3 * (launched - began))
        return statistics.median(steps), statistics.median(launches)

    def answers(self) -> list[CompletionOutput]:
        random = np.random.default_rng(7)
        lengths = random.integers(20, 1500, 64)
        prompts = [random.integers(10, 4000, length).tolist() for length in lengths]
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=20, ignore_eos=True)
        return [out.outputs[0] for out in self.llm.generate(prompts, params)]

    def attend_eagerly(self) -> None:
        """From now on, to the requests that decode."""
        pieces = self.llm.engine.worker.runner.pieces
        assert pieces is not None
        assert pieces.decodes, "nothing was captured"
        pieces.decodes.clear()

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
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    times = []
    answers = []
    for piecewise_tokens in (0, max(SIZES)):
        engine = Engine(asked, piecewise_tokens)
        times.append(engine.times())
        answers.append(engine.answers())
        if piecewise_tokens:
            engine.attend_eagerly()
            times.append(engine.times())
        engine.close()
    eager, captured, pieces = times
    print(f"{torch.cuda.get_device_name()}, {asked.decoding} requests decode")
    names = ("eager ms", "pieces ms", "captured ms")
    print(f"{'prompt tokens':>14}" + "".join(f"{name:>13}{'launch':>8}" for name in names))
    for size in (0, *SIZES):
        pairs = (found[size] for found in (eager, pieces, captured))
        print(f"{size:14}" + "".join(f"{step:13.2f}{launch:8.2f}" for step, launch in pairs))
    compare(*answers)


if __name__ == "__main__":
    main()
