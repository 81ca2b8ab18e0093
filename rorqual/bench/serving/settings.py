"""What a serving benchmark is asked for, as a user says it. Imports little: the command line reads
the options whenever it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rorqual.config.option import option

_server = partial(option, group="Server")
_prompts = partial(option, group="Prompts")
_load = partial(option, group="Load")
_method = partial(option, group="Method")
_results = partial(option, group="Results")


@dataclass(frozen=True)
class ServingSettings:
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
    dataset_path: Path | None = option(
        None, "ShareGPT's JSON, or a trace's JSON lines.", group="Prompts"
    )
    num_prompts: int | None = _prompts(
        None, "Requests a run; --prompts-per-concurrency decides if left out."
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
    ramp_seconds: float = _load(
        0.0, "Without a rate: the first --max-concurrency requests come spread over so long."
    )
    send_seconds: float = _load(math.inf, "Of a run: after so long nothing more is sent.")
    run_seconds: float = _load(
        math.inf, "Of a run: what is open after so long is given up and counts as failed."
    )
    sweep: str | None = _load(
        None, "Concurrencies, such as 8,64,2048: one row each, and a Pareto chart."
    )
    slo: str | None = _load(
        None, "Search the highest concurrency that keeps this, e.g. ttft=2s,tps_user=20."
    )
    slo_start: int = _load(4, "First concurrency of the search.")
    slo_max: int = _load(4096, "Highest concurrency of the search.")
    slo_probes: int = _load(10, "Most measurements of the search.")
    slo_seconds: float = _load(
        math.inf, "The search begins no measurement that might end later than this."
    )
    goodput: tuple[str, ...] = _method(
        (), "ttft, tpot or e2el a good request keeps: ttft:2000, tpot=50ms."
    )
    gpus: int | None = _method(None, "GPUs the server runs on; divides tokens/s. 1 if left out.")
    repeats: int = _method(1, "Figures are medians over this many runs.")
    num_warmups: int | None = _method(
        None, "Requests before each run; as many as the concurrency if left out."
    )
    flush_cache: str = _method("auto", "auto, none, or the page to POST before each run.")
    metrics_path: str = _method("/metrics", "Prometheus page with the speculation counters.")
    percentiles: str = _method("90,95,99", "Comma-separated.", flags=("--metric-percentiles",))
    info_path: str | None = _results(None, "Page with the server's configuration, for the JSON.")
    label: str | None = _results(None, "Name of this result in tables and charts.")
    card: str | None = _results(None, "The server's GPU, for the JSON, where it cannot be asked.")
    save_detailed: bool = _results(False, "Also write every request's times and text to the JSON.")
    chart: Path | None = option(
        None, "PATH.png and PATH.html; next to --json if left out.", group="Results"
    )
