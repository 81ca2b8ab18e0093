"""rorqual simulate: play a workload through the engine's scheduler on cards one need not own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.cli.options import shares
from rorqual.errors import ConfigError

HOST = 8  # cards of one, over which a model is split by default
LAYOUT_KEYS = ("tp", "dp", "pp", "ep", "dense_tp", "embed_tp", "head_tp")

COUNT = "Cards in all: as many replicas as they make, in place of --replicas."
LAYOUT = (
    "Sizes of a replica, such as tp=8 or dp=64,ep=64; the others as `serve` has them. "
    "Left out: tp=8, or less where that does not divide --count."
)
REPLICAS = "Replicas, 1 if left out; those that decode where prompts have cards of their own."
Count = Annotated[int | None, typer.Option(help=COUNT)]
Layout = Annotated[str | None, typer.Option(help=LAYOUT)]
Replicas = Annotated[int | None, typer.Option(help=REPLICAS)]


def simulate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face id, a shape that ships, or a folder with a config.json."
        ),
    ] = "deepseek-v3",
    gpu: Annotated[
        str,
        typer.Option(help="A card that ships (list: rorqual plan --cards), or a YAML file of one."),
    ] = "h200",
    count: Count = None,
    layout: Layout = None,
    replicas: Replicas = None,
    prefill_replicas: Annotated[
        int,
        typer.Option(
            help="Replicas for prompts alone; 0 computes prompts where tokens are decoded."
        ),
    ] = 0,
    prefill_layout: Annotated[
        str | None, typer.Option(help="Their sizes; --layout if left out.")
    ] = None,
    attention: Annotated[
        int,
        typer.Option(help="Attention cards of a replica whose experts lie on cards of their own."),
    ] = 0,
    experts: Annotated[int, typer.Option(help="Expert cards of such a replica.")] = 0,
    placement: Annotated[
        str, typer.Option(help="An expert card holds `experts` of every layer, or whole `layers`.")
    ] = "experts",
    micro_batches: Annotated[
        int, typer.Option(help="Batches in flight: one computes while another is sent.")
    ] = 1,
    arrivals: Annotated[
        str, typer.Option(help="poisson, gamma, fixed, at-once or closed.")
    ] = "poisson",
    rate: Annotated[float, typer.Option(help="Requests/s.")] = 10.0,
    burstiness: Annotated[
        float, typer.Option(help="gamma: shape of the intervals; below 1 is burstier than Poisson.")
    ] = 1.0,
    clients: Annotated[
        int,
        typer.Option(help="closed: how many send their next request when the last is answered."),
    ] = 16,
    requests: Annotated[int | None, typer.Option(help="Requests in all.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Requests arrive for so long; 60 if neither is given.")
    ] = None,
    input_len: Annotated[
        str, typer.Option(help="Tokens in: N, uniform:LOW:HIGH or lognormal:MEAN:SPREAD.")
    ] = "1000",
    output_len: Annotated[str, typer.Option(help="Tokens out, likewise.")] = "300",
    prefix_groups: Annotated[
        int, typer.Option(help="Prompts begin with one of so many shared prefixes.")
    ] = 0,
    prefix_len: Annotated[
        int, typer.Option(help="Tokens of a shared prefix, before --input-len.")
    ] = 0,
    prefix_zipf: Annotated[
        float, typer.Option(help="Exponent of the prefixes' popularity; 0 is even.")
    ] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option(help="JSON lines of timestamp (ms), input_length, output_length, hash_ids."),
    ] = None,
    trace_block: Annotated[int, typer.Option(help="Tokens a hash_id stands for.")] = 512,
    speed: Annotated[float, typer.Option(help="2 replays a trace twice as fast.")] = 1.0,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Sequences at once on a rank; as many as fit, 256 at most, if left out."),
    ] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of a rank's step.")] = 2048,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence; what the workload needs if left out.")
    ] = None,
    chunked_prefill_size: Annotated[
        int | None, typer.Option(help="Most prompt tokens of one request in a step.")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens of a cache page.")] = 64,
    num_pages: Annotated[
        int | None, typer.Option(help="Pages of a rank; as many as its memory holds if left out.")
    ] = None,
    prefix_caching: Annotated[
        bool, typer.Option(help="Keep and find pages of common prefixes.")
    ] = True,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="Speculation: probability of each of num_speculative_tokens drafts, such as "
            "0.85,0.7."
        ),
    ] = None,
    steps_in_flight: Annotated[
        int, typer.Option(help="2: a step is planned while the one before runs.")
    ] = 2,
    balancing: Annotated[
        str,
        typer.Option(
            help="A request goes to the rank with the fewest live-tokens, or round-robin."
        ),
    ] = "live-tokens",
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help="RANK=FACTOR: a rank of every replica that computes so much more slowly."
        ),
    ] = None,
    routing: Annotated[
        str,
        typer.Option(help="uniform, zipf:EXPONENT (/placed, /perfect), or a JSON list of counts."),
    ] = "uniform",
    network: Annotated[
        float | None, typer.Option(help="Gbit/s a card between nodes, in place of the card's.")
    ] = None,
    network_latency: Annotated[
        float | None, typer.Option(help="Microseconds of a message between nodes, likewise.")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="Engine: auto, rorqual, sglang, or roofline for lower bounds.")
    ] = "auto",
    quant: Annotated[str, typer.Option(help="auto as published, fp8 or none.")] = "auto",
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            "--kv-cache-dtype",
            help="The cache's dtype, say fp8; the model's if left out.",
        ),
    ] = None,
    memory_utilization: Annotated[
        float, typer.Option(help="Share of a card's memory to use.")
    ] = 0.9,
    warm_up: Annotated[
        float, typer.Option(help="Latencies are of requests that arrive after so many seconds.")
    ] = 0.0,
    interval: Annotated[
        float, typer.Option(help="Seconds between two points of what is recorded over time.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same run.")] = 0,
    gantt: Annotated[
        list[Path] | None,
        typer.Option(help="Draw a few steps to this .html, .svg or .png; may be repeated."),
    ] = None,
    gantt_at: Annotated[float, typer.Option(help="Seconds from which on steps are drawn.")] = 10.0,
    gantt_steps: Annotated[int, typer.Option(help="How many.")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write settings, figures and series to this file.")
    ] = None,
) -> None:
    """Play a workload through the scheduler, prefix cache and cost model: latencies, throughput,
    queues, use of resources."""
    from rorqual.planner.simulator import gantt as chart
    from rorqual.planner.simulator import report
    from rorqual.planner.simulator.results import as_json, outcome
    from rorqual.planner.simulator.simulator import Simulation

    given = _counted(context.params)
    if requests is None and seconds is None and trace is None:
        given["seconds"] = 60.0 if arrivals in ("poisson", "gamma", "fixed") else None
    work = _workload(given)
    deployment = _deployment(given, longest=_longest(given, work))
    run = Simulation(
        deployment, work, seed, interval, (gantt_at, gantt_steps if gantt else 0)
    ).run()
    found = outcome(run, warm_up)
    report.show(run, found)
    for path in gantt or ():
        chart.write(chart.gantt(run, f"{model} on {gpu}, {deployment.cards} cards"), path)
    if json_file:
        settings = {
            name: [str(item) for item in value] if isinstance(value, list) else value
            for name, value in given.items()
        }
        json_file.write_text(
            json.dumps(as_json(run, found, settings), indent=1, default=str) + "\n"
        )


def _counted(params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` with layout and replicas: what was left out follows from the number of cards."""
    given = dict(params)
    count = given["count"]
    wanted = given["replicas"]
    if count is None:
        given["layout"] = given["layout"] or f"tp={HOST}"
        given["replicas"] = 1 if wanted is None else wanted
        return given
    if count < 1:
        raise ConfigError(f"count={count} is out of range; accepted: at least 1")
    given["layout"] = given["layout"] or f"tp={math.gcd(HOST, count)}"
    size = given["attention"] + given["experts"] or _sizes(given["layout"]).world
    first = given["prefill_replicas"] and _sizes(given["prefill_layout"] or given["layout"]).world
    prompts = given["prefill_replicas"] * first
    given["replicas"], rest = divmod(count - prompts, size)
    if given["replicas"] < 1 or rest or wanted not in (None, given["replicas"]):
        beside = f"{prompts} for prompts and " if prompts else ""
        multiple = f"a multiple of {size}" if wanted is None else f"{wanted} x {size}"
        raise ConfigError(f"count={count}: no whole replicas; accepted: {beside}{multiple}")
    return given


def _workload(given: Mapping[str, Any]) -> Any:
    from rorqual.planner.simulator.workload import (
        Arrivals,
        LengthDistribution,
        SharedPrefix,
        Workload,
    )

    return Workload(
        Arrivals(given["arrivals"], given["rate"], given["burstiness"], given["clients"]),
        LengthDistribution.parse(given["input_len"]),
        LengthDistribution.parse(given["output_len"]),
        SharedPrefix(given["prefix_groups"], given["prefix_len"], given["prefix_zipf"]),
        given["requests"],
        given["seconds"],
        str(given["trace"]) if given["trace"] else None,
        given["trace_block"],
        given["speed"],
    )


def _longest(given: Mapping[str, Any], work: Any) -> tuple[int, int]:
    """(typical, longest) tokens of a request, prompt and output; drawn once more, since they
    depend on the seed alone."""
    jobs = [(job.prompt + job.output) for job in work.jobs(given["seed"])]
    if not jobs:
        raise ConfigError("the workload holds no requests")
    return math.ceil(sum(jobs) / len(jobs)), max(jobs)


def _deployment(given: Mapping[str, Any], longest: tuple[int, int]) -> Any:
    from rorqual.config.parallel import ParallelConfig
    from rorqual.planner.simulator import pools

    engine = pools.PoolSettings(
        context=longest[0],
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        max_model_len=given["max_model_len"] or longest[1] + 1,
        chunked_prefill_size=given["chunked_prefill_size"],
        page_size=given["page_size"],
        num_pages=given["num_pages"],
        prefix_caching=given["prefix_caching"],
        acceptance=shares(given["acceptance"]),
        steps_in_flight=given["steps_in_flight"],
        micro_batches=given["micro_batches"],
        slow=_slow(given["slow"] or ()),
    )
    attention = given["attention"]
    experts = given["experts"]
    prefill = given["prefill_replicas"]
    if bool(attention) != bool(experts) or (attention and prefill):
        raise ConfigError(
            f"attention={attention} and experts={experts} go together, and not with "
            f"prefill_replicas={prefill}"
        )
    if attention:
        sizes = ParallelConfig()
        return pools.split(
            _model(given, sizes),
            engine,
            attention,
            experts,
            given["placement"],
            given["replicas"],
            given["balancing"],
        )
    model = _model(given, _sizes(given["layout"]))
    if not prefill:
        return pools.together(model, engine, given["replicas"], given["balancing"])
    first = _model(given, _sizes(given["prefill_layout"] or given["layout"]))
    return pools.disaggregated(
        first, model, engine, (prefill, given["replicas"]), given["balancing"]
    )


def _model(given: Mapping[str, Any], sizes: Any) -> Any:
    from dataclasses import replace

    from rorqual.config.hardware import load_device
    from rorqual.models.hub import model_folder
    from rorqual.planner.costs.catalog import shape_of, with_quant
    from rorqual.planner.costs.costs import Format
    from rorqual.planner.timing.profiles import load_profile, profile_for
    from rorqual.planner.timing.roofline import StepModel, with_link

    shape = shape_of(given["model"])
    quant = given["quant"]
    if shape:
        config = with_quant(shape[0], ("fp8" if shape[1] else "none") if quant == "auto" else quant)
    else:
        config = with_quant(model_folder(given["model"], weights=False), quant)
    card = with_link(load_device(given["gpu"]), given["network"])
    if given["network_latency"] is not None:
        if given["network_latency"] < 0:
            raise ConfigError(f"network_latency={given['network_latency']} us must be at least 0")
        card = replace(card, network=replace(card.network, latency=given["network_latency"] * 1e-6))
    engine = profile_for(card) if given["profile"] == "auto" else load_profile(given["profile"])
    routing = _routing(given["routing"])
    return StepModel(
        config,
        sizes,
        card,
        engine,
        Format(kv_dtype=given["kv_dtype"]),
        routing,
        given["memory_utilization"],
    )


def _routing(text: str) -> Any:
    from rorqual.planner.costs.routing import Routing

    if not text.partition("/")[0].endswith(".json") and not text.endswith(".json"):
        return Routing.parse(text)
    try:
        counts = json.loads(Path(text).read_text())
        return Routing("recorded", counts=tuple(float(count) for count in counts))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{text}: {error}; it should be a JSON list of how often each expert was chosen"
        ) from None


def _sizes(text: str) -> Any:
    from rorqual.config.parallel import ParallelConfig

    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in LAYOUT_KEYS or not value.isdigit():
            raise ConfigError(
                f"layout {text!r}: {part!r} is not understood; accepted: "
                f"{', '.join(LAYOUT_KEYS)}, each with =N"
            )
        found[name] = int(value)
    return ParallelConfig(**found)


def _slow(given: Any) -> dict[int, float]:
    found = {}
    for text in given:
        rank, _, factor = text.partition("=")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(
                f"slow={text!r} is not understood; accepted: RANK=FACTOR, such as 3=1.2"
            ) from None
        if found[int(rank)] < 1 or int(rank) < 0:
            raise ConfigError(
                f"slow={text!r}: ranks count from 0, and a slow rank's factor is at least 1"
            )
    return found
