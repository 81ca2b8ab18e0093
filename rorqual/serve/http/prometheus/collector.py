"""Prometheus text from the engines' newest snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
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
from rorqual.serve.http.prometheus.names import (
    GAUGES,
    HISTOGRAMS,
    RORQUAL,
    SPECULATION,
    VLLM,
    MetricNames,
)


def registry(
    pool: EnginePool, counts: Counter[str], names: str, model: str, speculates: bool
) -> CollectorRegistry:
    """names: as ServeConfig.metrics_names. model: the served name, for vLLM's labels."""
    made = CollectorRegistry(auto_describe=False)
    if names in ("rorqual", "both"):
        made.register(EngineCollector(pool, RORQUAL))
        made.register(OwnCollector(pool, counts))
    if names in ("vllm", "both"):
        made.register(EngineCollector(pool, VLLM, {"model_name": model}, speculates))
    return made


class EngineCollector(Collector):
    """What the engines count, by engine. labels: added to every sample. Without `speculates`
    figures of drafts are left out."""

    def __init__(
        self,
        pool: EnginePool,
        names: MetricNames,
        labels: dict[str, str] | None = None,
        speculates: bool = True,
    ):
        self.pool = pool
        self.names = names
        self.common = labels or {}
        self.labels = [*self.common, "engine"]
        self.counters = {**names.counters, **(SPECULATION if speculates else {})}
        self.by_position = names.by_position if speculates else ()

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        clients = self.pool.clients
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(self._name(name), text, labels=self.labels)
            for client in clients:
                gauge.add_metric(self._values(client), read(client.snapshot))
            yield gauge
        for name, (text, read) in self.counters.items():
            counter = self._counter(name, text)
            for client in clients:
                counter.add_metric(self._values(client), read(client.snapshot))
            yield counter
        yield from self._host_cache(clients)
        yield self._finished(clients)
        for what in self.by_position:
            yield self._positions(what, clients)
        for name, text in HISTOGRAMS.items():
            yield self._histogram(name, text, clients)

    def _name(self, name: str) -> str:
        return f"{self.names.prefix}:{name}"

    def _counter(self, name: str, text: str, *more: str) -> CounterMetricFamily:
        return CounterMetricFamily(self._name(name), text, labels=[*self.labels, *more])

    def _values(self, client: EngineClient, *more: str) -> list[str]:
        return [*self.common.values(), str(client.index), *more]

    def _host_cache(self, clients: list[EngineClient]) -> Iterator[Metric]:
        """Figures of host memory, where configured."""
        reporting = [client for client in clients if client.snapshot.host_cache]
        for place, name in enumerate(self.names.host_cache if reporting else ()):
            if name is None:
                continue
            kind = CounterMetricFamily if name[2] else GaugeMetricFamily
            family = kind(self._name(name[0]), name[1], labels=self.labels)
            for client in reporting:
                family.add_metric(self._values(client), client.snapshot.host_cache[place])
            yield family

    def _finished(self, clients: list[EngineClient]) -> Metric:
        family = self._counter("request_success", "Requests by how they ended.", "finished_reason")
        for client in clients:
            found = dict.fromkeys(self.names.finished, 0) | client.snapshot.finished
            for reason, count in found.items():
                family.add_metric(self._values(client, reason), count)
        return family

    def _positions(self, what: str, clients: list[EngineClient]) -> Metric:
        family = self._counter(f"spec_decode_num_{what}_tokens_per_pos", "By position.", "position")
        for client in clients:
            values = client.snapshot.drafted if what == "draft" else client.snapshot.accepted
            for position, count in enumerate(values):
                family.add_metric(self._values(client, str(position)), count)
        return family

    def _histogram(self, name: str, text: str, clients: list[EngineClient]) -> Metric:
        family = HistogramMetricFamily(self._name(name), text, labels=self.labels)
        bounds = [*map(str, map(float, BOUNDS[name])), "+Inf"]
        for client in clients:
            state = client.snapshot.histograms.get(name)
            if state is None:
                continue
            total = 0
            buckets = []
            for bound, count in zip(bounds, state.counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric(self._values(client), buckets, state.total)
        return family


EXPERT_SERVERS = (
    ("expert_server_up", "1 while an expert server is linked."),
    ("expert_server_call_seconds", "Seconds of a call to an expert server, smoothed."),
    ("expert_server_share", "Share of the rows that others could take too, at most 1."),
)
EXPERT_MOVES = (
    ("expert_rebalances", "Times that experts were moved to even out the ranks' loads."),
    ("expert_moves", "Moves put in force; a rebalance takes several."),
    ("expert_slots_moved", "Slots whose expert was replaced."),
    ("expert_moves_failed", "Moves given up; experts stayed where they were."),
)


TRANSFERS = (
    ("kv_transfer_requests", "Requests whose prompts were computed elsewhere.", True),
    ("kv_transfer_failures", "Of these: not all pages came.", True),
    ("kv_transfer_pages_received", "Pages fetched from other engines.", True),
    ("kv_transfer_pages_sent", "Pages that other engines fetched.", True),
    ("kv_transfer_leases_expired", "Answers whose pages nobody fetched in time.", True),
    ("kv_transfer_offers_refused", "Answers whose pages were not kept: too many were.", True),
    ("kv_transfer_pages_held", "Pages kept for other engines.", False),
    ("kv_transfer_requests_waiting", "Requests whose pages are on their way.", False),
)
TRAFFIC = (
    ("kv_transfer_bytes_received", "Bytes of pages fetched from other engines."),
    ("kv_transfer_bytes_sent", "Bytes of pages that other engines fetched."),
    ("kv_transfer_seconds", "Seconds that fetches took, several at once counted apart."),
    ("kv_transfer_errors", "Fetches that brought not all pages."),
)


class OwnCollector(Collector):
    """Figures without a name in vLLM: expert load, and counts of the API process."""

    def __init__(self, pool: EnginePool, counts: Counter[str]):
        self.pool = pool
        self.counts = counts

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        load = CounterMetricFamily(
            "rorqual:expert_tokens",
            "Tokens by MoE layer and expert.",
            labels=["engine", "layer", "expert"],
        )
        for client in self.pool.clients:
            for layer, counts in enumerate(client.snapshot.expert_load):
                for expert, count in enumerate(counts):
                    load.add_metric([str(client.index), str(layer), str(expert)], count)
        yield load
        yield from self._balance()
        yield from self._transfers()
        yield from self._expert_servers()
        events = CounterMetricFamily(
            "rorqual:http_events",
            "Requests of the API that did not simply succeed.",
            labels=["event"],
        )
        for name, count in self.counts.items():
            events.add_metric([name], count)
        yield events
        yield CounterMetricFamily(
            "rorqual:engine_restarts", "Engine processes started again.", self.pool.restarts
        )
        startup = GaugeMetricFamily(
            "rorqual:startup_seconds",
            "Seconds that an engine's start took, by phase; api: before this server started it.",
            labels=["engine", "phase"],
        )
        for client in self.pool.clients:
            for phase, seconds in {"api": self.pool.began, **client.startup}.items():
                startup.add_metric([str(client.index), phase], seconds)
        yield startup
        yield GaugeMetricFamily(
            "rorqual:healthy",
            "1 while every engine serves and each expert has a server.",
            int(self.pool.healthy),
        )

    def _transfers(self) -> Iterator[Metric]:
        for place, (name, text, counts) in enumerate(TRANSFERS):
            kind = CounterMetricFamily if counts else GaugeMetricFamily
            family = kind(f"rorqual:{name}", text, labels=["engine"])
            for client in self.pool.clients:
                if client.snapshot.transfers:
                    family.add_metric([str(client.index)], client.snapshot.transfers[place])
            yield family
        for place, (name, text) in enumerate(TRAFFIC):
            labels = ["engine", "transport"]
            counter = CounterMetricFamily(f"rorqual:{name}", text, labels=labels)
            for client in self.pool.clients:
                for transport, values in client.snapshot.traffic.items():
                    counter.add_metric([str(client.index), transport], values[place])
            yield counter

    def _expert_servers(self) -> Iterator[Metric]:
        for place, (name, text) in enumerate(EXPERT_SERVERS):
            family = GaugeMetricFamily(f"rorqual:{name}", text, labels=["engine", "server"])
            for client in self.pool.clients:
                for server, *values in client.snapshot.expert_servers:
                    family.add_metric([str(client.index), server], float(values[place]))
            yield family

    def _balance(self) -> Iterator[Metric]:
        balance = GaugeMetricFamily(
            "rorqual:expert_balancedness",
            "Mean over max of the ranks' loads, by MoE layer, lately.",
            labels=["engine", "layer"],
        )
        for client in self.pool.clients:
            for layer, value in enumerate(client.snapshot.expert_balancedness):
                balance.add_metric([str(client.index), str(layer)], value)
        yield balance
        for place, (name, text) in enumerate(EXPERT_MOVES):
            family = CounterMetricFamily(f"rorqual:{name}", text, labels=["engine"])
            for client in self.pool.clients:
                if client.snapshot.expert_moves:
                    family.add_metric([str(client.index)], client.snapshot.expert_moves[place])
            yield family
