"""`rorqual bench calibrate --full`: our kernels' times for the planner, and the rest of a whole
engine's step, with the digests of the kernels, this GPU and the versions.

The file is written as rows are measured, and another call continues: rows of this GPU model, these
versions and these kernels are kept, others are measured again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from rorqual.bench.kernel_times.rows import TimedRow, complete, rows, tables
from rorqual.bench.provenance import client_facts, local_cards
from rorqual.bench.step_times.rows import asked, steps
from rorqual.bench.step_times.run import (
    MakeTimer,
    check_conditions,
    replace_file,
    time_steps,
)
from rorqual.config.hardware import load_device
from rorqual.errors import ConfigError
from rorqual.planner.timing import digests
from rorqual.planner.timing.between import learn
from rorqual.planner.timing.tables import BETWEEN, KernelTables, load_tables
from rorqual.planner.timing.timed_steps import StepMeasurement, TimedStep

Timer = Callable[[TimedRow], float]
Kept = tuple[dict[TimedRow, float], dict[TimedStep, StepMeasurement], Mapping[str, float]]
SAVED_EVERY = 20  # seconds
BASE = "h200_sglang"  # supplies collectives and missing rows, only on a GPU of the same model


def run(
    device: str,
    out: Path,
    limit: float,
    only: str | None,
    timer: Timer,
    conditions: dict[str, str],
    engines: MakeTimer | None = None,
    rates: Mapping[str, float] | None = None,
) -> tuple[int, int]:
    """Measures what `out` lacks and writes it, for at most about `limit` seconds. device: the GPU
    as the planner calls it; only: comma-separated parts of rows' names; conditions: what must be
    the same for rows to stay; engines: times steps of whole engines, without which none are;
    rates: what this GPU reaches in this run. Returns rows held and rows wanted."""
    load_device(device)
    wanted = [row for row in rows() if asked(row.name, only)]
    whole = [step for step in steps(learnt=True) if asked(step.name, only)] if engines else []
    if not wanted and not whole:
        raise ConfigError(f"only={only!r} names no row; `--list` prints them")
    file = _File(out, device, conditions, rates or {})
    file.measure(wanted, timer, limit)
    if engines and whole:
        file.measure_steps(whole, engines, limit)
    file.write()
    held = sum(row in file.rows for row in wanted)
    held += sum(step in file.steps or step.name in file.left_out for step in whole)
    return held, len(wanted) + len(whole)


class _File:
    """What is measured so far."""

    def __init__(
        self, out: Path, device: str, conditions: dict[str, str], rates: Mapping[str, float]
    ):
        self.out = out
        self.device = device
        self.conditions = conditions
        self.rows, self.steps, kept = _kept(out, device, conditions)
        self.rates = kept or rates  # most rows are of the first run
        self.failed: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.began = time.monotonic()

    def measure(self, wanted: list[TimedRow], timer: Timer, limit: float) -> None:
        saved = self.began
        for row in wanted:
            if row in self.rows:
                continue
            if time.monotonic() - self.began > limit:
                break
            try:
                self.rows[row] = round(timer(row), 3)
            except Exception as error:
                if "CUDA error" in str(error):  # nothing further can be measured by this process
                    raise
                self.failed[row.name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                print(f"{row.name}: FAILED {self.failed[row.name]}", file=sys.stderr, flush=True)
                continue
            print(f"{row.name:60}{self.rows[row]:10.2f} us", flush=True)
            if time.monotonic() - saved > SAVED_EVERY:
                self.write()
                saved = time.monotonic()

    def measure_steps(self, wanted: list[TimedStep], engines: MakeTimer, limit: float) -> None:
        until = self.began + limit
        self.left_out |= time_steps(wanted, engines, until, self.steps, self.write)

    def _complete(self) -> set[str]:
        there = {*self.steps, *(step for step in steps(True) if step.name in self.left_out)}
        return complete(self.rows) | ({BETWEEN} if there >= set(steps(learnt=True)) else set())

    def write(self) -> None:
        present = digests.present()
        whole = self._complete()
        facts = client_facts(("torch", "triton"))
        given = self.conditions
        data: dict[str, Any] = {
            "meta": {
                "engine": "rorqual",
                "device": self.device,
                "base": BASE if load_tables(BASE).device == self.device else None,
                "unit": "us",
                "source": f"{given['card']}, torch {given['torch']}, triton {given['triton']}, "
                f"driver {given['driver']}, commit {facts['git_commit']}, {facts['date']}, "
                f"{' '.join(facts['command'])}",
                "condition": "CUDA graph replay over rotated buffers; experts drawn uniformly",
                "conditions": given,
                "rates": dict(self.rates),
                "commit": facts["git_commit"],
                "kernels": {name: present[name] for name in sorted(whole)},
                "failed": self.failed,
                "left_out": self.left_out,
            },
            **tables(self.rows),
            "rows": [
                [row.family, row.dtype, row.key, us, present[row.family]]
                for row, us in self.rows.items()
            ],
            "steps": [
                [*astuple(step), *measured, present[BETWEEN]]
                for step, measured in self.steps.items()
            ],
        }
        if {BETWEEN, *(row.family for row in rows())} == whole:
            base = load_tables(BASE) if data["meta"]["base"] else None
            data["between"] = learn(self.steps, self.device, KernelTables(data, base))
        replace_file(self.out, data)


def conditions_here() -> dict[str, str]:
    """What a time depends on besides the kernels: this GPU and these versions."""
    import torch
    import triton

    from rorqual.ops.triton.runtime.tuning import card_of

    card = card_of(torch.device("cuda"))
    own = card is not None and card.file.is_file()
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": (local_cards() or ["unknown"])[0].rpartition(",")[2].strip(),
        "own_tuning": "yes" if own else "no",
    }


def _kept(out: Path, device: str, conditions: Mapping[str, str]) -> Kept:
    if not out.is_file():
        return {}, {}, {}
    try:
        data = json.loads(out.read_text())
        meta = data["meta"]
        found = [(TimedRow(row[0], row[1], tuple(row[2])), row[3], row[4]) for row in data["rows"]]
        whole = [(TimedStep(*row[:7]), StepMeasurement(*row[7:9]), row[9]) for row in data["steps"]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{out} is no file of calibrate --full: {error!r}") from None
    check_conditions(out, meta, device, conditions)
    present = digests.present()
    known = {*rows()}
    kept = {row: us for row, us, digest in found if row in known and present[row.family] == digest}
    steps_kept = {step: ms for step, ms, digest in whole if present[BETWEEN] == digest}
    return kept, steps_kept, meta["rates"] if kept or steps_kept else {}
