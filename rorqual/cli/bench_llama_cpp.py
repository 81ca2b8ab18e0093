"""rorqual bench llama-cpp: our CPU steps beside llama.cpp's."""

from __future__ import annotations

from typing import Annotated

import typer

from rorqual.bench.llama_cpp.work import LlamaCppWork
from rorqual.cli.options import Flags, Given, Json, numbers, with_options

Shape = Annotated[
    str,
    typer.Argument(help="A shape that ships, a folder with a config.json or a Hugging Face id."),
]


@with_options(work=Flags(LlamaCppWork))
def bench_llama_cpp(work: Given, model: Shape = "deepseek-v2-lite", json_file: Json = None) -> None:
    """Decode steps and prompts of a shape with random weights on a CPU, beside llama.cpp at its
    best setting: a GGUF file of the same weights is written, and the two take turns."""
    from rorqual.bench.llama_cpp import run

    wanted = LlamaCppWork(**work)
    batches = numbers(wanted.concurrency)
    report = run.run(
        model,
        wanted,
        batches,
        lambda line: typer.echo(line, err=True),
        json_file,
    )
    run.print_table(report)
