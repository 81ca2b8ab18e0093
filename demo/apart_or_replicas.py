"""One server that computes prompts and one that answers, against two that do both, behind a router
each, on as many processor cores; and what the simulator says beforehand.

    python demo/apart_or_replicas.py --json apart.json

Each server has a core of its own (its engine one thread, its API process beside it); the router and
this client use what is left of both. Constants are measured first: steps of one engine in this
process, and with requests one at a time what the servers, the router and the client add to them;
then the simulator says what each load will bring; then both deployments get the same requests, in
turns. What is measured while other programs take a tenth of a processor (`others`) is measured
again, where a better moment comes soon. The decode server sends the first token, as the simulator
has it. Loads: `--streams` requests at a time for the peak, then
Poisson arrivals at shares of the peak that two plain servers reached. `carried`: tokens/s of two
cores that nothing else used, by the processor time that each server took.

    python demo/apart_or_replicas.py --first-token --requests 40 --turns 3

compares instead two routers before one prefill and one decode server: the first token of a stream
comes from the prefill server, or from the decode server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
from served_load import made_prompts, play, running_router

from rorqual import LLM
from rorqual.bench.serving.client import Client, RequestRecord, ServerTarget
from rorqual.bench.serving.launched_server import launched_server
from rorqual.bench.serving.load import ArrivalLoad, drive
from rorqual.bench.serving.prompts import Prompt
from rorqual.engine.engine import Engine
from rorqual.engine.scheduling.chunk_controller import AUTO
from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.planner.simulator.cost_runner import HostTimes, MeasuredCosts
from rorqual.planner.simulator.results import outcome
from rorqual.planner.simulator.simulator import Deployment, Pool, Simulation
from rorqual.planner.simulator.workload import Arrivals, LengthDistribution, Workload
from rorqual.request import Request, SamplingParams

PAGE = 16
SEQS = 64
BUDGET = 1024
SHARES = (0.5, 0.7, 0.9)
ROWS = (0, 1, 4, 12, 32)
STREAMS = 16  # of each server, whose steps tell what a server adds
TINY = 16  # tokens of their prompts
LENGTHS = (256, 1024)  # of prompts that tell what a request adds
WAITING = 8  # prompts at a time, where they are to wait for each other
ONE_BY_ONE = 24  # such requests; half as many before them are not counted
DISTURBED = 0.1  # processors that other programs take: what was measured is not kept
LOOK_SECONDS = 0.5
WAIT_SECONDS = 40.0  # for a better moment
NAMES = ("replicas", "apart")
FIGURES = ("tokens_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")

T = TypeVar("T")
Figures = dict[str, float]


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


def apart_options(prefill: str, decode: str, first_token: str) -> tuple[str, ...]:
    """Of a router. first_token: the server that it comes from."""
    servers = ("--prefill", prefill, "--decode", decode)
    return (*servers, "--prefill-from", "1", "--first-token", first_token)


def apart_roles(folder: Path) -> list[tuple[str, ...]]:
    """Options of the server that computes prompts, and of the one that answers."""
    secret = folder / "kv-secret"
    secret.write_bytes(os.urandom(32).hex().encode())
    apart = ("--kv-secret-file", str(secret), "--kv-port", "0", "--kv-peers", "127.0.0.1")
    return [("--role", "prefill", *apart), ("--role", "decode", *apart)]


@dataclass(frozen=True)
class Deployed:
    """Addresses: of both routers, and of the server that answers behind the second. processes: of
    each deployment its two servers, and its router."""

    replicas: str
    apart: str
    decode: str
    processes: dict[str, tuple[int, int, int]]

    def spent(self, name: str) -> list[float]:
        """Processor seconds of these so far."""
        return [processor_seconds(pid) for pid in self.processes[name]]


def processor_seconds(pid: int) -> float:
    """Of a process and those that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    own = time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)
    return own + sum(processor_seconds(int(child)) for child in children)


@contextmanager
def deployed(longest: int, cores: tuple[int, int], folder: Path) -> Iterator[Deployed]:
    """All four servers; the two that are not asked sleep."""
    roles = [(), (), *apart_roles(folder)]
    with ExitStack() as stack:
        urls, pids = [], []
        for number, role in enumerate(roles):
            with on_core(cores[number % 2]):
                started = launched_server([*options(longest), *role])
                server = stack.enter_context(started)
            urls.append(server.url)
            pids.append(server.pid)
        both = ("--replica", urls[0], "--replica", urls[1], "--policy", "least_loaded")
        split = apart_options(urls[2], urls[3], "decode")
        one, other = (
            stack.enter_context(running_router(folder / f"{name}.log", 2, 60, *given))
            for name, given in zip(NAMES, (both, split), strict=True)
        )
        processes = {
            "replicas": (pids[0], pids[1], one.pid),
            "apart": (pids[2], pids[3], other.pid),
        }
        yield Deployed(one.url, other.url, urls[3], processes)


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


# ---- other programs


def busy_seconds() -> float:
    """Of all processors, since the machine started."""
    with open("/proc/stat", encoding="utf-8") as file:
        user, nice, system, _, _, irq, soft, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def others(where: Deployed, work: Callable[[], T]) -> tuple[T, float]:
    """`work` while other programs take little, if that can be had soon; and the processors that
    they took meanwhile."""
    deadline = time.monotonic() + WAIT_SECONDS
    found = None
    while True:
        while _watched(where, lambda: time.sleep(LOOK_SECONDS))[1] > DISTURBED:
            if time.monotonic() > deadline:
                break
        again = _watched(where, work)
        if found is None or again[1] < found[1]:
            found = again
        if found[1] <= DISTURBED or time.monotonic() > deadline:
            return found


def _watched(where: Deployed, work: Callable[[], T]) -> tuple[T, float]:
    def ours() -> float:
        return sum(sum(where.spent(name)) for name in NAMES) + time.process_time()

    began = time.monotonic()
    before = busy_seconds() - ours()
    result = work()
    after = busy_seconds() - ours()
    return result, max(0.0, after - before) / (time.monotonic() - began)


# ---- constants


class StepTimes:
    """Of one engine in this process. scheduler: of every server, whose steps have fewer tokens than
    this one's at most."""

    def __init__(self, longest: int):
        llm = LLM(
            threads=1,
            max_num_seqs=SEQS,
            max_num_batched_tokens=BUDGET + max(ROWS),
            max_model_len=longest,
            page_size=PAGE,
            num_pages=SEQS * (-(-longest // PAGE) + 1),
            skip_tokenizer_init=True,
        )
        self.llm = llm
        self.engine: Engine = llm.engine
        self.scheduler = replace(self.engine.scheduler.config, max_num_batched_tokens=BUDGET)
        self.random = random.Random(0)
        self.count = 0

    def add(self, length: int, output: int) -> None:
        self.queue(tuple(self.random.randrange(10, 4000) for _ in range(length)), output)

    def queue(self, tokens: tuple[int, ...], output: int) -> None:
        self.count += 1
        params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        self.engine.add(Request(f"r{self.count}", tokens, params))

    def step(self) -> float:
        """Of processor time, which other programs of the machine change little."""
        start = time.process_time()
        self.engine.step()
        return time.process_time() - start

    def at(self, rows: int, prompt: int, length: int, times: int) -> float:
        """The mean over the chunks of `prompt` tokens that prompts of `length` have, of the median
        of some, while `rows` requests decode behind such prompts. Several prompts where they are
        shorter than the chunk."""
        (scheduler,) = self.engine.scheduler.schedulers
        for _ in range(rows):
            self.add(length, 4096)
        while scheduler.waiting or scheduler.prefilling:
            self.step()
        if prompt:
            self.engine.scheduler.prompt_budget = prompt
        runs = []
        for _ in range(times):
            for start in range(0, prompt, length):
                self.add(length if prompt <= length else min(length, prompt - start), 1)
            runs.append([self.step()])
            while scheduler.waiting or scheduler.prefilling:
                runs[-1].append(self.step())
        self.engine.scheduler.prompt_budget = BUDGET + max(ROWS)
        for name in list(scheduler.sequences):
            self.engine.abort(name)
        self.engine.scheduler.prefix.clear()
        whole = max(1, length // prompt) if prompt else 1  # not a rest, which is shorter
        return fmean(median(chunk) for chunk in zip(*(run[:whole] for run in runs), strict=True))

    def cached(self, length: int) -> float:
        """The median of prompts of `length` that are cached, all but the last page."""
        tokens = tuple(self.random.randrange(10, 4000) for _ in range(length))
        found = []
        for _ in range(ONE_BY_ONE):
            self.queue(tokens, 1)
            while self.engine.has_work:
                found.append(self.step())
        self.engine.scheduler.prefix.clear()
        return median(found)

    def table(self, length: int) -> dict[tuple[int, int], float]:
        prompts = sorted({0, PAGE, length // 4, BUDGET // 2, BUDGET})
        self.at(1, length // 4, length, 3)
        found = {}
        for rows in ROWS:
            for prompt in prompts:
                if rows or prompt:
                    found[rows, prompt] = self.at(rows, prompt, length, 4 if prompt else 20)
        return found


@dataclass(frozen=True)
class Line:
    """Seconds by tokens of a prompt, through two measured lengths."""

    at: tuple[float, float]

    def __call__(self, tokens: int) -> float:
        few, many = LENGTHS
        slope = (self.at[1] - self.at[0]) / (many - few)
        return max(0.0, self.at[0] + slope * (tokens - few))


def alone(where: Deployed, name: str, length: int) -> tuple[float, float]:
    """Of requests one at a time whose prompt is cached where it is computed, while the server that
    answers apart fetches its pages each time: seconds until the token, and processor seconds of the
    second server."""
    prompt = made_prompts(1, (length, 1), length)[0]
    target = ServerTarget(getattr(where, name))
    body = target.body(prompt)

    async def ask(count: int) -> list[RequestRecord]:
        records = []
        async with Client(target) as client, Client(ServerTarget(where.decode)) as other:
            for _ in range(count):
                status, text = await other.page("/reset_prefix_cache", "POST")
                if status != 200:
                    raise SystemExit(f"{where.decode}: {status} {text}")
                record = RequestRecord(length, 1, time.perf_counter())
                records.append(await client.send(body, record))
        return records

    asyncio.run(ask(ONE_BY_ONE // 2))
    before = where.spent(name)[1]
    records = asyncio.run(ask(ONE_BY_ONE))
    wrong = next((record.error for record in records if record.error), None)
    if wrong:
        raise SystemExit(f"{target.base_url}: a request failed: {wrong}")
    spent = (where.spent(name)[1] - before) / ONE_BY_ONE
    return median(record.ttft or 0.0 for record in records), spent


def each_prompt(where: Deployed, name: str, length: int, seed: int) -> float:
    """Seconds of one server that computes prompts between two of them, answered with a token, while
    several wait."""
    load = ArrivalLoad(WAITING)
    records = played(getattr(where, name), made_prompts(6 * WAITING, (length, 1), seed), load)
    ends = sorted(record.end for record in records)[WAITING:-WAITING]
    return (ends[-1] - ends[0]) / (len(ends) - 1) * (2 if name == "replicas" else 1)


def streamed_token(where: Deployed, length: int) -> float:
    """Seconds that a prompt takes longer apart for each token that the other server answers
    meanwhile: router and client wake for it on both cores, and leave the caches of the prompts'
    core colder. Half of the prompts' time is with such streams, of short prompts."""
    target = ServerTarget(where.apart)
    streams: list[RequestRecord] = []

    async def run(seed: int, beside: bool) -> tuple[float, float]:
        prompts = made_prompts(6 * WAITING, (length, 1), seed)
        long = made_prompts(6 * WAITING, (TINY, LENGTHS[0]), seed + 1)
        async with Client(target) as client:
            other = asyncio.create_task(
                drive(client, long, ArrivalLoad(2), [0.0] * len(long), streams.append)
            )
            if not beside:
                other.cancel()
            load = ArrivalLoad(WAITING)
            found = await drive(client, prompts, load, [0.0] * len(prompts))
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
        ends = sorted(record.end for record in found.records)[WAITING:-WAITING]
        tokens = sum(
            ends[0] <= at <= ends[-1]
            for record in {id(one): one for one in streams}.values()
            for at in record.chunks
        )
        streams.clear()
        return (ends[-1] - ends[0]) / (len(ends) - 1), tokens / (len(ends) - 1)

    found = []
    for turn in range(2):
        alone_each, _ = asyncio.run(run(1000 + turn, False))
        each, tokens = asyncio.run(run(2000 + turn, True))
        found.append((each - alone_each) / tokens)
    return max(0.0, fmean(found))


@dataclass(frozen=True)
class Constants:
    """Seconds. delivery: between an engine and a client, through the router, both ways together;
    transfer: from the end of a prompt's step until its pages are where its answer begins. request:
    that a prompt takes longer where others wait, than its step alone in this process, because the
    server's API process, router and client use the same core, and both cores the same memory; sent:
    likewise of the server that computes prompts apart, which also sends their pages. received:
    processor time of the server that answers, for a request besides its steps. step, row: that a
    step with decoding rows is longer in one of two servers than in this process, and for each row;
    beside_row: of it, processor time of router and client for a token; streamed: that prompts take
    longer apart for each token answered."""

    delivery: Line
    transfer: Line
    request: Line
    sent: Line
    received: Line
    beside_row: float
    streamed: float
    step: float
    row: float

    def told(self) -> dict[str, Any]:
        lines = ("delivery", "transfer", "request", "sent", "received")
        names = ("beside_row", "streamed", "step", "row")
        return {
            "lengths": LENGTHS,
            **{f"{name}_ms": [1e3 * s for s in getattr(self, name).at] for name in lines},
            **{f"{name}_us": 1e6 * getattr(self, name) for name in names},
        }


def constants(times: StepTimes, core: int, where: Deployed) -> Constants:
    found: dict[str, list[float]] = {
        name: [] for name in ("delivery", "transfer", "request", "sent", "received")
    }
    seeds = itertools.count(1)

    def prompts_of(name: str, length: int) -> float:
        """The median of some runs."""
        runs = [each_prompt(where, name, length, next(seeds)) for _ in range(3)]
        return median(runs)

    most = 0.0
    for length in LENGTHS:
        with on_core(core):
            again = times.cached(length)
            step = times.at(0, length, length, 9)
            token = times.at(1, 0, length, 20)
        measures: list[Callable[[], Any]] = [
            partial(alone, where, "replicas", length),
            partial(alone, where, "apart", length),
            partial(prompts_of, "replicas", length),
            partial(prompts_of, "apart", length),
        ]
        results = [others(where, measure) for measure in measures]
        most = max(most, *(busy for _, busy in results))
        (both, _), (apart, spent), replicas_each, apart_each = (result for result, _ in results)
        found["delivery"].append(both - again)
        found["transfer"].append(apart - both - token)
        found["request"].append(replicas_each - step)
        found["sent"].append(apart_each - step)
        found["received"].append(spent - token)
    lines = {name: Line((seconds[0], seconds[1])) for name, seconds in found.items()}
    with on_core(core):
        one, many = (times.at(rows, 0, TINY, 40) for rows in (1, STREAMS))
    (few, _), less = others(where, lambda: gap(where, 2))
    (full, beside), more = others(where, lambda: gap(where, 2 * STREAMS))
    streamed, beyond = others(where, lambda: streamed_token(where, LENGTHS[-1]))
    more = max(more, beyond)
    print(f"processors that other programs took meanwhile, at most: {max(most, less, more):.2f}")
    row = max(0.0, (full - many) - (few - one)) / (STREAMS - 1)
    step = max(0.0, few - one - row)
    return Constants(**lines, beside_row=beside, streamed=streamed, step=step, row=row)


def gap(where: Deployed, streams: int) -> tuple[float, float]:
    """Mean seconds between two tokens of so many streams over both replicas while all of them
    run; processor seconds of router and client for a token."""
    output = 128
    before = where.spent("replicas")[2] + time.process_time()
    records = played(where.replicas, made_prompts(streams, (TINY, output), 2), ArrivalLoad(streams))
    beside = where.spent("replicas")[2] + time.process_time() - before
    running = slice(output // 8, -output // 8)
    return fmean(s for record in records for s in record.itls[running]), beside / streams / output


# ---- predictions


@dataclass(frozen=True)
class Inputs:
    """Of a prediction: steps at (rows, prompt tokens), behind prompts as long as the load's."""

    steps: dict[tuple[int, int], float]
    known: Constants
    scheduler: SchedulerConfig

    def told(self) -> dict[str, float]:
        return {f"{r} rows, {p} new": 1e3 * s for (r, p), s in self.steps.items()}


def deployment(name: str, given: Inputs, shape: tuple[int, int]) -> Deployment:
    """Where one server answers all requests, what router and client take for its tokens is taken
    from both cores alike."""
    length, output = shape
    known = given.known
    delivery = known.delivery(length)
    request = known.request(length)
    host = HostTimes(known.step, known.row, request)
    costs = MeasuredCosts(given.steps)
    one = Pool("all", given.scheduler, costs, steps_in_flight=1, itl_ms=AUTO, host=host)
    if name == "replicas":
        return Deployment((replace(one, replicas=2),), delivery=delivery)
    most = given.scheduler.max_num_batched_tokens + SEQS * given.scheduler.max_model_len
    arrives = replace(given.scheduler, max_num_batched_tokens=most, prefix_caching=False)
    prompts = replace(host, request=known.sent(length) + output * known.streamed)
    answers = HostTimes(
        known.step,
        max(0.0, known.row - known.beside_row / 2),
        received=known.received(length),
    )
    pools = (
        replace(one, name="prefill", first_only=True, host=prompts),
        replace(one, name="decode", scheduler=arrives, remote=True, host=answers),
    )
    return Deployment(pools, lambda tokens: known.transfer(tokens), delivery, redraws=True)


def predicted(name: str, given: Inputs, shape: tuple[int, int], load: Workload) -> dict[str, float]:
    """tokens/s, and milliseconds."""
    found = outcome(Simulation(deployment(name, given, shape), load, 0).run())
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
        return {
            key: median(turn[key] for turn in self.turns) for key in (*FIGURES, "carried", "others")
        }


def rows_of(load: Load, given: Inputs, where: Deployed, turns: int, folder: Path) -> list[Row]:
    work = load.simulated(folder)
    rows = [Row(load, name, predicted(name, given, load.shape, work)) for name in NAMES]
    for turn in range(turns):
        for row in rows if turn % 2 else rows[::-1]:
            attempts = itertools.count()

            def turn_of(row: Row = row, turn: int = turn, attempts: Any = attempts) -> Figures:
                """No prompt twice: it would be cached."""
                seed = crc32(f"{load.label} {row.name} {turn} {next(attempts)}".encode())
                prompts = made_prompts(load.count, load.shape, seed)
                before = where.spent(row.name)
                found = measured(played(getattr(where, row.name), prompts, load.sent()))
                spent = [now - b for now, b in zip(where.spent(row.name), before, strict=True)]
                found["carried"] = load.count * load.shape[1] / busiest(row.name, spent)
                return found

            figures, busy = others(where, turn_of)
            row.turns.append({**figures, "others": busy})
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
    rest = f"{row.measured['carried']:9.1f}  {row.measured['others']:6.2f}"
    print(f"{row.load.label:16} {row.name:9} {shown}  {rest}", flush=True)


def run_shape(
    shape: tuple[int, int], given: Inputs, where: Deployed, asked: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    for url in (where.replicas, where.apart):
        played(url, made_prompts(8, shape, 0), ArrivalLoad(8))
    print(f"\n{shape[0]} tokens in, {shape[1]} out; load of the machine {os.getloadavg()[0]:.1f}")
    print(json.dumps(given.told()))
    print(
        f"{'':26}" + "  ".join(f"{key:>17}" for key in FIGURES) + "    carried  others", flush=True
    )
    peak = Load("peak", shape, asked.requests, streams=asked.streams)
    rows = rows_of(peak, given, where, asked.turns, folder)
    most = rows[0].measured["tokens_s"] / shape[1]
    for share in SHARES:
        label = f"{share:.0%}, {share * most:.2f}/s"
        load = Load(label, shape, asked.requests, share * most)
        rows += rows_of(load, given, where, asked.turns, folder)
    return {
        "shape": shape,
        "step_ms": given.told(),
        "rows": [{**asdict(row), "measured": row.measured} for row in rows],
    }


def run(shapes: list[tuple[int, int]], asked: argparse.Namespace) -> dict[str, Any]:
    longest = max(max(LENGTHS), *(sum(shape) for shape in shapes)) + PAGE
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as name,
        deployed(longest, (first, second), Path(name)) as where,
    ):
        times = StepTimes(longest)
        known = constants(times, first, where)
        print(json.dumps(known.told()))
        found = []
        for shape in shapes:
            with on_core(first):
                given = Inputs(times.table(shape[0]), known, times.scheduler)
            found.append(run_shape(shape, given, where, asked, Path(name)))
        return {"constants": known.told(), "shapes": found}


# ---- the first token from either server


def second_gap(records: list[RequestRecord]) -> float:
    """The median time from the first to the second token, in ms."""
    return 1e3 * median(record.itls[0] for record in records if record.itls)


def first_tokens(shapes: list[tuple[int, int]], asked: argparse.Namespace) -> None:
    """Prints, for each load, medians of the turns for both routers, which take turns: ms to the
    first token, from it to the second, and between tokens."""
    longest = max(sum(shape) for shape in shapes) + PAGE
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        urls = []
        for core, role in zip(cores, apart_roles(folder), strict=True):
            with on_core(core):
                started = launched_server([*options(longest), *role])
                urls.append(stack.enter_context(started).url)
        routers = {}
        for source in ("decode", "prefill"):
            given = apart_options(*urls, source)
            log = folder / f"{source}.log"
            routers[source] = stack.enter_context(running_router(log, 2, 60, *given)).url
        for shape in shapes:
            for rate in (None, *asked.rates):
                first_tokens_of(routers, shape, rate, asked)


def first_tokens_of(
    routers: dict[str, str],
    shape: tuple[int, int],
    rate: float | None,
    asked: argparse.Namespace,
) -> None:
    """rate: requests/s; None: one at a time."""
    load = ArrivalLoad(1) if rate is None else ArrivalLoad(rate=rate)
    turns: dict[str, list[dict[str, float]]] = {source: [] for source in routers}
    for turn in range(-1, asked.turns):
        for source, url in list(routers.items())[:: 1 if turn % 2 else -1]:
            seed = crc32(f"{shape} {rate} {turn} {source}".encode())
            records = played(url, made_prompts(asked.requests, shape, seed), load)
            if turn >= 0:  # the first ones warm up
                turns[source].append({**measured(records), "second": second_gap(records)})
    label = "one at a time" if rate is None else f"{rate:g} requests/s"
    for source, found in turns.items():
        shown = "  ".join(
            f"{key} {median(one[key] for one in found):.1f}"
            for key in ("ttft_p50", "ttft_p99", "second", "itl_p50", "itl_p99", "tokens_s")
        )
        print(f"{shape[0]}:{shape[1]}, {label}, first token from {source}: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=60, help="of each run")
    parser.add_argument("--streams", type=int, default=16, help="at a time, for the peak")
    parser.add_argument("--turns", type=int, default=3, help="medians are over so many")
    parser.add_argument("--shapes", default="1024:64,256:256", help="tokens in:out, ...")
    parser.add_argument("--first-token", action="store_true", help="compare routers instead")
    parser.add_argument("--rates", type=float, nargs="*", default=[7.2], help="with it: requests/s")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    shapes = [tuple(int(part) for part in text.split(":")) for text in asked.shapes.split(",")]
    if asked.first_token:
        print(f"medians of {asked.turns} turns, ms; load {os.getloadavg()}", flush=True)
        first_tokens([(length, output) for length, output in shapes], asked)
        return
    print(
        f"measured, and in parentheses how far off the prediction was; ms; load {os.getloadavg()}"
    )
    found = run([(length, output) for length, output in shapes], asked)
    errors = {
        key: fmean(
            abs(error(row["predicted"][key], row["measured"][key]))
            for one in found["shapes"]
            for row in one["rows"]
        )
        for key in FIGURES
    }
    print("mean error of predictions: " + ", ".join(f"{k} {v:.0%}" for k, v in errors.items()))
    if asked.json:
        asked.json.write_text(json.dumps({**found, "errors": errors}, indent=1) + "\n")


if __name__ == "__main__":
    main()
