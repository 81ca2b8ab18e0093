"""uvicorn's HTTP protocol with limits it lacks: bytes of headers, seconds for a request to
arrive, and a way to cut a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rorqual.serve.errors import ApiError
from rorqual.serve.http.response import ABORT
from rorqual.serve.limits import ServerLimits


class Connection(HttpToolsProtocol):
    limits = ServerLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.header_bytes = 0
        self.impatience = self.loop.call_later(self.limits.patience, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.impatience.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.header_bytes = 0
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.impatience.cancel()  # from here the body's time is the gate's to watch
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self.header_bytes += size
        if self.header_bytes > self.limits.headers:
            raise httptools.HttpParserError("too many bytes of headers")

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, in the API's own shape."""
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
    """The protocol class with these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
