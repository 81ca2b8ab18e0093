"""rorqual bench serve: the command's options, and what it does with them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.cli.options import Given, Json, numbers, with_options
from rorqual.config.option import option
from rorqual.errors import ConfigError

_server = partial(option, group="Server")
_prompts = partial(option, group="Prompts")
_load = partial(option, group="Load")
_method = partial(option, group="Method")
_results = partial(option, group="Results")


@dataclass(frozen=True)
class Settings:
    """What is measured, how, and where the figures go."""

    base_url: str = _server("http://127.0.0.1:8000", "http://host:port of the server.")
    endpoint: str = _server("/v1/completions", "/v1/completions or /v1/chat/completions.")
    model: str | None = _server(
        None, "The model's name in the API; the server's first one if left out."
    )
    api_key: str | None = _server(None, "The server's key.", env="OPENAI_API_KEY")
    header: tuple[str, ...] = _server((), "NAME=VALUE sent with every request; may be repeated.")
    stream: bool = _server(True, "Without streaming there is no TTFT, TPOT or ITL.")
    ignore_eos: bool = _server(True, "Ask for exactly the output length.")
    temperature: float | None = _server(0.0, "Below 0 leaves it to the server.")
    extra_body: str | None = _server(None, "A JSON object merged into every request.")
    timeout: float = _server(3600.0, "Seconds a request may take.")
    connect_timeout: float = _server(30.0, "Seconds connecting may take.")
    tokenizer: str | None = _prompts(
        None, "A folder or Hugging Face id; the bundled tokenizer if left out."
    )
    dataset: str = _prompts(
        "random", "random, shared-prefix, sharegpt or trace.", flags=("--dataset-name",)
    )
    dataset_path: Path | None = option(None, "ShareGPT's JSON, or a trace's JSON lines.")
    num_prompts: int | None = _prompts(
        None, "Requests a run; --prompts-per-concurrency decides if left out.", group="Prompts"
    )
    prompts_per_concurrency: int = _prompts(10, "Requests a run, as a multiple of the concurrency.")
    input_len: int = _prompts(1000, "Tokens in (of the question alone, for shared-prefix).")
    output_len: int = _prompts(1000, "Tokens out.")
    range_ratio: float = _prompts(
        0.0, "Spread of both lengths; 0 is exact.", flags=("--random-range-ratio",)
    )
    range_convention: str = _prompts("vllm", "vllm: n(1-r) to n(1+r); sglang: n r to n.")
    prompt_format: str = _prompts("auto", "ids, text, or auto: ids for /v1/completions.")
    prefix_groups: int = _prompts(64, "shared-prefix: how many prefixes.")
    prompts_per_group: int = _prompts(16, "shared-prefix: questions a prefix.")
    prefix_len: int = _prompts(2048, "shared-prefix: tokens of a prefix.")
    sharegpt_output_len: int | None = _prompts(
        None, "sharegpt: tokens out instead of the answers' lengths."
    )
    trace_block: int = _prompts(512, "trace: tokens a hash_id stands for.")
    trace_speed: float = _prompts(1.0, "trace: 2 replays twice as fast.")
    seed: int = _prompts(0, "Of prompts and arrivals.")
    request_rate: float = _load(math.inf, "Requests/s; inf sends all at once.")
    burstiness: float = _load(
        1.0, "Gamma shape of the intervals; 1 is a Poisson process, less is burstier."
    )
    max_concurrency: int | None = _load(None, "Most open requests at a time.")
    sweep: str | None = _load(
        None, "Concurrencies, such as 8,64,2048: one row each, and a Pareto chart."
    )
    slo: str | None = _load(
        None, "Search the highest concurrency that keeps this, e.g. ttft=2s,tps_user=20."
    )
    slo_start: int = _load(4, "First concurrency of the search.")
    slo_max: int = _load(4096, "Highest concurrency of the search.")
    slo_probes: int = _load(10, "Most measurements of the search.")
    goodput: tuple[str, ...] = _method(
        (), "ttft, tpot or e2el a good request keeps: ttft:2000, tpot=50ms."
    )
    gpus: int | None = _method(None, "Cards the server runs on; divides tokens/s. 1 if left out.")
    repeats: int = _method(1, "Figures are medians over this many runs.")
    num_warmups: int | None = _method(
        None, "Requests before each run; as many as the concurrency if left out."
    )
    flush_cache: str = _method("auto", "auto, none, or the page to POST before each run.")
    metrics_path: str = _method("/metrics", "Prometheus page with the speculation counters.")
    percentiles: str = _method("90,95,99", "Comma-separated.", flags=("--metric-percentiles",))
    info_path: str | None = _results(None, "Page with the server's configuration, for the JSON.")
    label: str | None = _results(None, "Name of this result in tables and charts.")
    card: str | None = _results(None, "The server's card, for the JSON, where it cannot be asked.")
    save_detailed: bool = _results(False, "Also write every request's times and text to the JSON.")
    chart: Path | None = option(None, "PATH.png and PATH.html; next to --json if left out.")


@with_options(chosen=Settings)
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
    from rorqual.bench.serving.load import ArrivalLoad
    from rorqual.bench.serving.session import Outputs, Session, SloSearch, compare_files

    asked = Settings(**chosen)
    if compare:
        return compare_files(files or [], asked.gpus, asked.chart)
    if files:
        raise typer.BadParameter(f"{files[0]}: result files are read with --compare only")
    target = _target(asked)
    session = Session(
        target,
        _data(asked),
        _method_of(asked),
        Outputs(json_file, asked.chart, asked.label, asked.card, asked.info_path),
        _as_text(asked.prompt_format, target.chat),
        asked.tokenizer,
        group="Results",
    )
    limits = (asked.slo_start, asked.slo_max, asked.slo_probes)
    search = SloSearch.parse(asked.slo, *limits) if asked.slo else None
    wanted = numbers(asked.sweep.replace("/", ",")) if asked.sweep else []
    if asked.max_concurrency is not None and (wanted or search):
        raise typer.BadParameter(
            "--sweep and --slo choose the concurrency: leave out --max-concurrency"
        )
    base = ArrivalLoad(asked.max_concurrency, asked.request_rate, asked.burstiness)
    if not asyncio.run(session.run(base, wanted, search)):
        raise typer.Exit(1)


def _target(asked: Settings) -> Any:
    from rorqual.bench.serving.client import ServerTarget

    greedy_or_more = asked.temperature is not None and asked.temperature >= 0
    return ServerTarget(
        base_url=asked.base_url,
        endpoint=asked.endpoint,
        model=asked.model,
        api_key=asked.api_key,
        stream=asked.stream,
        ignore_eos=asked.ignore_eos,
        temperature=asked.temperature if greedy_or_more else None,
        extra_body=_json_object(asked.extra_body),
        headers=dict(_pair(item) for item in asked.header),
        timeout=asked.timeout,
        connect_timeout=asked.connect_timeout,
        keep_text=asked.save_detailed,
    )


def _data(asked: Settings) -> Any:
    from rorqual.bench.serving.measure import Data
    from rorqual.bench.serving.prompts import PrefixGroups, PromptLengths

    return Data(
        name=asked.dataset,
        lengths=PromptLengths(
            asked.input_len, asked.output_len, asked.range_ratio, asked.range_convention
        ),
        num_prompts=asked.num_prompts,
        per_concurrency=asked.prompts_per_concurrency,
        groups=PrefixGroups(asked.prefix_groups, asked.prompts_per_group, asked.prefix_len),
        path=asked.dataset_path,
        sharegpt_output_len=asked.sharegpt_output_len,
        trace_block=asked.trace_block,
        trace_speed=asked.trace_speed,
    )


def _method_of(asked: Settings) -> Any:
    from rorqual.bench.serving.measure import Method
    from rorqual.bench.serving.metrics import GoodputLimits

    return Method(
        repeats=asked.repeats,
        warm_ups=asked.num_warmups,
        flush=asked.flush_cache,
        metrics_path=asked.metrics_path,
        limits=GoodputLimits.parse(list(asked.goodput)),
        percentiles=_percentiles(asked.percentiles),
        gpus=asked.gpus or 1,
        seed=asked.seed,
        details=asked.save_detailed,
    )


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
