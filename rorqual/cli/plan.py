"""rorqual plan: which layout, how fast, what limits it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.cli.options import Given, with_options
from rorqual.config.option import option
from rorqual.errors import ConfigError

_question = partial(option, group="Question")
_costs = partial(option, group="Costs")


@dataclass(frozen=True)
class Asked:
    """What the planner is asked, as a user says it."""

    gpu: str = _question("h200", "A card that ships (list: --cards), or a YAML file of one.")
    count: int = _question(8, "How many.")
    prompt: int = _question(1024, "Tokens of a prompt.")
    output: int = _question(1024, "Tokens of an answer.")
    ttft: float | None = _question(None, "Time to first token, in seconds at most.")
    tpot: float | None = _question(None, "Time per output token, in milliseconds at most.")
    num_speculative_tokens: tuple[int, ...] = _question(
        (0,), "Draft counts to try, comma-separated.", aliases=("next_n",)
    )
    acceptance: float = _question(0.85, "Probability that a draft is taken.")
    routing: str = _question(
        "uniform", "uniform, zipf:EXPONENT or recorded:FILE, with /placed or /perfect."
    )
    network: float | None = _question(None, "Gbit/s a card between nodes, in place of the card's.")
    memory_utilization: float = _question(0.9, "Share of a card's memory to use.")
    splits: bool = _question(
        True, "Also prefill and decode, attention and experts, on cards of their own."
    )
    profile: str = _costs(
        "auto", "Engine: auto, rorqual, sglang, calibrated, or roofline for lower bounds."
    )
    quant: str = _costs("auto", "auto as published, fp8 or none.")
    kv_dtype: str | None = _costs(
        None,
        "The cache's dtype, say fp8; the model's if left out.",
        flags=(
            "--kv-dtype",
            "--kv-cache-dtype",
        ),
    )


@with_options(asked=Asked)
def plan(
    asked: Given,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face id, a shape that ships, or a folder with a config.json."
        ),
    ] = None,
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

    found = search(_question_of(model, Asked(**asked)))
    report.show(found, model, top, console)
    for path, write in ((csv, report.write_csv), (png, report.write_png)):
        if path:
            write(found, path)
    if yaml:
        report.write_yaml(found, model, yaml)


def _question_of(model: str, asked: Asked) -> Any:
    from rorqual.config.hardware import load_device
    from rorqual.planner.costs.costs import Format
    from rorqual.planner.costs.routing import Routing
    from rorqual.planner.search.deployments import Goal, Question
    from rorqual.planner.timing.profiles import load_profile, profile_for
    from rorqual.planner.timing.roofline import with_link

    card = with_link(load_device(asked.gpu), asked.network)
    tpot = asked.tpot / 1e3 if asked.tpot else None
    return Question(
        model_of(model, asked.quant),
        card,
        asked.count,
        profile_for(card) if asked.profile == "auto" else load_profile(asked.profile),
        Goal(asked.prompt, asked.output, asked.ttft, tpot),
        Format(kv_dtype=asked.kv_dtype),
        Routing.parse(asked.routing),
        asked.num_speculative_tokens,
        asked.acceptance,
        asked.memory_utilization,
        asked.splits,
    )


def model_of(model: str, quant: str) -> Any:
    """The configuration of a shape that ships, or of a folder or an id, without its weights."""
    from rorqual.models.hub import model_folder
    from rorqual.planner.costs.catalog import shape_of, with_quant

    shape = shape_of(model)
    if shape is None:
        return with_quant(model_folder(model, weights=False), quant)
    published = "fp8" if shape[1] else "none"
    return with_quant(shape[0], published if quant == "auto" else quant)


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
