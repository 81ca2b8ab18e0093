"""One server that computes prompts and one that answers, against two that do both, behind a router
each, on as many processor cores; and what the simulator says beforehand.

    python demo/apart_or_replicas.py --json apart.json

Each server has a core of its own (its engine one thread, its API process beside it). Constants are
measured first, on one engine in this process, on one of the two plain servers and between two
processes that pass pages; then the simulator says what each load will bring; then both deployments
get the same requests, in turns. Loads: `--streams` requests at a time for the peak, then Poisson
arrivals at shares of the peak that two plain servers reached. `carried`: tokens/s of two cores that
nobody else used, by the processor time that each server took.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any
from zlib import crc32

import numpy as np
from served_load import made_prompts, play, running_router

from rorqual import LLM
from rorqual.bench.comm import page_transfers
from rorqual.bench.comm.transfer_setup import TransferSetup
from rorqual.bench.serving.client import RequestRecord, ServerTarget
from rorqual.bench.serving.launched_server import launched_server
from rorqual.bench.serving.load import ArrivalLoad
from rorqual.bench.serving.prompts import Prompt
from rorqual.engine.engine import Engine
from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.models.hub import model_folder
from rorqual.planner.simulator.cost_runner import MeasuredCosts
from rorqual.planner.simulator.results import outcome
from rorqual.planner.simulator.simulator import Deployment, Pool, Simulation
from rorqual.planner.simulator.workload import Arrivals, LengthDistribution, Workload
from rorqual.planner.timing.page_times import PageTimes
from rorqual.request import Request, SamplingParams

PAGE = 16
SEQS = 64
BUDGET = 1024
SHARES = (0.5, 0.7, 0.9)
ROWS = (0, 1, 4, 12, 32)
STREAMS = 16  # whose steps tell what a server adds
TINY = 16  # tokens of a prompt whose time is all overhead
NAMES = ("replicas", "apart")
FIGURES = ("tokens_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started meanwhile stays on this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---- servers


def options(longest: int) -> list[str]:
    pages = SEQS * (-(-longest // PAGE) + 1)
    return [
        *("--threads", "1", "--page-size", str(PAGE), "--max-num-seqs", str(SEQS)),
        *("--max-num-batched-tokens", str(BUDGET), "--max-model-len", str(longest)),
        *("--num-pages", str(pages)),
    ]


@dataclass(frozen=True)
class Deployed:
    """Addresses: of both routers, and of a plain server behind the first. processes: of each
    deployment its two servers, and its router."""

    replicas: str
    apart: str
    plain: str
    processes: dict[str, tuple[int, int, int]]

    def spent(self, name: str) -> list[float]:
        """Processor seconds of these so far."""
        return [processor_seconds(pid) for pid in self.processes[name]]


def processor_seconds(pid: int) -> float:
    """Of a process and those that it started."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(processor_seconds(int(child)) for child in children)


@contextmanager
def deployed(longest: int, cores: tuple[int, int], folder: Path) -> Iterator[Deployed]:
    """All four servers; the two that are not asked sleep."""
    secret = folder / "kv-secret"
    secret.write_bytes(os.urandom(32).hex().encode())
    apart = ("--kv-secret-file", str(secret), "--kv-port", "0", "--kv-peers", "127.0.0.1")
    roles = [(), (), ("--role", "prefill", *apart), ("--role", "decode", *apart)]
    with ExitStack() as stack:
        urls, pids = [], []
        for number, role in enumerate(roles):
            with on_core(cores[number % 2]):
                started = launched_server([*options(longest), *role])
                server = stack.enter_context(started)
            urls.append(server.url)
            pids.append(server.pid)
        both = ("--replica", urls[0], "--replica", urls[1], "--policy", "least_loaded")
        split = ("--prefill", urls[2], "--decode", urls[3], "--prefill-from", "1")
        one, other = (
            stack.enter_context(running_router(folder / f"{name}.log", 2, 60, *given))
            for name, given in zip(NAMES, (both, split), strict=True)
        )
        processes = {
            "replicas": (pids[0], pids[1], one.pid),
            "apart": (pids[2], pids[3], other.pid),
        }
        yield Deployed(one.url, other.url, urls[0], processes)


def played(url: str, prompts: list[Prompt], load: ArrivalLoad) -> list[RequestRecord]:
    """Raises SystemExit where a request failed."""
    records = play(ServerTarget(url), prompts, load).records
    wrong = next((record.error for record in records if record.error), None)
    if wrong:
        raise SystemExit(f"{url}: a request failed: {wrong}")
    return records


def measured(records: list[RequestRecord]) -> dict[str, float]:
    """tokens/s, and milliseconds."""
    began = min(record.due for record in records)
    ended = max(record.end for record in records)
    first = [1e3 * (record.ttft or 0.0) for record in records]
    gaps = [1e3 * gap for record in records for gap in record.itls]
    return {
        "tokens_s": sum(record.output_tokens for record in records) / (ended - began),
        "ttft_p50": float(np.percentile(first, 50)),
        "ttft_p99": float(np.percentile(first, 99)),
        "itl_p50": float(np.percentile(gaps, 50)),
        "itl_p99": float(np.percentile(gaps, 99)),
    }


# ---- constants


class StepTimes:
    """Of one engine in this process."""

    def __init__(self, longest: int):
        llm = LLM(
            threads=1,
            max_num_seqs=SEQS,
            max_num_batched_tokens=BUDGET,
            max_model_len=longest,
            page_size=PAGE,
            num_pages=SEQS * (-(-longest // PAGE) + 1),
            skip_tokenizer_init=True,
        )
        self.llm = llm
        self.engine: Engine = llm.engine
        self.random = random.Random(0)
        self.count = 0

    def add(self, length: int, output: int) -> None:
        self.count += 1
        tokens = tuple(self.random.randrange(10, 4000) for _ in range(length))
        params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        self.engine.add(Request(f"r{self.count}", tokens, params))

    def step(self) -> float:
        """Of processor time, which other programs of the machine change little."""
        start = time.process_time()
        self.engine.step()
        return time.process_time() - start

    def at(self, rows: int, prompt: int, length: int, times: int) -> float:
        """The least of some: `rows` requests decode behind prompts of `length`, and `prompt`
        tokens of such prompts are computed."""
        (scheduler,) = self.engine.scheduler.schedulers
        for _ in range(rows):
            self.add(length, 4096)
        while scheduler.waiting or scheduler.prefilling:
            self.step()
        found = []
        for _ in range(times):
            for start in range(0, prompt, length):
                self.add(min(length, prompt - start), 1)
            found.append(self.step())
            while scheduler.waiting or scheduler.prefilling:
                self.step()
        for name in list(scheduler.sequences):
            self.engine.abort(name)
        self.engine.scheduler.prefix.clear()
        return min(found)

    def table(self, length: int) -> dict[tuple[int, int], float]:
        prompts = sorted({0, PAGE, length // 4, BUDGET // 2, BUDGET - max(ROWS)})
        self.at(1, length // 4, length, 3)
        found = {}
        for rows in ROWS:
            for prompt in prompts:
                if rows or prompt:
                    found[rows, prompt] = self.at(rows, prompt, length, 5 if prompt else 20)
        return found


@dataclass(frozen=True)
class Constants:
    """Seconds: steps at (rows, prompt tokens); delivery: between an engine and a client, through
    the router, both ways together; step, row: that a step with decoding rows is longer in a server,
    and for each of them; pages: between two engines, each page of so many bytes. scheduler: of
    every server."""

    steps: dict[tuple[int, int], float]
    delivery: float
    step: float
    row: float
    pages: PageTimes
    page_bytes: float
    scheduler: SchedulerConfig

    def costs(self) -> MeasuredCosts:
        return MeasuredCosts(
            {
                (rows, prompt): s + (self.step + rows * self.row if rows else 0.0)
                for (rows, prompt), s in self.steps.items()
            }
        )

    def transfer(self, tokens: int) -> float:
        """The router's second request, and the pages."""
        return self.delivery + self.pages.seconds(-(-tokens // PAGE) * self.page_bytes)

    def told(self) -> dict[str, Any]:
        return {
            "step_ms": {f"{r} rows, {p} new": 1e3 * s for (r, p), s in self.steps.items()},
            "delivery_ms": 1e3 * self.delivery,
            "server_step_us": 1e6 * self.step,
            "server_row_us": 1e6 * self.row,
            "pages": asdict(self.pages),
            "page_bytes": self.page_bytes,
        }


def constants(times: StepTimes, core: int, where: Deployed, shape: tuple[int, int]) -> Constants:
    with on_core(core):
        table = times.table(shape[0])
        alone, together = (times.at(rows, 0, TINY, 40) for rows in (1, STREAMS))
    one_by_one = ArrivalLoad(concurrency=1)
    tiny = played(where.replicas, made_prompts(15, (TINY, 2), 1), one_by_one)
    first = median(record.ttft or 0.0 for record in tiny)
    step = max(0.0, gap(where.plain, 1) - alone)
    row = max(0.0, gap(where.plain, STREAMS) - together - step) / STREAMS
    pages, page = page_times(shape[0])
    delivery = max(0.0, first - table[0, TINY])
    return Constants(table, delivery, step, row, pages, page, times.engine.scheduler.config)


def gap(url: str, streams: int) -> float:
    """Median seconds between two tokens of so many streams."""
    records = played(url, made_prompts(streams, (TINY, 128), 2), ArrivalLoad(streams))
    return median(seconds for record in records for seconds in record.itls)


def page_times(length: int) -> tuple[PageTimes, float]:
    """As `rorqual bench pages` has them, and bytes of a page."""
    points = []
    for tokens in (max(PAGE, length // 8), length):
        setup = TransferSetup(str(model_folder(None)), tokens, PAGE, repeats=15)
        found = page_transfers.bench(setup)
        points.append((float(found.bytes), median(found.transports[0].pages)))
    return PageTimes.fit(points), points[-1][0] / (length // PAGE)


# ---- predictions


def deployment(name: str, known: Constants) -> Deployment:
    costs = known.costs()
    one = Pool("all", known.scheduler, costs, steps_in_flight=1)
    if name == "replicas":
        return Deployment((replace(one, replicas=2),), delivery=known.delivery)
    most = known.scheduler.max_num_batched_tokens + SEQS * known.scheduler.max_model_len
    arrives = replace(known.scheduler, max_num_batched_tokens=most, prefix_caching=False)
    pools = (
        replace(one, name="prefill", first_only=True),
        replace(one, name="decode", scheduler=arrives, remote=True),
    )
    return Deployment(pools, known.transfer, known.delivery, redraws=True)


def predicted(name: str, known: Constants, load: Workload) -> dict[str, float]:
    """tokens/s, and milliseconds."""
    found = outcome(Simulation(deployment(name, known), load, 0).run())
    assert found.itl is not None
    return {
        "tokens_s": found.output_rate,
        "ttft_p50": 1e3 * found.ttft.p50,
        "ttft_p99": 1e3 * found.ttft.p99,
        "itl_p50": 1e3 * found.itl.p50,
        "itl_p99": 1e3 * found.itl.p99,
    }


@dataclass(frozen=True)
class Load:
    """rate: requests/s, as Poisson arrivals; None: `streams` at a time."""

    label: str
    shape: tuple[int, int]
    count: int
    rate: float | None = None
    streams: int = 0

    def sent(self) -> ArrivalLoad:
        return ArrivalLoad(self.streams) if self.rate is None else ArrivalLoad(rate=self.rate)

    def simulated(self, folder: Path) -> Workload:
        """With the same arrivals."""
        length, output = self.shape
        lengths = [LengthDistribution("fixed", float(tokens)) for tokens in self.shape]
        if self.rate is None:
            closed = Arrivals("closed", clients=self.streams)
            return Workload(closed, lengths[0], lengths[1], requests=self.count)
        times = self.sent().arrivals(np.random.default_rng(0), self.count)
        rows = [
            {"timestamp": 1e3 * at, "input_length": length, "output_length": output} for at in times
        ]
        path = folder / "trace.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Workload(trace=str(path))


# ---- both


@dataclass
class Row:
    """Medians of what was measured, and what was said before."""

    load: Load
    name: str
    predicted: dict[str, float]
    turns: list[dict[str, float]] = field(default_factory=list)

    @property
    def measured(self) -> dict[str, float]:
        return {key: median(turn[key] for turn in self.turns) for key in (*FIGURES, "carried")}


def rows_of(load: Load, known: Constants, where: Deployed, turns: int, folder: Path) -> list[Row]:
    work = load.simulated(folder)
    rows = [Row(load, name, predicted(name, known, work)) for name in NAMES]
    for turn in range(turns):
        for row in rows if turn % 2 else rows[::-1]:
            prompts = made_prompts(
                load.count, load.shape, crc32(f"{load.label} {row.name} {turn}".encode())
            )
            before = where.spent(row.name)
            turn_found = measured(played(getattr(where, row.name), prompts, load.sent()))
            spent = [now - b for now, b in zip(where.spent(row.name), before, strict=True)]
            turn_found["carried"] = load.count * load.shape[1] / busiest(row.name, spent)
            row.turns.append(turn_found)
    for row in rows:
        print_row(row)
    return rows


def busiest(name: str, spent: list[float]) -> float:
    """Seconds that two cores of their own would take at least: the router shares them, and two
    replicas share the work."""
    first, second, router = spent
    return (max(first, second) if name == "apart" else (first + second) / 2) + router / 2


def error(predicted: float, measured: float) -> float:
    """As a share. Where two tokens come in one read the gap between them is 0."""
    return predicted / measured - 1 if measured else math.inf


def print_row(row: Row) -> None:
    shown = "  ".join(
        f"{row.measured[key]:9.1f} ({error(row.predicted[key], row.measured[key]):+5.0%})"
        for key in FIGURES
    )
    carried = row.measured["carried"]
    print(f"{row.load.label:16} {row.name:9} {shown}  {carried:9.1f}", flush=True)


def run_shape(shape: tuple[int, int], asked: argparse.Namespace) -> dict[str, Any]:
    longest = sum(shape) + PAGE
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as name,
        deployed(longest, (first, second), Path(name)) as where,
    ):
        for url in (where.replicas, where.apart):
            played(url, made_prompts(8, shape, 0), ArrivalLoad(8))
        known = constants(StepTimes(longest), first, where, shape)
        print(
            f"\n{shape[0]} tokens in, {shape[1]} out; load of the machine {os.getloadavg()[0]:.1f}"
        )
        print(json.dumps(known.told()))
        print(f"{'':26}" + "  ".join(f"{key:>17}" for key in FIGURES) + "    carried", flush=True)
        peak = Load("peak", shape, asked.requests, streams=asked.streams)
        rows = rows_of(peak, known, where, asked.turns, Path(name))
        most = rows[0].measured["tokens_s"] / shape[1]
        for share in SHARES:
            label = f"{share:.0%}, {share * most:.2f}/s"
            load = Load(label, shape, asked.requests, share * most)
            rows += rows_of(load, known, where, asked.turns, Path(name))
        return {
            "shape": shape,
            "constants": known.told(),
            "rows": [{**asdict(row), "measured": row.measured} for row in rows],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=60, help="of each run")
    parser.add_argument("--streams", type=int, default=16, help="at a time, for the peak")
    parser.add_argument("--turns", type=int, default=3, help="medians are over so many")
    parser.add_argument("--shapes", default="1024:64,256:256", help="tokens in:out, ...")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    shapes = [tuple(int(part) for part in text.split(":")) for text in asked.shapes.split(",")]
    print(
        f"measured, and in parentheses how far off the prediction was; ms; load {os.getloadavg()}"
    )
    found = [run_shape((length, output), asked) for length, output in shapes]
    errors = {
        key: fmean(
            abs(error(row["predicted"][key], row["measured"][key]))
            for one in found
            for row in one["rows"]
        )
        for key in FIGURES
    }
    print("mean error of predictions: " + ", ".join(f"{k} {v:.0%}" for k, v in errors.items()))
    if asked.json:
        asked.json.write_text(json.dumps({"shapes": found, "errors": errors}, indent=1) + "\n")


if __name__ == "__main__":
    main()
