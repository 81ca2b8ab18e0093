"""`rorqual bench cpu`: decode steps and prompts of random model shapes, compared with transformers
at its best settings; the two alternate in one process."""

from __future__ import annotations

import gc
import json
import math
import platform as host
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rorqual.bench.cpu import formats
from rorqual.bench.cpu.peer import PROBED_STEPS, Peer
from rorqual.bench.cpu.read_rate import Clock, ReadRate, clock_of, seconds_of
from rorqual.bench.cpu.shapes import Shape, draw_shapes
from rorqual.bench.cpu.work import SETTLING, CpuWork
from rorqual.bench.offline.run import experts_hit, floor_seconds, greedy
from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.bench.wide_console import wide_console
from rorqual.config.whole_file import write_whole
from rorqual.errors import ConfigError
from rorqual.llm.llm import LLM
from rorqual.planner.costs.costs import BatchShape, step_ops, total

FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd")
PRODUCT = (512, 2048, 2048)  # rows, columns and depth of torch's large product


@dataclass
class CpuRow:
    """One shape and one kind of step. With --formats "ours" is a format and the peer bf16. ratio:
    the median of the turns' ratios. share: of a decode step the bytes of the floor over our time,
    as a share of read_gb_s, what memory was read at between this row's turns (its median); of a
    prompt our multiplications, as a share of torch's large product's."""

    shape: str
    sizes: str
    work: str
    ours_ms: float
    peer_ms: float
    ratio: float
    floor_ms: float
    share: float
    experts_hit: float | None
    setting: str
    read_gb_s: float | None = None
    turns: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class CpuReport:
    seed: int
    processor: str
    threads: int
    bandwidth: float
    product: float
    rows: list[CpuRow] = field(default_factory=list)

    def mean(self, work: str) -> float | None:
        """Geometric, over shapes."""
        logs = [math.log(row.ratio) for row in self.rows if row.work == work]
        return math.exp(sum(logs) / len(logs)) if logs else None

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")


def processor() -> str:
    """Its name, and those of its instructions that kernels care about."""
    text = Path("/proc/cpuinfo").read_text()
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip().lower(), value.strip())
    name = found.get("model name") or host.machine()
    have = set((found.get("flags") or found.get("features") or "").split())
    return f"{name} ({' '.join(flag for flag in FLAGS if flag in have)})"


def product_rate(clock: Clock) -> float:
    """Multiplications and additions a second of torch's large product, in the faster dtype."""
    best = 0.0
    rows, columns, depth = PRODUCT
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(rows, depth).to(dtype)
        w = torch.randn(columns, depth).to(dtype)
        took = min(seconds_of(partial(torch.nn.functional.linear, x, w), clock) for _ in range(5))
        best = max(best, 2 * rows * columns * depth / took)
    return best


def run(work: CpuWork, tell: Callable[[str], None], json_file: Path | None = None) -> CpuReport:
    seed = work.seed if work.seed is not None else time.time_ns() % 2**31
    if work.threads:
        torch.set_num_threads(work.threads)
    if work.processor_time and torch.get_num_threads() > 1:
        raise ConfigError("processor_time adds up what threads take; accepted: threads=1")
    clock = clock_of(work.processor_time)
    report = CpuReport(
        seed,
        processor(),
        torch.get_num_threads(),
        ReadRate(clock).best(9),
        product_rate(clock),
    )
    tell(f"seed {seed}; {report.processor}; {report.threads} threads, torch {torch.__version__}")
    tell(
        f"memory read at {report.bandwidth / 1e9:.1f} GB/s, torch's product of "
        f"{'x'.join(map(str, PRODUCT))} at {report.product / 1e9:.0f} GFLOP/s"
    )
    for number, shape in enumerate(draw_shapes(seed, work.shapes)):
        if shape.parameters > work.largest * 1e6:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for row in _rows(shape, Path(folder), work, report, seed + number):
                report.rows.append(row)
                tell(_line(row))
        gc.collect()
        if json_file:
            report.write(json_file)
    return report


def _rows(
    shape: Shape, folder: Path, work: CpuWork, report: CpuReport, seed: int
) -> Iterable[CpuRow]:
    if not work.format_names:
        return measure(shape, folder, work, report, seed)
    return beside_wide(shape, folder, work, report)


def beside_wide(shape: Shape, folder: Path, work: CpuWork, report: CpuReport) -> Iterator[CpuRow]:
    found = formats.measured(shape, folder, work, report.product)
    for what, seconds, floors, hit, read in found:
        for name in (formats.WIDE, *work.format_names):
            turns = list(zip(seconds[name], seconds[formats.WIDE], strict=True))
            yield _row(shape, f"{what}, {name}", turns, floors[name], hit, "our bf16", read)


def measure(
    shape: Shape, folder: Path, work: CpuWork, report: CpuReport, seed: int
) -> Sequence[CpuRow]:
    compiled_len = work.max_model_len if work.compiled else None
    peer = Peer(shape.data, folder, seed, clock_of(work.processor_time), compiled_len)
    llm = formats.cpu_llm(folder, work)
    rows = [_decoding(shape, llm, peer, batch, work) for batch in (1, 16)]
    rows.append(_prompts(shape, llm, peer, work, report))
    llm.engine.close()
    return rows


def _tokens(shape: Shape, count: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(shape.config.vocab_size, (count, length), generator=generator)


def _decoding(shape: Shape, llm: LLM, peer: Peer, batch: int, work: CpuWork) -> CpuRow:
    prompts = _tokens(shape, batch, work.context)
    setting, tried = peer.best(prompts, PROBED_STEPS, work.seconds)
    steps = SETTLING + work.steps * work.turns
    theirs = peer.decoding(prompts, setting)
    engine = llm.engine
    engine.scheduler.prefix.clear()
    memory = ReadRate(peer.clock)
    reads = []
    found = []
    with steady_state_steps(engine, prompts.tolist(), greedy(steps + 4 * batch + 8)):

        def our_seconds(count: int) -> float:
            return seconds_of(lambda: [engine.step() for _ in range(count)], peer.clock)

        our_seconds(SETTLING)
        theirs.seconds(SETTLING)
        for _ in range(work.turns):
            found.append((our_seconds(work.steps), theirs.seconds(work.steps)))
            reads.append(memory.best())
    read = statistics.median(reads)
    floor = floor_seconds(llm, batch, work.context + steps // 2, read)
    turns = [(ours / work.steps, other / work.steps) for ours, other in found]
    hit = experts_hit(llm, prompts.tolist())
    words = f"{setting} (best of {tried})"
    return _row(shape, f"decode, batch {batch}", turns, floor, hit, words, read)


def _prompts(shape: Shape, llm: LLM, peer: Peer, work: CpuWork, report: CpuReport) -> CpuRow:
    prompts = _tokens(shape, 1, work.prompt)
    setting, tried = peer.best(prompts, 0, work.seconds)
    ids = prompts.tolist()

    def our_seconds() -> float:
        llm.engine.scheduler.prefix.clear()
        return seconds_of(lambda: llm.generate(ids, greedy(1)), peer.clock)

    our_seconds()
    turns = [(our_seconds(), peer.prompt_seconds(prompts, setting)) for _ in range(work.turns)]
    flops = total(step_ops(shape.config, BatchShape(1, work.prompt, 0))).flops
    floor = flops / report.product
    words = f"{setting} (best of {tried})"
    return _row(shape, f"prompt of {work.prompt}", turns, floor, None, words)


def _row(
    shape: Shape,
    work: str,
    turns: list[tuple[float, float]],
    floor: float,
    hit: float | None,
    setting: str,
    read: float | None = None,
) -> CpuRow:
    """read: bytes/s of memory that the floor is from."""
    ours = statistics.median(ours for ours, _ in turns)
    return CpuRow(
        shape.name,
        shape.sizes,
        work,
        1e3 * ours,
        1e3 * statistics.median(peer for _, peer in turns),
        statistics.median(peer / ours for ours, peer in turns),
        1e3 * floor,
        floor / ours,
        hit,
        setting,
        read and read / 1e9,
        turns,
    )


def _line(row: CpuRow) -> str:
    return (
        f"{row.shape:14} {row.work:22} ours {row.ours_ms:9.2f} ms, the other "
        f"{row.peer_ms:9.2f} ms, ratio {row.ratio:5.2f}, floor {row.floor_ms:8.2f} ms "
        f"({100 * row.share:.0f} %{_at(row)})  {row.setting}"
    )


def _at(row: CpuRow) -> str:
    return "" if row.read_gb_s is None else f" of {row.read_gb_s:.0f} GB/s"


def print_table(report: CpuReport) -> None:
    from rich.table import Table

    # with --formats the other is bf16
    columns = ("shape", "work", "ours ms", "the other's ms", "ratio", "floor ms", "% of floor")
    title = f"{report.processor}, {report.threads} threads, seed {report.seed}"
    table = Table(title=title)
    for name in (*columns, "GB/s read", "experts", "sizes"):
        table.add_column(name)
    for row in report.rows:
        hit = "" if row.experts_hit is None else f"{row.experts_hit:.1f}"
        numbers = (row.ours_ms, row.peer_ms, row.ratio, row.floor_ms, 100 * row.share)
        cells = [f"{number:.2f}" for number in numbers[:4]] + [f"{numbers[4]:.0f}"]
        cells.append("" if row.read_gb_s is None else f"{row.read_gb_s:.0f}")
        table.add_row(row.shape, row.work, *cells, hit, row.sizes)
    wide_console(180).print(table)
    for work in dict.fromkeys(row.work for row in report.rows):
        print(f"{work}: geometric mean of the ratios {report.mean(work):.2f}")
