"""rorqual simulate: play a workload through the engine's scheduler on cards one need not own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.cli.options import Given, with_options
from rorqual.cli.plan import model_of
from rorqual.config.option import option
from rorqual.errors import ConfigError

HOST = 8  # cards of one, over which a model is split by default
LAYOUT_KEYS = ("tp", "dp", "pp", "ep", "dense_tp", "embed_tp", "head_tp")

_deployment = partial(option, group="Deployment")
_workload = partial(option, group="Workload")
_engine = partial(option, group="Engine")
_costs = partial(option, group="Costs")
_report = partial(option, group="Report")


@dataclass(frozen=True)
class Settings:
    """What is simulated, and what is shown of it."""

    gpu: str = _deployment(
        "h200", "A card that ships (list: rorqual plan --cards), or a YAML file of one."
    )
    count: int | None = _deployment(
        None, "Cards in all: as many replicas as they make, in place of --replicas."
    )
    layout: str | None = _deployment(
        None,
        "Sizes of a replica, such as tp=8 or dp=64,ep=64; the others as `serve` has them. "
        "Left out: tp=8, or less where that does not divide --count.",
    )
    replicas: int | None = _deployment(
        None, "Replicas, 1 if left out; those that decode where prompts have cards of their own."
    )
    prefill_replicas: int = _deployment(
        0, "Replicas for prompts alone; 0 computes prompts where tokens are decoded."
    )
    prefill_layout: str | None = _deployment(None, "Their sizes; --layout if left out.")
    attention: int = _deployment(
        0, "Attention cards of a replica whose experts lie on cards of their own."
    )
    experts: int = _deployment(0, "Expert cards of such a replica.")
    placement: str = _deployment(
        "experts", "An expert card holds `experts` of every layer, or whole `layers`."
    )
    network: float | None = _deployment(
        None, "Gbit/s a card between nodes, in place of the card's."
    )
    network_latency: float | None = _deployment(
        None, "Microseconds of a message between nodes, likewise."
    )
    balancing: str = _deployment(
        "live-tokens", "A request goes to the rank with the fewest live-tokens, or round-robin."
    )
    slow: tuple[str, ...] = _deployment(
        (), "RANK=FACTOR: a rank of every replica that computes so much more slowly."
    )
    arrivals: str = _workload("poisson", "poisson, gamma, fixed, at-once or closed.")
    rate: float = _workload(10.0, "Requests/s.")
    burstiness: float = _workload(
        1.0, "gamma: shape of the intervals; below 1 is burstier than Poisson."
    )
    clients: int = _workload(
        16, "closed: how many send their next request when the last is answered."
    )
    requests: int | None = _workload(None, "Requests in all.")
    seconds: float | None = _workload(None, "Requests arrive for so long; 60 if neither is given.")
    input_len: str = _workload("1000", "Tokens in: N, uniform:LOW:HIGH or lognormal:MEAN:SPREAD.")
    output_len: str = _workload("300", "Tokens out, likewise.")
    prefix_groups: int = _workload(0, "Prompts begin with one of so many shared prefixes.")
    prefix_len: int = _workload(0, "Tokens of a shared prefix, before --input-len.")
    prefix_zipf: float = _workload(0.0, "Exponent of the prefixes' popularity; 0 is even.")
    trace: Path | None = option(
        None,
        "JSON lines of timestamp (ms), input_length, output_length, hash_ids.",
        group="Workload",
    )
    trace_block: int = _workload(512, "Tokens a hash_id stands for.")
    speed: float = _workload(1.0, "2 replays a trace twice as fast.")
    seed: int = _workload(0, "The same seed gives the same run.")
    micro_batches: int = _engine(1, "Batches in flight: one computes while another is sent.")
    max_num_seqs: int | None = _engine(
        None, "Sequences at once on a rank; as many as fit, 256 at most, if left out."
    )
    max_num_batched_tokens: int = _engine(2048, "Tokens of a rank's step.")
    max_model_len: int | None = _engine(
        None, "Longest sequence; what the workload needs if left out."
    )
    chunked_prefill_size: int | None = _engine(None, "Most prompt tokens of one request in a step.")
    page_size: int = _engine(64, "Tokens of a cache page.")
    num_pages: int | None = _engine(
        None, "Pages of a rank; as many as its memory holds if left out."
    )
    prefix_caching: bool = _engine(True, "Keep and find pages of common prefixes.")
    acceptance: tuple[float, ...] = _engine(
        (), "Speculation: probability of each of num_speculative_tokens drafts, such as 0.85,0.7."
    )
    steps_in_flight: int = _engine(2, "2: a step is planned while the one before runs.")
    memory_utilization: float = _engine(0.9, "Share of a card's memory to use.")
    routing: str = _costs(
        "uniform", "uniform, zipf:EXPONENT (/placed, /perfect), or a JSON list of counts."
    )
    profile: str = _costs("auto", "Engine: auto, rorqual, sglang, or roofline for lower bounds.")
    quant: str = _costs("auto", "auto as published, fp8 or none.")
    kv_dtype: str | None = _costs(
        None,
        "The cache's dtype, say fp8; the model's if left out.",
        flags=(
            "--kv-dtype",
            "--kv-cache-dtype",
        ),
    )
    warm_up: float = _report(0.0, "Latencies are of requests that arrive after so many seconds.")
    interval: float = _report(1.0, "Seconds between two points of what is recorded over time.")
    gantt: tuple[Path, ...] = _report(
        (), "Draw a few steps to this .html, .svg or .png; may be repeated."
    )
    gantt_at: float = _report(10.0, "Seconds from which on steps are drawn.")
    gantt_steps: int = _report(2, "How many.")

    def __post_init__(self) -> None:
        timed = self.arrivals in ("poisson", "gamma", "fixed")
        if timed and self.requests is None and self.seconds is None and self.trace is None:
            object.__setattr__(self, "seconds", 60.0)


@with_options(chosen=Settings)
def simulate(
    chosen: Given,
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face id, a shape that ships, or a folder with a config.json."
        ),
    ] = "deepseek-v3",
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

    asked = Settings(**chosen)
    given = _counted({"model": model, **asdict(asked)})
    work = _workload_of(given)
    deployment = _deployment_of(given, longest=_longest(given, work))
    drawn = (asked.gantt_at, asked.gantt_steps if asked.gantt else 0)
    run = Simulation(deployment, work, asked.seed, asked.interval, drawn).run()
    found = outcome(run, asked.warm_up)
    report.show(run, found)
    for path in asked.gantt:
        chart.write(chart.gantt(run, f"{model} on {asked.gpu}, {deployment.cards} cards"), path)
    if json_file:
        written = as_json(run, found, given)
        json_file.write_text(json.dumps(written, indent=1, default=str) + "\n")


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


def _workload_of(given: Mapping[str, Any]) -> Any:
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


def _deployment_of(given: Mapping[str, Any], longest: tuple[int, int]) -> Any:
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
        acceptance=given["acceptance"],
        steps_in_flight=given["steps_in_flight"],
        micro_batches=given["micro_batches"],
        slow=_slow(given["slow"]),
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
    from rorqual.config.hardware import load_device
    from rorqual.planner.costs.costs import Format
    from rorqual.planner.timing.profiles import load_profile, profile_for
    from rorqual.planner.timing.roofline import StepModel, with_link

    card = with_link(load_device(given["gpu"]), given["network"])
    if given["network_latency"] is not None:
        if given["network_latency"] < 0:
            raise ConfigError(f"network_latency={given['network_latency']} us must be at least 0")
        card = replace(card, network=replace(card.network, latency=given["network_latency"] * 1e-6))
    engine = profile_for(card) if given["profile"] == "auto" else load_profile(given["profile"])
    routing = _routing(given["routing"])
    return StepModel(
        model_of(given["model"], given["quant"]),
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
