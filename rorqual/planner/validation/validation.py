"""Predictions compared with published and measured figures, for `rorqual plan --validate`. Data:
data/published.yaml. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rorqual.errors import ConfigError
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.simulator.pools import PoolSettings, together
from rorqual.planner.simulator.results import outcome
from rorqual.planner.simulator.simulator import Simulation
from rorqual.planner.simulator.workload import Arrivals, LengthDistribution, Workload
from rorqual.planner.timing.roofline import StepModel, StepTime
from rorqual.planner.timing.tables import RENEWAL, STALE
from rorqual.planner.validation.closed_loop import Loop, play
from rorqual.planner.validation.fitting import GROUPS, fitted_rows
from rorqual.planner.validation.own_steps import own_groups, shipped_groups
from rorqual.planner.validation.points import ValidationGroup, ValidationPoint
from rorqual.planner.validation.published import model_of_row, published_rows


def _stale(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a step that decodes and one of prompts, as the rows' models would run them."""
    found: set[str] = set()
    for row in group["rows"]:
        model = model_of_row(group, row)
        if group["kind"] not in PROMPTS:
            model.step(GroupWork(BatchShape.decode(1, 1024)))
        if group["kind"] in (*PROMPTS, "closed_loop", "served"):
            model.step(GroupWork(None, (BatchShape(1, 1024),)))
        found.update(model.families(STALE))
    return tuple(sorted(found))


def _closed_loop(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    loop = Loop(row["clients"], group["prompt"], group["output"], ratio=group["ratio"])
    result = play(model_of_row(group, row), loop)
    label = f"{row['clients']} clients"
    chosen = group["name"] in GROUPS and (group["name"], row["clients"]) in fitted_rows()
    return [
        ValidationPoint(label, "TPOT", "ms", row["tpot_ms"], result.tpot * 1e3, fitted=chosen),
        ValidationPoint(label, "TTFT", "ms", row["ttft_ms"], result.ttft * 1e3, fitted=chosen),
    ]


def _served(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    """A server under so many streams that all begin at once, each with `waves` requests: played by
    the simulator, over the engine's own scheduler."""
    clients = row["clients"]
    model = model_of_row(group, row)
    workload = Workload(
        Arrivals("closed", clients=clients),
        LengthDistribution(mean=group["prompt"]),
        LengthDistribution(mean=group["output"]),
        requests=clients * row["waves"],
    )
    engine = PoolSettings(
        context=group["prompt"] + group["output"],
        max_num_seqs=group["max_num_seqs"],
        max_num_batched_tokens=model.profile.max_chunk,
    )
    result = outcome(Simulation(together(model, engine, 1), workload).run())
    assert result.tpot is not None
    assert result.itl is not None
    label = f"{clients} streams"
    return [
        ValidationPoint(label, "output", "tok/s", row["tokens_per_s"], result.output_rate),
        ValidationPoint(label, "TPOT", "ms", row["tpot_ms"], result.tpot.p50 * 1e3),
        ValidationPoint(label, "TTFT p50", "ms", row["ttft_ms"], result.ttft.p50 * 1e3),
        ValidationPoint(label, "TTFT p99", "ms", row["ttft_p99_ms"], result.ttft.p99 * 1e3),
        ValidationPoint(label, "ITL p99", "ms", row["itl_p99_ms"], result.itl.p99 * 1e3),
    ]


def _decode(group: Mapping[str, Any], row: Mapping[str, Any]) -> StepTime:
    both = {**group, **row}
    drafts = both.get("num_speculative_tokens", 0)
    return model_of_row(group, row).step(
        GroupWork(BatchShape.verify(both["clients"], both["context"], drafts), drafts=drafts)
    )


def hidden(time: StepTime) -> float:
    """Seconds where all of the network's time passes behind other work, or the network's where
    that is longer."""
    network = time.by("limiter").get("network", 0.0)
    return max(time.seconds - network, network)


def _step(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    return [
        ValidationPoint(
            f"{row['clients']} requests",
            "step",
            "ms",
            row["step_ms"],
            _decode(group, row).seconds * 1e3,
        )
    ]


def _prefill_time(
    group: Mapping[str, Any], row: Mapping[str, Any]
) -> tuple[StepModel, StepTime, int]:
    both = {**group, **row}
    model = model_of_row(group, row)
    work = GroupWork(None, (BatchShape(both["batch"], both["prompt"]),))
    return model, model.step(work), work.tokens


def _prefill(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    model, time, tokens = _prefill_time(group, row)
    label = row.get("model", f"{group['prompt']} tokens")
    return [
        ValidationPoint(
            label, "prefill", "tok/s", row["tokens_per_s"], tokens * model.sizes.dp / time.seconds
        )
    ]


def _prefill_step(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    """hides_network: two micro-batches, at best with the network's time behind the other's."""
    _, time, _ = _prefill_time(group, row)
    hides = row.get("hides_network", False)
    seconds = hidden(time) if hides else time.seconds
    label = f"prompts, {'two micro-batches' if hides else 'no overlap'}"
    return [ValidationPoint(label, "step", "ms", row["step_ms"], seconds * 1e3)]


def _prefill_rate(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    model, time, tokens = _prefill_time(group, row)
    node = tokens * model.device.link.span / model.sizes.tp
    return [
        ValidationPoint(
            f"{row['prompt']} tokens",
            "prefill",
            "tok/s a node",
            row["tokens_per_s"],
            node / time.seconds,
            node / hidden(time),
        )
    ]


def _decode_rate(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    time = _decode(group, row)
    node = row["clients"] * 8 * (1 + group.get("accepted", 0.0))
    return [
        ValidationPoint(
            f"{row['clients']} a GPU",
            "decode",
            "tok/s a node",
            row["tokens_per_s"],
            node / time.seconds,
            node / hidden(time),
        )
    ]


def _origin(given: Mapping[str, Any] | None) -> str:
    if given is None:
        return ""
    fitted = "in" if given["in_fit"] else "not in"
    command = given.get("command")
    how = f"by `{command}`" if command else "by a command that was not kept"
    return (
        f"measured at commit {given['commit']}, {given['date']}, {how}; {fitted} the fit of the "
        "tables"
    )


def stale_groups(groups: list[ValidationGroup]) -> list[str]:
    """Notes on predictions that use times of kernels that have changed, and on steps that were
    measured with other kernels than this commit's, or may have been."""
    return [*_stale_tables(groups), *_older_steps(groups), *_unrecorded(groups)]


def _unrecorded(groups: list[ValidationGroup]) -> list[str]:
    names = ", ".join(group.name for group in groups if group.unrecorded)
    if not names:
        return []
    return [
        "unrecorded kernels: figures of these groups were measured at an earlier commit, and with "
        f"which kernels was not kept: {names}",
        "to measure them again, on the GPU: the command that each group names",
    ]


def _older_steps(groups: list[ValidationGroup]) -> list[str]:
    families = sorted({family for group in groups for family in group.older})
    if not families:
        return []
    names = ", ".join(group.name for group in groups if group.older)
    return [
        f"older steps: {', '.join(families)} have changed since the steps of these groups were "
        f"measured: {names}",
        "to measure them again, on the GPU: rorqual bench steps --based-on h200 --out FILE",
    ]


def _stale_tables(groups: list[ValidationGroup]) -> list[str]:
    families = sorted({family for group in groups for family in group.stale})
    if not families:
        return []
    names = ", ".join(group.name for group in groups if group.stale)
    return [
        f"stale tables: {', '.join(families)} have changed since their times were measured, or no "
        "digest of their source was kept",
        f"errors of these groups say nothing of the kernels of this commit: {names}",
        f"to renew them, on the GPU: {RENEWAL} --based-on h200 --out FILE",
    ]


PROMPTS = ("prefill", "prefill_step", "prefill_rate")
KINDS = {
    "closed_loop": _closed_loop,
    "served": _served,
    "step": _step,
    "prefill": _prefill,
    "prefill_step": _prefill_step,
    "prefill_rate": _prefill_rate,
    "decode_rate": _decode_rate,
}


def validate(
    names: list[str] | None = None, kernels: str | None = None, steps: str | None = None
) -> list[ValidationGroup]:
    """All groups, or those whose name starts with one of `names`. kernels: a file of times that
    replaces the shipped ones. steps: a file of `rorqual bench steps`; then only its groups. Raises
    ConfigError where one of `names` begins no group."""
    if steps is not None:
        timed = own_groups(Path(steps), kernels)
        _check_names(names, [group.name for group in timed])
        return [group for group in timed if _wanted(group.name, names)]
    own = shipped_groups() if kernels is None and _may_want_steps(names) else []
    _check_names(names, [*published_rows(), *(group.name for group in own)])
    found = [group for group in own if _wanted(group.name, names)]
    for name, given in published_rows().items():
        if not _wanted(name, names):
            continue
        group = {**given, "kernels": kernels, "name": name}
        points = [point for row in group["rows"] for point in KINDS[group["kind"]](group, row)]
        kind = "bound" if group.get("bound") else "range" if group.get("range") else "prediction"
        found.append(
            ValidationGroup(
                name,
                group["title"],
                group["source"],
                group.get("note", ""),
                group.get("target", ""),
                kind,
                tuple(points),
                _origin(group.get("origin")),
                _stale(group),
                unrecorded="origin" in group,
            )
        )
    return found


def _wanted(name: str, asked: list[str] | None) -> bool:
    return not asked or any(name.startswith(each) for each in asked)


def _may_want_steps(asked: list[str] | None) -> bool:
    """Whether groups of steps are needed, which take a second to make: also to tell them where a
    name begins no other group."""
    if not asked:
        return True
    return any(
        "steps".startswith(each) or not any(_wanted(name, [each]) for name in published_rows())
        for each in asked
    )


def _check_names(asked: list[str] | None, known: list[str]) -> None:
    for each in asked or ():
        if not any(_wanted(name, [each]) for name in known):
            raise ConfigError(f"no group begins with {each!r}; known: {', '.join(known)}")
