"""Options that several commands share, and the model they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.request import SamplingParams

Model = Annotated[str | None, typer.Argument(help="A folder or a Hugging Face id; the bundled checkpoint if left out.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Weights = Annotated[str, typer.Option(help="checkpoint, or random: a config.json is enough.")]
Length = Annotated[int | None, typer.Option(help="Longest sequence, prompt and output together.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]
Prefill = Annotated[str, typer.Option("--mla-prefill", help="MLA form for prompts: CD, CC, A_CC, A_CC_ME or AM_CC_ME.")]
Decode = Annotated[str, typer.Option("--mla-decode", help="MLA form for decode steps.")]
Ignored = Annotated[list[str] | None, typer.Option("--ignore-config-field", help="A config.json field to disregard; may be repeated.")]
Mode = Annotated[str, typer.Option("--exe-mode", help="auto, eager or graph (also acl_graph, reduce-overhead).")]
NextN = Annotated[int, typer.Option("--next-n", help="Speculative drafts a step; 0 is off.")]
Drafter = Annotated[str, typer.Option(help="Who guesses: mtp (the checkpoint's prediction module; auto is the same) or ngram (look-up).")]
Policy = Annotated[str, typer.Option("--next-n-policy", help="fixed, or adaptive: fewer drafts where that is faster, by batch size.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]


def load(model: str | None, **options: Any) -> Any:
    from rorqual.serve.llm import LLM

    given = {name: value for name, value in options.items() if value is not None}
    given["ignore_config_fields"] = tuple(given.get("ignore_config_fields", ()))
    return LLM(model, **given)


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
