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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from served_load import LOOK_SECONDS, counted, made_prompts, play, running_router

from rorqual.bench import provenance
from rorqual.bench.peers.model_folder import ServedModel, served_model
from rorqual.bench.peers.server_process import (
    RunningServer,
    StartedServer,
    last_lines,
    started_server,
)
from rorqual.bench.serving.client import RequestRecord, ServerTarget
from rorqual.bench.serving.load import ArrivalLoad, Run
from rorqual.bench.serving.metrics import GoodputLimits, causes, figures
from rorqual.errors import RorqualError, TargetError

LAYOUTS = ("replicas", "apart", "tp2")  # in this order
MOST_STREAMS = 64
LEAST_STREAMS = 8
TOKENS_IN_FLIGHT = 128_000  # of prompts in the closed loop, which limits its streams
FIRST_START = 60.0  # seconds that a layout may take of which nothing is known
STOP_SECONDS = 8.0  # kept for ending the servers
WARM_UPS = 8
WARM_UP_TOKENS = 16  # of each answer
ASKED = 4  # prompts whose greedy answers are compared
ASKED_IN = 256  # tokens of each, at most
ASKED_OUT = 24
RAMP = 0.25  # of a closed loop's time, over which its streams begin
LEAST_ITL = 0.002  # seconds, for the number of prompts that a closed loop may need
DRAIN = 2.0  # times a load's seconds after which requests that are still open have failed
COUNTERS_SECONDS = 3.0  # after which /metrics must have what the engines counted
CPU_SEQS = 64
CPU_PAGE = 16
COLUMNS = ("tokens_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50")
FAULTS = ("failed", "moved", "computed_by_decode")
KEPT = (
    *("completed", "failed", "duration", "request_throughput", "client_cpu_cores"),
    *("token_source", "short_outputs", "input_length_mismatches", "total_cached_tokens"),
)


# ---- what is measured


@dataclass(frozen=True)
class Shape:
    """Tokens of each prompt and answer; streams: open requests of the closed loop."""

    input: int
    output: int
    streams: int

    @staticmethod
    def parse(text: str) -> Shape:
        """INxOUT or INxOUT@STREAMS; without STREAMS as many as TOKENS_IN_FLIGHT allow."""
        lengths, _, streams = text.partition("@")
        first, _, second = lengths.partition("x")
        try:
            found = [int(part) for part in (first, second, streams or "1")]
        except ValueError:
            found = [0]
        if min(found) < 1 or len(found) < 3:
            raise argparse.ArgumentTypeError(f"{text!r}; accepted: INxOUT or INxOUT@STREAMS")
        most = max(LEAST_STREAMS, min(MOST_STREAMS, TOKENS_IN_FLIGHT // found[0]))
        return Shape(found[0], found[1], found[2] if streams else most)

    @property
    def label(self) -> str:
        return f"{self.input}x{self.output}@{self.streams}"

    def seed(self, *more: int) -> list[int]:
        return [self.input, self.output, *more]


@dataclass(frozen=True)
class Cell:
    """share: of the replicas' peak, as Poisson arrivals; None: the closed loop."""

    layout: str
    shape: Shape
    share: float | None = None

    @property
    def key(self) -> list[Any]:
        return [self.layout, self.shape.label, self.share]


def all_cells(
    layouts: Sequence[str], shapes: Sequence[Shape], shares: Sequence[float]
) -> list[Cell]:
    """In the order of measuring: of each layout all closed loops, then the shares."""
    loads = (None, *shares)
    return [
        Cell(layout, shape, share)
        for layout in LAYOUTS
        if layout in layouts
        for share in loads
        for shape in shapes
    ]


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
        told = found["setup"]
        other = [name for name in {*told, *setup} if told.get(name) != setup.get(name)]
        if other:
            differ = "; ".join(f"{n}: {told.get(n)!r}, now {setup.get(n)!r}" for n in sorted(other))
            raise SystemExit(f"{path} is of another setup ({differ}); name another file")
        return Results(path, setup, found["starts"], found["answers"], found["cells"])

    def write(self) -> None:
        """In one step: an interrupted call leaves the file as it was."""
        told = {name: value for name, value in vars(self).items() if name != "path"}
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
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


# ---- servers


def common_options(
    model: ServedModel, weights: str, device: str, shapes: Sequence[Shape]
) -> list[str]:
    longest = max(shape.input + shape.output for shape in shapes) + CPU_PAGE
    options = [str(model.folder), "--weights", weights, "--max-model-len", str(longest)]
    if device != "cpu":
        return options
    pages = CPU_SEQS * (-(-longest // CPU_PAGE) + 1)
    return [
        *options,
        *("--device", "cpu", "--threads", "1", "--max-num-seqs", str(CPU_SEQS)),
        *("--page-size", str(CPU_PAGE), "--num-pages", str(pages)),
    ]


def transport_of(device: str) -> str:
    return "tcp" if device == "cpu" else "handles"


def layout_options(layout: str, device: str, secret: Path) -> list[list[str]]:
    """What each of its servers gets beside the options that all have. Both servers of a pair see
    both GPUs, since one reads the other's memory."""
    gpus = [[] if device == "cpu" else ["--device", f"cuda:{number}"] for number in (0, 1)]
    if layout == "tp2":
        return [["--tp", "2"]]
    if layout == "replicas":
        return gpus
    kv = ["--kv-transport", transport_of(device), "--kv-secret-file", str(secret)]
    return [
        [*gpus[0], "--role", "prefill", "--kv-port", "0", *kv],
        [*gpus[1], "--role", "decode", "--kv-peers", "127.0.0.1", *kv],
    ]


def router_options(layout: str, urls: Sequence[str]) -> list[str]:
    """Nothing for one server, which has no router."""
    if layout == "tp2":
        return []
    if layout == "apart":
        return ["--prefill", urls[0], "--decode", urls[1], "--prefill-from", "1"]
    return ["--replica", urls[0], "--replica", urls[1], "--policy", "least_loaded"]


@dataclass(frozen=True)
class Running:
    """A layout that takes requests. url: where they go, the router's if there is one."""

    layout: str
    url: str
    servers: tuple[RunningServer, ...]
    router: RunningServer | None
    transport: str

    def check(self) -> None:
        """Raises TargetError where one of its processes has ended."""
        for server in (*self.servers, *filter(None, [self.router])):
            if server.lost():
                raise TargetError(f"a server has ended:\n{last_lines(server.log)}")

    def pages(self, least: float = 0) -> dict[str, float]:
        """Totals since the start: prompts that the prefill server took, those whose pages the
        decode server fetched, those of which not all came, and bytes by the transport. Waits for
        `least` fetched prompts, because engines report their counts four times a second."""
        if self.layout != "apart" or self.router is None:
            return {}
        decode = self.servers[1].url
        by = f'transport="{self.transport}"'
        deadline = time.monotonic() + COUNTERS_SECONDS
        while True:
            found = {
                "prefilled": counted(self.router.url, "rorqual_router_prefills_total", '"ok"'),
                "fetched": counted(decode, "rorqual:kv_transfer_requests_total"),
                "failures": counted(decode, "rorqual:kv_transfer_failures_total"),
                "bytes": counted(decode, "rorqual:kv_transfer_bytes_received_total", by),
            }
            if found["fetched"] >= least or time.monotonic() > deadline:
                return found
            time.sleep(LOOK_SECONDS)

    def moved(self) -> float:
        """Requests and streams that the router has sent to a second server."""
        if self.router is None:
            return 0
        names = ("rorqual_router_retries_total", "rorqual_router_resumes_total")
        return sum(counted(self.router.url, name) for name in names)

    def pages_since(self, before: Mapping[str, float], requests: int) -> dict[str, float]:
        """Of so many requests that have ended."""
        if not before:
            return {}
        after = self.pages(before["fetched"] + requests)
        return {name: total - before[name] for name, total in after.items()}


@contextmanager
def running(
    layout: str, common: Sequence[str], device: str, logs: Path, seconds: float
) -> Iterator[Running]:
    """Its servers start side by side. Raises TargetError where they are not ready in time."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        secret = Path(name) / "kv-secret"
        secret.write_text(os.urandom(32).hex(), encoding="utf-8")
        started = []
        for number, own in enumerate(layout_options(layout, device, secret)):
            command = serve_command([*common, *own])
            log = logs / f"{layout}-{number}.log"
            started.append(stack.enter_context(started_server(command, log)))
        stack.callback(end_together, started)
        servers = tuple(one.wait_ready(end - one.began) for one in started)
        given = router_options(layout, [server.url for server in servers])
        router = None
        url = servers[0].url
        if given:
            log = logs / f"{layout}-router.log"
            left = max(1.0, end - time.monotonic())
            router = stack.enter_context(running_router(log, len(servers), left, *given))
            url = router.url
        yield Running(layout, url, servers, router, transport_of(device))


def end_together(started: Sequence[StartedServer]) -> None:
    """Ask all to end, so that each is not waited for before the next is asked."""
    for server in started:
        with suppress(ProcessLookupError):
            server.process.send_signal(signal.SIGTERM)


def serve_command(options: Sequence[str]) -> Callable[[int], list[str]]:
    command = [sys.executable, "-m", "rorqual", "serve"]
    return lambda port: [*command, *options, "--port", str(port)]


# ---- loads


def greedy_answers(url: str, shapes: Sequence[Shape], seconds: float) -> list[str]:
    """Raises TargetError where one fails."""
    length = min(ASKED_IN, *(shape.input for shape in shapes))
    prompts = made_prompts(ASKED, (length, ASKED_OUT), 1)
    load = ArrivalLoad(run_seconds=seconds)
    run = play(ServerTarget(url, temperature=0.0, keep_text=True), prompts, load)
    refuse_failures(run)
    return ["".join(record.text) for record in run.records]


def warm_up(where: Running, shapes: Sequence[Shape], seconds: float) -> None:
    """Raises TargetError where a request fails."""
    end = time.monotonic() + seconds
    before = where.pages()
    for shape in shapes:
        lengths = (shape.input, min(shape.output, WARM_UP_TOKENS))
        load = ArrivalLoad(run_seconds=max(1.0, end - time.monotonic()))
        prompts = made_prompts(WARM_UPS, lengths, shape.seed(2))
        refuse_failures(play(ServerTarget(where.url), prompts, load))
    where.pages_since(before, WARM_UPS * len(shapes))  # so that a cell's counts are its own


def refuse_failures(run: Run) -> None:
    failed = causes(run.records)
    if failed:
        raise TargetError(f"{sum(failed.values())} requests failed: {next(iter(failed))}")


def load_of(
    cell: Cell, run_seconds: float, most_seconds: float, peak: float | None
) -> tuple[ArrivalLoad, int]:
    """And how many prompts it may need."""
    if cell.share is None:
        load = ArrivalLoad(
            cell.shape.streams,
            send_seconds=run_seconds,
            ramp_seconds=RAMP * run_seconds,
            run_seconds=most_seconds,
        )
        turns = math.ceil(run_seconds / (cell.shape.output * LEAST_ITL))
        return load, cell.shape.streams * (1 + turns)
    assert peak is not None
    rate = cell.share * peak / cell.shape.output
    return ArrivalLoad(rate=rate, run_seconds=most_seconds), max(1, round(rate * run_seconds))


def steady_rate(records: Sequence[RequestRecord], begin: float, end: float) -> float:
    """tokens/s between two times of time.perf_counter. A chunk counts for its share of its
    request's tokens."""
    tokens = sum(
        record.output_tokens * sum(begin <= at < end for at in record.chunks) / len(record.chunks)
        for record in records
        if record.error is None and record.chunks
    )
    return tokens / (end - begin)


def measure(
    cell: Cell, where: Running, run_seconds: float, most_seconds: float, peak: float | None
) -> dict[str, Any]:
    """One cell, as it stands in the file. Raises TargetError where a server has ended, or the
    closed loop had too few prompts."""
    load, count = load_of(cell, run_seconds, most_seconds, peak)
    percent = 0 if cell.share is None else round(100 * cell.share)
    seed = cell.shape.seed(3, percent)
    lengths = (cell.shape.input, cell.shape.output)
    prompts = made_prompts(count, lengths, seed)
    before = where.pages()
    moved = where.moved()
    began = time.monotonic()
    run = play(ServerTarget(where.url), prompts, load, seed)
    seconds = time.monotonic() - began
    where.check()
    pages = where.pages_since(before, len(run.records))
    if cell.share is None and len(run.records) == count:
        raise TargetError(f"{count} requests were too few for {run_seconds:g} s")
    found = figures(run, GoodputLimits(), (50.0, 99.0))
    rate = found["output_throughput"]
    if cell.share is None:
        rate = steady_rate(run.records, run.start + RAMP * run_seconds, run.start + run_seconds)
    return {
        "key": cell.key,
        "shape": asdict(cell.shape),
        "requests_s": None if cell.share is None else load.rate,
        "tokens_s": rate,
        **{f"{name}_p50": found[f"median_{name}_ms"] for name in ("ttft", "itl", "tpot")},
        **{f"{name}_p99": found[f"p99_{name}_ms"] for name in ("ttft", "itl", "tpot")},
        **{name: found[name] for name in KEPT},
        "failures": dict(causes(run.records)),
        "pages": pages,
        "moved": round(where.moved() - moved),
        "computed_by_decode": computed_by_decode(pages, len(run.records)),
        "seconds": seconds,
        "load_of_machine": os.getloadavg()[0],
        "commit": provenance.git_commit(),
    }


def computed_by_decode(pages: Mapping[str, float], requests: int) -> int:
    """Prompts that the decode server computed itself: the prefill server did not take them, or not
    all of their pages came."""
    if not pages:
        return 0
    return round(max(0.0, requests - (pages["fetched"] - pages["failures"])))


# ---- all of it


class Measurement:
    """Layout after layout until the time is over; `unmeasured` says why cells are missing."""

    def __init__(self, asked: argparse.Namespace, results: Results, model: ServedModel):
        self.asked = asked
        self.results = results
        self.end = time.monotonic() + asked.seconds
        self.logs = asked.json.with_name(f"{asked.json.stem}-logs")
        self.common = common_options(model, asked.weights, asked.device, asked.shapes)
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
