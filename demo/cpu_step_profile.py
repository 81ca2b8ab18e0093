"""Where the time of decode steps on a CPU goes, by operation of the op table. On one thread in
processor time, so that others on the machine count little; on several by the clock, beside what the
same operations take on one.

    python demo/cpu_step_profile.py deepseek-v2-lite --quantization w4a16 --num-layers 4 --batch 1,8
    python demo/cpu_step_profile.py deepseek-v2-lite --quantization w4a16 --num-layers 4 --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from rorqual.bench.cpu.read_rate import ReadRate
from rorqual.bench.offline.run import floor_seconds, greedy
from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.llm.llm import LLM
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.cpu.native import library

ENTRIES = ("add_norm", "norm", "linear", "mlp", "mla_prologue", "mla_absorbed", "gqa_prologue")
ENTRIES += ("attention", "router", "experts", "embed", "argmax", "decode_rows", "commit_tokens")
SETTLING, STEPS, PROMPT = 8, 24, 32
TURNS = 6  # of either number of threads, of whole and of profiled steps
Clock = Callable[[], float]


class Profile:
    """Seconds of each entry without those of entries that it calls, and how often it ran. "rest":
    what a step takes outside of all of them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.inner = [0.0]

    def timed(self, name: str, entry: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.inner.append(0.0)
            start = self.clock()
            result = entry(*given, **named)
            took = self.clock() - start
            self.seconds[name] += took - self.inner.pop()
            self.calls[name] += 1
            self.inner[-1] += took
            return result

        return call

    def steps(self, llm: LLM, count: int) -> None:
        plain = {name: getattr(CpuOps, name) for name in ENTRIES}
        for name, entry in plain.items():
            setattr(CpuOps, name, self.timed(name, entry))
        before = self.inner[0]
        took = count * steps_of(llm, count, self.clock)
        self.seconds["rest"] += took - (self.inner[0] - before)
        self.calls["rest"] += count
        for name, entry in plain.items():
            setattr(CpuOps, name, entry)


def steps_of(llm: LLM, count: int, clock: Clock) -> float:
    """Seconds a step."""
    start = clock()
    for _ in range(count):
        llm.engine.step()
    return (clock() - start) / count


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
    kernels = library()
    if kernels:
        kernels.rq_threads(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--quantize-head", default="off")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    counts = sorted({1, options.threads})
    cut = {} if options.num_layers is None else {"num_layers": options.num_layers}
    llm = LLM(
        options.model,
        device="cpu",
        dtype="bfloat16",
        quantization=options.quantization,
        quantize_head=options.quantize_head,
        weights="random",
        skip_tokenizer_init=True,
        max_num_seqs=64,
        max_model_len=512,
        kv_cache_bytes=256 * 2**20,
        threads=options.threads,
        **cut,
    )
    rates = {}
    for count in counts:
        use_threads(count)
        rates[count] = ReadRate(clock).best(9)
        print(f"memory read at {rates[count] / 1e9:.1f} GB/s, threads: {count}")
    for batch in (int(each) for each in options.batch.split(",")):
        size = llm.engine.model_config.vocab_size
        prompts = torch.randint(size, (batch, PROMPT)).tolist()
        total = 2 * STEPS * len(counts)
        settings = greedy(total + SETTLING + 4 * batch + 16)
        llm.engine.scheduler.prefix.clear()
        took: dict[int, list[float]] = {count: [] for count in counts}
        profiles = {count: Profile(clock) for count in counts}
        with steady_state_steps(llm.engine, prompts, settings):
            steps_of(llm, SETTLING, clock)
            for _ in range(TURNS):
                for count in counts:
                    use_threads(count)
                    took[count].append(steps_of(llm, STEPS // TURNS, clock))
                    profiles[count].steps(llm, STEPS // TURNS)
        for count in counts:
            floor = floor_seconds(llm, batch, PROMPT + total // 2, rates[count])
            step = statistics.median(took[count])
            print(
                f"batch {batch}, threads {count}: {1e3 * step:.2f} ms a step, "
                f"floor {1e3 * floor:.2f}"
            )
        most = profiles[counts[-1]]
        for name, _ in most.seconds.most_common():
            each = (f"{1e3 * profiles[count].seconds[name] / STEPS:8.3f}" for count in counts)
            print(f"  {name:14} {' '.join(each)} ms a step, {most.calls[name] / STEPS:5.1f} calls")
    llm.engine.close()


if __name__ == "__main__":
    main()
