"""A workload and a deployment from what a user says of them; see SimulationSettings. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rorqual.config.hardware import load_device
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.planner.costs.catalog import model_of
from rorqual.planner.costs.costs import Format
from rorqual.planner.costs.routing import Routing
from rorqual.planner.simulator import pools
from rorqual.planner.simulator.expert_drift import ExpertDrift
from rorqual.planner.simulator.incidents import Autoscaling, ReplicaFailure
from rorqual.planner.simulator.simulator import Deployment
from rorqual.planner.simulator.workload import (
    Arrivals,
    LengthDistribution,
    SharedPrefix,
    Workload,
)
from rorqual.planner.timing.page_times import PageTimes
from rorqual.planner.timing.profiles import load_profile, profile_for
from rorqual.planner.timing.roofline import StepModel, with_link

TARGET = 0.7  # requests of a replica under autoscaling, of those that it can run
MOST_SLOW = 1_000_000
HOST = 8  # GPUs of one, over which a model is split by default
LAYOUT_KEYS = ("tp", "dp", "pp", "ep", "dense_tp", "embed_tp", "head_tp")


def counted(params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` with layout and replicas: what was left out follows from the number of GPUs."""
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


def workload_of(given: Mapping[str, Any]) -> Workload:
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


def longest_requests(given: Mapping[str, Any], work: Any) -> tuple[int, int]:
    """(typical, longest) tokens of a request, prompt and output; drawn once more, since they
    depend on the seed alone."""
    jobs = [(job.prompt + job.output) for job in work.jobs(given["seed"])]
    if not jobs:
        raise ConfigError("the workload holds no requests")
    return math.ceil(sum(jobs) / len(jobs)), max(jobs)


def deployment_of(given: Mapping[str, Any], longest: tuple[int, int]) -> Deployment:
    """With what is to happen to it."""
    found = _pools_of(given, longest)
    _check_slow(given, max(pool.ranks for pool in found.pools))
    last = found.pools[-1]
    sizes = [Autoscaling.sizes(text, last.name) for text in given["autoscale"]]
    seqs = {
        pool.name: pool.scheduler.max_num_seqs * pool.ranks * pool.groups for pool in found.pools
    }
    times = {name: given[name] for name in ("scale_down_after", "start_seconds")}
    rules = tuple(
        Autoscaling(
            pool,
            least,
            most,
            given["target_requests"] or TARGET * seqs.get(pool, 1),
            given["scale_interval"],
            times["scale_down_after"],
            times["start_seconds"],
        )
        for pool, least, most in sizes
    )
    failures = tuple(ReplicaFailure.parse(text, last.name) for text in given["fail"])
    return replace(found, failures=failures, failover=given["failover"], autoscaling=rules)


def _drift(given: Mapping[str, Any]) -> Callable[[int], ExpertDrift] | None:
    if not given["expert_load"]:
        if given["enable_eplb"]:
            raise ConfigError("enable_eplb needs expert_load: counts of picks to follow")
        return None
    config = model_of(given["model"], given["quant"])
    layers = [layer for layer, sparse in enumerate(config.moe_layers) if sparse]
    if not layers:
        raise ConfigError("expert_load: the model has no experts")
    read = partial(
        ExpertDrift.read,
        given["expert_load"],
        layers,
        config.moe.num_experts,
        config.moe.top_k,
        period=given["expert_load_seconds"],
        redundant=given["redundant_experts"],
        moves=given["enable_eplb"],
        window=given["eplb_window"],
        threshold=given["eplb_threshold"],
    )
    return lambda ranks: read(ranks=ranks)


def _pools_of(given: Mapping[str, Any], longest: tuple[int, int]) -> Deployment:
    engine = pools.PoolSettings(
        context=longest[0],
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        max_model_len=given["max_model_len"] or longest[1] + 1,
        chunked_prefill_size=given["chunked_prefill_size"],
        itl_ms=given["itl_ms"],
        page_size=given["page_size"],
        num_pages=given["num_pages"],
        prefix_caching=given["prefix_caching"],
        acceptance=given["acceptance"],
        steps_in_flight=given["steps_in_flight"],
        micro_batches=given["micro_batches"],
        slow=_slow(given["slow"]),
        expert_drift=_drift(given),
    )
    attention = given["attention"]
    experts = given["experts"]
    prefill = given["prefill_replicas"]
    if bool(attention) != bool(experts) or (attention and prefill):
        raise ConfigError(
            f"attention={attention} and experts={experts} go together, and not with "
            f"prefill_replicas={prefill}"
        )
    if attention and (engine.expert_drift is not None or given["redundant_experts"]):
        raise ConfigError("expert_load and redundant_experts do not go with attention:experts")
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
    model = _model(given, _sizes(given["layout"], given["redundant_experts"]))
    if engine.expert_drift is not None and model.sizes.ep == 1:
        raise ConfigError("expert_load goes with a layout whose experts lie on ranks: ep=N")
    page_times = given["page_times"]
    if page_times is not None and not prefill:
        raise ConfigError("page_times goes with prefill_replicas")
    if not prefill:
        return pools.together(model, engine, given["replicas"], given["balancing"])
    first = _model(
        given, _sizes(given["prefill_layout"] or given["layout"], given["redundant_experts"])
    )
    measured = page_times and PageTimes.read(page_times, given["page_transport"])
    return pools.disaggregated(
        first, model, engine, (prefill, given["replicas"]), given["balancing"], measured
    )


def _model(given: Mapping[str, Any], sizes: Any) -> StepModel:
    device = with_link(load_device(given["gpu"]), given["network"])
    if given["network_latency"] is not None:
        if given["network_latency"] < 0:
            raise ConfigError(f"network_latency={given['network_latency']} us must be at least 0")
        network = replace(device.network, latency=given["network_latency"] * 1e-6)
        device = replace(device, network=network)
    engine = profile_for(device) if given["profile"] == "auto" else load_profile(given["profile"])
    routing = _routing(given["routing"])
    return StepModel(
        model_of(given["model"], given["quant"]),
        sizes,
        device,
        engine,
        Format(kv_dtype=given["kv_dtype"], split_latent=device.is_npu),
        routing,
        given["memory_utilization"],
    )


def _routing(text: str) -> Routing:
    if not text.partition("/")[0].endswith(".json") and not text.endswith(".json"):
        return Routing.parse(text)
    try:
        counts = json.loads(Path(text).read_text())
        return Routing("recorded", counts=tuple(float(count) for count in counts))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{text}: {error}; it should be a JSON list of how often each expert was chosen"
        ) from None


def _sizes(text: str, redundant: int = 0) -> ParallelConfig:
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in LAYOUT_KEYS or not value.isdigit():
            raise ConfigError(
                f"layout {text!r}: {part!r} is not understood; accepted: "
                f"{', '.join(LAYOUT_KEYS)}, each with =N"
            )
        found[name] = int(value)
    return ParallelConfig(**found, redundant_experts=redundant if found.get("ep", 1) > 1 else 0)


def _check_slow(given: Mapping[str, Any], ranks: int) -> None:
    for text in given["slow"]:
        if int(text.partition("=")[0]) >= ranks:
            raise ConfigError(
                f"slow={text!r}: a replica has no such rank; the ranks that attention is split "
                f"over (dp of --layout, or --attention) count from 0 to {ranks - 1}"
            )


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
        if not 1 <= found[int(rank)] <= MOST_SLOW or int(rank) < 0:
            raise ConfigError(
                f"slow={text!r}: ranks count from 0, and a slow rank's factor is 1 to {MOST_SLOW:,}"
            )
    return found
