"""Predictions compared with steps of this engine timed by `rorqual bench steps`, none of which the
tables were made from. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rorqual.config.hardware import DATA
from rorqual.errors import ConfigError
from rorqual.planner.timing import digests
from rorqual.planner.timing.between import step_model
from rorqual.planner.timing.profiles import Profile, load_profile, with_kernels
from rorqual.planner.timing.roofline import StepModel
from rorqual.planner.timing.tables import STALE
from rorqual.planner.timing.timed_steps import StepMeasurement, TimedStep, read, rows_of
from rorqual.planner.validation.points import ValidationGroup, ValidationPoint

TARGETS = {"decode": "5 %, worst 10 %", "prompts": "8 %", "mixed": "8 %"}  # of the tables' GPU
SHIPPED = DATA / "measured"


def own_groups(path: Path, kernels: str | None) -> list[ValidationGroup]:
    """One for each engine and kind of step in the file. kernels: a file of times in place of the
    shipped ones of that GPU."""
    data = read(path)
    meta = data["meta"]
    profile = with_kernels(load_profile("rorqual"), kernels)
    tables = profile.kernel_tables()
    assert tables is not None, "our own profile has tables"
    if meta["device"] not in (*profile.devices, *profile.scales_to):
        raise ConfigError(
            f"{path} is of {meta['device']}, the times of {tables.source} are of {tables.device}; "
            "--kernels names others"
        )
    grouped: dict[tuple[Any, ...], dict[TimedStep, StepMeasurement]] = {}
    for step, measured in rows_of(data).items():
        grouped.setdefault((*step.engine, step.kind), {})[step] = measured
    return [_group(steps, meta, profile) for steps in grouped.values()]


def shipped_groups() -> list[ValidationGroup]:
    """For the shipped files, each with the shipped times of its GPU."""
    return [
        group for path in sorted(SHIPPED.glob("steps_*.json")) for group in own_groups(path, None)
    ]


def _group(
    steps: Mapping[TimedStep, StepMeasurement],
    meta: Mapping[str, Any],
    profile: Profile,
) -> ValidationGroup:
    first = next(iter(steps))
    device = meta["device"]
    model = step_model(first, device, profile)
    points = []
    for step, measured in steps.items():
        seconds = sum(model.step(work).seconds for work in step.works(measured.context))
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
        _older(model, meta),
        unrecorded="kernels" not in meta,
    )


def _older(model: StepModel, meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Kernels that the model costs and that have changed since the file's steps were measured."""
    measured = meta.get("kernels")
    if measured is None:
        return ()
    now = digests.present()
    costed = [family for family in model.families() if family in now]
    return tuple(family for family in costed if measured.get(family) != now[family])
