"""`rorqual bench offline`: output tokens/s of the whole engine at given concurrencies, beside the memory-bandwidth floor and,
on request, beside transformers' generate in the same process on the same checkpoint, prompts, dtype and threads."""

from __future__ import annotations

import gc
import json
import platform as host
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rorqual import __version__
from rorqual.bench.peer import Peer
from rorqual.perf.costs import Format, decode_floor_seconds
from rorqual.platforms.base import Platform
from rorqual.request import Request, SamplingParams
from rorqual.serve.llm import LLM

READ_BYTES = 256 * 2**20


@dataclass
class Row:
    """One concurrency. `step_ms`: (time for all tokens - time for the first) / (output - 1); ratios are against `ours`."""

    engine: str
    concurrency: int
    prompt: int
    output: int
    seconds: float
    tokens_per_s: float
    step_ms: float
    prefill_tokens_per_s: float
    floor_ms: float
    experts_hit: float | None = None
    settings: str = ""

    @property
    def percent_of_floor(self) -> float:
        return 100 * self.floor_ms / self.step_ms


@dataclass
class Report:
    rows: list[Row] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        rows = [{**asdict(row), "percent_of_floor": row.percent_of_floor} for row in self.rows]
        path.write_text(json.dumps({"rows": rows, **self.provenance}, indent=2) + "\n")


def run(
    llm: LLM,
    concurrency: Sequence[int],
    prompt: int,
    output: int,
    repeats: int = 3,
    compare: str | None = None,
    data: Path | None = None,
) -> Report:
    """Measure every concurrency; `compare` is `transformers`, or `transformers-compiled`, to measure it too. Prompts are random ids,
    or pieces of the text file `data`."""
    report = Report(provenance=provenance(llm))
    bandwidth = read_bandwidth(llm.engine.platform)
    gc.collect()
    gc.freeze()  # what is loaded stays: a collection in the middle of a run would look through all of it, in either engine
    report.provenance["read_bandwidth_gb_s"] = round(bandwidth / 1e9, 2)
    for count in concurrency:
        prompts = make_prompts(llm, count, prompt, data)
        floor = 1e3 * floor_seconds(llm, count, prompt + output // 2, bandwidth)
        report.rows.append(ours(llm, prompts, output, repeats, floor))
        if compare:
            peer = Peer(llm, prompts)
            once, settings = peer.compiled() if compare == "transformers-compiled" else peer.best(output)
            report.rows.append(_row(compare, prompts, output, repeats, once, floor))
            report.rows[-1].settings = settings
    return report


def provenance(llm: LLM) -> dict[str, Any]:
    engine = llm.engine
    return {
        "rorqual": __version__,
        "torch": torch.__version__,
        "model": Path(engine.config.model).name,
        "weights": engine.config.weights,
        "dtype": engine.dtype,
        "device": torch.cuda.get_device_name() if engine.platform.name == "cuda" else host.processor() or host.machine(),
        "threads": torch.get_num_threads(),
        "startup_seconds": {name: round(seconds, 3) for name, seconds in engine.stats.startup.items()},
    }


def read_bandwidth(platform: Platform) -> float:
    """Bytes/s at which the device's memory is read, by summing a random buffer larger than its caches."""
    size = READ_BYTES if platform.name == "cpu" else 16 * READ_BYTES
    data = torch.rand(size // 4, device=platform.device)

    def once() -> None:
        data.sum()
        platform.synchronize()

    once()
    return size / min(_timed(once) for _ in range(9))


def floor_seconds(llm: LLM, batch: int, context: int, bandwidth: float) -> float:
    engine = llm.engine
    return decode_floor_seconds(engine.model_config, batch, context, bandwidth, fmt=Format(engine.dtype, form=engine.config.mla_decode))


def make_prompts(llm: LLM, count: int, length: int, data: Path | None) -> list[list[int]]:
    """Different prompts of equal length, so that neither engine finds a cached prefix."""
    if data is not None:
        ids = llm.get_tokenizer().encode(data.read_text(encoding="utf-8"), add_special_tokens=False)
        stride = max(1, (len(ids) - length) // max(1, count))
        return [ids[i * stride : i * stride + length] for i in range(count)]
    vocab = llm.engine.model_config.vocab_size
    generator = torch.Generator().manual_seed(count)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def ours(llm: LLM, prompts: list[list[int]], output: int, repeats: int, floor_ms: float) -> Row:
    llm.generate(prompts, greedy(min(4, output)))  # warm up

    def once(tokens: int) -> float:
        llm.engine.scheduler.prefix.clear()
        return _timed(lambda: llm.generate(prompts, greedy(tokens)))

    row = _row("rorqual", prompts, output, repeats, once, floor_ms)
    row.settings = f"threads {torch.get_num_threads()}" if llm.engine.platform.name == "cpu" else llm.engine.config.exe_mode
    row.experts_hit = experts_hit(llm, prompts)
    return row


def experts_hit(llm: LLM, prompts: list[list[int]]) -> float:
    """Distinct experts a layer in one decode step of these prompts, averaged over layers; counted in a step of its own, unrecorded."""
    engine, layers = llm.engine, llm.engine.model.moe_layers()
    work = [Request(f"hit-{i}", tuple(prompt), greedy(8)) for i, prompt in enumerate(prompts)]
    for request in work:
        engine.add(request)
    while len(engine.scheduler.decoding) < len(work) or engine.scheduler.prefilling:
        engine.step()
    planned = engine.scheduler.plan()
    assert planned is not None
    graphs, engine.runner.graphs = engine.runner.graphs, None
    for layer in layers:
        layer.exchange.load.zero_()
        layer.exchange.record_load = True
    engine.scheduler.update(planned, engine.runner.collect(engine.runner.launch(planned.plan)))
    for layer in layers:
        layer.exchange.record_load = engine.config.record_expert_load
    engine.runner.graphs = graphs
    for request in work:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
    hit = [int((layer.exchange.load > 0).sum()) for layer in layers]
    return sum(hit) / max(1, len(hit))


def _row(engine: str, prompts: list[list[int]], output: int, repeats: int, once: Callable[[int], float], floor_ms: float) -> Row:
    first = statistics.median(once(1) for _ in range(repeats))
    whole = statistics.median(once(output) for _ in range(repeats))
    count, length = len(prompts), len(prompts[0])
    step = (whole - first) / max(1, output - 1)
    return Row(engine, count, length, output, whole, count * output / whole, 1e3 * step, count * length / first, floor_ms)


def print_report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"offline, {report.provenance['dtype']}, {report.provenance['device']}")
    for name in (
        "engine",
        "batch",
        "prompt/output",
        "tok/s",
        "step ms",
        "floor ms",
        "% of floor",
        "prefill tok/s",
        "experts",
        "ratio",
        "settings",
    ):
        table.add_column(name, justify="left" if name in ("engine", "settings") else "right")
    mine = {row.concurrency: row.tokens_per_s for row in report.rows if row.engine == "rorqual"}
    for row in report.rows:
        ratio = mine[row.concurrency] / row.tokens_per_s
        cells = (f"{row.tokens_per_s:,.0f}", f"{row.step_ms:.3f}", f"{row.floor_ms:.3f}", f"{row.percent_of_floor:.0f}")
        sizes = (str(row.concurrency), f"{row.prompt}/{row.output}")
        hit = "" if row.experts_hit is None else f"{row.experts_hit:.1f}"
        table.add_row(row.engine, *sizes, *cells, f"{row.prefill_tokens_per_s:,.0f}", hit, f"{ratio:.1f}x", row.settings)
    console = Console()
    console = console if console.is_terminal else Console(width=150)  # a log file has no width to fit into
    console.print(table)
    startup = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report.provenance["startup_seconds"].items())
    print(f"start-up: {startup}; memory read at {report.provenance['read_bandwidth_gb_s']} GB/s")
