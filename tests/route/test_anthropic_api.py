"""Anthropic's API behind a router: its clients know neither OpenAI's errors nor its last line."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tests.route.fakes import FakeServer, Faults, RouterUnderTest, routed, run

PATH = "/v1/messages"
ASK = {"prompt": "abc", "max_tokens": 4}
STREAM = {**ASK, "stream": True}
STOP = b"message_stop"


async def post(router: RouterUnderTest, body: Any, path: str = PATH) -> tuple[int, bytes]:
    async with router.session.post(
        router.url + path, json=body, headers={"X-Request-Id": "mine"}
    ) as answer:
        return answer.status, await answer.read()


def events(raw: bytes) -> list[tuple[bytes, Any]]:
    """Of a stream, each with its name. Events without one are no events of this API."""
    found = []
    *blocks, rest = raw.split(b"\n\n")
    assert rest == b""
    for block in blocks:
        name, data = block.split(b"\n")
        assert name.startswith(b"event: "), block
        found.append((name.removeprefix(b"event: "), json.loads(data.removeprefix(b"data: "))))
    return found


def check_error(found: Any, kind: str, message: str) -> None:
    assert found["type"] == "error"
    assert found["error"]["type"] == kind
    assert message in found["error"]["message"]
    assert found["request_id"] == "mine"


@pytest.mark.parametrize("after", range(1, 6))
def test_a_stream_whose_server_dies_ends_with_an_error_of_its_api(after: int) -> None:
    """Else the official client takes it for an answer that is complete."""

    async def test() -> None:
        bad, good = FakeServer("bad", Faults(die_after=after)), FakeServer("good")
        async with routed(good, bad) as router:
            status, raw = await post(router, STREAM)
            assert status == 200
            *before, (name, last) = events(raw)
            assert len(before) == after
            assert name == b"error"
            check_error(last, "api_error", "is lost")
            assert good.bodies == [], "these streams name no tokens"

    run(test())


def test_a_stream_that_has_ended_gets_no_error_after_its_end() -> None:
    async def test() -> None:
        for fault in (Faults(die_after=6), Faults(error_after=3)):
            async with routed(FakeServer("only", fault)) as router:
                names = [name for name, _ in events((await post(router, STREAM))[1])]
            ends = [names.index(end) for end in (b"error", STOP) if end in names]
            assert ends == [len(names) - 1]

    run(test())


def test_a_stream_that_is_cut_off() -> None:
    async def test() -> None:
        async with routed(FakeServer("slow", Faults(slow=0.05))) as router:
            asking = asyncio.create_task(post(router, {**STREAM, "max_tokens": 1000}))
            await router.until(lambda: any(s.in_flight for s in router.router.servers))
            server = router.router.servers.pick(False, b"")
            await router.until(lambda: any(a.response for a in server.attempts))
            router.router.cut()
            name, last = events((await asking)[1])[-1]
            assert name == b"error"
            check_error(last, "overloaded_error", "the router is ending")

    run(test())


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
def test_the_routers_own_errors(body: Any) -> None:
    async def test() -> None:
        fake = FakeServer()
        fake.healthy = 503
        async with routed(fake, max_body_bytes=100) as router:
            for path in (PATH, PATH + "/count_tokens"):
                status, raw = await post(router, body, path)
                assert status == 503
                check_error(json.loads(raw), "overloaded_error", "no server")
            status, raw = await post(router, {**body, "prompt": "x" * 100})
            assert status == 413
            check_error(json.loads(raw), "request_too_large", "100 bytes")
            assert "code" in json.loads((await post(router, body, "/v1/messages_too"))[1])["error"]

    run(test())


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize(("status", "code"), [(500, "engine_dead"), (429, "queue_full")])
def test_another_server_answers_what_one_could_not(body: Any, status: int, code: str) -> None:
    """This API's errors have no code in the body: a header names it."""

    async def test() -> None:
        bad, good = FakeServer("bad", Faults(refuse=status, code=code)), FakeServer("good")
        async with routed(good, bad) as router:
            found, raw = await post(router, body)
            assert found == 200
            if body is STREAM:
                assert events(raw)[-1][0] == STOP
            else:
                assert json.loads(raw)["server"] == "good"
            assert "rorqual_router_retries_total 1.0" in (await router.get("/metrics"))[1]

    run(test())


@pytest.mark.parametrize(("status", "code"), [(500, "other"), (429, "client_limit")])
def test_other_errors_are_the_clients(status: int, code: str) -> None:
    async def test() -> None:
        bad, good = FakeServer("bad", Faults(refuse=status, code=code)), FakeServer("good")
        async with routed(good, bad) as router:
            found, raw = await post(router, ASK)
            assert (found, json.loads(raw)["error"]["message"]) == (status, "bad refuses")
            assert good.bodies == []

    run(test())
