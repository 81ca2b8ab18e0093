"""What the planner predicts for attention and experts on two cards, beside three other ways to use
these two: written down before anybody has run it.

    python demo/split_predictions.py                      # a table for docs
    python demo/split_predictions.py --json FILE          # every cell, milliseconds and tokens/s
    python demo/split_predictions.py --gpu h100 --measured FOLDER --json FILE    # and what ran

The split is the one over driver handles in a captured step, with the link's own latency and
bandwidth. Contexts are those of every request; decoding alone. FOLDER has files of `rorqual bench
offline --json`, called LAYOUT-MODEL-CONTEXT.json: split1, split2, split3, dp2ep2, tp2 or replica
(one of two); qwen3-30b, v2-lite or v3; 1k, 8k or 32k. Or of `demo/decode_cells.py --json`, called
LAYOUT-MODEL.json, -512.json or -long.json, whose rows have their own contexts. With --json and
--measured FILE is read, so that what is judged is what was written down before."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rorqual.config.hardware import DeviceSpec, load_device
from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.engine.scheduling.scheduler_output import split_lengths
from rorqual.errors import ConfigError
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.costs.shards import rank_kv_bytes_per_token
from rorqual.planner.timing.profiles import Profile, profile_for
from rorqual.planner.timing.roofline import StepModel
from rorqual.planner.timing.split import decode_step, split_memory

MODELS = {
    "Qwen3-30B-A3B": ("Qwen/Qwen3-30B-A3B", {}),
    "V2-Lite": ("deepseek-ai/DeepSeek-V2-Lite", {}),
    "V3, 8 layers": ("deepseek-ai/DeepSeek-V3", {"num_hidden_layers": 8}),
}
CONTEXTS = (1024, 8192, 32768)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHOWN = (1, 8, 64, 256)
PARTS = (1, 2, 3)
FILES = re.compile(
    r"(split[123]|dp2ep2|tp2|replica)-(qwen3-30b|v2-lite|v3)(?:-(1|8|32)k|-512|-long)?"
)
FILE_MODELS = dict(zip(("qwen3-30b", "v2-lite", "v3"), MODELS, strict=True))
FILE_LAYOUTS = {"dp2ep2": "dp 2 ep 2", "tp2": "tp 2", "replica": "two replicas"}
LAYOUTS = {
    "dp 2 ep 2": ParallelConfig(dp=2, ep=2),
    "tp 2": ParallelConfig(tp=2),
    "two replicas": ParallelConfig(),
}


@dataclass(frozen=True)
class Cell:
    """ms: a step. rate: tokens/s a card. busy: of the split, the shares of a step in which
    attention's card and the experts' have work."""

    model: str
    context: int
    requests: int
    layout: str
    ms: float
    rate: float
    busy: tuple[float, float] | None = None


def cells(device: DeviceSpec, profile: Profile) -> Iterator[Cell]:
    for name, (model, changes) in MODELS.items():
        config = published(model, overrides=changes)
        for context in CONTEXTS:
            for requests in REQUESTS:
                given = (config, device, profile, context, requests)
                for layout, ms, busy in (*_layouts(*given), *_splits(*given)):
                    rate = requests / ms * 1e3 / 2
                    yield Cell(name, context, requests, layout, ms, rate, busy)


Found = tuple[str, float, tuple[float, float] | None]


def _layouts(
    config: ModelConfig, device: DeviceSpec, profile: Profile, context: int, requests: int
) -> Iterator[Found]:
    for layout, sizes in LAYOUTS.items():
        model = StepModel(config, sizes, device, profile)
        each = requests if layout == "tp 2" else -(-requests // 2)
        if each * context > model.cache_tokens(each):
            continue
        work = GroupWork(BatchShape.decode(each, context))
        if layout == "dp 2 ep 2":
            work = GroupWork(BatchShape.decode(each, context), stage_tokens=requests)
        yield layout, 1e3 * model.step(work).seconds, None


def _splits(
    config: ModelConfig, device: DeviceSpec, profile: Profile, context: int, requests: int
) -> Iterator[Found]:
    model = StepModel(config, ParallelConfig(), device, profile)
    memory = split_memory(model, 1, "experts", requests)
    each = rank_kv_bytes_per_token(config, model.sizes, model.fmt)
    if not memory.fits or requests * context * each > memory.left:
        return
    for parts in PARTS:
        if requests < parts:
            continue
        step = decode_step(model, split_lengths((1,) * requests, parts), context, 1, 1)
        yield f"split, {parts} at once", 1e3 * step.seconds, step.schedule.busy[:2]


def table(found: list[Cell]) -> Iterator[str]:
    """Tokens/s a card of some, in Markdown; the best of a row in bold."""
    names = [*LAYOUTS, *(f"split, {parts} at once" for parts in PARTS)]
    yield f"| model | context | requests | {' | '.join(names)} | busy |"
    yield "|---" * (len(names) + 4) + "|"
    rates = {(one.model, one.context, one.requests, one.layout): one for one in found}
    for model in MODELS:
        for context in CONTEXTS:
            for requests in SHOWN:
                row = {name: rates.get((model, context, requests, name)) for name in names}
                best = max((one.rate for one in row.values() if one), default=0.0)
                yield (
                    f"| {model} | {context:,} | {requests} | "
                    + " | ".join(
                        [*(_shown(one, best) for one in row.values()), _busy(row[names[4]])]
                    )
                    + " |"
                )


def _shown(cell: Cell | None, best: float) -> str:
    if cell is None:
        return "-"
    return f"**{cell.rate:,.0f}**" if cell.rate == best else f"{cell.rate:,.0f}"


def _busy(cell: Cell | None) -> str:
    if cell is None or cell.busy is None:
        return "-"
    return ", ".join(f"{share:.0%}" for share in cell.busy)


Measured = tuple[str, int, int, str, float]


def measured(folder: Path) -> Iterator[Measured]:
    """(model, context, requests, layout, ms a step) of each row in the folder's files. Raises
    SystemExit where there is none."""
    files = [(path, FILES.fullmatch(path.stem)) for path in sorted(folder.glob("*.json"))]
    if not any(match for _, match in files):
        raise SystemExit(f"split_predictions: no file in {folder} is called LAYOUT-MODEL-CONTEXT")
    for path, match in files:
        if match is None:
            continue
        layout = FILE_LAYOUTS.get(match[1], f"split, {match[1][-1]} at once")
        for row in json.loads(path.read_text())["rows"]:
            requests = row["concurrency"] * (2 if match[1] == "replica" else 1)
            context = 1024 * (int(match[3]) if match[3] else round(row["prompt"] / 1000))
            yield FILE_MODELS[match[2]], context, requests, layout, row["step_ms"]


def errors(found: list[Cell], rows: Iterable[Measured]) -> Iterator[str]:
    """What ran beside what was predicted, in Markdown, and the errors' mean and worst."""
    predicted = {(one.model, one.context, one.requests, one.layout): one.ms for one in found}
    off = []
    yield "| model | context | layout | requests | step ms | predicted | off |"
    yield "|---" * 7 + "|"
    for model, context, requests, layout, ms in sorted(rows, key=lambda row: (row[:2], row[3])):
        said = predicted.get((model, context, requests, layout))
        start = f"| {model} | {context:,} | {layout} | {requests} | {ms:.2f} | "
        if said is None:
            yield start + "- | |"
            continue
        off.append(said / ms - 1)
        yield start + f"{said:.2f} | {off[-1]:+.0%} |"
    if off:
        sizes = [abs(one) for one in off]
        mean = sum(sizes) / len(sizes)
        yield f"\nmean error {mean:.1%}, worst {max(sizes):.1%}, {len(off)} cells"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measured", type=Path, help="a folder of measured steps")
    given = parser.parse_args()
    if given.measured and given.json:
        kept = [Cell(**one) for one in json.loads(given.json.read_text())]
        print(*errors(kept, measured(given.measured)), sep="\n")
        return
    try:
        device = load_device(given.gpu)
    except ConfigError as error:
        parser.error(str(error))
    found = list(cells(device, profile_for(device)))
    if given.measured:
        print(*errors(found, measured(given.measured)), sep="\n")
        return
    print(*table(found), sep="\n")
    if given.json:
        lines = ",\n".join(json.dumps(_rounded(one)) for one in found)
        given.json.write_text(f"[\n{lines}\n]\n")


def _rounded(cell: Cell) -> dict[str, object]:
    busy = None if cell.busy is None else [round(share, 3) for share in cell.busy]
    return {**vars(cell), "ms": round(cell.ms, 4), "rate": round(cell.rate, 1), "busy": busy}


if __name__ == "__main__":
    main()
