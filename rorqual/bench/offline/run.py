"""`rorqual bench offline`: output tokens/s of the whole engine at given concurrencies, compared
with the memory-bandwidth floor and, on request, with transformers' generate in the same process on
the same checkpoint, prompts, dtype and threads."""

from __future__ import annotations

import json
import platform as host
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rorqual import __version__
from rorqual.bench.offline.profile import StepProfile, profile_steps, trace_steps
from rorqual.bench.offline.steady_state import enough_tokens, steady_state_steps
from rorqual.bench.offline.transformers_baseline import TransformersBaseline
from rorqual.bench.offline.work import OfflineWork
from rorqual.bench.wide_console import wide_console
from rorqual.cache.spec import DTYPE_BYTES
from rorqual.config.process import loaded_frozen, process_age
from rorqual.config.whole_file import write_whole
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError
from rorqual.llm.llm import LLM
from rorqual.parallel.eplb.load_file import write_expert_load
from rorqual.planner.costs.costs import (
    BatchShape,
    Format,
    decode_floor_seconds,
    layer_ops,
    step_ops,
    total,
)
from rorqual.planner.costs.costs import GroupWork as RankWork
from rorqual.planner.costs.parallel_costs import rank_step
from rorqual.planner.costs.weights import head_weight
from rorqual.planner.search.deployments import layout_name
from rorqual.platforms.base import Platform
from rorqual.request import SamplingParams

IN_PROCESS = ("transformers", "transformers-compiled")
READ_BYTES = 256 * 2**20
LOAD_SECONDS = 10.0  # timeout for all ranks to report their expert load
SHORTEST = 8  # steps of all requests together that are worth a clock of their own


@dataclass
class OfflineRow:
    """One concurrency. `step_ms`: of a step while all requests are decoding, on its own clock;
    beside a peer, which has no such moment, and where outputs are too short for one (`settings`
    says so), (time for all tokens - time for the first) / (output - 1), in which the difference of
    two prompt runs shows. With speculation a step verifies drafts, makes new ones and brings
    `accepted_length` tokens a request. `acceptance`: share of drafts taken, by place (a draft is
    taken only after all before it). Ratios are against the first row.
    """

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
    num_speculative_tokens: int = 0
    accepted_length: float = 1.0
    acceptance: list[float] = field(default_factory=list)
    profile: StepProfile | None = None
    traces: list[str] = field(default_factory=list)

    @property
    def percent_of_floor(self) -> float:
        return 100 * self.floor_ms / self.step_ms


@dataclass
class Report:
    rows: list[OfflineRow] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)

    def beside(self, rows: Iterable[OfflineRow]) -> None:
        """Each behind that of the same concurrency."""
        for row in rows:
            last = max(
                i for i, other in enumerate(self.rows) if other.concurrency == row.concurrency
            )
            self.rows.insert(last + 1, row)

    def write(self, path: Path) -> None:
        rows = [{**asdict(row), "percent_of_floor": row.percent_of_floor} for row in self.rows]
        write_whole(path, json.dumps({"rows": rows, **self.provenance}, indent=2) + "\n")


def run(
    report: Report,
    llm: LLM,
    concurrency: Sequence[int],
    work: OfflineWork,
    compare: str | None = None,
) -> None:
    """Measure every concurrency and add to the report; `compare` is one of IN_PROCESS, to
    measure it too, or the name of a peer that is measured later (vllm_baseline.py)."""
    if not report.provenance:
        llm.generate([make_prompts(llm, 1, work)[0][:16]], greedy(1))
        age = process_age()
        report.provenance = {**provenance(llm), "start_to_first_token_seconds": round(age, 2)}
    bandwidth = report.provenance.get("read_bandwidth_gb_s", 0) * 1e9 or read_bandwidth(
        llm.engine.platform
    )
    # a single rank has only its own requests
    here = llm.engine.config.dp if llm.engine.config.single_rank_bench else 1
    # all before the first is measured: a text may be too short for the last
    made = [make_prompts(llm, count // here * work.groups, work) for count in concurrency]
    with loaded_frozen():  # for either engine
        report.provenance["read_bandwidth_gb_s"] = round(bandwidth / 1e9, 2)
        profiled = []
        for count, prompts in zip(concurrency, made, strict=True):
            size = count // here
            groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
            floor = 1e3 * floor_seconds(llm, count, work.prompt + work.output // 2, bandwidth)
            report.rows.append(ours(llm, groups, work, floor, here, alike=compare is not None))
            _tell(report.rows[-1])
            profiled.append((report.rows[-1], groups[0]))
            if compare in IN_PROCESS:
                peer = TransformersBaseline(llm, groups[0])
                once, settings = (
                    peer.compiled()
                    if compare == "transformers-compiled"
                    else peer.best(work.output)
                )
                report.rows.append(_row(compare, groups[:1], work, once, floor))
                report.rows[-1].settings = settings
                _tell(report.rows[-1])
        # at the end: a profiler that has been there slows what follows
        for row, prompts in profiled if work.profile else ():
            if llm.engine.platform.name == "cuda":
                row.profile = profile_steps(llm, prompts, work.profile_steps)
            drafts = row.num_speculative_tokens
            prefix = work.trace_prefix(row.concurrency, drafts, len(profiled) == 1)
            row.traces = trace_steps(llm, prompts, work.profile_steps, prefix)


def _tell(row: OfflineRow) -> None:
    """Print a row as soon as it is known: a long run may be interrupted."""
    drafts = (
        f" num_speculative_tokens {row.num_speculative_tokens}, "
        f"{row.accepted_length:.2f} tokens a step,"
        if row.num_speculative_tokens
        else ""
    )
    step = f"step {row.step_ms:.3f} ms (floor {row.floor_ms:.3f})"
    rates = f"{row.tokens_per_s:,.1f} tok/s, prefill {row.prefill_tokens_per_s:,.0f} tok/s"
    print(
        f"{row.engine} batch {row.concurrency}:{drafts} {step}, {rates}",
        file=sys.stderr,
        flush=True,
    )


def provenance(llm: LLM) -> dict[str, Any]:
    engine = llm.engine
    return {
        "rorqual": __version__,
        "torch": torch.__version__,
        "model": Path(engine.config.model).name,
        "weights": engine.config.weights,
        "dtype": engine.dtype,
        "kv_cache_dtype": engine.config.kv_cache_dtype,
        "expert_balance": engine.config.expert_balance,
        "simulated_expert_load": engine.config.simulated_expert_load,
        "device": torch.cuda.get_device_name()
        if engine.platform.name == "cuda"
        else host.processor() or host.machine(),
        "threads": torch.get_num_threads(),
        "allreduce_backend": engine.stats.allreduce_backend,
        "all2all_backend": engine.stats.all2all_backend,
        "startup_seconds": {
            name: round(seconds, 3) for name, seconds in engine.stats.startup.items()
        },
    }


def read_bandwidth(platform: Platform) -> float:
    """Bytes/s at which the device's memory is read, by summing a random buffer larger than its
    caches. It takes at most half of what the engine's cache left of the memory."""
    size = READ_BYTES
    if platform.name != "cpu":
        platform.release_memory()
        size = min(16 * READ_BYTES, platform.available_memory() // 2 // 512 * 512)
    data = torch.rand(size // 4, device=platform.device)

    def once() -> None:
        data.sum()
        platform.synchronize()

    once()
    return size / min(_timed(once) for _ in range(9))


def floor_seconds(llm: LLM, batch: int, context: int, bandwidth: float) -> float:
    """Of one step, its drafts and their verification included, under uniform routing. Of several
    ranks: of one of them, nothing sent."""
    engine = llm.engine
    num_speculative_tokens = llm.engine.config.num_speculative_tokens
    config = engine.model_config
    fmt = Format(engine.dtype, engine.config.kv_cache_dtype, engine.config.mla_decode)
    sizes = engine.config.parallel
    if not sizes.is_single:
        rows = -(-batch // sizes.dp)
        decode = (
            BatchShape.verify(rows, context, num_speculative_tokens)
            if num_speculative_tokens
            else BatchShape.decode(rows, context)
        )
        work = RankWork(
            decode,
            stage_tokens=batch * (num_speculative_tokens + 1),
            drafts=num_speculative_tokens if engine.mtp_layers else 0,
        )
        step = rank_step(config, sizes, work, fmt)
        return sizes.pp * (step.total("weight_bytes") + step.total("cache_bytes")) / bandwidth
    if not num_speculative_tokens:
        return decode_floor_seconds(config, batch, context, bandwidth, fmt=fmt)
    verify = BatchShape(batch, num_speculative_tokens + 1, context - num_speculative_tokens - 1)
    needed = total(step_ops(config, verify, fmt)).bytes
    if engine.mtp_layers:
        head = head_weight(config).bytes(engine.dtype)
        merge = 2 * config.hidden_size**2 * DTYPE_BYTES[engine.dtype]
        passes = [verify if engine.config.draft_window else BatchShape.decode(batch, context)]
        passes += [BatchShape.decode(batch, context)] * (num_speculative_tokens - 1)
        layer = config.num_layers - 1  # the module's own layer is built like the last one
        needed += sum(
            total(layer_ops(config, layer, work, fmt)).bytes + merge + head for work in passes
        )
    return needed / bandwidth


def make_prompts(llm: LLM, count: int, work: OfflineWork) -> list[list[int]]:
    """Different prompts of equal length, so that neither engine finds a cached prefix. Raises
    ConfigError where the text is too short for them."""
    if work.text is not None:
        ids = llm.get_tokenizer().encode(work.text, add_special_tokens=False)
        return work.pieces(ids, count, llm.engine.worker.spec.page_size)
    vocab = llm.engine.model_config.vocab_size
    if llm.engine.config.single_rank_bench:
        # rank 0 has the embeddings of the first ids, and zeros for the others
        vocab //= llm.engine.config.parallel.embed_tp or 1
    generator = torch.Generator().manual_seed(count)
    return torch.randint(vocab, (count, work.prompt), generator=generator).tolist()


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def ours(
    llm: LLM,
    groups: list[list[list[int]]],
    work: OfflineWork,
    floor_ms: float,
    times: int = 1,
    alike: bool = False,
) -> OfflineRow:
    """`times`: so many ranks, this one included, are taken to do what this one does. alike:
    `step_ms` as a peer's is measured."""
    llm.generate(groups[0], greedy(min(4, work.output)))  # warm up

    def once(tokens: int) -> float:
        llm.engine.scheduler.prefix.clear()
        return _timed(lambda: [llm.generate(prompts, work.sampling(tokens)) for prompts in groups])

    engine = llm.engine
    config = llm.engine.config
    drafts = DraftCounts(llm)
    row = _row("rorqual", groups, work, once, floor_ms)
    drafts.describe(row)
    row.concurrency *= times
    row.tokens_per_s *= times
    row.prefill_tokens_per_s *= times
    steady = (
        None if alike and not config.num_speculative_tokens else steady_steps(llm, groups, work)
    )
    if steady is not None:
        row.step_ms = 1e3 * steady
    row.settings = (
        f"threads {torch.get_num_threads()}" if engine.platform.name == "cpu" else config.exe_mode
    )
    if compiled := engine.stats.compiled:
        row.settings += (
            f", compile: {compiled.variants} variants, {compiled.from_cache} from the cache, "
            f"{compiled.seconds:.1f} s"
        )
    if steady is None:
        row.settings += ", step: a difference"
    if engine.speculation:
        row.settings += f", {engine.speculation.drafter}" + (
            " adaptive" if config.speculative_policy == "adaptive" else ""
        )
        row.settings += ", SIMULATED acceptance" if config.simulated_acceptance else ""
    if not config.parallel.is_single:
        row.settings += f", {layout_name(config.parallel)}" + (
            ", SINGLE RANK: nothing is sent" if config.single_rank_bench else ""
        )
    row.settings += expert_labels(config)
    row.experts_hit = experts_hit(llm, groups[0])
    return row


def expert_labels(config: EngineConfig) -> str:
    """What was done about the experts' load; above all where it changes tokens."""
    found = f", {config.redundant_experts} redundant experts" if config.redundant_experts else ""
    found += ", placed by counts" if config.init_expert_load else ""
    found += ", FORCED expert balance: tokens mean nothing" * (config.expert_balance == "forced")
    if config.simulated_expert_load:
        name = Path(config.simulated_expert_load).name
        found += f", SIMULATED expert load {name}: {config.simulated_rank} rank"
    return found


def write_load(llm: LLM, work: OfflineWork) -> None:
    """Write how many tokens were routed to each expert so far, if a file was named; with several
    ranks, after the last step's counts have arrived."""
    engine = llm.engine
    path = work.expert_load
    if path is None or engine.config.single_rank_bench:
        return
    engine.expert_load()  # asks
    deadline = time.monotonic() + LOAD_SECONDS
    counts = engine.expert_load()
    while not engine.config.parallel.is_single and time.monotonic() < deadline:
        newer = engine.expert_load()
        if newer and newer == counts:
            break
        counts = newer
        time.sleep(0.2)
    if not counts:
        raise ConfigError(f"nothing was counted, so {path} is not written")
    layers = engine.worker.expert_layers
    config = engine.model_config
    write_expert_load(path, counts, layers, config.num_layers + engine.mtp_layers)


class DraftCounts:
    """Drafts verified and taken since it was made."""

    def __init__(self, llm: LLM):
        self.stats = llm.engine.stats
        self.num_speculative_tokens = llm.engine.config.num_speculative_tokens
        self.before = (list(self.stats.drafted), list(self.stats.accepted))

    def describe(self, row: OfflineRow) -> None:
        drafted, accepted = (
            [now - then for now, then in zip(nows, thens, strict=True)]
            for nows, thens in (
                (self.stats.drafted, self.before[0]),
                (self.stats.accepted, self.before[1]),
            )
        )
        row.num_speculative_tokens = self.num_speculative_tokens
        row.acceptance = [
            round(a / d, 4) if d else 0.0 for a, d in zip(accepted, drafted, strict=True)
        ]
        if drafted and drafted[0]:
            row.accepted_length = round(1 + sum(accepted) / drafted[0], 3)


def steady_steps(llm: LLM, groups: list[list[list[int]]], work: OfflineWork) -> float | None:
    """Median over runs of the seconds of a decode step while all requests are decoding. None if
    outputs are too short for that; with speculation, which has no alternative, raises
    ConfigError."""
    try:
        found = [steady_step(llm, prompts, work) for prompts in groups for _ in range(work.repeats)]
    except ConfigError:
        if llm.engine.config.num_speculative_tokens:
            raise
        return None
    long_enough = (
        llm.engine.config.num_speculative_tokens or min(steps for _, steps in found) >= SHORTEST
    )
    return statistics.median(seconds / steps for seconds, steps in found) if long_enough else None


def steady_step(llm: LLM, prompts: list[list[int]], asked: OfflineWork) -> tuple[float, int]:
    """Seconds of decode steps while every request is decoding, and how many there were."""
    engine = llm.engine
    engine.scheduler.prefix.clear()
    with steady_state_steps(engine, prompts, asked.sampling(asked.output)) as count:
        engine.step()
        start = time.perf_counter()
        steps = 0
        while len(engine.scheduler.decoding) == count:
            engine.step()
            steps += 1
        seconds = time.perf_counter() - start
    return seconds, max(1, steps)


def experts_hit(llm: LLM, prompts: list[list[int]]) -> float | None:
    """Distinct experts per layer in one decode step of these prompts, averaged over layers. Counted
    in a separate step, neither captured nor compiled. None on several ranks, each of which has only
    its own tokens."""
    engine = llm.engine
    layers = llm.engine.model.moe_layers()
    if not (engine.config.parallel.is_single or engine.config.single_rank_bench):
        return None
    with steady_state_steps(engine, prompts, greedy(enough_tokens(engine, prompts, 8))):
        while engine.in_flight:
            engine.collect()
        runner = engine.worker.runner
        graphs = runner.graphs
        compiled = runner.compiled
        runner.graphs = None
        runner.compiled = None
        before = [layer.exchange.load.clone() for layer in layers]
        for layer in layers:
            layer.exchange.load.zero_()
            layer.exchange.record_load = True
        engine.launch()
        engine.collect()
        hit = [int((layer.exchange.load > 0).sum()) for layer in layers]
        for layer, load in zip(layers, before, strict=True):
            layer.exchange.record_load = engine.config.counts_expert_load
            layer.exchange.load.add_(load)
        runner.graphs = graphs
        runner.compiled = compiled
    return sum(hit) / max(1, len(hit))


def _row(
    engine: str,
    groups: list[list[list[int]]],
    work: OfflineWork,
    once: Callable[[int], float],
    floor_ms: float,
) -> OfflineRow:
    first = statistics.median(once(1) for _ in range(work.repeats)) / len(groups)
    whole = statistics.median(once(work.output) for _ in range(work.repeats)) / len(groups)
    return row_of(engine, len(groups[0]), len(groups[0][0]), work.output, first, whole, floor_ms)


def row_of(
    engine: str, count: int, prompt: int, output: int, first: float, whole: float, floor_ms: float
) -> OfflineRow:
    """first, whole: seconds for one token and for all of each request, prompts included."""
    step = (whole - first) / max(1, output - 1)
    return OfflineRow(
        engine,
        count,
        prompt,
        output,
        whole,
        count * output / whole,
        1e3 * step,
        count * prompt / first,
        floor_ms,
    )


COLUMNS = (
    "engine",
    "batch",
    "prompt/output",
    "tok/s",
    "step ms",
    "floor ms",
    "% of floor",
    "prefill tok/s",
    "experts",
    "tokens a step",
    "taken by place",
    "ratio",
    "settings",
)


def print_report(report: Report) -> None:
    from rich.table import Table

    table = Table(title=f"offline, {report.provenance['dtype']}, {report.provenance['device']}")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("engine", "settings") else "right")
    base: dict[int, float] = {}
    for row in report.rows:
        first = base.setdefault(row.concurrency, row.tokens_per_s)
        ratio = row.tokens_per_s / first if row.engine == "rorqual" else first / row.tokens_per_s
        table.add_row(*_cells(row, ratio))
    console = wide_console(150)
    console.print(table)
    for row in report.rows:
        if row.profile:
            drafts = f"num_speculative_tokens {row.num_speculative_tokens}"
            print("\n".join([f"batch {row.concurrency}, {drafts}:", *row.profile.lines()]))
        for path in row.traces:
            print(f"trace of batch {row.concurrency}, for ui.perfetto.dev: {path}")
    _print_start(report.provenance)


def _cells(row: OfflineRow, ratio: float) -> tuple[str, ...]:
    drafts = ("", "")
    name = row.engine
    if row.num_speculative_tokens:
        name = f"{row.engine} num_speculative_tokens={row.num_speculative_tokens}"
        shares = " ".join(f"{share:.2f}" for share in row.acceptance)
        drafts = (f"{row.accepted_length:.2f}", shares)
    return (
        name,
        str(row.concurrency),
        f"{row.prompt}/{row.output}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.step_ms:.3f}",
        f"{row.floor_ms:.3f}",
        f"{row.percent_of_floor:.0f}",
        f"{row.prefill_tokens_per_s:,.0f}",
        "" if row.experts_hit is None else f"{row.experts_hit:.1f}",
        *drafts,
        f"{ratio:.2f}x",
        row.settings,
    )


def _print_start(provenance: dict[str, Any]) -> None:
    startup = ", ".join(
        f"{name} {seconds:.2f} s" for name, seconds in provenance["startup_seconds"].items()
    )
    first = provenance["start_to_first_token_seconds"]
    print(f"start-up: {startup}; from the start of the process to the first token {first:.1f} s")
    print(f"memory read at {provenance['read_bandwidth_gb_s']} GB/s")
