"""One server that computes prompts and one that answers, against two that do both, behind a router
each, on as many processor cores; and what the simulator says beforehand.

    python demo/apart_or_replicas.py --json apart.json

Each server has a core of its own (its engine one thread, its API process beside it); the router and
this client use what is left of both. Constants are measured first (apart_constants.py); then the
simulator says what each load will bring; then both deployments get the same requests, in turns. The
decode server sends the first token, as the simulator has it. Loads: `--streams` requests at a time
for the peak, then Poisson arrivals at shares of the peak that two plain servers reached. `carried`:
tokens/s of two cores that nothing else used, by the processor time that each server took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any
from zlib import crc32

import numpy as np
from apart_constants import LENGTHS, Constants, StepTimes, constants
from served_load import made_prompts
from servers_on_cores import (
    NAMES,
    PAGE,
    SEQS,
    Deployed,
    deployed,
    measured,
    on_core,
    others,
    played,
    shapes_of,
)

from rorqual.bench.serving.load import ArrivalLoad
from rorqual.engine.scheduling.chunk_controller import AUTO
from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.planner.simulator.cost_runner import HostTimes, MeasuredCosts
from rorqual.planner.simulator.results import outcome
from rorqual.planner.simulator.simulator import Deployment, Pool, Simulation
from rorqual.planner.simulator.workload import Arrivals, LengthDistribution, Workload

SHARES = (0.5, 0.7, 0.9)
FIGURES = ("tokens_s", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")

Figures = dict[str, float]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=60, help="of each run")
    parser.add_argument("--streams", type=int, default=16, help="at a time, for the peak")
    parser.add_argument("--turns", type=int, default=3, help="medians are over so many")
    parser.add_argument("--shapes", default="1024:64,256:256", help="tokens in:out, ...")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    print(
        f"measured, and in parentheses how far off the prediction was; ms; load {os.getloadavg()}"
    )
    found = run(shapes_of(asked.shapes), asked)
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
