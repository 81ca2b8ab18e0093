"""Two GPUs of one host, used in three ways under the same loads: one server computes prompts and
one answers (apart), two servers that do both (replicas), one server on both GPUs (tp2).

    python demo/apart_on_gpus.py deepseek-v2-lite --weights random --seconds 200 --json apart.json
    python demo/apart_on_gpus.py --device cpu --shapes 96x16 --run-seconds 4 --json apart.json

One layout runs at a time. For each shape a closed loop gives its peak, then Poisson arrivals come
at shares of the replicas' peak, the same arrivals and prompts for every layout; so the replicas are
first. A cell (layout, shape, load) is in FILE as soon as it is measured, and another call with the
same FILE measures what is missing. Exit status: 0 if nothing is missing, 1 if something is or
failed. What stands after `--` goes to all servers.

Columns: tokens/s (of the closed loop those between the first quarter and the end of its time, of
arrivals all tokens by the time until the last one), milliseconds of TTFT, ITL and TPOT, failed
requests, those that the router moved to a second server, and with apart the prompts that the
answering server computed itself. The last three should be 0; a cell where they are not is measured
again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_layouts import LAYOUTS, Running, common_options, running, transport_of
from layout_loads import ASKED, Cell, Shape, computed_by_decode, greedy_answers, measure, warm_up

from rorqual.bench import provenance
from rorqual.bench.peers.model_folder import ServedModel, served_model
from rorqual.errors import RorqualError, TargetError

FIRST_START = 60.0  # seconds that a layout may take of which nothing is known
STOP_SECONDS = 8.0  # kept for ending the servers
DRAIN = 2.0  # times a load's seconds after which requests that are still open have failed
COLUMNS = ("tokens_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50")
FAULTS = ("failed", "moved", "computed_by_decode")


# ---- what was measured


@dataclass
class Results:
    """setup: what must be the same for cells to stand in one table. starts: seconds of each
    layout's start, warm-up included. answers: greedy ones, by layout."""

    path: Path
    setup: dict[str, Any]
    starts: dict[str, float] = field(default_factory=dict)
    answers: dict[str, list[str]] = field(default_factory=dict)
    cells: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def read(path: Path, setup: dict[str, Any]) -> Results:
        """Raises SystemExit where the file is of another setup."""
        if not path.exists():
            return Results(path, setup)
        found = json.loads(path.read_text(encoding="utf-8"))
        earlier = found["setup"]
        other = [name for name in {*earlier, *setup} if earlier.get(name) != setup.get(name)]
        if other:
            differ = "; ".join(
                f"{n}: {earlier.get(n)!r}, now {setup.get(n)!r}" for n in sorted(other)
            )
            raise SystemExit(f"{path} is of another setup ({differ}); name another file")
        return Results(path, setup, found["starts"], found["answers"], found["cells"])

    def write(self) -> None:
        """In one step: an interrupted call leaves the file as it was."""
        content = {name: value for name, value in vars(self).items() if name != "path"}
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self.path)

    def found(self, cell: Cell) -> dict[str, Any] | None:
        """The cell without a fault, if it was measured."""
        same = (one for one in self.cells if one["key"] == cell.key)
        return next((one for one in same if not faults(one)), None)

    def peak(self, shape: Shape) -> float | None:
        """tokens/s of the replicas."""
        cell = self.found(Cell("replicas", shape))
        return None if cell is None else cell["tokens_s"]

    def add(self, cell: dict[str, Any]) -> None:
        self.cells = [one for one in self.cells if one["key"] != cell["key"]] + [cell]
        self.write()

    def start_seconds(self, layout: str) -> float:
        """That a start of this layout is expected to take."""
        return self.starts.get(layout) or max(self.starts.values(), default=FIRST_START)

    def cell_seconds(self, cell: Cell) -> float:
        """That a cell is expected to take."""
        like = [
            one["seconds"]
            for one in self.cells
            if one["key"][1] == cell.shape.label and (one["key"][2] is None) == (cell.share is None)
        ]
        return max(like, default=DRAIN * self.setup["run_seconds"])


def faults(cell: Mapping[str, Any]) -> int:
    return sum(cell[name] for name in FAULTS)


# ---- all of it


def all_cells(
    layouts: Sequence[str], shapes: Sequence[Shape], shares: Sequence[float]
) -> list[Cell]:
    """In the order of measuring: layouts as in LAYOUTS, so that the replicas' peaks are known; of
    each all closed loops, then the shares."""
    loads = (None, *shares)
    return [
        Cell(layout, shape, share)
        for layout in LAYOUTS
        if layout in layouts
        for share in loads
        for shape in shapes
    ]


class Measurement:
    """Layout after layout until the time is over; `unmeasured` says why cells are missing."""

    def __init__(self, asked: argparse.Namespace, results: Results, model: ServedModel):
        self.asked = asked
        self.results = results
        self.end = time.monotonic() + asked.seconds
        self.logs = asked.json.with_name(f"{asked.json.stem}-logs")
        max_tokens = max(shape.input + shape.output for shape in asked.shapes)
        self.common = common_options(model, asked.weights, asked.device, max_tokens)
        self.common += asked.server_options
        self.unmeasured: list[str] = []

    @property
    def left(self) -> float:
        """Seconds, without those that ending the servers may take."""
        return self.end - time.monotonic() - STOP_SECONDS

    def run(self) -> None:
        for layout in LAYOUTS:
            cells = [
                cell
                for cell in all_cells([layout], self.asked.shapes, self.asked.shares)
                if layout in self.asked.layouts and self.results.found(cell) is None
            ]
            if not cells:
                continue
            start = self.results.start_seconds(layout)
            if self.left < start + self.results.cell_seconds(cells[0]):
                self.unmeasured.append(
                    f"{layout}: {self.left:.0f} s are too few to start it ({start:.0f} s)"
                )
                continue
            try:
                self.run_layout(layout, cells)
            except (RorqualError, OSError) as error:
                self.unmeasured.append(f"{layout}: {error}")
                print(f"{layout}: {error}", flush=True)

    def run_layout(self, layout: str, cells: Sequence[Cell]) -> None:
        began = time.monotonic()
        self.logs.mkdir(parents=True, exist_ok=True)
        common = self.common
        with running(layout, common, self.asked.device, self.logs, self.left) as where:
            ready = time.monotonic() - began
            self.ask(where)
            warm_up(where, list(dict.fromkeys(cell.shape for cell in cells)), self.left)
            took = time.monotonic() - began
            self.results.starts[layout] = took
            self.results.write()
            print(f"{layout}: ready after {ready:.1f} s, warm after {took:.1f}", flush=True)
            for cell in cells:
                self.run_cell(cell, where)

    def ask(self, where: Running) -> None:
        """The greedy answers. With apart also whether pages come by the transport. Raises
        TargetError where they do not."""
        before = where.pages()
        answers = greedy_answers(where.url, self.asked.shapes, self.left)
        pages = where.pages_since(before, ASKED)
        if pages and (computed_by_decode(pages, ASKED) or not pages["bytes"]):
            raise TargetError(f"pages do not come by {where.transport}: {pages}")
        self.results.answers[where.layout] = answers

    def run_cell(self, cell: Cell, where: Running) -> None:
        peak = None if cell.share is None else self.results.peak(cell.shape)
        if cell.share is not None and peak is None:
            self.unmeasured.append(f"{title(cell.key)}: the replicas' peak is not known")
            return
        if self.left < self.results.cell_seconds(cell):
            self.unmeasured.append(f"{title(cell.key)}: no time is left")
            return
        most = DRAIN * self.asked.run_seconds
        allowed = min(most, self.left)
        found = measure(cell, where, self.asked.run_seconds, allowed, peak)
        if found["failed"] and allowed < most:
            self.unmeasured.append(f"{title(cell.key)}: not done when the time was over")
            return
        self.results.add(found)
        print(line_of(found), flush=True)


def setup_of(asked: argparse.Namespace, model: ServedModel) -> dict[str, Any]:
    return {
        "model": model.name,
        "weights": asked.weights,
        "device": asked.device,
        "gpus": [] if asked.device == "cpu" else gpu_names(),
        "transport": transport_of(asked.device),
        "torch": version("torch"),
        "run_seconds": asked.run_seconds,
        "server_options": asked.server_options,
    }


def gpu_names() -> list[str]:
    """Raises SystemExit where fewer than two are visible. Without torch, whose import takes
    seconds of the time and whose context takes memory that the servers need."""
    names = [card.partition(",")[0] for card in provenance.local_cards() or ()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(names) if visible is None else len(visible.split(","))
    if min(count, len(names)) < 2:
        raise SystemExit(
            f"{count} of {len(names)} GPUs are visible; this needs two, or --device cpu"
        )
    return names


# ---- what is printed


def title(key: Sequence[Any]) -> str:
    layout, shape, share = key
    return f"{layout:9} {shape:14} {'peak' if share is None else f'{share:.0%}':>5}"


def line_of(cell: Mapping[str, Any]) -> str:
    values = [math.nan if cell[name] is None else cell[name] for name in COLUMNS]
    numbers = "".join(f"{value:11.1f}" for value in values)
    counts = "".join(f"{cell[name]:10}" for name in FAULTS)
    return f"{title(cell['key'])}{numbers}{counts}"


def report(results: Results, wanted: Sequence[Cell], unmeasured: Sequence[str]) -> int:
    """The exit status."""
    names = "".join(f"{name:>11}" for name in COLUMNS)
    print(
        f"\n{'layout':9} {'shape':14} {'load':>5}{names}{'failed':>10}{'moved':>10}{'computed':>10}"
    )
    keys = [cell.key for cell in wanted]
    for cell in sorted(results.cells, key=lambda one: order(one["key"])):
        print(line_of(cell))
        for cause, count in cell["failures"].items():
            print(f"    {count} failed: {cause}")
    for line in compared(results.answers):
        print(line)
    commits = sorted({str(cell["commit"]) for cell in results.cells})
    if len(commits) > 1:
        print(f"cells are of several commits: {', '.join(commits)}")
    missing = [cell.key for cell in wanted if results.found(cell) is None]
    print(f"{len(keys) - len(missing)} of {len(keys)} cells measured")
    for why in unmeasured:
        print(f"    {why}")
    return int(bool(missing))


def order(key: Sequence[Any]) -> tuple[str, float, int]:
    """Layouts of one load beside each other."""
    layout, shape, share = key
    return shape, share or 0.0, LAYOUTS.index(layout)


def compared(answers: Mapping[str, Sequence[str]]) -> list[str]:
    """How many greedy answers are the same between the first layout and each other one."""
    if len(answers) < 2:
        return []
    first, *others = [layout for layout in LAYOUTS if layout in answers]
    lines = []
    for other in others:
        pairs = list(zip(answers[first], answers[other], strict=True))
        same = sum(one == two for one, two in pairs)
        lines.append(f"greedy answers of {first} and {other}: {same} of {len(pairs)} are the same")
    return lines


def parse_arguments(given: Sequence[str]) -> argparse.Namespace:
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", help="the bundled checkpoint if left out")
    parser.add_argument("--weights", choices=("checkpoint", "random"), default="checkpoint")
    parser.add_argument("--layers", type=int, help="with random weights: of so many alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="any of them, in any order")
    parser.add_argument("--shapes", default="1000x128,8000x128", help="INxOUT[@STREAMS], ...")
    parser.add_argument("--shares", default="0.5,0.7,0.9", help="of the replicas' peak")
    parser.add_argument("--run-seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything")
    parser.add_argument("--json", type=Path, required=True, help="results, also of earlier calls")
    asked = parser.parse_args(given[:split])
    asked.server_options = list(given[split + 1 :])
    asked.layouts = asked.layouts.split(",")
    if unknown := set(asked.layouts) - set(LAYOUTS):
        parser.error(f"--layouts {sorted(unknown)}; accepted: {', '.join(LAYOUTS)}")
    try:
        asked.shapes = [Shape.parse(text) for text in asked.shapes.split(",")]
        asked.shares = [float(text) for text in asked.shares.split(",") if text]
    except (argparse.ArgumentTypeError, ValueError) as error:
        parser.error(f"--shapes or --shares: {error}")
    if not all(0 < share < 10 for share in asked.shares):
        parser.error(f"--shares {asked.shares}; accepted: above 0, below 10")
    if not (asked.run_seconds > 0 and asked.seconds > 0):
        parser.error("--run-seconds and --seconds must be above 0")
    return asked


def main(given: Sequence[str] | None = None) -> int:
    asked = parse_arguments(sys.argv[1:] if given is None else given)
    with tempfile.TemporaryDirectory() as scratch:
        model = served_model(asked.model, Path(scratch), asked.layers)
        if model.random and asked.weights != "random":
            raise SystemExit(f"{model.name} has no weights; give --weights random")
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        results = Results.read(asked.json, setup_of(asked, model))
        wanted = all_cells(asked.layouts, asked.shapes, asked.shares)
        measurement = Measurement(asked, results, model)
        try:
            measurement.run()
        except KeyboardInterrupt:
            measurement.unmeasured.append("interrupted")
        return report(results, wanted, measurement.unmeasured)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
