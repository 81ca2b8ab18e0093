"""A tracer whose spans stay in this process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rorqual.telemetry.otlp import OtlpTracer

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Recorded:
    """`tracer`, and what became of its spans. Nobody listens at its endpoint."""

    def __init__(self) -> None:
        self.tracer = OtlpTracer("http://127.0.0.1:9/v1/traces", "tests", "1")
        self.exporter = InMemorySpanExporter()
        self.tracer.provider._active_span_processor._span_processors = ()  # nothing is posted
        self.tracer.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        """Those that have ended."""
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def trace_of(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}"


def id_of(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def failed(span: ReadableSpan) -> bool:
    return not span.status.is_ok and span.status.status_code.name == "ERROR"


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})
