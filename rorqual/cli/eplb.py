"""rorqual eplb: plans expert placements, and shows how balanced the ranks' loads become."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.cli.options import Given, with_options
from rorqual.cli.output import write_output
from rorqual.config.option import check_options, option
from rorqual.errors import ConfigError


@dataclass(frozen=True)
class EplbSettings:
    ep: int = option(8, "Ranks that share the experts.", at_least_one=True)
    redundant: int = option(0, "Slots beyond one for each expert, on all ranks together.", least=0)
    nodes: int = option(
        1,
        "Hosts of these ranks: with --groups the experts of a group stay on one.",
        at_least_one=True,
    )
    groups: int = option(1, "The router's groups of experts.", at_least_one=True)
    speed: tuple[float, ...] = option(
        (), "How fast each rank is, if they differ: comma-separated, in order.", above=0
    )
    evaluate: Path | None = option(None, "Judge by the counts of this file instead.")
    present: Path | None = option(
        None,
        "Start from the placement that the counts of this file give, and move few experts.",
    )
    write: Path | None = option(
        None, "Write the plan: JSON with `physical_to_logical_map` [layers, slots].", output=True
    )
    as_json: bool = option(False, "Print one JSON object.", flags=("--json",))

    def __post_init__(self) -> None:
        check_options(self)
        if self.present and self.nodes > 1:
            raise ConfigError("--present goes with one node alone")
        if self.groups > 1 and self.groups % self.nodes:
            raise ConfigError(
                f"--groups={self.groups}: not as many on each of --nodes={self.nodes}; accepted: a "
                f"multiple of {self.nodes}"
            )


@with_options(asked=EplbSettings)
def eplb(
    asked: Given,
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Tokens by expert: JSON with `logical_count` \\[layers, experts], as `bench "
            "offline --expert-load` writes it. Of several files, one for each workload, all count "
            "alike."
        ),
    ],
) -> None:
    """Plan copies and places of experts from counts of tokens by expert, and print the balancedness
    (mean over max of the ranks' loads, mean over layers) before and after."""
    settings = EplbSettings(**asked)
    found, plan = planned(files, settings)
    if settings.write is not None:
        text = json.dumps({"physical_to_logical_map": plan.tolist()}) + "\n"
        write_output(settings.write, text)
    typer.echo(json.dumps(found) if settings.as_json else _text(found))


def planned(files: list[Path], settings: EplbSettings) -> tuple[dict[str, Any], Any]:
    """(figures, the plan [layers, slots])"""
    from rorqual.parallel.eplb import placement as plans
    from rorqual.parallel.eplb.load_file import moe_layers_of, read_expert_load
    from rorqual.parallel.eplb.movement import rebalance

    ep = settings.ep
    speeds = settings.speed or None
    load = plans.combined_loads([moe_layers_of(read_expert_load(path)) for path in files])
    judged = moe_layers_of(read_expert_load(settings.evaluate)) if settings.evaluate else load
    if judged.shape != load.shape:
        raise ConfigError(
            f"{settings.evaluate} has counts of {list(judged.shape)}, the others of "
            f"{list(load.shape)}: they are not of one model"
        )
    layers, experts = load.shape
    if experts % settings.groups:
        raise ConfigError(
            f"--groups={settings.groups}: {experts} experts are no such number of equal groups; "
            f"accepted: a divisor of {experts}"
        )
    slots = experts + settings.redundant
    before = plans.identity_placement(layers, experts) if experts % ep == 0 else None
    if settings.present is not None:
        there = moe_layers_of(read_expert_load(settings.present))
        before = plans.place(there, slots, ep, speeds=speeds)
    start = time.perf_counter()
    if settings.present is not None and before is not None:
        plan = rebalance(before, load, ep, speeds)
    else:
        plan = plans.place(load, slots, ep, settings.groups, settings.nodes, speeds)
    seconds = time.perf_counter() - start
    by_layer = plans.balancedness_by_layer(plan, judged, ep, speeds)
    found = {
        "before": None if before is None else plans.balancedness(before, judged, ep, speeds),
        "after": float(by_layer.mean()),
        "worst_layer": float(by_layer.min()),
        "layers": layers,
        "slots": slots,
        "ep": ep,
        "redundant": settings.redundant,
        "seconds": seconds,
    }
    if settings.present is not None and before is not None:
        found["moved"] = int(plans.moved(before, plan, ep).sum())
    return found, plan


def _text(found: dict[str, Any]) -> str:
    was = "unknown" if found["before"] is None else f"{found['before']:.4f}"
    lines = [
        f"{found['layers']} layers, {found['slots']} slots ({found['redundant']} redundant) on "
        f"{found['ep']} ranks, planned in {1e3 * found['seconds']:.0f} ms",
        f"balancedness before {was}, after {found['after']:.4f} (worst layer "
        f"{found['worst_layer']:.4f})",
    ]
    if "moved" in found:
        lines.append(f"copies of experts that move to another rank: {found['moved']}")
    return "\n".join(lines)
