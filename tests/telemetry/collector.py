"""A collector for tests: an HTTP server that reads spans as OTLP's protobuf messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.child_process import python_path

# of processes that find what this one finds, and tell their spans soon
ENVIRONMENT = {
    "PYTHONPATH": python_path(),
    "OTEL_BSP_SCHEDULE_DELAY": "100",
}
SERVER = 2  # kinds, by OTLP's numbers
CLIENT = 3
ERROR = 2  # status


@dataclass(frozen=True)
class Collected:
    """A span as it came; service: of the process that told it. Times are nanoseconds."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start: int
    end: int
    failed: bool
    said: str
    attributes: dict[str, Any]


class Collector:
    """Listens while in its context."""

    def __init__(self) -> None:
        self.spans: list[Collected] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.paths.add(self.path)
                size = int(self.headers["Content-Length"])
                found = ExportTraceServiceRequest.FromString(self.rfile.read(size))
                collector.take(found)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> Collector:
        self.thread.start()
        return self

    def __exit__(self, *rest: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def take(self, found: ExportTraceServiceRequest) -> None:
        for of_resource in found.resource_spans:
            service = read(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    self.spans.append(
                        Collected(
                            service,
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.kind,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            span.status.code == ERROR,
                            span.status.message,
                            read(span.attributes),
                        )
                    )

    def wait_until(self, condition: Callable[[list[Collected]], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition(list(self.spans)):
            present = [(span.service, span.name) for span in self.spans]
            assert time.monotonic() < deadline, f"still waiting; there are {present}"
            time.sleep(0.02)

    def of_trace(self, trace: str) -> list[Collected]:
        return [span for span in list(self.spans) if span.trace == trace]


def read(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
