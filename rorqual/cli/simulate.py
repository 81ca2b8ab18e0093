"""rorqual simulate: play a workload through the engine's scheduler on GPUs one need not own."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rorqual.cli.options import Given, with_options
from rorqual.cli.output import HERE, checked_output, write_output, writing
from rorqual.planner.simulator.settings import SimulationSettings

Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write settings, figures and series to this file.",
        callback=checked_output,
    ),
]


@with_options(chosen=SimulationSettings)
def simulate(
    chosen: Given,
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face id, a shape that ships, or a folder with a config.json."
        ),
    ] = "deepseek-v3",
    json_file: Json = None,
) -> None:
    """Play a workload through the scheduler, prefix cache and cost model: latencies, throughput,
    queues, use of resources."""
    from rich.console import Console

    from rorqual.planner.simulator import gantt as chart
    from rorqual.planner.simulator import report
    from rorqual.planner.simulator.from_settings import (
        counted,
        deployment_of,
        longest_requests,
        workload_of,
    )
    from rorqual.planner.simulator.results import as_json, outcome
    from rorqual.planner.simulator.simulator import Simulation

    asked = SimulationSettings(**chosen)
    for path in set(asked.gantt) - {HERE}:
        chart.check_ending(path)
    given = counted({"model": model, **asdict(asked)})
    work = workload_of(given)
    deployment = deployment_of(given, longest_requests(given, work))
    # a run makes millions of objects without cycles: garbage collection would take a tenth of it
    gc.disable()
    drawn = (asked.gantt_at, asked.gantt_steps if asked.gantt else 0)
    run = Simulation(deployment, work, asked.seed, asked.interval, drawn).run()
    found = outcome(run, asked.warm_up)
    report.show(run, found)
    for path in asked.gantt:
        drawn_steps = chart.gantt(run, f"{model} on {asked.gpu}, {deployment.gpus} GPUs")
        if path == HERE:
            console = Console(width=None if Console().is_terminal else 140)
            console.print(chart.in_terminal(drawn_steps, console.width))
        else:
            with writing(path):
                chart.write(drawn_steps, path)
    if json_file:
        written = as_json(run, found, given)
        write_output(json_file, json.dumps(written, indent=1, default=str) + "\n")
