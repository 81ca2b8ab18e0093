"""Where the time of decode steps on a CPU goes, by operation of the op table, on one thread in
processor time, so that others on the machine count little.

    python demo/cpu_step_profile.py deepseek-v2-lite --quantization w4a16 --num-layers 4 --batch 1,8
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from rorqual.bench.cpu.run import read_rate
from rorqual.bench.offline.run import floor_seconds, greedy
from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.llm.llm import LLM
from rorqual.ops.cpu.backend import CpuOps

ENTRIES = ("add_norm", "norm", "linear", "mlp", "mla_prologue", "mla_absorbed", "gqa_prologue")
ENTRIES += ("attention", "router", "experts", "embed", "argmax", "decode_rows", "commit_tokens")
SETTLING, STEPS, PROMPT = 8, 24, 32


class Profile:
    """Seconds of each entry without those of entries that it calls, and how often it ran."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.inner = [0.0]

    def timed(self, name: str, entry: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.inner.append(0.0)
            start = time.thread_time()
            result = entry(*given, **named)
            took = time.thread_time() - start
            self.seconds[name] += took - self.inner.pop()
            self.calls[name] += 1
            self.inner[-1] += took
            return result

        return call


def steps_of(llm: LLM, count: int) -> float:
    """Seconds a step."""
    start = time.thread_time()
    for _ in range(count):
        llm.engine.step()
    return (time.thread_time() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--batch", default="1,8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cut = {} if options.num_layers is None else {"num_layers": options.num_layers}
    llm = LLM(
        options.model,
        device="cpu",
        dtype="bfloat16",
        quantization=options.quantization,
        weights="random",
        skip_tokenizer_init=True,
        max_num_seqs=64,
        max_model_len=512,
        kv_cache_bytes=256 * 2**20,
        threads=1,
        **cut,
    )
    rate = read_rate(time.thread_time)
    print(f"memory read at {rate / 1e9:.1f} GB/s")
    for batch in (int(each) for each in options.batch.split(",")):
        size = llm.engine.model_config.vocab_size
        prompts = torch.randint(size, (batch, PROMPT)).tolist()
        floor = floor_seconds(llm, batch, PROMPT + STEPS, rate)
        settings = greedy(2 * STEPS + SETTLING + 4 * batch + 16)
        llm.engine.scheduler.prefix.clear()
        profile = Profile()
        plain = {name: getattr(CpuOps, name) for name in ENTRIES}
        with steady_state_steps(llm.engine, prompts, settings):
            steps_of(llm, SETTLING)
            took = steps_of(llm, STEPS)
            for name, entry in plain.items():
                setattr(CpuOps, name, profile.timed(name, entry))
            steps_of(llm, STEPS)
            for name, entry in plain.items():
                setattr(CpuOps, name, entry)
        print(f"batch {batch}: {1e3 * took:.2f} ms a step, floor {1e3 * floor:.2f}")
        for name, seconds in profile.seconds.most_common():
            calls = profile.calls[name]
            print(f"  {name:14} {1e3 * seconds / STEPS:8.3f} ms a step, {calls / STEPS:5.1f} calls")
    llm.engine.close()


if __name__ == "__main__":
    main()
