"""rorqual bench micro-batches: what cutting steps gains, and what auto decides."""

from __future__ import annotations

from typing import Annotated

import typer

from rorqual.cli.options import (
    Flags,
    Given,
    Json,
    Model,
    Recipe,
    Settings,
    load,
    numbers,
    with_options,
)
from rorqual.cli.output import write_output
from rorqual.config.parallel import AUTO
from rorqual.engine.config import EngineConfig


@with_options(
    engine=Flags(
        EngineConfig, without=("micro_batches", "num_speculative_tokens", "keep_step_times")
    )
)
def bench_micro_batches(
    engine: Given,
    model: Model = None,
    prompts: Annotated[
        str, typer.Option(help="Comma-separated tokens of a step of prompts, on each rank.")
    ] = "100,700",
    batches: Annotated[
        str, typer.Option(help="Comma-separated requests that decode on each rank.")
    ] = "6,24",
    requests: Annotated[int, typer.Option(min=1, help="Of a step of prompts, on each rank.")] = 10,
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds of all numbers of parts; medians are taken.")
    ] = 5,
    config: Recipe = None,
    settings: Settings = None,
    json_file: Json = None,
) -> None:
    """Tokens/s of steps in 1 to 4 parts and as --micro-batches auto decides, by size, in one
    engine of several ranks."""
    from rorqual.bench.micro_batches import run as bench

    sizes = bench.BenchSizes(tuple(numbers(prompts)), tuple(numbers(batches)), requests, repeats)
    most = max(requests, *sizes.batches)
    derived = {
        "max_num_seqs": most,
        "max_num_batched_tokens": max(most, *sizes.prompts),
        "enable_prefix_caching": False,
    }
    llm = load(
        model,
        config,
        settings,
        {**derived, **engine, "micro_batches": AUTO, "keep_step_times": False},
        skip_tokenizer_init=True,
    )
    try:
        cells = bench.run(llm.engine, sizes, lambda line: typer.echo(line, err=True))
        gbits = llm.engine.config.slow_link_gbits
        bench.print_table(cells, gbits)
        if json_file:
            found = bench.as_json(cells, llm.engine.worker.step_times, gbits)
            write_output(json_file, found + "\n")
    finally:
        llm.engine.close()
