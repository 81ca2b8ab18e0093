"""`rorqual bench calibrate --full`: the times of our kernels as the planner reads them, with the
digests of the kernels, this GPU and the versions.

The file grows while it is written and a further call goes on where the last one stopped: rows of
this GPU's kind, these versions and these kernels stay, others are measured anew.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rorqual.bench.kernel_times.rows import TimedRow, complete, rows, tables
from rorqual.bench.provenance import client_facts, local_cards
from rorqual.config.hardware import load_device
from rorqual.errors import ConfigError
from rorqual.planner.timing import digests
from rorqual.planner.timing.tables import load_tables

Timer = Callable[[TimedRow], float]
SAVED_EVERY = 20  # seconds
BASE = "h200_sglang"  # lends collectives and what a file lacks, on a GPU of its own kind alone


def run(
    device: str, out: Path, limit: float, only: str | None, timer: Timer, conditions: dict[str, str]
) -> tuple[int, int]:
    """Measures what `out` lacks and writes it, for at most about `limit` seconds. device: the GPU
    as the planner calls it; only: comma-separated parts of rows' names; conditions: what must be
    the same for rows to stay. Returns rows held and rows wanted."""
    load_device(device)
    wanted = [row for row in rows() if _asked(row, only)]
    if not wanted:
        raise ConfigError(f"only={only!r} names no row; `--list` prints them")
    measured, failed = _kept(out, device, conditions)
    began = saved = time.monotonic()
    for row in wanted:
        if row in measured:
            continue
        if time.monotonic() - began > limit:
            break
        try:
            measured[row] = round(timer(row), 3)
            failed.pop(row.name, None)
        except Exception as error:
            if "CUDA error" in str(error):  # nothing further can be measured by this process
                raise
            failed[row.name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(f"{row.name}: FAILED {failed[row.name]}", file=sys.stderr, flush=True)
            continue
        print(f"{row.name:60}{measured[row]:10.2f} us", flush=True)
        if time.monotonic() - saved > SAVED_EVERY:
            _write(out, device, conditions, measured, failed)
            saved = time.monotonic()
    _write(out, device, conditions, measured, failed)
    return sum(row in measured for row in wanted), len(wanted)


def _asked(row: TimedRow, only: str | None) -> bool:
    return only is None or any(word in row.name for word in only.split(",") if word)


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


def _kept(
    out: Path, device: str, conditions: Mapping[str, str]
) -> tuple[dict[TimedRow, float], dict[str, str]]:
    if not out.is_file():
        return {}, {}
    try:
        data = json.loads(out.read_text())
        meta = data["meta"]
        found = [(TimedRow(row[0], row[1], tuple(row[2])), row[3], row[4]) for row in data["rows"]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{out} is no file of calibrate --full: {error!r}") from None
    if meta["device"] != device or meta["conditions"] != dict(conditions):
        raise ConfigError(
            f"{out} is of {meta['device']}, {meta['conditions']}; here it is {device}, "
            f"{dict(conditions)}. Name another file"
        )
    present = digests.present()
    return {row: us for row, us, digest in found if present[row.family] == digest}, {}


def _write(
    out: Path,
    device: str,
    conditions: Mapping[str, str],
    measured: Mapping[TimedRow, float],
    failed: Mapping[str, str],
) -> None:
    present = digests.present()
    facts = client_facts(("torch", "triton"))
    data: dict[str, Any] = {
        "meta": {
            "engine": "rorqual",
            "device": device,
            "base": BASE if load_tables(BASE).device == device else None,
            "unit": "us",
            "source": f"{conditions['card']}, torch {conditions['torch']}, triton "
            f"{conditions['triton']}, driver {conditions['driver']}, commit {facts['git_commit']}, "
            f"{facts['date']}, {' '.join(facts['command'])}",
            "condition": "CUDA graph replay over rotated buffers; experts drawn uniformly",
            "conditions": dict(conditions),
            "commit": facts["git_commit"],
            "kernels": {name: present[name] for name in sorted(complete(measured))},
            "failed": dict(failed),
        },
        **tables(measured),
        "rows": [
            [row.family, row.dtype, row.key, us, present[row.family]]
            for row, us in measured.items()
        ],
    }
    part = out.with_name(out.name + ".part")
    part.write_text(json.dumps(data, indent=None, separators=(",", ":")))
    os.replace(part, out)
