"""rorqual plan: which layout, how fast, what limits it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.errors import ConfigError

Seconds = Annotated[float | None, typer.Option(help="Time to first token, in seconds at most.")]
Millis = Annotated[
    float | None, typer.Option(help="Time per output token, in milliseconds at most.")
]


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face id, a shape that ships, or a folder with a config.json."
        ),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="A card that ships (list: --cards), or a YAML file of one.")
    ] = "h200",
    count: Annotated[int, typer.Option(help="How many.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024,
    output: Annotated[int, typer.Option(help="Tokens of an answer.")] = 1024,
    ttft: Seconds = None,
    tpot: Millis = None,
    num_speculative_tokens: Annotated[
        str, typer.Option("--next-n", help="Draft counts to try, comma-separated.")
    ] = "0",
    acceptance: Annotated[float, typer.Option(help="Probability that a draft is taken.")] = 0.85,
    routing: Annotated[
        str, typer.Option(help="uniform, zipf:EXPONENT or recorded:FILE, with /placed or /perfect.")
    ] = "uniform",
    profile: Annotated[
        str,
        typer.Option(
            help="Engine: auto, rorqual, sglang, calibrated, or roofline for lower bounds."
        ),
    ] = "auto",
    quant: Annotated[str, typer.Option(help="auto as published, fp8 or none.")] = "auto",
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            "--kv-cache-dtype",
            help="The cache's dtype, say fp8; the model's if left out.",
        ),
    ] = None,
    network: Annotated[
        float | None, typer.Option(help="Gbit/s a card between nodes, in place of the card's.")
    ] = None,
    memory_utilization: Annotated[
        float, typer.Option(help="Share of a card's memory to use.")
    ] = 0.9,
    splits: Annotated[
        bool,
        typer.Option(help="Also prefill and decode, attention and experts, on cards of their own."),
    ] = True,
    top: Annotated[int, typer.Option(help="Deployments to print.")] = 5,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write every costed option to this file.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Draw the Pareto front to this file.")
    ] = None,
    yaml: Annotated[Path | None, typer.Option("--yaml", help="Write the best as a recipe.")] = None,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate", help="Print predictions beside published and measured figures instead."
        ),
    ] = False,
    group: Annotated[
        str | None, typer.Option(help="Beginnings of groups to validate, comma-separated.")
    ] = None,
    question: Annotated[
        str | None, typer.Option(help="Answer one question of those --questions lists instead.")
    ] = None,
    questions: Annotated[bool, typer.Option("--questions", help="List the questions.")] = False,
    cards: Annotated[
        bool,
        typer.Option("--cards", help="List the cards that ship, with the source of every figure."),
    ] = False,
) -> None:
    """Search layouts, batches and roles for a service goal; print the best with the reason, or
    why nothing works."""
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 160)
    if validate or question or questions or cards:
        _instead(console, validate, group, question, questions)
        return
    if model is None:
        raise ConfigError(
            "name a model, or ask for --validate, --questions, --question NAME or --cards"
        )
    from rorqual.planner.search import report
    from rorqual.planner.search.planner import search

    goal = (prompt, output, ttft, tpot)
    chosen = _question(
        model,
        gpu,
        count,
        profile,
        quant,
        kv_dtype,
        network,
        routing,
        num_speculative_tokens,
        acceptance,
        memory_utilization,
        splits,
        goal,
    )
    found = search(chosen)
    report.show(found, model, top, console)
    for path, write in ((csv, report.write_csv), (png, report.write_png)):
        if path:
            write(found, path)
    if yaml:
        report.write_yaml(found, model, yaml)


def _question(
    model: str,
    gpu: str,
    count: int,
    profile: str,
    quant: str,
    kv_dtype: str | None,
    network: float | None,
    routing: str,
    num_speculative_tokens: str,
    acceptance: float,
    utilization: float,
    splits: bool,
    goal: tuple[int, int, float | None, float | None],
) -> Any:
    from rorqual.cli.options import numbers
    from rorqual.config.hardware import load_device
    from rorqual.planner.costs.catalog import shape_of, with_quant
    from rorqual.planner.costs.costs import Format
    from rorqual.planner.costs.routing import Routing
    from rorqual.planner.search.deployments import Goal, Question
    from rorqual.planner.timing.profiles import load_profile, profile_for
    from rorqual.planner.timing.roofline import with_link

    shape = shape_of(model)
    if shape:
        config = with_quant(shape[0], ("fp8" if shape[1] else "none") if quant == "auto" else quant)
    else:
        from rorqual.models.hub import model_folder

        config = with_quant(model_folder(model, weights=False), quant)
    card = with_link(load_device(gpu), network)
    engine = profile_for(card) if profile == "auto" else load_profile(profile)
    asked = Goal(goal[0], goal[1], goal[2], goal[3] / 1e3 if goal[3] else None)
    drafts = tuple(numbers(num_speculative_tokens, least=0))
    fmt = Format(kv_dtype=kv_dtype)
    return Question(
        config,
        card,
        count,
        engine,
        asked,
        fmt,
        Routing.parse(routing),
        drafts,
        acceptance,
        utilization,
        splits,
    )


def _instead(
    console: Any, validate: bool, group: str | None, question: str | None, questions: bool
) -> None:
    from rorqual.planner.search import report

    if validate:
        from rorqual.planner.validation import validation

        report.show_validation(validation.validate(group.split(",") if group else None), console)
    elif question or questions:
        from rorqual.planner.validation import questions as known
        from rorqual.planner.validation.deployed import Line

        if question:
            report.show_answer(*known.answer(question), console)
        else:
            report.show_answer(
                "Questions",
                [Line(name, title) for name, (title, _) in known.QUESTIONS.items()],
                console,
            )
    else:
        report.show_cards(console)
