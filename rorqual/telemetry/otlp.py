"""Spans through OpenTelemetry's SDK, posted to a collector in OTLP by a thread of the SDK's. Needs
the extra `otel`.

Ending a span puts it into a queue of bounded length (limits.py), from which that thread takes
batches. What does not fit is dropped: a collector that is away, or never answers, costs a request
nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rorqual.telemetry.limits import FLUSH_SECONDS, MAX_VALUE_LENGTH, QUIET_SECONDS
from rorqual.telemetry.spans import Attributes, RequestSpan, RequestTracer, SpanKind

NAMES = ("traceparent", "tracestate")
KINDS = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}
# not the global one, which may be set to another form
PROPAGATOR = TraceContextTextMapPropagator()


class OtlpSpan(RequestSpan):
    """offset: nanoseconds from the monotonic clock to the time of day, the same for all spans of
    a request."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, offset: int):
        self.tracer = tracer
        self.span = span
        self.offset = offset

    @property
    def recording(self) -> bool:  # type: ignore[override]
        return self.span.is_recording()

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        start: float | None = None,
    ) -> RequestSpan:
        parent = trace.set_span_in_context(self.span, Context())
        made = self.tracer.start_span(name, parent, KINDS[kind], attributes, None, self._ns(start))
        return OtlpSpan(self.tracer, made, self.offset)

    def set(self, attributes: Attributes) -> None:
        self.span.set_attributes(attributes)

    def fail(self, kind: str, why: str = "") -> None:
        self.span.set_attribute("error.type", kind)
        self.span.set_status(trace.Status(trace.StatusCode.ERROR, why[:MAX_VALUE_LENGTH] or None))

    def end(self, at: float | None = None) -> None:
        self.span.end(self._ns(at))

    def carry(self, headers: dict[str, str]) -> dict[str, str]:
        found = {name: value for name, value in headers.items() if name.lower() not in NAMES}
        PROPAGATOR.inject(found, trace.set_span_in_context(self.span, Context()))
        return found

    def _ns(self, at: float | None) -> int:
        return self.offset + (time.monotonic_ns() if at is None else int(at * 1e9))


class OtlpTracer(RequestTracer):
    """url: as a whole, with its path. service: the name where OTEL_SERVICE_NAME gives none. The
    SDK reads the other OTEL_ variables by itself: sampler, headers, certificates, batches."""

    active = True

    def __init__(self, url: str, service: str, version: str):
        exporter = OTLPSpanExporter(endpoint=url)
        _seldom("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        _seldom("opentelemetry.sdk._shared_internal")
        self.provider = TracerProvider(
            resource=_resource(service, version),
            span_limits=SpanLimits(max_attribute_length=MAX_VALUE_LENGTH),
            shutdown_on_exit=False,  # it would wait half a minute for a collector
        )
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self.provider.get_tracer("rorqual", version)

    def start(
        self, name: str, headers: Mapping[str, str], attributes: Attributes | None = None
    ) -> RequestSpan:
        parent = PROPAGATOR.extract(headers, Context())
        offset = time.time_ns() - time.monotonic_ns()
        now = offset + time.monotonic_ns()
        span = self.tracer.start_span(
            name, parent, trace.SpanKind.SERVER, attributes, None, start_time=now
        )
        return OtlpSpan(self.tracer, span, offset)

    def close(self) -> None:
        last = threading.Thread(target=self.provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(FLUSH_SECONDS)


def _resource(service: str, version: str) -> Resource:
    """Who tells, as the environment says or else as we do."""
    found = Resource.create()
    own = {"service.version": version, "service.instance.id": str(uuid.uuid4())}
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": service}))
    return Resource(own).merge(found)


class SeldomFilter(logging.Filter):
    """Lets one line through in QUIET_SECONDS."""

    def __init__(self) -> None:
        super().__init__()
        self.next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self.next:
            return False
        self.next = now + QUIET_SECONDS
        return True


def _seldom(name: str) -> None:
    logger = logging.getLogger(name)
    if not any(isinstance(one, SeldomFilter) for one in logger.filters):
        logger.addFilter(SeldomFilter())
