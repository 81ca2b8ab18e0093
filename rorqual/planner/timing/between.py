"""The part of a step's time that individually timed kernels do not cover, per layer: measured steps
of whole engines minus the kernels' times. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from rorqual.config.hardware import load_device
from rorqual.config.parallel import ParallelConfig
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.parallel_costs import rank_step
from rorqual.planner.timing.profiles import Profile, load_profile
from rorqual.planner.timing.roofline import StepModel
from rorqual.planner.timing.tables import KernelTables, between_key
from rorqual.planner.timing.timed_steps import StepMeasurement, TimedStep


def step_model(
    step: TimedStep, device: str, profile: Profile, tables: KernelTables | None = None
) -> StepModel:
    overrides = {"num_hidden_layers": step.layers} if step.layers else None
    config = published(step.model, step.quant, overrides)
    return StepModel(config, ParallelConfig(), load_device(device), profile, tables=tables)


def learn(
    steps: Mapping[TimedStep, StepMeasurement], device: str, tables: KernelTables
) -> dict[str, list[list[float]]]:
    """The section `between` of a file of times: [tokens, us a layer] by attention, the experts'
    weights and phase, sorted; the mean where several models or steps say something of one. Steps
    of more than one part are left out."""
    profile = load_profile("rorqual")
    sums: dict[str, dict[int, list[float]]] = {}
    for step, measured in steps.items():
        works = step.works(measured.context)
        if len(works) > 1:
            continue
        model = step_model(step, device, profile, tables)
        ops = rank_step(model.config, model.sizes, works[0], model.fmt).ops
        layers, kind, phase = model.between_of(ops, works[0])
        rest = (measured.ms * 1e3 - model.kernels(works[0]) * 1e6) / layers
        key = between_key(*kind, phase)
        sums.setdefault(key, {}).setdefault(works[0].tokens, []).append(rest)
    return {
        key: [[at, round(sum(found) / len(found), 3)] for at, found in sorted(rows.items())]
        for key, rows in sums.items()
    }
