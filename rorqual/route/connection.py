"""Clients' connections: aiohttp's, with time limits for what a client sends and takes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web

HEAD_SECONDS = 30.0  # for a request's headers, from its first byte or the connection's start
KEEP_ALIVE_SECONDS = 75.0  # between two requests
LAST_SECONDS = 30.0  # for the last bytes of a connection that is closed
HEADER_BYTES = 32 << 10  # of all headers and the request line


class ClientConnection(web.RequestHandler):
    """aiohttp ends connections between two requests, but has no limit for the head of one, and
    waits without end until a closed connection's last bytes are taken. Each of these would hold a
    file for as long as a client likes."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._request_count  # of complete heads
        super().data_received(data)
        if self._request_count > before:
            self._disarm()
        elif self.deadline is None and self._waits_for_head:
            self._arm()

    async def start(self) -> None:
        try:
            await super().start()
        finally:
            self.force_close()

    def force_close(self) -> None:
        transport = self.transport
        super().force_close()
        if transport is not None and transport.get_write_buffer_size():
            self._loop.call_later(LAST_SECONDS, transport.abort)

    @property
    def _waits_for_head(self) -> bool:
        """Whether no request is being answered."""
        return self._waiter is not None and not self._waiter.done()

    def _arm(self) -> None:
        self.deadline = self._loop.call_later(HEAD_SECONDS, self._cut)

    def _disarm(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _cut(self) -> None:
        self.deadline = None
        if self.transport is not None:
            self.transport.abort()


class LimitedRunner(web.AppRunner):
    """Its sites make a ClientConnection for each client."""

    @property
    def server(self) -> Any:
        found = super().server
        return None if found is None else partial(_connection, found)


def _connection(server: web.Server) -> ClientConnection:
    return ClientConnection(
        server,
        loop=asyncio.get_running_loop(),
        keepalive_timeout=KEEP_ALIVE_SECONDS,
        access_log=None,  # type: ignore[arg-type]
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
        max_headers=128,
        auto_decompress=False,  # compressed bodies are refused
    )
