"""A span for each completion, from its headers to the last byte of the response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rorqual.config.log import request_id
from rorqual.serve.http.response import SPAN
from rorqual.telemetry.spans import RequestSpan, RequestTracer, Value

# paths by gen_ai.operation.name
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}


class TracedRequests:
    """ASGI middleware, after the one that checks the key. A stream's chunks bypass it."""

    def __init__(self, app: ASGIApp, tracer: RequestTracer):
        self.app = app
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "POST" or path not in OPERATIONS:
            await self.app(scope, receive, send)
            return
        span = scope[SPAN] = self.start(scope)

        def watched(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                _note_status(span, message["status"])
            return send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            span.fail("cancelled")
            raise
        except Exception as error:
            span.fail(type(error).__name__)
            raise
        finally:
            span.end()

    def start(self, scope: Scope) -> RequestSpan:
        path = scope["path"]
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        attributes: dict[str, Value] = {
            "http.request.method": "POST",
            "http.route": path,
            "url.path": path,
            "gen_ai.operation.name": OPERATIONS[path],
            "gen_ai.provider.name": "rorqual",
            "gen_ai.request.id": request_id.get(),
        }
        return self.tracer.start(f"POST {path}", headers, attributes)


def _note_status(span: RequestSpan, status: int) -> None:
    span.set({"http.response.status_code": status})
    if status >= 500:
        span.fail(str(status))
