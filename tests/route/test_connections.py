"""Clients that send or take too little: what they hold is not theirs for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("aiohttp")

from rorqual.route import connection
from tests.route.fakes import FakeServer, Faults, RouterUnderTest, routed, run, said

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: router\r\n"
BODY = b'{"prompt": "abc", "max_tokens": 4}'
ASK = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(router: RouterUnderTest) -> AsyncIterator[Streams]:
    port = int(router.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the router closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        return b""


async def answer(reader: asyncio.StreamReader) -> bytes:
    """The body of one answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    (length,) = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
    return await reader.readexactly(int(length.partition(b":")[2]))


@pytest.mark.parametrize("sent", [b"", HEAD, b"\r\n", ASK + HEAD], ids=range(4))
def test_a_head_that_is_not_sent_to_its_end(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    if sent.startswith(ASK):  # what follows an answer is not in its time
        monkeypatch.setattr(connection, "KEEP_ALIVE_SECONDS", 0.2)

    async def test() -> None:
        async with routed(FakeServer()) as router, connected(router) as (reader, writer):
            writer.write(sent)
            rest = await ended(reader)
            assert rest.count(b"HTTP/1.1 200 ") == sent.count(ASK)
            assert (await router.ask({"prompt": "abc"}))[0] == 200

    run(test())


def test_the_head_of_a_later_request_has_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)

    async def test() -> None:
        async with routed(FakeServer()) as router, connected(router) as (reader, writer):
            for _ in range(2):
                writer.write(ASK)
                assert said("abc", 0, 4).encode() in await answer(reader)
            writer.write(HEAD)
            assert await ended(reader) == b""

    run(test())


def test_a_connection_without_requests_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "KEEP_ALIVE_SECONDS", 0.2)

    async def test() -> None:
        async with routed(FakeServer()) as router, connected(router) as (reader, writer):
            writer.write(ASK)
            assert said("abc", 0, 4).encode() in await answer(reader)
            assert await ended(reader) == b""

    run(test())


def test_what_takes_long_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of a head: not of a body, nor of an answer, behind which the next head may
    already have begun."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(connection, "KEEP_ALIVE_SECONDS", 0.2)
    body = b'{"prompt": "abc", "max_tokens": 20, "stream": true}'

    async def test() -> None:
        fake = FakeServer("slow", Faults(slow=0.05))
        async with routed(fake) as router, connected(router) as (reader, writer):
            writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
            for start in range(0, len(body), 6):
                await asyncio.sleep(0.05)
                writer.write(body[start : start + 6])
            await reader.readuntil(b"data: ")
            writer.write(HEAD)
            assert b"data: [DONE]" in await ended(reader)

    run(test())
