"""Tokens a second of prompts alone: every request asks for one token, and no two share a prefix.

    python demo/prefill_rate.py deepseek-v3 --layers 8 --prompts 4x1024,1x8192

The model has random weights. A figure is the median of several rounds of fresh prompts, from the
first one's arrival to the last one's token. --profile also prints where one more round's time on
the GPU went.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import numpy as np
import torch

from rorqual.bench.offline.profile import summarize, timeline
from rorqual.engine.config import EngineConfig
from rorqual.engine.engine import Engine
from rorqual.models.hub import model_folder
from rorqual.request import Request, SamplingParams


class Load:
    """Rounds of prompts through one engine."""

    def __init__(self, engine: Engine, seed: int):
        self.engine = engine
        self.random = np.random.default_rng(seed)
        self.count = 0

    def seconds(self, prompts: int, length: int) -> float:
        ids = self.random.integers(10, 4000, (prompts, length)).tolist()
        self.engine.platform.synchronize()
        began = time.perf_counter()
        for one in ids:
            self.count += 1
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            self.engine.add(Request(f"prompt-{self.count}", tuple(one), params))
        while self.engine.has_work:
            self.engine.step()
        self.engine.platform.synchronize()
        return time.perf_counter() - began

    def profile(self, prompts: int, length: int) -> str:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            self.seconds(prompts, length)
        spans, launches = timeline(found.events())
        return "\n".join(summarize(spans, 1, launches).lines(18))


def parsed(text: str) -> list[tuple[int, int]]:
    """4x1024,1x8192 as [(4, 1024), (1, 8192)]."""
    return [
        (int(n), int(length)) for n, _, length in (one.partition("x") for one in text.split(","))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a shape, or a folder with a config.json")
    parser.add_argument("--prompts", type=parsed, default="8x1000", help="say 4x1024,1x8192")
    parser.add_argument("--layers", type=int, help="build the first so many layers only")
    parser.add_argument("--piecewise-tokens", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    engine = Engine(
        EngineConfig(
            str(model_folder(asked.model)),
            weights="random",
            num_layers=asked.layers,
            max_model_len=16384,
            max_num_seqs=64,
            cudagraph_capture_sizes=(8,),
            enable_prefix_caching=False,
            piecewise_tokens=asked.piecewise_tokens,
        )
    )
    load = Load(engine, asked.seed)
    print(f"{asked.model}, {engine.platform.describe()}, seed {asked.seed}", flush=True)
    for prompts, length in asked.prompts:
        load.seconds(prompts, length)
        took = statistics.median(load.seconds(prompts, length) for _ in range(asked.rounds))
        rate = prompts * length / took
        print(f"{prompts} x {length}: {1e3 * took:.1f} ms, {rate:.0f} tokens/s", flush=True)
        if asked.profile:
            print(load.profile(prompts, length), flush=True)
    engine.close()
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
