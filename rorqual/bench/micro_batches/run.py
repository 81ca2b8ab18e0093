"""`rorqual bench micro-batches`: tokens/s of steps with fixed numbers of micro-batches and with
`micro_batches="auto"`, alternating in one engine, compared with the most that overlap can gain."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from rich.console import Console
from rich.table import Table

from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.bench.provenance import client_facts
from rorqual.config.parallel import AUTO, MAX_AUTO_MICRO_BATCHES
from rorqual.config.process import loaded_frozen
from rorqual.engine.engine import Engine
from rorqual.engine.micro_batches.policy import (
    MARGIN,
    FixedParts,
    MeasuredParts,
    MicroBatchPolicy,
    best_parts,
    layer_of,
    predicted,
    rest_of,
    shapes,
)
from rorqual.engine.micro_batches.report import lines
from rorqual.engine.micro_batches.step_times import StepTimes
from rorqual.engine.scheduling.scheduler_output import split_lengths_of_ranks
from rorqual.errors import ConfigError
from rorqual.request import Request, SamplingParams

BLOCK_SECONDS = 0.5  # of one number of parts before the next, at least
CONTEXT = 64  # cached tokens when decoding begins
DECODE, PROMPTS = "decode", "prompts"
HIDES = 0.6  # of what overlap permits, that auto should gain where
HIDDEN = (0.5, 1.5)  # range of communication time over computation time


@dataclass(frozen=True)
class BenchSizes:
    """Of a data-parallel rank. prompts: tokens of a step, of `requests` requests; batches: of
    requests that decode."""

    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    requests: int = 10
    repeats: int = 5


@dataclass
class Cell:
    """One size. rates: tokens/s of all ranks, of each repeat, by setting. decided: the number of
    micro-batches that auto used. permitted: largest possible gain from full overlap of
    communication and computation, by the times that auto measured. predicted: the rates' ratios to
    one micro-batch by the same times, before this size was run."""

    phase: str
    tokens: int
    requests: int
    permitted: float
    wire_share: float
    decided: int = 1
    predicted: dict[str, float] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)

    def rate(self, name: str) -> float:
        return statistics.median(self.rates[name])

    def ratios(self, name: str, other: str) -> list[float]:
        """Within each repeat."""
        pairs = zip(self.rates[name], self.rates[other], strict=True)
        return [one / two for one, two in pairs]

    def ratio(self, name: str, other: str) -> float:
        return statistics.median(self.ratios(name, other))

    def spread(self, name: str, other: str = "1") -> float:
        """Half the relative interquartile range of the ratios."""
        ratios = self.ratios(name, other)
        if len(ratios) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return (high - low) / 2 / middle

    @property
    def best_fixed(self) -> str:
        fixed = [name for name in self.rates if name != AUTO]
        return max(fixed, key=lambda name: self.ratio(name, "1"))


def run(engine: Engine, sizes: BenchSizes, report: Callable[[str], None]) -> list[Cell]:
    """The engine was made with micro_batches="auto"; its measurement decides."""
    times = engine.worker.step_times
    if times is None:
        raise ConfigError(f"micro_batches={engine.config.micro_batches!r}; accepted here: auto")
    if engine.worker.runner.graphs is not None and sizes.batches:
        report("captured decode steps keep their parts, so they are timed with exe_mode eager only")
        sizes = replace(sizes, batches=())
    for line in lines(times):
        report(line)
    policies: dict[str, MicroBatchPolicy] = {
        str(count): FixedParts(count) for count in range(1, MAX_AUTO_MICRO_BATCHES + 1)
    }
    policies[AUTO] = MeasuredParts(times)
    found = []
    with loaded_frozen():
        for cell in _cells(engine, sizes, times):
            ratios = ", ".join(f"{name}: x{ratio:.2f}" for name, ratio in cell.predicted.items())
            report(f"{cell.phase} {cell.tokens}: predicted {ratios}")
            measure = _prompts if cell.phase == PROMPTS else _decode
            measure(engine, cell, policies, sizes.repeats)
            found.append(cell)
            report(f"{cell.phase} {cell.tokens}: auto took {cell.decided}")
    return found


def _cells(engine: Engine, sizes: BenchSizes, times: StepTimes) -> Iterator[Cell]:
    most = engine.worker.batched_tokens
    for tokens in sizes.prompts:
        if not sizes.requests <= tokens <= most:
            raise ConfigError(
                f"{tokens} tokens of {sizes.requests} prompts; accepted: {sizes.requests} to {most}"
            )
        yield _cell(PROMPTS, tokens, sizes.requests, times, engine.config.dp)
    for batch in sizes.batches:
        if batch > engine.worker.max_num_seqs:
            raise ConfigError(f"batch {batch} exceeds max_num_seqs={engine.worker.max_num_seqs}")
        yield _cell(DECODE, batch, batch, times, engine.config.dp)


def _cell(phase: str, tokens: int, requests: int, times: StepTimes, ranks: int) -> Cell:
    decodes = phase == DECODE
    cell = Cell(phase, tokens, requests, *permitted(times, decodes, tokens))
    cell.predicted = foretold(times, decodes, even(tokens, requests), ranks)
    return cell


def even(tokens: int, requests: int) -> tuple[int, ...]:
    """Tokens of each request."""
    each, over = divmod(tokens, requests)
    return tuple(each + (place < over) for place in range(requests))


def foretold(
    times: StepTimes, decodes: bool, lengths: tuple[int, ...], ranks: int
) -> dict[str, float]:
    """How many times as fast as in one part a step is predicted to be: in 2, 3, ... parts, and as
    auto decides. Nothing where this phase was not measured."""
    phase = times.decode if decodes else times.prompts
    if not phase.sizes:
        return {}
    decoding = (sum(lengths) if decodes else 0,) * ranks
    found = {}
    for count in range(1, MAX_AUTO_MICRO_BATCHES + 1):
        totals = ((sum(lengths),) * ranks,)
        parts = split_lengths_of_ranks((lengths,) * ranks, count) if count > 1 else totals
        seconds = predicted(times, decodes, shapes(parts, decoding)) if parts else None
        if seconds is not None:
            found[str(count)] = seconds
    whole = found["1"]
    found[AUTO] = found[str(best_parts(times, (lengths,) * ranks, decoding))]
    return {name: whole / seconds for name, seconds in found.items() if name != "1"}


def permitted(times: StepTimes, decodes: bool, tokens: int) -> tuple[float, float]:
    """((a + b) / max(a, b) - 1 of a whole pass, b / a): b travels, a is the rest of the pass. Not
    the sum of the stages' computation: timed one by one, they have more launches that nothing
    hides."""
    phase = times.decode if decodes else times.prompts
    if not phase.sizes:
        return 0.0, 0.0
    stages = layer_of(times, decodes, (tokens, 0) if decodes else (0, tokens))
    near = min(phase.sizes, key=lambda size: abs(size.tokens - tokens))
    rest = rest_of(times.layers, phase, near) * tokens / near.tokens
    compute = max(0.0, times.layers * sum(stage.compute for stage in stages) + rest)
    wire = times.layers * sum(stage.wire for stage in stages)
    if compute == 0:
        return 0.0, math.inf
    return (compute + wire) / max(compute, wire) - 1, wire / compute


# ---- the two kinds of steps


def _prompts(
    engine: Engine, cell: Cell, policies: dict[str, MicroBatchPolicy], repeats: int
) -> None:
    """As under load: a step's requests are added while the step before is computed, and are all
    that it computes."""
    ranks = engine.config.dp
    lengths = even(cell.tokens, cell.requests)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    depth = max(1, min(engine.depth, engine.worker.max_num_seqs // cell.requests))

    def launch(step: int, seed: int) -> None:
        drawn = _draw(engine, ranks * cell.tokens, seed)
        for place, length in enumerate(length for length in lengths for _ in range(ranks)):
            tokens, drawn = drawn[:length], drawn[length:]
            engine.add(Request(f"prompt-{step}-{place}", tuple(tokens), params))
        before = engine.stats.prompt_tokens
        engine.launch()
        computed = engine.stats.prompt_tokens - before
        if computed != ranks * cell.tokens:
            raise ConfigError(
                f"{depth} steps in flight leave room for {computed} of a step's "
                f"{ranks * cell.tokens} tokens; accepted: more memory for the cache"
            )

    def once(number: int) -> float:
        launched = collected = 0
        start = time.perf_counter()
        while collected < launched or time.perf_counter() - start < BLOCK_SECONDS:
            more = time.perf_counter() - start < BLOCK_SECONDS
            while more and launched - collected < depth:
                launch(launched, 100 * number + launched)
                launched += 1
            engine.collect()
            collected += 1
        return collected * ranks * cell.tokens / (time.perf_counter() - start)

    _alternate(engine, cell, policies, repeats, once)


def _decode(
    engine: Engine, cell: Cell, policies: dict[str, MicroBatchPolicy], repeats: int
) -> None:
    ranks = engine.config.dp
    count = ranks * cell.requests
    context = min(CONTEXT, engine.max_model_len // 4)
    drawn = _draw(engine, count * context, 0)
    prompts = [drawn[i * context : (i + 1) * context] for i in range(count)]
    params = SamplingParams(
        temperature=0,
        max_tokens=engine.max_model_len - context,
        ignore_eos=True,
        detokenize=False,
    )

    def once(number: int) -> float:
        tokens = 0
        start = time.perf_counter()
        while (seconds := time.perf_counter() - start) < BLOCK_SECONDS:
            tokens += len(engine.step())
        return tokens / seconds

    engine.scheduler.micro_batches = FixedParts()
    with steady_state_steps(engine, prompts, params):
        _alternate(engine, cell, policies, repeats, once)
        if len(engine.scheduler.decoding) != count:
            raise ConfigError(
                "a request ended while it was timed; accepted: a longer max_model_len"
            )


def _alternate(
    engine: Engine,
    cell: Cell,
    policies: dict[str, MicroBatchPolicy],
    repeats: int,
    once: Callable[[int], float],
) -> None:
    """One unmeasured round, then `repeats` of all in turn, every second one backwards."""
    for repeat in range(-1, repeats):
        for name, policy in list(policies.items())[:: -1 if repeat % 2 else 1]:
            engine.scheduler.micro_batches = policy
            before = engine.stats.steps_by_parts.copy()
            rate = once(repeat)
            if name == AUTO:
                took = engine.stats.steps_by_parts - before
                cell.decided = max(took, key=lambda parts: took[parts])
            if repeat >= 0:
                cell.rates.setdefault(name, []).append(rate)


def _draw(engine: Engine, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed + 1000)
    drawn = torch.randint(engine.model_config.vocab_size, (count,), generator=generator)
    found: list[int] = drawn.tolist()
    return found


# ---- report


def print_table(cells: Sequence[Cell], gbits: float = 0.0) -> None:
    """gbits: of an imitated slow link."""
    fixed = [str(count) for count in range(1, MAX_AUTO_MICRO_BATCHES + 1)]
    link = f" (an imitated link of {gbits:g} Gbit/s)" if gbits else ""
    table = Table(
        title=f"tokens/s of all ranks{link}, medians; x: median of the ratios to 1 part within a "
        "repeat, ± half between its quartiles"
    )
    heads = ["phase", "tokens a rank", "wire / compute", *fixed, AUTO]
    more = ["auto took", "predicted x", "auto x", "auto / best fixed", "permitted x", "share"]
    for head in (*heads, *more):
        table.add_column(head, justify="right", no_wrap=head == heads[1])
    for cell in cells:
        table.add_row(*_row(cell, fixed))
    console = Console(width=180)
    console.print(table)
    for line in verdicts(cells):
        console.print(line)


def verdicts(cells: Sequence[Cell]) -> Iterator[str]:
    """What auto should hold to, and the cells in which it does not, beyond the spread."""
    slower = [cell for cell in cells if cell.decided > 1 and _beyond(cell, "1", 1.0)]
    yield _verdict("auto is not slower than one part", slower)
    # if auto used the same number, the difference between the two is noise
    others = [cell for cell in cells if str(cell.decided) != cell.best_fixed]
    behind = [cell for cell in others if _beyond(cell, cell.best_fixed, 1 - MARGIN)]
    yield _verdict(f"auto is within {MARGIN:.0%} of the best fixed number of parts", behind)
    low, high = HIDDEN
    hides = [cell for cell in cells if low <= cell.wire_share <= high]
    lost = [cell for cell in hides if share_of(cell) < HIDES]
    name = f"auto gains {HIDES:.0%} of what is permitted ({len(hides)} cells, wire {low} to {high})"
    yield _verdict(name, lost)


def _verdict(name: str, lost: Sequence[Cell]) -> str:
    cells = ", ".join(f"{cell.phase} {cell.tokens}" for cell in lost)
    return f"{name}: {'not in ' + cells if cells else 'in every cell'}"


def _beyond(cell: Cell, other: str, least: float) -> bool:
    return cell.ratio(AUTO, other) * (1 + cell.spread(AUTO, other)) < least


def share_of(cell: Cell) -> float:
    return (cell.ratio(AUTO, "1") - 1) / cell.permitted


def _row(cell: Cell, fixed: Sequence[str]) -> list[str]:
    gain = cell.ratio(AUTO, "1") - 1
    share = f"{share_of(cell):.0%}" if cell.permitted > 0.01 else "-"
    best = cell.best_fixed
    return [
        cell.phase,
        str(cell.tokens),
        f"{cell.wire_share:.2f}",
        *(f"{cell.rate(name):,.0f} x{cell.ratio(name, '1'):.2f}" for name in fixed),
        f"{cell.rate(AUTO):,.0f}",
        str(cell.decided),
        f"{cell.predicted[AUTO]:.2f}" if cell.predicted else "-",
        f"{gain + 1:.2f} ± {cell.spread(AUTO):.2f}",
        f"{cell.ratio(AUTO, best):.2f} ± {cell.spread(AUTO, best):.2f} ({best})",
        f"{cell.permitted + 1:.2f}",
        share,
    ]


def as_json(cells: Sequence[Cell], times: StepTimes, gbits: float = 0.0) -> str:
    data = {
        "slow_link_gbits": gbits,
        "cells": [asdict(cell) for cell in cells],
        "measured": json.loads(times.as_json()),
        "meta": client_facts(("torch",)),
    }
    return json.dumps(data, indent=1)
