"""uvicorn's HTTP protocol with additional limits: bytes of headers, seconds for a request to
arrive, and aborting a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rorqual.serve.errors import ApiError
from rorqual.serve.http.response import ABORT, DIRECT
from rorqual.serve.limits import BODY_GRACE, ServerLimits


class Connection(HttpToolsProtocol):
    """A request has `patience` seconds for its headers, from its first byte (which has as long from
    the connection's start), and then a little more than that for its body: normally the route's own
    deadline responds with 408 first, but a route that does not read the body would not notice."""

    limits = ServerLimits()
    deadline: asyncio.TimerHandle | None = None
    receiving = False  # a request has started and is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.header_bytes = 0
        self._arm(self.limits.patience)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.header_bytes = 0
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        self.receiving = True
        self._arm(self.limits.patience)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._disarm()
        if not self.pipeline:
            self._arm(self.limits.patience + BODY_GRACE)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.receiving = False
        self._disarm()

    def on_response_complete(self) -> None:
        """Reading of a pipelined request resumes here, so its time starts."""
        waited = bool(self.pipeline)
        super().on_response_complete()
        if waited and not self.pipeline and self.receiving:
            self._arm(self.limits.patience + BODY_GRACE)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self.deadline = self.loop.call_later(seconds, self.transport.abort)

    def _disarm(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _count(self, size: int) -> None:
        self.header_bytes += size
        if self.header_bytes > self.limits.headers:
            raise httptools.HttpParserError("too many bytes of headers")

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        super().data_received(data)
        answered = self.cycle is None or self.cycle.response_complete
        if answered and not self.receiving and self.deadline is None:
            self._arm(self.limits.patience)  # blank lines, which uvicorn counts as activity

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, in the API's error format."""
        status, text = (
            (431, "the headers are too large")
            if self.header_bytes > self.limits.headers
            else (400, msg)
        )
        body = ApiError(status, text).body()
        line = (
            b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
            if status == 431
            else b"HTTP/1.1 400 Bad Request\r\n"
        )
        head = (
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        ) % len(body)
        self.transport.write(line + head + body)
        self.transport.close()


def limited(limits: ServerLimits) -> type[Any]:
    """A protocol class with these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


class DirectSend:
    """The outermost ASGI layer: puts its `send` into the scope, for the chunks of streams. Inner
    layers add to a response's head; passing the body through them only costs time."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT] = send
        await self.app(scope, receive, send)
