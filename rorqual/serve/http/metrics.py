"""What the server knows of itself: one snapshot for a page to draw, and the same figures for
Prometheus."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from rorqual.serve.engines.client import EngineClient
from rorqual.serve.engines.histogram import BOUNDS
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.messages import RequestTimes, Snapshot

WINDOW = 60.0  # seconds that "recent" means
PERCENTILES = (50, 90, 95, 99)
HELP = {
    "time_to_first_token_seconds": "Arrival to first token.",
    "request_time_per_output_token_seconds": "Mean time of a request's tokens after the first.",
    "inter_token_latency_seconds": "Time between tokens; tokens that came together share it.",
    "e2e_request_latency_seconds": "Arrival to last token.",
    "request_queue_time_seconds": "Arrival to admission.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request.",
}
GAUGES = {
    "num_requests_running": ("Sequences that run.", lambda s: s.running),
    "num_requests_waiting": ("Sequences that wait in the engine.", lambda s: s.waiting),
    "kv_cache_usage_perc": (
        "Share of cache pages that running sequences hold, 0 to 1.",
        lambda s: s.pages_used / max(1, s.pages_total),
    ),
}
COUNTERS = {
    "prompt_tokens": ("Prompt tokens computed.", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda s: s.output_tokens),
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_queries,
    ),
    "prefix_cache_hits": ("Prompt tokens found there.", lambda s: s.prefix_hits),
    "num_preemptions": (
        "Sequences that gave up their pages to be computed again.",
        lambda s: s.preemptions,
    ),
    "engine_steps": ("Steps launched.", lambda s: s.steps),
    "spec_decode_num_drafts": ("Drafts verified.", lambda s: s.drafted[0] if s.drafted else 0),
    "spec_decode_num_draft_tokens": ("Tokens drafted.", lambda s: sum(s.drafted)),
    "spec_decode_num_accepted_tokens": ("Drafted tokens accepted.", lambda s: sum(s.accepted)),
}


class EngineCollector(Collector):
    """Prometheus text from the engines' newest snapshots, under vLLM's names with the prefix
    `rorqual:`."""

    def __init__(self, fleet: EnginePool, counts: Counter[str]):
        self.fleet = fleet
        self.counts = counts

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        clients = self.fleet.clients
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(f"rorqual:{name}", text, labels=["engine"])
            for client in clients:
                gauge.add_metric([str(client.index)], read(client.snapshot))
            yield gauge
        for name, (text, read) in COUNTERS.items():
            counter = CounterMetricFamily(f"rorqual:{name}", text, labels=["engine"])
            for client in clients:
                counter.add_metric([str(client.index)], read(client.snapshot))
            yield counter
        yield from self._by_label(clients)
        for name in BOUNDS:
            yield _histogram(name, clients)
        yield from self._own()

    def _by_label(self, clients: list[EngineClient]) -> Iterator[Metric]:
        finished = CounterMetricFamily(
            "rorqual:request_success",
            "Requests by how they ended.",
            labels=["engine", "finished_reason"],
        )
        drafted = CounterMetricFamily(
            "rorqual:spec_decode_num_draft_tokens_per_pos",
            "By position.",
            labels=["engine", "position"],
        )
        accepted = CounterMetricFamily(
            "rorqual:spec_decode_num_accepted_tokens_per_pos",
            "By position.",
            labels=["engine", "position"],
        )
        load = CounterMetricFamily(
            "rorqual:expert_tokens",
            "Tokens by MoE layer and expert.",
            labels=["engine", "layer", "expert"],
        )
        for client in clients:
            index = str(client.index)
            snapshot = client.snapshot
            for reason, count in snapshot.finished.items():
                finished.add_metric([index, reason], count)
            for family, values in ((drafted, snapshot.drafted), (accepted, snapshot.accepted)):
                for position, count in enumerate(values):
                    family.add_metric([index, str(position)], count)
            for layer, counts in enumerate(snapshot.expert_load):
                for expert, count in enumerate(counts):
                    load.add_metric([index, str(layer), str(expert)], count)
        yield from (finished, drafted, accepted, load)

    def _own(self) -> Iterator[Metric]:
        """What the API process itself counts."""
        events = CounterMetricFamily(
            "rorqual:http_events",
            "Requests of the API that did not simply succeed.",
            labels=["event"],
        )
        for name, count in self.counts.items():
            events.add_metric([name], count)
        yield events
        yield CounterMetricFamily(
            "rorqual:engine_restarts", "Engine processes started again.", self.fleet.restarts
        )
        yield GaugeMetricFamily(
            "rorqual:healthy", "1 while every engine serves.", int(self.fleet.healthy)
        )


def _histogram(name: str, clients: list[EngineClient]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"rorqual:{name}", HELP[name], labels=["engine"])
    for client in clients:
        state = client.snapshot.histograms.get(name)
        if state is None:
            continue
        total = 0
        buckets = []
        for bound, count in zip(
            [*map(str, map(float, BOUNDS[name])), "+Inf"], state.counts, strict=True
        ):
            total += count
            buckets.append((bound, total))
        family.add_metric([str(client.index)], buckets, state.total)
    return family


class Rates:
    """Tokens a second over the last seconds, from samples of the counters."""

    def __init__(self, fleet: EnginePool):
        self.fleet = fleet
        self.samples: deque[tuple[float, int, int]] = deque(maxlen=600)

    def sample(self) -> None:
        snapshots = [client.snapshot for client in self.fleet.clients]
        self.samples.append(
            (
                time.monotonic(),
                sum(s.prompt_tokens for s in snapshots),
                sum(s.output_tokens for s in snapshots),
            )
        )

    def over(self, seconds: float) -> dict[str, float]:
        if len(self.samples) < 2:
            return {"prompt": 0.0, "output": 0.0}
        last = self.samples[-1]
        first = next(sample for sample in self.samples if sample[0] >= last[0] - seconds)
        span = last[0] - first[0]
        if span <= 0:
            return {"prompt": 0.0, "output": 0.0}
        return {
            "prompt": max(0, last[1] - first[1]) / span,
            "output": max(0, last[2] - first[2]) / span,
        }


def snapshot(fleet: EnginePool, rates: Rates, counts: Counter[str]) -> dict[str, Any]:
    """The state of this moment: counters since the engines started, gauges, percentiles over the
    last WINDOW seconds."""
    now = time.monotonic()
    return {
        "time": time.time(),
        "healthy": fleet.healthy,
        "restarts": fleet.restarts,
        "tokens_per_second": rates.over(5.0),
        "window_seconds": WINDOW,
        "recent": percentiles(
            [one for client in fleet.clients for one in client.ended if one.at >= now - WINDOW]
        ),
        "http_events": dict(counts),
        "engines": [_engine(client) for client in fleet.clients],
    }


def _engine(client: EngineClient) -> dict[str, Any]:
    found: Snapshot = client.snapshot
    kv = {"pages": found.pages_total, "used": found.pages_used, "cached": found.pages_cached}
    return {
        "engine": client.index,
        "age_seconds": round(time.monotonic() - found.at, 3) if found.at else None,
        "open": len(client.live),
        "running": found.running,
        "waiting": found.waiting,
        "steps": found.steps,
        "prompt_tokens": found.prompt_tokens,
        "output_tokens": found.output_tokens,
        "kv": kv,
        "prefix": {"queries": found.prefix_queries, "hits": found.prefix_hits},
        "preemptions": found.preemptions,
        "finished": found.finished,
        "speculation": {"drafted": found.drafted, "accepted": found.accepted},
        "expert_load": found.expert_load,
    }


def percentiles(ended: list[RequestTimes]) -> dict[str, Any]:
    """Of the requests that ended lately, seconds: {"count", "ttft": {"p50": ...}, ...}."""
    series = {
        "ttft": [one.ttft for one in ended],
        "tpot": [one.tpot for one in ended if one.tpot is not None],
        "e2e": [one.e2e for one in ended],
        "queue": [one.queue for one in ended],
    }
    return {
        "count": len(ended),
        **{name: _ranks(sorted(values)) for name, values in series.items()},
    }


def _ranks(values: list[float]) -> dict[str, float | None]:
    last = len(values) - 1
    return {f"p{p}": values[round(p / 100 * last)] if values else None for p in PERCENTILES}
