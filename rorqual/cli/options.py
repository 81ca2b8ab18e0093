"""Commands from dataclasses: each field that is an option becomes a flag."""

from __future__ import annotations

import functools
import inspect
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from rorqual.cli.output import checked_output
from rorqual.config.option import FieldOption, by_field
from rorqual.errors import quoted

Model = Annotated[
    str | None,
    typer.Argument(help="A folder or a Hugging Face id; the bundled checkpoint if left out."),
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, npu or npu:N.")]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="A folder or a Hugging Face id; the model's own if left out, or the bundled "
        "checkpoint's where weights are random and the folder has none.",
    ),
]
Recipe = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A YAML recipe: the model and engine options. Flags go before it."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any engine option as name=value, say tp=2; may be repeated."),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Also write the figures to this file.", callback=checked_output),
]

# A command's argument for a dataclass: values of the given flags, by field.
Given = dict[str, Any]


def numbers(text: str, least: int = 1) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no comma-separated list of integers") from None
    if not found or min(found) < least:
        raise typer.BadParameter(f"every number must be at least {least}")
    return found


def shares(text: str | None) -> tuple[float, ...]:
    """Comma-separated probabilities."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no comma-separated list of numbers") from None


# ---- flags of fields


@dataclass(frozen=True)
class Flags:
    """Flags of a dataclass. only: restrict to these fields; without: omit these. defaults: where
    the command's differ from the dataclass's; shown in the help, not passed."""

    of: type
    only: Sequence[str] | None = None
    without: Sequence[str] = ()
    defaults: dict[str, Any] = field(default_factory=dict)

    def fields(self) -> Iterator[tuple[Field[Any], FieldOption]]:
        for item in fields(self.of):
            wanted = self.only is None or item.name in self.only
            if "option" in item.metadata and wanted and item.name not in self.without:
                yield item, item.metadata["option"]


def with_options(**groups: type | Flags) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a typer command from a function: each of its parameters named here becomes the flags of
    a dataclass, and receives the values of the given ones. Defaults are left out, so that they do
    not override a recipe's values."""
    wanted = {
        name: item if isinstance(item, Flags) else Flags(item) for name, item in groups.items()
    }

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        made = {name: dict(_parameters(flags)) for name, flags in wanted.items()}

        @functools.wraps(function)
        def command(**values: Any) -> None:
            for name, parameters in made.items():
                found = {
                    target: values.pop(parameter.name) for target, parameter in parameters.items()
                }
                values[name] = {
                    target: tuple(value) if isinstance(value, list) else value
                    for target, value in found.items()
                    if value is not None and value != []
                }
            function(**values)

        parameters = [
            *(item for item in own if item.name not in made),
            *(item for group in made.values() for item in group.values()),
        ]
        parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {item.name: item.annotation for item in parameters}
        del command.__wrapped__
        return command

    return decorate


def _parameters(flags: Flags) -> Iterator[tuple[str, inspect.Parameter]]:
    """(field, its typer parameter)."""
    hints = get_type_hints(flags.of)
    for item, option in flags.fields():
        default = flags.defaults.get(item.name, item.default)
        kind, more = _kind(hints[item.name])
        parameter = typer.Option(
            *_declarations(item.name, option, kind is bool),
            help=escape(option.help),  # brackets are no markup
            envvar=option.env,
            callback=checked_output if option.output else None,
            rich_help_panel=option.group,
            show_default=_shown(default),
            **more,
        )
        name = option.flags[0].strip("-").replace("-", "_") if option.flags else item.name
        yield (
            item.name,
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, parameter],
            ),
        )


def _declarations(name: str, option: FieldOption, is_switch: bool) -> list[str]:
    flags = option.flags or [f"--{it.replace('_', '-')}" for it in (name, *option.aliases)]
    return [f"{flag}/--no-{flag[2:]}" if is_switch else flag for flag in flags]


def _shown(default: Any) -> str | bool:
    """A default as shown in the help, which describes None and () in words."""
    if default is None or default == ():
        return False
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return ("no", "yes")[default] if isinstance(default, bool) else str(default)


def _kind(hint: Any) -> tuple[Any, dict[str, Any]]:
    """(type of a flag's value, parser settings). Several numbers are one comma-separated value; for
    texts the flag is repeated."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in reversed(get_args(hint)) if part is not type(None))
    if get_origin(hint) is None:
        return hint, {}
    of = get_args(hint)[0]
    if of in (str, Path):
        return list[str] if of is str else list[Path], {}
    return tuple, {"parser": shares if of is float else _counts, "metavar": "N,N,..."}


def _counts(text: str) -> tuple[int, ...]:
    return tuple(numbers(text, least=0))


# ---- the engine that a command names


def load(
    model: str | None,
    recipe: Path | None,
    settings: list[str] | None,
    engine: Given,
    defaults: Given | None = None,
    **text: Any,
) -> Any:
    """An LLM; see engine_options for precedence. `text`: arguments of LLM itself, not of its
    engine."""
    from rorqual.llm.llm import LLM

    named, found = engine_options(recipe, settings, engine, defaults)
    become_rank(model or named, found)
    return LLM(model or named, **text, **found)


def become_rank(model: str | None, options: dict[str, Any]) -> None:
    """In a process that torchrun started with a rank above 0: run as that rank of rank 0's engine,
    and exit with it. Elsewhere do nothing."""
    if options.get("launcher") != "torchrun":
        return
    from rorqual.engine.config import EngineConfig
    from rorqual.engine.distributed.launchers.torchrun import take_part

    # it blocks on rank 0 in a library, where a Python signal handler would not run
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    status = take_part(EngineConfig.from_dict({"model": "", **options}), model)
    if status is not None:
        sys.exit(status)


def engine_options(
    recipe: Path | None,
    settings: list[str] | None,
    options: dict[str, Any],
    defaults: dict[str, Any] | None = None,
) -> tuple[str | None, dict[str, Any]]:
    """(the recipe's model, options by name). Precedence: `settings`, then `options`, the recipe,
    `defaults`."""
    from rorqual.engine.config import EngineConfig, read_recipe

    model, found = read_recipe(recipe) if recipe else (None, {})
    given = {name: value for name, value in options.items() if value is not None}
    last = by_field(EngineConfig, _settings(settings or []))
    return model, {**(defaults or {}), **found, **given, **last}


def _settings(pairs: list[str]) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"{pair!r} is no name=value")
        value = _yaml(pair, text)
        found[name.strip()] = tuple(value) if isinstance(value, list) else value
    return found


def _yaml(pair: str, text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: a date that does not exist
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise typer.BadParameter(
            f"{quoted(pair)}: the value cannot be read as YAML: {reason}"
        ) from None
