"""Predictions beside steps of this engine that `rorqual bench steps` timed, none of them among
those that the tables were made of. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rorqual.config.hardware import DATA
from rorqual.errors import ConfigError
from rorqual.planner.timing.between import rates_ratio, step_model
from rorqual.planner.timing.profiles import Profile, load_profile, with_kernels
from rorqual.planner.timing.tables import STALE, KernelTables
from rorqual.planner.timing.timed_steps import Measured, TimedStep, read, rows_of
from rorqual.planner.validation.points import ValidationGroup, ValidationPoint

TARGETS = {"decode": "5 %, worst 10 %", "prompts": "8 %", "mixed": "8 %"}
SHIPPED = DATA / "measured"


def own_groups(path: Path, kernels: str | None) -> list[ValidationGroup]:
    """One for each engine and kind of step in the file. kernels: a file of times in place of the
    shipped ones of that GPU."""
    data = read(path)
    meta = data["meta"]
    profile = own_profile(meta["device"], kernels)
    tables = profile.kernel_tables()
    assert tables is not None, "our own profile has tables"
    if tables.device != meta["device"]:
        raise ConfigError(
            f"{path} is of {meta['device']}, the times of {tables.source} are of {tables.device}; "
            "--kernels names others"
        )
    if tables.conditions.get("card") not in (None, meta["conditions"].get("card")):
        raise ConfigError(
            f"{path} was measured on {meta['conditions'].get('card')}, the times on "
            f"{tables.conditions.get('card')}"
        )
    grouped: dict[tuple[Any, ...], dict[TimedStep, Measured]] = {}
    for step, measured in rows_of(data).items():
        grouped.setdefault((*step.engine, step.kind), {})[step] = measured
    return [_group(steps, meta, profile, tables) for steps in grouped.values()]


def shipped_groups() -> list[ValidationGroup]:
    """Of the files that ship, each beside the shipped times of its GPU."""
    return [
        group for path in sorted(SHIPPED.glob("steps_*.json")) for group in own_groups(path, None)
    ]


def own_profile(device: str, kernels: str | None) -> Profile:
    """On the times in `kernels`, or on those that ship for that GPU."""
    if kernels is not None:
        return with_kernels(load_profile("rorqual"), kernels)
    shipped = DATA / f"kernels_{device}_rorqual.json"
    if device == "h200" or not shipped.is_file():
        return load_profile("rorqual")
    return with_kernels(load_profile("rorqual"), str(shipped))


def _group(
    steps: Mapping[TimedStep, Measured],
    meta: Mapping[str, Any],
    profile: Profile,
    tables: KernelTables,
) -> ValidationGroup:
    first = next(iter(steps))
    device = meta["device"]
    model = step_model(first, device, profile)
    slower = rates_ratio(meta["rates"], tables.rates) if tables.rates else {}
    points = []
    for step, measured in steps.items():
        seconds = 0.0
        for work in step.works(measured.context):
            found = model.step(work).by("limiter")
            seconds += sum(time * slower.get(limiter, 1.0) for limiter, time in found.items())
        label = step.name.removeprefix(first.model).strip()
        points.append(ValidationPoint(label, "step", "ms", measured.ms, seconds * 1e3))
    quant = "" if first.quant == "auto" else f"-{first.quant}"
    cut = f"-{first.layers}" if first.layers else ""
    left = [f"{name}: {why}" for name, why in meta["left_out"].items() if first.model in name]
    return ValidationGroup(
        f"steps-{device}-{first.model}{quant}{cut}-{first.kind}",
        f"this engine, {first.model}{quant}{cut}, {first.kind}, one {meta['conditions']['card']}",
        f"rorqual bench steps, torch {meta['conditions']['torch']}, triton "
        f"{meta['conditions']['triton']}",
        "; ".join(left),
        TARGETS[first.kind],
        "prediction",
        tuple(points),
        f"measured at commit {meta['commit']}, {meta['date'][:10]}, by `{meta['command']}`; not in "
        "the fit of the tables",
        model.families(STALE),
    )
