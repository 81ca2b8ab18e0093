"""rorqual bench serve: measure a server that speaks the OpenAI API."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from rorqual.bench.serving.settings import ServingSettings
from rorqual.cli.options import Given, Json, numbers, with_options
from rorqual.cli.output import check_chart


@with_options(chosen=ServingSettings)
def bench_serve(
    chosen: Given,
    compare: Annotated[
        bool, typer.Option(help="Measure nothing: compare the result files named as arguments.")
    ] = False,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Result files for --compare (also vLLM's and SGLang's).", show_default=False
        ),
    ] = None,
    json_file: Json = None,
) -> None:
    """Measure an OpenAI-compatible server: throughput, TTFT, TPOT, ITL, E2EL. Ends with 1 if a
    request failed or the SLO cannot be kept."""
    from rorqual.bench.serving import from_settings
    from rorqual.bench.serving.load import ArrivalLoad
    from rorqual.bench.serving.session import Outputs, Session, SloSearch, compare_files

    asked = ServingSettings(**chosen)
    if asked.chart is not None:
        check_chart(asked.chart)
    if compare:
        return compare_files(files or [], asked.gpus, asked.chart)
    if files:
        raise typer.BadParameter(f"{files[0]}: result files are read with --compare only")
    target = from_settings.target_of(asked)
    session = Session(
        target,
        from_settings.data_of(asked),
        from_settings.method_of(asked),
        Outputs(json_file, asked.chart, asked.label, asked.card, asked.info_path),
        from_settings.as_text(asked.prompt_format, target.chat),
        asked.tokenizer,
    )
    limits = (asked.slo_start, asked.slo_max, asked.slo_probes, asked.slo_seconds)
    search = SloSearch.parse(asked.slo, *limits) if asked.slo else None
    wanted = numbers(asked.sweep.replace("/", ",")) if asked.sweep else []
    if asked.max_concurrency is not None and (wanted or search):
        raise typer.BadParameter(
            "--sweep and --slo choose the concurrency: leave out --max-concurrency"
        )
    base = ArrivalLoad(
        asked.max_concurrency,
        asked.request_rate,
        asked.burstiness,
        asked.send_seconds,
        asked.ramp_seconds,
        asked.run_seconds,
    )
    if not asyncio.run(session.run(base, wanted, search)):
        raise typer.Exit(1)
