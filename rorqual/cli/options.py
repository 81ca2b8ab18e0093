"""Options that several commands share, and the model they name."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.request import SamplingParams

Model = Annotated[
    str | None,
    typer.Argument(help="A folder or a Hugging Face id; the bundled checkpoint if left out."),
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
KvDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="The cache's dtype: auto (the model's), or as --dtype, or fp8 (MLA models: half the "
        "bytes).",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Weights = Annotated[str, typer.Option(help="checkpoint, or random: a config.json is enough.")]
TOKENIZER = (
    "A folder or a Hugging Face id; the model's own if left out, or the bundled checkpoint's "
    "where weights are random and the folder has none."
)
TokenizerName = Annotated[str | None, typer.Option("--tokenizer", help=TOKENIZER)]
Length = Annotated[int | None, typer.Option(help="Longest sequence, prompt and output together.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]
Prefill = Annotated[
    str,
    typer.Option("--mla-prefill", help="MLA form for prompts: CD, CC, A_CC, A_CC_ME or AM_CC_ME."),
]
Decode = Annotated[str, typer.Option("--mla-decode", help="MLA form for decode steps.")]
Ignored = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-config-field", help="A config.json field to disregard; may be repeated."
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        "--exe-mode",
        help="auto, eager, graph (also acl_graph, reduce-overhead), or compile (also "
        "ge_graph, max-autotune): torch.compile, with a cache.",
    ),
]
Embed = Annotated[
    str,
    typer.Option("--embed-device", help="auto, or cpu: the embedding table stays in host memory."),
]
NextN = Annotated[int, typer.Option("--next-n", help="Speculative drafts a step; 0 is off.")]
Drafter = Annotated[
    str,
    typer.Option(
        help="Who guesses: mtp (the checkpoint's prediction module; auto is the same) or ngram "
        "(look-up)."
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        "--next-n-policy",
        help="fixed, or adaptive: fewer drafts where that is faster, by batch size.",
    ),
]
Tp = Annotated[int, typer.Option(help="Ranks that split attention, and all else that follows it.")]
Dp = Annotated[
    int, typer.Option(help="Ranks with sequences of their own; experts are shared among them.")
]
Pp = Annotated[int, typer.Option(help="Pipeline stages.")]
Ep = Annotated[
    int,
    typer.Option(help="Groups of ranks with whole experts of their own; 1 splits every expert."),
]
Launcher = Annotated[
    str,
    typer.Option(
        help="Who starts the other ranks: local (this process, on this host), torchrun or ray."
    ),
]
Interface = Annotated[
    str | None,
    typer.Option(help="torchrun, ray: the network interface, or its address, that ranks meet on."),
]
SecretFile = Annotated[
    str | None,
    typer.Option(
        help="torchrun, ray: a file of mode 600 on every host; else RORQUAL_SECRET is read."
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
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]

# An LLM's own, of which the ranks of its engine know nothing.
TEXT_OPTIONS = ("tokenizer", "skip_tokenizer_init")


def load(
    model: str | None, recipe: Path | None = None, settings: list[str] | None = None, **options: Any
) -> Any:
    """An LLM. `settings` go before `options`, and these, where they differ from the defaults,
    before the recipe."""
    from rorqual.llm.llm import LLM

    text = {name: options.pop(name) for name in TEXT_OPTIONS if name in options}
    named, found = engine_options(recipe, settings, options)
    become_rank(model or named, found)
    return LLM(model or named, **text, **found)


def become_rank(model: str | None, options: dict[str, Any]) -> None:
    """In a process that torchrun started with a rank above 0: be that rank of rank 0's engine,
    and exit with it. Elsewhere nothing."""
    if options.get("launcher") != "torchrun":
        return
    from rorqual.engine.config import EngineConfig
    from rorqual.engine.distributed.launchers.torchrun import take_part

    status = take_part(EngineConfig.from_dict({"model": "", **options}), model)
    if status is not None:
        sys.exit(status)


def engine_options(
    recipe: Path | None, settings: list[str] | None, options: dict[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """(the recipe's model, options by name)."""
    from rorqual.engine.config import EngineConfig, read_recipe

    defaults = {item.name: item.default for item in fields(EngineConfig)}
    model, found = read_recipe(recipe) if recipe else (None, {})
    for name, value in options.items():
        if value is not None and (name not in found or value != defaults.get(name)):
            found[name] = tuple(value) if isinstance(value, list) else value
    return model, {**found, **_settings(settings or [])}


def _settings(pairs: list[str]) -> dict[str, Any]:
    import yaml

    for pair in pairs:
        if "=" not in pair:
            raise typer.BadParameter(f"{pair!r} is no name=value")
    return {
        name.strip(): yaml.safe_load(value)
        for name, value in (pair.split("=", 1) for pair in pairs)
    }


def sampling(llm: Any, **given: Any) -> SamplingParams:
    return llm.defaults.params(**given)


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
