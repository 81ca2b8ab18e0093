"""Spans by themselves: whose children they are, what a collector that is away costs, and that
nothing is there while nobody asks."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rorqual.config.otlp import check_otlp_endpoint, traces_url
from rorqual.errors import ConfigError
from rorqual.telemetry.start import start_tracer
from tests.serve.running import ROOT

VARIABLES = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "variables", "url"),
    [
        (None, {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("https://c/otlp/spans", {}, "https://c/otlp/spans"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1/x"}, "http://c:1/x/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1/x"}, "http://c:1/x"),
        ("http://d:1", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1"}, "http://d:1/v1/traces"),
        (
            None,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1", "OTEL_TRACES_EXPORTER": "none"},
            None,
        ),
    ],
)
def test_where_spans_go(
    given: str | None,
    variables: dict[str, str],
    url: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert traces_url(given) == url


@pytest.mark.parametrize("given", ["", "c:4318", "grpc://c:4317", "http://", "http://c:99999"])
def test_a_wrong_endpoint_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="accepted: http://HOST:PORT"):
        check_otlp_endpoint(given)


def test_nothing_is_loaded_while_nobody_asks() -> None:
    """Neither the SDK nor an exporter, in router and server."""
    script = """
import sys
import rorqual.route.app
import rorqual.serve.launch
from rorqual.telemetry.start import start_tracer
tracer = start_tracer(None, "x", "1")
span = tracer.start("x", {})
assert span.child("y") is span and not span.recording and not tracer.active
assert span.carry({"a": "b"}) == {"a": "b"}
found = [name for name in sys.modules if name.startswith("opentelemetry.")]
assert not [name for name in found if ".sdk" in name or ".exporter" in name], found
"""
    pytest.importorskip("aiohttp")
    pytest.importorskip("fastapi")
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def test_without_the_package_a_flag_is_a_mistake_and_the_environment_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "rorqual.telemetry.otlp", None)
    with pytest.raises(ConfigError, match=r"install rorqual\[otel\]"):
        start_tracer("http://127.0.0.1:4318", "x", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert not start_tracer(None, "x", "1").active
    assert "no spans are exported" in caplog.text


class TestWithTheSdk:
    @pytest.fixture(autouse=True)
    def _needs_it(self) -> None:
        pytest.importorskip("opentelemetry.sdk")
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

    def test_whose_child_a_span_is(self) -> None:
        from tests.telemetry.recorded import (
            PARENT,
            TRACE,
            TRACEPARENT,
            Recorded,
            failed,
            id_of,
            parent_of,
            trace_of,
        )

        recorded = Recorded()
        given = {"traceparent": TRACEPARENT, "tracestate": "a=b"}
        span = recorded.tracer.start("request", given, {"x": 1})
        began = time.monotonic()
        child = span.child("queue", {"y": "z" * 5000}, start=began - 2.0)
        child.end(began - 1.5)
        carried = span.carry({"Traceparent": "of the client", "Accept": "*/*"})
        span.fail("lost", "it broke off")
        span.end()
        inner, outer = recorded.spans
        assert (trace_of(outer), parent_of(outer)) == (TRACE, PARENT)
        assert (trace_of(inner), parent_of(inner)) == (TRACE, id_of(outer))
        expected = {"Accept": "*/*", "traceparent": f"00-{TRACE}-{id_of(outer)}-01"}
        assert carried == {**expected, "tracestate": "a=b"}
        assert abs((inner.end_time - inner.start_time) - 5e8) < 1000
        assert abs(outer.start_time - inner.start_time - 2e9) < 5e8
        assert len(inner.attributes["y"]) == 1024
        assert (failed(inner), failed(outer)) == (False, True)
        assert outer.attributes["error.type"] == "lost"
        assert outer.resource.attributes["service.name"] == "tests"

    @pytest.mark.parametrize("given", ["", "nonsense", "00-" + "0" * 32 + "-" + "1" * 16 + "-01"])
    def test_a_wrong_parent_is_none(self, given: str) -> None:
        from tests.telemetry.recorded import Recorded, parent_of

        recorded = Recorded()
        recorded.tracer.start("request", {"traceparent": given}).end()
        assert parent_of(recorded.spans[0]) is None

    def test_a_client_that_does_not_sample_is_followed(self) -> None:
        from tests.telemetry.recorded import TRACE, TRACEPARENT, Recorded

        recorded = Recorded()
        span = recorded.tracer.start("request", {"traceparent": TRACEPARENT[:-1] + "0"})
        child = span.child("queue")
        assert not span.recording
        carried = child.carry({})["traceparent"]
        assert carried.startswith(f"00-{TRACE}-")
        assert carried.endswith("-00")
        child.end()
        span.end()
        assert recorded.spans == []

    @pytest.fixture(params=["nobody listens", "it never answers"])
    def endpoint(self, request: pytest.FixtureRequest) -> Iterator[str]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            if request.param == "it never answers":
                listener.listen()
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"

    def test_a_collector_that_is_away_costs_nothing(
        self,
        endpoint: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Twice as many spans as the queue holds: it stays bounded, nobody waits, and the end is
        bounded too."""
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from rorqual.telemetry import otlp
        from rorqual.telemetry.limits import QUEUED

        assert BatchSpanProcessor._default_max_queue_size() == QUEUED
        monkeypatch.setattr(otlp, "FLUSH_SECONDS", 0.2)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        tracer = otlp.OtlpTracer(endpoint, "tests", "1")
        slow = 0  # one that waited for a batch would do so for a second, every 512
        for _ in range(2 * QUEUED):
            before = time.monotonic()
            tracer.start("request", {}).end()
            slow += time.monotonic() - before > 0.5
        (processor,) = tracer.provider._active_span_processor._span_processors
        assert len(processor._batch_processor._queue) <= QUEUED
        assert slow <= 1
        before = time.monotonic()
        tracer.close()
        assert time.monotonic() - before < 15
        assert len(caplog.records) < 5
