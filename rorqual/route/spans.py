"""Spans of the router: of a client's request, and of each attempt at a server as its child."""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web

from rorqual.route.calls import GENERATES, REQUEST_ID, RoutedCall
from rorqual.telemetry.spans import RequestSpan, RequestTracer, SpanKind, Value

MAX_REASON_LENGTH = 300  # characters of the reason for leaving a server


def request_span(tracer: RequestTracer, request: web.Request) -> RequestSpan:
    if not tracer.active:
        return tracer.start("", {})
    headers = {name.lower(): value for name, value in request.headers.items()}
    route = request.path if request.path in GENERATES else "/v1/*"
    attributes: dict[str, Value] = {
        "http.request.method": request.method,
        "http.route": route,
        "url.path": request.path,
    }
    return tracer.start(f"{request.method} {route}", headers, attributes)


def note_call(call: RoutedCall) -> None:
    """Set attributes of the request on its span."""
    if not call.span.recording:
        return
    found: dict[str, Value] = {"gen_ai.request.id": call.headers[REQUEST_ID]}
    if call.fields is not None:
        found["gen_ai.request.stream"] = call.streams
        model = call.fields.get("model")
        if isinstance(model, str):
            found["gen_ai.request.model"] = model
    call.span.set(found)


def attempt_span(
    call: RoutedCall, url: str, why: str, after: BaseException | str = ""
) -> RequestSpan:
    """why: prefill, first, retry (nothing, or only the prefill server's token, was sent to the
    client) or resume (the stream goes on).
    after: how the previous attempt ended."""
    call.attempts += 1
    if not call.span.recording:
        return call.span.child("")  # so that the trace context is still passed on
    parts = urlsplit(url)
    found: dict[str, Value] = {
        "http.request.method": call.method,
        "url.full": url + call.path,
        "server.address": parts.hostname or "",
        "rorqual.attempt.number": call.attempts,
        "rorqual.attempt.why": why,
    }
    if parts.port is not None:
        found["server.port"] = parts.port
    if after:
        found["rorqual.attempt.after"] = str(after)[:MAX_REASON_LENGTH]
    return call.span.child(f"{why} {call.path}", found, SpanKind.CLIENT)
