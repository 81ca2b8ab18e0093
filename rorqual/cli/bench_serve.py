"""rorqual bench serve: the command's options, and what it does with them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.cli.options import Json, numbers
from rorqual.errors import ConfigError


def bench_serve(
    base_url: Annotated[
        str, typer.Option(help="http://host:port of the server.")
    ] = "http://127.0.0.1:8000",
    endpoint: Annotated[
        str, typer.Option(help="/v1/completions or /v1/chat/completions.")
    ] = "/v1/completions",
    model: Annotated[
        str | None,
        typer.Option(help="The model's name in the API; the server's first one if left out."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True)] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE sent with every request; may be repeated.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A folder or Hugging Face id; the bundled tokenizer if left out."),
    ] = None,
    dataset: Annotated[
        str, typer.Option("--dataset-name", help="random, shared-prefix, sharegpt or trace.")
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="ShareGPT's JSON, or a trace's JSON lines.")
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Requests a run; --prompts-per-concurrency decides if left out."),
    ] = None,
    prompts_per_concurrency: Annotated[
        int, typer.Option(help="Requests a run, as a multiple of the concurrency.")
    ] = 10,
    input_len: Annotated[
        int, typer.Option(help="Tokens in (of the question alone, for shared-prefix).")
    ] = 1000,
    output_len: Annotated[int, typer.Option(help="Tokens out.")] = 1000,
    range_ratio: Annotated[
        float, typer.Option("--random-range-ratio", help="Spread of both lengths; 0 is exact.")
    ] = 0.0,
    range_convention: Annotated[
        str, typer.Option(help="vllm: n(1-r) to n(1+r); sglang: n r to n.")
    ] = "vllm",
    prompt_format: Annotated[
        str, typer.Option(help="ids, text, or auto: ids for /v1/completions.")
    ] = "auto",
    prefix_groups: Annotated[int, typer.Option(help="shared-prefix: how many prefixes.")] = 64,
    prompts_per_group: Annotated[int, typer.Option(help="shared-prefix: questions a prefix.")] = 16,
    prefix_len: Annotated[int, typer.Option(help="shared-prefix: tokens of a prefix.")] = 2048,
    sharegpt_output_len: Annotated[
        int | None, typer.Option(help="sharegpt: tokens out instead of the answers' lengths.")
    ] = None,
    trace_block: Annotated[int, typer.Option(help="trace: tokens a hash_id stands for.")] = 512,
    trace_speed: Annotated[float, typer.Option(help="trace: 2 replays twice as fast.")] = 1.0,
    request_rate: Annotated[
        float, typer.Option(help="Requests/s; inf sends all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Gamma shape of the intervals; 1 is a Poisson process, less is burstier."
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Most open requests at a time.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="Concurrencies, such as 8,64,2048: one row each, and a Pareto chart."),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help="Search the highest concurrency that keeps this, e.g. ttft=2s,tps_user=20."
        ),
    ] = None,
    slo_start: Annotated[int, typer.Option(help="First concurrency of the search.")] = 4,
    slo_max: Annotated[int, typer.Option(help="Highest concurrency of the search.")] = 4096,
    slo_probes: Annotated[int, typer.Option(help="Most measurements of the search.")] = 10,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="ttft, tpot or e2el a good request keeps: ttft:2000, tpot=50ms."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Cards the server runs on; divides tokens/s. 1 if left out.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Figures are medians over this many runs.")] = 1,
    num_warmups: Annotated[
        int | None,
        typer.Option(help="Requests before each run; as many as the concurrency if left out."),
    ] = None,
    flush_cache: Annotated[
        str, typer.Option(help="auto, none, or the page to POST before each run.")
    ] = "auto",
    metrics_path: Annotated[
        str, typer.Option(help="Prometheus page with the speculation counters.")
    ] = "/metrics",
    info_path: Annotated[
        str | None, typer.Option(help="Page with the server's configuration, for the JSON.")
    ] = None,
    stream: Annotated[
        bool, typer.Option(help="Without streaming there is no TTFT, TPOT or ITL.")
    ] = True,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for exactly the output length.")] = True,
    temperature: Annotated[
        float | None, typer.Option(help="Below 0 leaves it to the server.")
    ] = 0.0,
    extra_body: Annotated[
        str | None, typer.Option(help="A JSON object merged into every request.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take.")] = 3600.0,
    connect_timeout: Annotated[float, typer.Option(help="Seconds connecting may take.")] = 30.0,
    percentiles: Annotated[
        str, typer.Option("--metric-percentiles", help="Comma-separated.")
    ] = "90,95,99",
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    label: Annotated[
        str | None, typer.Option(help="Name of this result in tables and charts.")
    ] = None,
    card: Annotated[
        str | None, typer.Option(help="The server's card, for the JSON, where it cannot be asked.")
    ] = None,
    save_detailed: Annotated[
        bool, typer.Option(help="Also write every request's times and text to the JSON.")
    ] = False,
    chart: Annotated[
        Path | None, typer.Option(help="PATH.png and PATH.html; next to --json if left out.")
    ] = None,
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
    from rorqual.bench.serving import measure
    from rorqual.bench.serving.client import ServerTarget
    from rorqual.bench.serving.load import ArrivalLoad
    from rorqual.bench.serving.metrics import GoodputLimits
    from rorqual.bench.serving.prompts import PrefixGroups, PromptLengths
    from rorqual.bench.serving.session import Outputs, Session, SloSearch, compare_files

    if compare:
        return compare_files(files or [], gpus, chart)
    if files:
        raise typer.BadParameter(f"{files[0]}: result files are read with --compare only")
    target = ServerTarget(
        base_url=base_url,
        endpoint=endpoint,
        model=model,
        api_key=api_key,
        stream=stream,
        ignore_eos=ignore_eos,
        temperature=None if temperature is None or temperature < 0 else temperature,
        extra_body=_json_object(extra_body),
        headers=dict(_pair(item) for item in header or []),
        timeout=timeout,
        connect_timeout=connect_timeout,
        keep_text=save_detailed,
    )
    data = measure.Data(
        name=dataset,
        lengths=PromptLengths(input_len, output_len, range_ratio, range_convention),
        num_prompts=num_prompts,
        per_concurrency=prompts_per_concurrency,
        groups=PrefixGroups(prefix_groups, prompts_per_group, prefix_len),
        path=dataset_path,
        sharegpt_output_len=sharegpt_output_len,
        trace_block=trace_block,
        trace_speed=trace_speed,
    )
    method = measure.Method(
        repeats=repeats,
        warm_ups=num_warmups,
        flush=flush_cache,
        metrics_path=metrics_path,
        limits=GoodputLimits.parse(goodput or []),
        percentiles=_percentiles(percentiles),
        gpus=gpus or 1,
        seed=seed,
        details=save_detailed,
    )
    search = SloSearch.parse(slo, slo_start, slo_max, slo_probes) if slo else None
    wanted = numbers(sweep.replace("/", ",")) if sweep else []
    if max_concurrency is not None and (wanted or search):
        raise typer.BadParameter(
            "--sweep and --slo choose the concurrency: leave out --max-concurrency"
        )
    base = ArrivalLoad(max_concurrency, request_rate, burstiness)
    outputs = Outputs(json_file, chart, label, card, info_path)
    session = Session(
        target, data, method, outputs, _as_text(prompt_format, target.chat), tokenizer
    )
    if not asyncio.run(session.run(base, wanted, search)):
        raise typer.Exit(1)


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body {text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--extra-body {text!r}; accepted: a JSON object")
    return found


def _pair(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not (name and equals):
        raise ConfigError("--header takes NAME=VALUE")
    return name, value


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(
            f"--metric-percentiles {text!r}; accepted: comma-separated numbers between 0 and 100"
        ) from None


def _as_text(form: str, chat: bool) -> bool:
    choices: Sequence[str] = ("ids", "text", "auto")
    if form not in choices:
        raise ConfigError(f"--prompt-format {form!r}; accepted: {', '.join(choices)}")
    return form == "text" or (form == "auto" and chat)
