"""`rorqual bench cpu --formats`: the same steps with weights of fewer bits beside bf16, all engines
taking turns in one process. Weights are random, drawn in their format."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from rorqual.bench.cpu.read_rate import ReadRate, clock_of, seconds_of
from rorqual.bench.cpu.shapes import Shape
from rorqual.bench.cpu.work import SETTLING, CpuWork
from rorqual.bench.offline.run import experts_hit, floor_seconds, greedy
from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.llm.llm import LLM
from rorqual.planner.costs.costs import BatchShape, step_ops, total

WIDE = "bf16"
Turns = dict[str, list[float]]  # seconds of every engine's turns
# work, seconds by engine, floors by engine, experts hit, bytes/s of memory that floors are from
Found = tuple[str, Turns, dict[str, float], float | None, float | None]


def engines(
    shape: Shape, folder: Path, work: CpuWork, names: tuple[str, ...]
) -> Iterator[tuple[str, LLM]]:
    (folder / "config.json").write_text(json.dumps(shape.data))
    for name in (WIDE, *names):
        quantization = "auto" if name == WIDE else name
        yield name, cpu_llm(folder, work, quantization=quantization, load_format="dummy")


def cpu_llm(folder: Path, work: CpuWork, **more: str) -> LLM:
    """more: further options."""
    return LLM(
        folder,
        device="cpu",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_num_seqs=16,
        max_model_len=work.max_model_len,
        kv_cache_bytes=256 * 2**20,
        threads=torch.get_num_threads(),
        **more,
    )


def measured(shape: Shape, folder: Path, work: CpuWork, product: float) -> Iterator[Found]:
    """Of decode steps and a prompt."""
    llms = dict(engines(shape, folder, work, work.format_names))
    for batch in (1, 16):
        yield _decoding(shape, llms, batch, work)
    yield _prompts(shape, llms, work, product)
    for llm in llms.values():
        llm.engine.close()


def tokens(shape: Shape, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    size = shape.config.vocab_size
    return torch.randint(size, (count, length), generator=generator).tolist()


def _turns(
    calls: Mapping[str, Callable[[], object]],
    work: CpuWork,
    each: int,
    after: Callable[[], object] = lambda: None,
) -> Turns:
    """after: called after each turn of all engines."""
    clock = clock_of(work.processor_time)
    found: Turns = {name: [] for name in calls}
    for _ in range(work.turns):
        for name, call in calls.items():
            found[name].append(seconds_of(call, clock) / each)
        after()
    return found


def _decoding(shape: Shape, llms: Mapping[str, LLM], batch: int, work: CpuWork) -> Found:
    memory = ReadRate(clock_of(work.processor_time))
    reads: list[float] = []
    prompts = tokens(shape, batch, work.context)
    steps = SETTLING + work.steps * work.turns

    def stepping(llm: LLM, count: int) -> Callable[[], object]:
        return lambda: [llm.engine.step() for _ in range(count)]

    with ExitStack() as together:
        for llm in llms.values():
            llm.engine.scheduler.prefix.clear()
            settings = greedy(steps + 4 * batch + 8)
            together.enter_context(steady_state_steps(llm.engine, prompts, settings))
            stepping(llm, SETTLING)()
        calls = {name: stepping(llm, work.steps) for name, llm in llms.items()}
        turns = _turns(calls, work, work.steps, lambda: reads.append(memory.best()))
    read = statistics.median(reads)
    floors = {
        name: floor_seconds(llm, batch, work.context + steps // 2, read)
        for name, llm in llms.items()
    }
    hit = experts_hit(llms[WIDE], prompts)
    return f"decode, batch {batch}", turns, floors, hit, read


def _prompts(shape: Shape, llms: Mapping[str, LLM], work: CpuWork, product: float) -> Found:
    ids = tokens(shape, 1, work.prompt)

    def prompt(llm: LLM) -> Callable[[], object]:
        def call() -> None:
            llm.engine.scheduler.prefix.clear()
            llm.generate(ids, greedy(1))

        return call

    calls = {name: prompt(llm) for name, llm in llms.items()}
    for call in calls.values():
        call()
    floor = total(step_ops(shape.config, BatchShape(1, work.prompt, 0))).flops / product
    turns = _turns(calls, work, 1)
    return f"prompt of {work.prompt}", turns, dict.fromkeys(llms, floor), None, None
