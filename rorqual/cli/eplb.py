"""rorqual eplb: where experts should lie, and how even that makes the ranks' loads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.errors import ConfigError


def eplb(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Counts of picks: JSON with `logical_count` [layers, experts], as `bench offline "
            "--expert-load` writes it. Of several files, one for each workload, all count alike."
        ),
    ],
    ep: Annotated[int, typer.Option(help="Ranks that share the experts.", min=1)] = 8,
    redundant: Annotated[
        int, typer.Option(help="Slots beyond one for each expert, on all ranks together.", min=0)
    ] = 0,
    nodes: Annotated[
        int,
        typer.Option(
            help="Hosts of these ranks: with --groups the experts of a group stay on one.", min=1
        ),
    ] = 1,
    groups: Annotated[int, typer.Option(help="The router's groups of experts.", min=1)] = 1,
    speed: Annotated[
        list[float] | None,
        typer.Option(help="How fast each rank is, if they differ; once for each rank, in order."),
    ] = None,
    evaluate: Annotated[
        Path | None, typer.Option(help="Judge by the counts of this file instead.")
    ] = None,
    present: Annotated[
        Path | None,
        typer.Option(
            help="Start from the placement that the counts of this file give, and move few experts."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the plan: `physical_to_logical_map` [layers, slots]."),
    ] = None,
) -> None:
    """Plan copies and places of experts from counts of picks, and print the balancedness (mean over
    max of the ranks' loads, mean over layers) before and after."""
    from rorqual.parallel.eplb import placement as plans
    from rorqual.parallel.eplb.load_file import moe_layers_of, read_expert_load
    from rorqual.parallel.eplb.movement import rebalance

    loads = [moe_layers_of(read_expert_load(path)) for path in files]
    load = plans.combined(loads)
    judged = moe_layers_of(read_expert_load(evaluate)) if evaluate else load
    if judged.shape != load.shape:
        raise ConfigError(
            f"{evaluate} has counts of {list(judged.shape)}, the others of {list(load.shape)}: "
            "they are not of one model"
        )
    slots = load.shape[1] + redundant
    sizes: dict[str, Any] = {"groups": groups, "nodes": nodes, "speeds": speed}
    before = None
    start = time.perf_counter()
    if present is None:
        plan = plans.place(load, slots, ep, **sizes)
        if load.shape[1] % ep == 0:
            before = plans.unplanned(len(load), load.shape[1])
    else:
        if nodes > 1:
            raise ConfigError("--present goes with one node alone")
        counted = moe_layers_of(read_expert_load(present))
        before = plans.place(counted, slots, ep, speeds=speed)
        start = time.perf_counter()
        plan = rebalance(before, load, ep, speed)
    seconds = time.perf_counter() - start
    by_layer = plans.balancedness_by_layer(plan, judged, ep, speed)
    found = {
        "before": None if before is None else plans.balancedness(before, judged, ep, speed),
        "after": float(by_layer.mean()),
        "worst_layer": float(by_layer.min()),
        "layers": len(plan),
        "slots": slots,
        "ep": ep,
        "redundant": redundant,
        "seconds": seconds,
    }
    if present is not None and before is not None:
        found["moved"] = int(plans.moved(before, plan, ep).sum())
    if write is not None:
        write.write_text(json.dumps({"physical_to_logical_map": plan.tolist()}) + "\n")
    typer.echo(json.dumps(found) if as_json else _text(found))


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
