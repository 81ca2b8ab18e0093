"""What the simulator needs to know of servers on a CPU before it can say what they will bring: the
times of one engine's steps in this process; and, from requests one at a time and some together,
what the servers, the router and the client add to them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any

from engine_steps import StepDriver
from served_load import made_prompts
from servers_on_cores import BUDGET, PAGE, SEQS, Deployed, on_core, others, played

from rorqual import LLM
from rorqual.bench.serving.client import Client, RequestRecord, ServerTarget
from rorqual.bench.serving.load import ArrivalLoad, drive

ROWS = (0, 1, 4, 12, 32)
STREAMS = 16  # of each server, whose steps tell what a server adds
TINY = 16  # tokens of their prompts
LENGTHS = (256, 1024)  # of prompts that tell what a request adds
WAITING = 8  # prompts at a time, where they are to wait for each other
ONE_BY_ONE = 24  # such requests; half as many before them are not counted


class StepTimes(StepDriver):
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
        super().__init__(llm.engine)
        self.llm = llm
        self.scheduler = replace(self.engine.scheduler.config, max_num_batched_tokens=BUDGET)

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
        tokens = self.prompt(length)
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
