"""`rorqual bench llama-cpp`: our steps and prompts compared with llama.cpp's, on the same random
weights of one shape; the two alternate."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from rorqual.bench.cpu.read_rate import ReadRate, clock_of
from rorqual.bench.cpu.run import processor
from rorqual.bench.llama_cpp.check import check
from rorqual.bench.llama_cpp.drawn_weights import DrawnWeights
from rorqual.bench.llama_cpp.gguf_file import GgufTensor, gguf_package, tensors_of, write
from rorqual.bench.llama_cpp.peer import LlamaCpp
from rorqual.bench.llama_cpp.sides import LlamaSide, OurSide, Side
from rorqual.bench.llama_cpp.work import LlamaCppWork, kind_of
from rorqual.bench.wide_console import wide_console
from rorqual.config.hf import read_config
from rorqual.config.model import ModelConfig
from rorqual.config.whole_file import write_whole
from rorqual.errors import CapacityError
from rorqual.models.hub import model_folder
from rorqual.platforms import make_platform

MARGIN = 2 * 2**30  # bytes left free where both models are held at once
PAUSE = 0.05  # seconds before a turn: the other side's threads stop spinning
Tell = Callable[[str], None]


@dataclass
class LlamaCppRow:
    """One format, batch and kind of work. ms: of a step, or of all prompts; tokens_per_s: of all
    sequences; ratio: ours over llama.cpp's in tokens/s, the median of the turns' ratios where they
    took turns; gb: bytes that a step must read, of either; share: the time to read them at
    `bandwidth` over the time taken."""

    weights: str
    peer_weights: str
    batch: int
    work: str
    ours_ms: float
    peer_ms: float
    ours_tokens_per_s: float
    peer_tokens_per_s: float
    ratio: float
    ours_gb: float | None
    peer_gb: float | None
    ours_share: float | None
    peer_share: float | None
    bandwidth: float
    setting: str
    load: float
    took_turns: bool
    ours_turns: list[float] = field(default_factory=list)
    peer_turns: list[float] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Of decode steps: 1.1 times llama.cpp's tokens/s, or 80 % of the bandwidth on our bytes
        and no slower."""
        if self.ours_share is None:
            return ""
        good = self.ratio >= 1.1 or (self.ours_share >= 0.8 and self.ratio >= 1.0)
        return "met" if good else "missed"


@dataclass
class LlamaCppReport:
    processor: str
    threads: int
    model: str
    layers: int
    llama_cpp: str
    agreement: str = ""
    system: str = ""  # what llama.cpp says of its build
    sizes: dict[str, float] = field(default_factory=dict)  # GB of all weights
    rows: list[LlamaCppRow] = field(default_factory=list)

    def write(self, path: Path) -> None:
        rows = [{**asdict(row), "verdict": row.verdict} for row in self.rows]
        write_whole(path, json.dumps({**asdict(self), "rows": rows}, indent=2) + "\n")


def run(
    model: str, work: LlamaCppWork, batches: Sequence[int], tell: Tell, json_file: Path | None
) -> LlamaCppReport:
    """Raises ConfigError, EngineError where llama.cpp fails, TargetError where it computes another
    model."""
    gguf_package()  # says what is missing before anything is made
    source = model_folder(model, weights=False)
    data = json.loads((source / "config.json").read_text())
    if work.num_layers:
        data["num_hidden_layers"] = work.num_layers
    data.pop("quantization_config", None)
    data.pop("num_nextn_predict_layers", None)
    config = read_config(data)
    threads = work.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        folder = work.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        peer = stack.enter_context(LlamaCpp(work.llama_python, work.processor_time))
        report = LlamaCppReport(
            processor(), threads, source.name, config.num_layers, f"llama-cpp-python {peer.version}"
        )
        tell(f"{report.processor}, {threads} threads; {report.llama_cpp}")
        if work.check:
            report.agreement = str(check(data, peer))
            tell(report.agreement)
        (folder / "config.json").write_text(json.dumps(data))
        for name in work.format_names:
            _compare(name, config, folder, peer, work, batches, report, tell)
            if json_file:
                report.write(json_file)
    return report


def _compare(
    name: str,
    config: ModelConfig,
    folder: Path,
    peer: LlamaCpp,
    work: LlamaCppWork,
    batches: Sequence[int],
    report: LlamaCppReport,
    tell: Tell,
) -> None:
    kind = kind_of(name)
    path, tensors = _file(kind, config, folder, work, report, tell)
    size = sum(tensor.nbytes for tensor in tensors)
    report.sizes[kind] = size / 1e9
    theirs = LlamaSide(peer, path, tensors, config, work, report.threads)
    free = make_platform("cpu").available_memory()
    together = work.together if work.together is not None else free > 2.1 * size + MARGIN
    tell(
        f"{name} beside {kind}, {size / 1e9:.2f} GB; {free / 1e9:.1f} GB free: "
        + ("in turns" if together else "one after the other")
    )
    found: dict[Work, Turns] = {}
    if not together:
        found = dict(_measured([theirs], config, batches, work, tell))
        peer.unload()
    ours = OurSide(name, folder, work, max(batches))
    sides: list[Side] = [ours, theirs] if together else [ours]
    for what, turns in _measured(sides, config, batches, work, tell):
        both = {**found.get(what, {}), **turns}
        report.rows.append(_row(name, kind, what, ours, theirs, both, together))
        tell(_line(report.rows[-1]))
    report.sizes[name] = ours.weight_bytes / 1e9
    report.system = peer.system
    ours.close()


def _file(
    kind: str,
    config: ModelConfig,
    folder: Path,
    work: LlamaCppWork,
    report: LlamaCppReport,
    tell: Tell,
) -> tuple[Path, list[GgufTensor]]:
    """Written, unless it is there."""
    weights = DrawnWeights(config, work.seed)
    path = folder / f"{report.model}-{config.num_layers}-{work.seed}-{kind}.gguf"
    tensors = tensors_of(weights, kind)
    if path.exists():
        tell(f"{path} is there already")
        return path, tensors
    need = sum(tensor.nbytes for tensor in tensors)
    there = os.statvfs(folder)
    free = there.f_bavail * there.f_frsize
    if need > free:
        raise CapacityError(
            f"{path} needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free there"
        )
    start = time.perf_counter()
    unfinished = path.with_suffix(".unfinished")
    write(unfinished, weights, kind, report.threads)
    unfinished.rename(path)
    tell(f"{path}: {need / 1e9:.2f} GB written in {time.perf_counter() - start:.0f} s")
    return path, tensors


@dataclass(frozen=True)
class Work:
    """Decode steps or prompts of a batch."""

    batch: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}, batch {self.batch}"


Turns = dict[str, tuple[list[float], float, float]]  # by side: ms, bandwidth, load


def _measured(
    sides: Sequence[Side],
    config: ModelConfig,
    batches: Sequence[int],
    work: LlamaCppWork,
    tell: Tell,
) -> Iterator[tuple[Work, Turns]]:
    """Milliseconds of every turn of each side, of decode steps and prompts."""
    for batch in batches:
        prompts = prompts_of(config.vocab_size, batch, work.prompt)
        for side in sides:
            side.prepare(prompts, tell)
        steps = partial(_step_seconds, count=work.steps)
        with ExitStack() as stack:
            for side in sides:
                stack.enter_context(side.decoding(prompts))
            yield Work(batch, "decode"), _turns(sides, work, steps)
        yield Work(batch, "prompt"), _turns(sides, work, partial(_prompt_seconds, prompts=prompts))


def _step_seconds(side: Side, count: int) -> float:
    return side.steps(count) / count


def _prompt_seconds(side: Side, prompts: Sequence[Sequence[int]]) -> float:
    return side.prompt(prompts)


def _turns(sides: Sequence[Side], work: LlamaCppWork, call: Callable[[Side], float]) -> Turns:
    bandwidth = ReadRate(clock_of(work.processor_time)).best(9)
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(work.turns):
        for side in sides:
            time.sleep(PAUSE)
            found[side.name].append(1e3 * call(side))
    load = os.getloadavg()[0]
    return {name: (times, bandwidth, load) for name, times in found.items()}


def prompts_of(vocabulary: int, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(vocabulary, (count, length), generator=generator).tolist()


def _row(
    name: str,
    kind: str,
    what: Work,
    ours: OurSide,
    theirs: LlamaSide,
    turns: Turns,
    took_turns: bool,
) -> LlamaCppRow:
    mine, bandwidth, load = turns[ours.name]
    other = turns[theirs.name][0]
    medians = (statistics.median(mine), statistics.median(other))
    decode = what.kind == "decode"
    tokens = what.batch * (1 if decode else theirs.work.prompt)
    needed = (ours.step_bytes(what.batch), theirs.step_bytes(what.batch))
    return LlamaCppRow(
        weights=name,
        peer_weights=kind,
        batch=what.batch,
        work=what.kind,
        ours_ms=medians[0],
        peer_ms=medians[1],
        ours_tokens_per_s=1e3 * tokens / medians[0],
        peer_tokens_per_s=1e3 * tokens / medians[1],
        ratio=(
            statistics.median(b / a for a, b in zip(mine, other, strict=True))
            if took_turns
            else medians[1] / medians[0]
        ),
        ours_gb=needed[0] / 1e9 if decode else None,
        peer_gb=needed[1] / 1e9 if decode else None,
        ours_share=1e3 * needed[0] / bandwidth / medians[0] if decode else None,
        peer_share=1e3 * needed[1] / bandwidth / medians[1] if decode else None,
        bandwidth=bandwidth / 1e9,
        setting=str(theirs.setting(what.kind, what.batch)),
        load=load,
        took_turns=took_turns,
        ours_turns=mine,
        peer_turns=other,
    )


def _line(row: LlamaCppRow) -> str:
    share = (
        ""
        if row.ours_share is None or row.peer_share is None
        else f", {100 * row.ours_share:.0f} and {100 * row.peer_share:.0f} % of "
        f"{row.bandwidth:.1f} GB/s, {row.verdict}"
    )
    return (
        f"{row.weights}, batch {row.batch}, {row.work}: ours {row.ours_ms:.2f} ms "
        f"{row.ours_tokens_per_s:.1f} tok/s, llama.cpp {row.peer_weights} {row.peer_ms:.2f} ms "
        f"{row.peer_tokens_per_s:.1f} tok/s, ratio {row.ratio:.2f}{share}, load {row.load:.1f} "
        f"({row.setting})"
    )


def print_table(report: LlamaCppReport) -> None:
    from rich.table import Table

    title = (
        f"{report.model}, {report.layers} layers; {report.processor}, {report.threads} threads; "
        f"{report.llama_cpp}"
    )
    table = Table(title=title)
    columns = ("weights", "batch", "work", "ours ms", "its ms", "ours tok/s", "its tok/s", "ratio")
    for name in (*columns, "GB a step", "% of floor", "GB/s", "load", "llama.cpp's setting"):
        table.add_column(name)
    for row in report.rows:
        table.add_row(*_cells(row))
    wide_console(190).print(table)
    for name, size in report.sizes.items():
        print(f"{name}: {size:.2f} GB of weights")
    for row in report.rows:
        if row.verdict:
            print(f"{row.weights}, batch {row.batch}: {row.verdict}")


def _cells(row: LlamaCppRow) -> tuple[str, ...]:
    def pair(ours: float | None, other: float | None, form: str, times: float = 1) -> str:
        if ours is None or other is None:
            return ""
        return f"{times * ours:{form}} / {times * other:{form}}"

    return (
        f"{row.weights} / {row.peer_weights}",
        str(row.batch),
        row.work,
        f"{row.ours_ms:.2f}",
        f"{row.peer_ms:.2f}",
        f"{row.ours_tokens_per_s:.1f}",
        f"{row.peer_tokens_per_s:.1f}",
        f"{row.ratio:.2f}" + ("" if row.took_turns else " (no turns)"),
        pair(row.ours_gb, row.peer_gb, ".2f"),
        pair(row.ours_share, row.peer_share, ".0f", 100),
        f"{row.bandwidth:.1f}",
        f"{row.load:.1f}",
        row.setting,
    )
