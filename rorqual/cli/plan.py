"""rorqual plan: which layout, how fast, what limits it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.cli.options import Given, with_options
from rorqual.cli.output import checked_output, writing
from rorqual.errors import ConfigError
from rorqual.planner.search.settings import PlanSettings

Csv = Annotated[
    Path | None,
    typer.Option("--csv", help="Write every costed option to this file.", callback=checked_output),
]
Png = Annotated[
    Path | None,
    typer.Option("--png", help="Draw the Pareto front to this file.", callback=checked_output),
]
Yaml = Annotated[
    Path | None,
    typer.Option("--yaml", help="Write the best as a recipe.", callback=checked_output),
]
Validate = Annotated[
    bool,
    typer.Option(
        "--validate",
        help="Print predictions beside published and measured figures instead; ends with 1 "
        "where they stand on times of kernels that have changed since.",
    ),
]
Steps = Annotated[
    Path | None,
    typer.Option(
        "--steps", help="With --validate: steps that `rorqual bench steps` timed, these alone."
    ),
]
Question = Annotated[
    str | None, typer.Option(help="Answer one question of those --questions lists instead.")
]
Gpus = Annotated[
    bool, typer.Option("--gpus", help="List the GPUs that ship, with the source of every figure.")
]
Loads = Annotated[
    list[Path] | None,
    typer.Option(
        "--expert-load",
        help="With --question redundant-experts: counts of picks, JSON with `logical_count`; "
        "may be repeated.",
    ),
]


@with_options(asked=PlanSettings)
def plan(
    asked: Given,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face id, a shape that ships, or a folder with a config.json."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Deployments to print.")] = 5,
    csv: Csv = None,
    png: Png = None,
    chart: Annotated[bool, typer.Option("--chart", help="Draw it here as well.")] = False,
    yaml: Yaml = None,
    validate: Validate = False,
    group: Annotated[
        str | None, typer.Option(help="Beginnings of groups to validate, comma-separated.")
    ] = None,
    steps: Steps = None,
    question: Question = None,
    questions: Annotated[bool, typer.Option("--questions", help="List the questions.")] = False,
    expert_load: Loads = None,
    gpus: Gpus = False,
) -> None:
    """Search layouts, batches and roles for a service goal; print the best with the reason, or
    why nothing works."""
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 160)
    if validate or steps:
        _validate(console, group, asked.get("kernels"), steps)
        return
    if group:
        raise ConfigError("group goes with --validate")
    if question or questions or gpus:
        _instead(console, question, questions, expert_load)
        return
    if expert_load:
        raise ConfigError("expert_load goes with --question redundant-experts")
    if model is None:
        raise ConfigError(
            "name a model, or ask for --validate, --questions, --question NAME or --gpus"
        )
    from rorqual.planner.search import chart as pareto
    from rorqual.planner.search import report
    from rorqual.planner.search.from_settings import question_of
    from rorqual.planner.search.planner import search

    if png:
        pareto.check_png()
    found = search(question_of(model, PlanSettings(**asked)))
    report.show(found, model, top, console)
    if chart:
        console.print(pareto.in_terminal(found, min(console.width, 120)))
    for path, write in ((csv, report.write_csv), (png, pareto.write_png)):
        if path:
            with writing(path):
                write(found, path)
    if yaml:
        with writing(yaml):
            report.write_yaml(found, model, yaml)


def _validate(console: Any, group: str | None, kernels: str | None, steps: Path | None) -> None:
    from rorqual.planner.search import report
    from rorqual.planner.validation import validation

    names = [name for each in (group or "").split(",") if (name := each.strip())]
    groups = validation.validate(names, kernels, str(steps) if steps else None)
    report.show_validation(groups, console)
    stale = validation.stale_groups(groups)
    for line in stale:
        typer.echo(line, err=True)
    if stale:
        raise typer.Exit(1)


def _instead(console: Any, question: str | None, questions: bool, loads: list[Path] | None) -> None:
    from rorqual.planner.search import report

    if question or questions:
        from rorqual.planner.validation import questions as known
        from rorqual.planner.validation.deployed import Line

        if question:
            report.show_answer(*known.answer(question, loads or ()), console)
        else:
            report.show_answer(
                "Questions",
                [Line(name, title) for name, (title, _) in known.QUESTIONS.items()],
                console,
            )
    else:
        report.show_devices(console)
