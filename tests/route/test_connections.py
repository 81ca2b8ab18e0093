"""Clients that send or take too little: what they hold is not theirs for ever."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

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
    """With little room for what is not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    sock.setblocking(False)
    port = int(router.url.rpartition(":")[2])
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 16)
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


# ---- bodies that arrive


def asking(size: int) -> bytes:
    """A body of so many bytes."""
    return BODY[:-1] + b" " * (size - len(BODY)) + b"}"


async def refused(router: RouterUnderTest, size: int) -> bool:
    url = router.url + "/v1/completions"
    async with router.session.post(url, data=asking(size)) as found:
        if found.status == 200:
            return False
        assert found.status == 503
        assert (await found.json())["error"]["code"] == "router_full"
        return True


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
def test_bodies_count_while_they_arrive(chunked: bool) -> None:
    """What has come of it; not what has been announced."""
    body = asking(800)
    parts = [body[:600], body[600:]]
    head = b"Content-Length: 800\r\n\r\n"
    if chunked:
        parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
        parts[-1] += b"0\r\n\r\n"
        head = b"Transfer-Encoding: chunked\r\n\r\n"

    async def test() -> None:
        async with routed(FakeServer(), max_held_bytes=1000) as router:
            async with connected(router) as (reader, writer):
                writer.write(HEAD + head + parts[0])
                await router.until(lambda: router.router.held == 600)
                assert await refused(router, 401)
                assert not await refused(router, 200)
                writer.write(parts[1])
                assert said("abc", 0, 4).encode() in await answer(reader)
            await router.until(lambda: router.router.held == 0)
            assert not await refused(router, 1000)

    run(test())


def test_a_body_in_chunks_that_becomes_too_large() -> None:
    async def test() -> None:
        async with routed(FakeServer(), max_held_bytes=1000, max_body_bytes=900) as router:
            for first, second, status in ((300, 601, b"413"), (900, 101, b"503")):
                async with connected(router) as (reader, writer):
                    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
                    writer.write(b"%x\r\n%b\r\n" % (first, b" " * first))
                    await router.until(lambda size=first: router.router.held == size)
                    if status == b"503":
                        router.router.held += 100  # another's
                        router.router.config = replace(router.router.config, max_body_bytes=2000)
                    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (second, b" " * second))
                    assert (await reader.readline()).split()[1] == status
                await router.until(lambda: router.router.open == 0)
            assert router.router.held == 100

    run(test())


def test_a_body_that_does_not_come_does_not_count() -> None:
    async def test() -> None:
        async with routed(FakeServer(), max_held_bytes=1000) as router:
            async with connected(router) as (_, writer):
                writer.write(HEAD + b"Content-Length: 1000\r\n\r\n" + b" " * 10)
                await router.until(lambda: router.router.held == 10)
                assert not await refused(router, 990)
                assert await refused(router, 991)
            await router.until(lambda: router.router.held == 0)
            assert not await refused(router, 1000)

    run(test())


# ---- answers that are not read

BIG = 16  # MiB: more than the kernel keeps


def test_an_answer_that_is_not_read_is_dropped() -> None:
    """It counts until then, and does not keep a file."""

    async def test() -> None:
        async with (
            routed(FakeServer("big", Faults(big=BIG)), reader_timeout=0.3) as router,
            connected(router) as (reader, writer),
        ):
            writer.write(ASK)
            await router.until(lambda: router.router.held > BIG << 20)
            await router.until(lambda: router.router.held == 0)
            assert router.router.open == 0
            assert len(await ended(reader)) < BIG << 20

    run(test())


def test_an_answer_that_is_read_slowly_comes() -> None:
    """The time is that between two parts, not of the whole."""

    async def test() -> None:
        fake = FakeServer("big", Faults(big=BIG))
        async with (
            routed(fake, reader_timeout=1.0) as router,
            connected(router) as (reader, writer),
        ):
            loop = asyncio.get_running_loop()
            for pause in (0.1, 0.0):
                start = loop.time()
                writer.write(ASK)
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
                assert size > BIG << 20
                parts = []
                while left := size - sum(map(len, parts)):
                    parts.append(await reader.readexactly(min(left, 1 << 20)))
                    await asyncio.sleep(pause)
                assert len(json.loads(b"".join(parts))["big"]) == BIG << 20
                assert loop.time() - start > 10 * pause
            await router.until(lambda: router.router.held == 0)

    run(test())


def test_a_stream_that_is_not_read_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there are bytes that its client never takes."""
    monkeypatch.setattr(connection, "LAST_SECONDS", 0.2)
    body = b'{"prompt": "abc", "stream": true}'

    async def test() -> None:
        fake = FakeServer("stream", Faults(flood=BIG))
        async with routed(fake, reader_timeout=0.3) as router, connected(router) as (_, writer):
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            await router.until(lambda: router.connections() == 1)
            await router.until(lambda: router.connections() == 0)

    run(test())
