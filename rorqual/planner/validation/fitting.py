"""Two parameters of the profile `sglang` that are in no table are fitted on half of the published
rows: the experts' time relative to the kernels' table, and the number of steps already launched
when a prompt arrives. A hash of a row's name decides its half; errors are reported for the other
half.

    python -m rorqual.planner.validation.fitting

fits both again and prints the errors of either half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from rorqual.planner.timing.profiles import Profile, load_profile
from rorqual.planner.validation.closed_loop import Loop, play
from rorqual.planner.validation.published import model_of_row, published_rows

GROUPS = ("inferencex-1k", "inferencex-8k")
FACTORS = tuple(round(0.7 + step / 100, 2) for step in range(31))
QUEUED = tuple(step / 2 for step in range(31))
Row = tuple[str, int]  # group, clients


@lru_cache(maxsize=1)
def fitted_rows() -> frozenset[Row]:
    """Those that numbers are chosen on: the lower half by SHA-256 of "GROUP CLIENTS"."""
    rows = [(group, row["clients"]) for group in GROUPS for row in published_rows()[group]["rows"]]
    rows.sort(key=lambda row: hashlib.sha256(f"{row[0]} {row[1]}".encode()).hexdigest())
    return frozenset(rows[: len(rows) // 2])


def errors(profile: Profile, rows: Sequence[Row]) -> dict[Row, tuple[float, float]]:
    """Relative errors of TPOT and TTFT under a variant of the profile."""
    found = {}
    for name, clients in rows:
        group: Mapping[str, Any] = {**published_rows()[name], "kernels": None}
        row = next(row for row in group["rows"] if row["clients"] == clients)
        model = replace(model_of_row(group, row), profile=profile)
        loop = Loop(clients, group["prompt"], group["output"], ratio=group["ratio"])
        result = play(model, loop)
        tpot = result.tpot * 1e3 / row["tpot_ms"] - 1
        found[name, clients] = tpot, result.ttft * 1e3 / row["ttft_ms"] - 1
    return found


def loss(profile: Profile, metric: int) -> float:
    """Mean absolute error over the half that numbers are chosen on. metric: 0 TPOT, 1 TTFT."""
    return fmean(abs(each[metric]) for each in errors(profile, sorted(fitted_rows())).values())


def fit() -> tuple[float, float]:
    """(expert_factor with the least error of TPOT, then queued_steps with the least of TTFT)."""
    base = load_profile("sglang")
    factor = min(FACTORS, key=lambda each: loss(replace(base, expert_factor=each), 0))
    given = replace(base, expert_factor=factor)
    return factor, min(QUEUED, key=lambda each: loss(replace(given, queued_steps=each), 1))


def main() -> None:
    factor, queued = fit()
    print(f"expert_factor {factor}, queued_steps {queued}")
    profile = replace(load_profile("sglang"), expert_factor=factor, queued_steps=queued)
    rows = [(name, row["clients"]) for name in GROUPS for row in published_rows()[name]["rows"]]
    for (name, clients), (tpot, ttft) in errors(profile, rows).items():
        half = "chosen on" if (name, clients) in fitted_rows() else "held out"
        print(f"{name} {clients:3} clients, {half}: TPOT {tpot:+.1%}, TTFT {ttft:+.1%}")


if __name__ == "__main__":
    main()
