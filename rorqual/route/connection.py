"""Clients' connections: aiohttp's, with time limits for what a client sends and takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any

from aiohttp import web

log = logging.getLogger("rorqual.route")

PART_BYTES = 1 << 18  # of an answer that are written at once
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


async def send(
    request: web.Request, answer: web.StreamResponse, seconds: float
) -> web.StreamResponse:
    """Send an answer, or the end of a stream, until the kernel has all of it, and return it. A
    client that takes nothing for `seconds` loses its connection. Left to aiohttp, the answer would
    stay in memory for as long as the client likes."""
    transport = request.transport
    if transport is None:
        return answer
    transport.set_write_buffer_limits(high=0)
    try:
        if isinstance(answer, web.Response) and len(body := _body_of(answer)) > PART_BYTES:
            whole = answer
            answer = web.StreamResponse(status=whole.status, headers=whole.headers)
            answer.content_length = len(body)
            await answer.prepare(request)
            for start in range(0, len(body), PART_BYTES):
                part = memoryview(body)[start : start + PART_BYTES]
                await _taken(transport, answer.write(part), seconds)
        await answer.prepare(request)
        await _taken(transport, answer.write_eof(), seconds)
    except TimeoutError:
        log.warning("a client does not read its answer: its connection is cut")
        transport.abort()
    except ConnectionError:
        transport.abort()
    except BaseException:
        transport.abort()  # a part of it is sent: nothing else may follow
        raise
    else:
        transport.set_write_buffer_limits()
    return answer


def _body_of(answer: web.Response) -> bytes:
    return answer.body if isinstance(answer.body, bytes) else b""


async def _taken(
    transport: asyncio.WriteTransport, writing: Coroutine[Any, Any, None], seconds: float
) -> None:
    """Wait for a write. Raises TimeoutError where the client takes nothing for `seconds`."""
    task = asyncio.ensure_future(writing)
    try:
        await asyncio.sleep(0)  # it begins
        left = transport.get_write_buffer_size()
        while not task.done():
            await asyncio.wait({task}, timeout=seconds)
            now = transport.get_write_buffer_size()
            if now >= left and not task.done():
                raise TimeoutError
            left = now
        task.result()
    finally:
        task.cancel()
