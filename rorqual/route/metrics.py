"""The metrics of /metrics."""

from __future__ import annotations

from contextlib import suppress

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

from rorqual.route.servers import READY, Server

PREFIX = "rorqual_router"


class RouteMetrics:
    """Labels: `server` is a URL. Series of a removed server are deleted."""

    def __init__(self) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Requests sent to servers, by how that ended", "server", "outcome"
        )
        self.answers = self._counter("answers", "Answers to clients by status", "status")
        self.retries = self._counter("retries", "Requests tried again, nothing having been sent")
        self.resumes = self._counter("resumes", "Streams that went on elsewhere")
        self.streams_lost = self._counter("streams_lost", "Streams that ended with an error")
        self.prefills = self._counter("prefills", "Prompts sent to prefill servers", "outcome")
        self.first_tokens = self._counter(
            "first_tokens",
            "Streams whose prompt was sent to a prefill server, by the role of the server that the "
            "first token came from",
            "role",
        )
        self.in_flight = self._gauge("in_flight", "Requests under way", "server")
        self.up = self._gauge("server_ready", "1 where a server takes requests", "server")
        self.breaker = self._gauge(
            "breaker_open", "1 where a server failed too often in a row", "server"
        )
        self.open = self._gauge("open_requests", "Clients' requests that are open")
        self.registry_up = self._gauge(
            "registry_up", "1 where etcd answers; 0 also without --registry"
        )
        self.outcomes: set[tuple[str, str]] = set()

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", about, labels, registry=self.registry)

    def note(self, server: Server, outcome: str) -> None:
        """Count an ended attempt: ok, error (the server's), lost, or left (the client
        disconnected)."""
        self.outcomes.add((server.url, outcome))
        self.requests.labels(server.url, outcome).inc()

    def note_state(self, server: Server) -> None:
        self.up.labels(server.url).set(server.state == READY)

    def forget(self, url: str) -> None:
        for metric in (self.in_flight, self.up, self.breaker):
            with suppress(KeyError):  # it was never checked
                metric.remove(url)
        for pair in [pair for pair in self.outcomes if pair[0] == url]:
            self.requests.remove(*pair)
            self.outcomes.discard(pair)

    def text(self, servers: list[Server], breaker_failures: int) -> bytes:
        for server in servers:
            self.in_flight.labels(server.url).set(server.in_flight)
            self.breaker.labels(server.url).set(server.strikes >= breaker_failures)
        return generate_latest(self.registry)
