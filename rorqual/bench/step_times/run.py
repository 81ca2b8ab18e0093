"""`rorqual bench steps`: times of whole steps that predictions are judged on, and those that
`bench calibrate --full` learns from. The file grows, and a further call goes on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, Protocol

from rorqual.bench.provenance import client_facts
from rorqual.bench.step_times.measure import DoesNotFit
from rorqual.bench.step_times.rows import by_engine
from rorqual.config.whole_file import write_whole
from rorqual.errors import ConfigError, RorqualError
from rorqual.planner.timing import digests
from rorqual.planner.timing.timed_steps import StepMeasurement, TimedStep, read, rows_of


class Timer(Protocol):
    def measure(self, row: TimedStep) -> StepMeasurement: ...

    def close(self) -> None: ...


Rates = Mapping[str, float]
MakeTimer = Callable[[list[TimedStep]], Timer]


def time_steps(
    wanted: Iterable[TimedStep],
    make: MakeTimer,
    until: float,
    known: dict[TimedStep, StepMeasurement],
    on_progress: Callable[[], None],
) -> dict[str, str]:
    """Adds to `known` what it lacks, engine by engine, until time.monotonic() is past `until`;
    calls `on_progress` after each engine. Returns what does not fit on this GPU, or failed, by
    name."""
    left: dict[str, str] = {}
    missing = [row for row in wanted if row not in known]
    for engine, rows in by_engine(missing):
        if time.monotonic() > until:
            break
        try:
            timer = make(rows)
        except RorqualError as error:
            left.update((row.name, f"does not start: {error}") for row in rows)
            print(f"{engine}: {error}", file=sys.stderr, flush=True)
            continue
        try:
            for row in rows:
                if time.monotonic() > until:
                    break
                try:
                    known[row] = timer.measure(row)
                except DoesNotFit as error:
                    left[row.name] = f"does not fit: {error}"
                    print(f"{row.name}: {left[row.name]}", flush=True)
                    continue
                print(f"{row.name:60}{known[row].ms:10.3f} ms", flush=True)
        finally:
            timer.close()
        on_progress()
    return left


def run(
    device: str,
    out: Path,
    limit: float,
    wanted: list[TimedStep],
    make: MakeTimer,
    conditions: dict[str, str],
    rates: Rates,
) -> tuple[int, int]:
    """Writes `out`; device: the GPU as the planner calls it; rates: what it reaches in this run.
    Returns rows that are timed or do not fit, and rows wanted."""
    known, left, kept = _kept(out, device, conditions)

    def write() -> None:
        facts = client_facts(("torch", "triton"))
        data = {
            "meta": {
                "device": device,
                "conditions": conditions,
                "commit": facts["git_commit"],
                "date": facts["date"],
                "command": " ".join(facts["command"]),
                "rates": dict(kept or rates),
                "left_out": left,
                "kernels": dict(digests.present()),
            },
            "rows": [[*astuple(row), *measured] for row, measured in known.items()],
        }
        replace_file(out, data)

    fitting = [row for row in wanted if row.name not in left]
    left |= time_steps(fitting, make, time.monotonic() + limit, known, write)
    write()
    return sum(row in known or row.name in left for row in wanted), len(wanted)


def _kept(
    out: Path, device: str, conditions: Mapping[str, str]
) -> tuple[dict[TimedStep, StepMeasurement], dict[str, str], Rates]:
    if not out.is_file():
        return {}, {}, {}
    data = read(out)
    meta = data["meta"]
    check_conditions(out, meta, device, conditions)
    if meta.get("kernels") != digests.present():
        return {}, {}, {}  # of other kernels
    return rows_of(data), dict(meta["left_out"]), meta["rates"]


def check_conditions(
    out: Path, meta: Mapping[str, Any], device: str, conditions: Mapping[str, str]
) -> None:
    """Raises ConfigError where a file that is to go on is of another GPU or other versions."""
    if meta["device"] != device or meta["conditions"] != dict(conditions):
        raise ConfigError(
            f"{out} is of {meta['device']}, {meta['conditions']}; here it is {device}, "
            f"{dict(conditions)}. Name another file"
        )


def replace_file(out: Path, data: Mapping[str, Any]) -> None:
    """All of it or nothing: a run may be cut short at any time."""
    write_whole(out, json.dumps(data, separators=(",", ":")))
