"""Every message of a connection has so long to arrive, not the first alone; and whoever has been
told that it was too slow is not listened to any more."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

import uvicorn
from fastapi import FastAPI, Request

from rorqual.serve.http import connection
from rorqual.serve.http.app import _errors
from rorqual.serve.http.auth import Authenticator
from rorqual.serve.http.clients import ApiKeys
from rorqual.serve.http.key_guard import KeyGuard
from rorqual.serve.http.memory import MemoryTrimmer
from rorqual.serve.limits import ServerLimits

pytestmark = pytest.mark.exhaustive(but_first=True)

PATIENCE = 1.0
GRACE = 0.4
CUT_SECONDS = 10.0  # a loaded machine may be late; who is not cut off drips on for longer
SLOW = 3.0  # seconds the slow route takes: longer than any time limit here
GET = b"GET /quick HTTP/1.1\r\nhost: x\r\n\r\n"


def make_app(limits: ServerLimits) -> FastAPI:
    app = FastAPI()

    @app.get("/quick")
    async def quick() -> str:
        return "quick"

    @app.post("/read")
    async def read(request: Request) -> int:
        return len(await request.body())

    @app.post("/slow")
    async def slow(request: Request) -> int:
        size = len(await request.body())
        await asyncio.sleep(SLOW)
        return size

    api: Any = SimpleNamespace(counts=Counter())
    _errors(app, api)
    guard = KeyGuard(ApiKeys(None), limits.wrong_keys)
    app.add_middleware(
        Authenticator, guard=guard, limits=limits, counts=Counter(), memory=MemoryTrimmer()
    )
    return app


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    limits = ServerLimits(patience=PATIENCE)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        make_app(limits), http=connection.limited(limits), lifespan="off", log_level="error"
    )
    server = uvicorn.Server(config)
    server.capture_signals = suppress  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve([sock]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        sock.close()


Work = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def with_connection(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_GRACE", GRACE, raising=False)

    async def run() -> None:
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                async with asyncio.timeout(60):
                    await work(reader, writer)
            finally:
                writer.close()

    asyncio.run(run())


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head, await reader.readexactly(length)


async def seconds_until_cut(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, drip: bytes, most: float = 15.0
) -> float:
    """Sends `drip` byte by byte, again and again, until the server ends the connection."""
    start = time.monotonic()
    with suppress(ConnectionError):
        while time.monotonic() - start < most and not reader.at_eof():
            for i in range(len(drip)):
                writer.write(drip[i : i + 1])
                await writer.drain()
                await asyncio.sleep(0.02)
                if reader.at_eof() or reader.exception() is not None:
                    break
            with suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await reader.read(1000)
    return time.monotonic() - start


def test_headers_of_a_second_message_have_their_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        assert (await answer(reader))[1] == b'"quick"'
        writer.write(b"GET /quick HTTP/1.1\r\n")
        assert await seconds_until_cut(reader, writer, b"x-a: b\r\n") < CUT_SECONDS

    with_connection(work, monkeypatch)


def test_blank_lines_between_messages_are_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        await answer(reader)
        assert await seconds_until_cut(reader, writer, b"\r\n") < CUT_SECONDS

    with_connection(work, monkeypatch)


def test_after_408_the_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n{")
        head, _ = await answer(reader)
        assert head.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in head.lower()
        assert await seconds_until_cut(reader, writer, b"xx") < CUT_SECONDS

    with_connection(work, monkeypatch)


def test_a_body_that_nobody_reads_has_its_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /quick HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n{")
        assert (await answer(reader))[1] == b'"quick"'
        assert await seconds_until_cut(reader, writer, b"xxxx") < CUT_SECONDS

    with_connection(work, monkeypatch)


def test_who_sends_in_time_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests over longer than any limit; a long answer with a blank line or the next request's
    beginning behind the request, which the server does not read on meanwhile."""

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(4):
            writer.write(GET)
            assert (await answer(reader))[1] == b'"quick"'
            await asyncio.sleep(0.5 * PATIENCE)
        post = b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nabcd"
        writer.write(post + b"\r\n")
        assert (await answer(reader))[1] == b"4"
        writer.write(post + post.replace(b"/slow", b"/read")[:-2])
        assert (await answer(reader))[1] == b"4"
        writer.write(b"yz")
        assert (await answer(reader))[1] == b"4"
        writer.write(GET)
        assert (await answer(reader))[1] == b'"quick"'

    with_connection(work, monkeypatch)


def test_a_message_that_waits_for_its_turn_is_timed_from_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        post = b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nabcd"
        behind = b"GET /quick HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n{"
        writer.write(post + behind)
        assert (await answer(reader))[1] == b"4"
        assert (await answer(reader))[1] == b'"quick"'
        assert await seconds_until_cut(reader, writer, b"xxxx") < CUT_SECONDS

    with_connection(work, monkeypatch)
