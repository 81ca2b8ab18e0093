"""The first token of a stream comes from the server that computed its prompt, the rest from the one
that answers: no token is missing or told twice, whatever happens between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tests.route.fakes import FakeServer, Faults, RouterUnderTest, routed, run, token_of

BODY = {"prompt": "abc", "max_tokens": 8, "stream": True}
USAGE = {"stream_options": {"include_usage": True}}
FIRST = token_of("abc", 0, 0)


@asynccontextmanager
async def apart(
    faults: Faults | None = None, *decode: Faults, **options: Any
) -> AsyncIterator[tuple[RouterUnderTest, FakeServer, list[FakeServer]]]:
    """A prefill server that hands streams over, and servers that answer, with these faults."""
    prefill = FakeServer("prefill", faults, hands_over=True)
    answers = [FakeServer(f"decode{i}", one) for i, one in enumerate(decode or (Faults(),))]
    async with routed(prefill=(prefill,), decode=tuple(answers), **options) as router:
        yield router, prefill, answers


async def counted(router: RouterUnderTest, **wanted: float) -> None:
    """By role, of how many streams the first token came from there."""
    text = (await router.get("/metrics"))[1]
    start = 'rorqual_router_first_tokens_total{role="'
    lines = [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]
    found = {role: float(count) for role, count in (line.split('"} ') for line in lines)}
    assert found == wanted


def test_the_stream_is_one() -> None:
    async def test() -> None:
        async with apart() as (router, prefill, (decode,)):
            received = await router.post({**BODY, **USAGE})
            received.assert_whole("abc", 8, usage=True)
            assert received.ids == {"cmpl-prefill@5"}
            assert "rorqual" not in received.raw
            asked = {"do_remote_decode": True, "first_token": True}
            assert prefill.bodies == [{**BODY, **USAGE, "kv_transfer_params": asked}]
            assert prefill.headers[0]["x-rorqual-resumable"] == "1"
            (body,) = decode.bodies
            params = {"from": "prefill", "lease": 1, "first_token": True}
            assert body["kv_transfer_params"] == params
            choices = [{"index": 0, "token_ids": [FIRST], "ended": False}]
            assert body["rorqual_resume"]["choices"] == choices
            await counted(router, prefill=1)
            text = (await router.get("/metrics"))[1]
            assert "rorqual_router_resumes_total 0.0" in text
            assert 'rorqual_router_prefills_total{outcome="ok"} 1.0' in text

    run(test())


def test_the_client_has_it_while_the_other_server_is_silent() -> None:
    async def test() -> None:
        faults = Faults(hang_after=0)
        async with apart(None, faults, stall_timeout=60.0) as (router, _, (decode,)):
            where = router.url + "/v1/completions"
            async with router.session.post(where, json=BODY) as answer:
                raw = b""
                while f"<{FIRST}>".encode() not in raw:
                    raw += await answer.content.readany()
                await router.until(lambda: bool(decode.bodies))
            await router.until(lambda: decode.left == 1)  # the client has gone

    run(test())


def test_an_answer_of_one_token_needs_no_other_server() -> None:
    async def test() -> None:
        async with apart() as (router, _, (decode,)):
            (await router.post({**BODY, "max_tokens": 1})).assert_whole("abc", 1)
            assert decode.bodies == []
            await counted(router, prefill=1)

    run(test())


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("half", [False, True])
def test_the_prefill_server_dies(after: int, half: bool) -> None:
    """Before the first event, between the role and the token, and before it says where the pages
    are: they are not asked for."""

    async def test() -> None:
        async with apart(Faults(die_after=after, half=half)) as (router, _, (decode,)):
            (await router.post({**BODY, **USAGE})).assert_whole("abc", 8, usage=True)
            (body,) = decode.bodies
            assert "kv_transfer_params" not in body
            assert ("rorqual_resume" in body) == (after > 0)
            await counted(router, **{"prefill" if after == 2 else "decode": 1})

    run(test())


@pytest.mark.parametrize("after", [0, 1, 2])
def test_the_prefill_server_falls_silent_or_its_engine_dies(after: int) -> None:
    async def test() -> None:
        for faults in (Faults(hang_after=after), Faults(error_after=after)):
            async with apart(faults) as (router, _, (decode,)):
                (await router.post(BODY)).assert_whole("abc", 8)
                assert "kv_transfer_params" not in decode.bodies[0]

    run(test())


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_a_prefill_server_that_refuses(status: int) -> None:
    async def test() -> None:
        async with apart(Faults(refuse=status)) as (router, _, (decode,)):
            (await router.post(BODY)).assert_whole("abc", 8)
            assert decode.bodies == [BODY]
            await counted(router, decode=1)

    run(test())


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_server_that_goes_on_dies(after: int) -> None:
    """Its pages are leased to one reader: the next one computes the prompt."""

    async def test() -> None:
        faults = Faults(die_after=after), Faults()
        async with apart(None, *faults, resumes=0 if not after else 1) as (router, _, answers):
            router.router.servers.policies[False].turn = 1  # the first is next
            received = await router.post({**BODY, **USAGE})
            received.assert_whole("abc", 8, usage=True)
            first, second = (server.bodies for server in answers)
            if after < 4:
                assert first[0]["kv_transfer_params"]["from"] == "prefill"
                assert "kv_transfer_params" not in second[0]

    run(test())


def test_a_server_that_refuses_the_pages() -> None:
    """The client has the first token, and has asked for no pages."""

    async def test() -> None:
        async with apart(None, Faults(refuse=400, param="kv_transfer_params")) as found:
            router, _, (decode,) = found
            (await router.post({**BODY, **USAGE})).assert_whole("abc", 8, usage=True)
            assert ["kv_transfer_params" in body for body in decode.bodies] == [True, False]
            assert all("rorqual_resume" in body for body in decode.bodies)
            await counted(router, prefill=1)

    run(test())


def test_servers_that_are_full_for_a_while() -> None:
    async def test() -> None:
        full = Faults(refuse=429, refusals=5, code="queue_full")
        async with apart(None, full) as (router, _, (decode,)):
            (await router.post(BODY)).assert_whole("abc", 8)
            assert len(decode.bodies) == 6
            assert all(body["kv_transfer_params"]["lease"] == 1 for body in decode.bodies)

    run(test())


def test_servers_that_stay_full() -> None:
    async def test() -> None:
        full = Faults(refuse=429, refusals=1000, code="queue_full")
        async with apart(None, full, resume_wait=0.4) as (router, _, _):
            received = await router.post(BODY)
            assert received.texts == {0: f"<{FIRST}>"}
            assert [error["code"] for error in received.errors] == ["stream_lost"]
            assert received.done == 1

    run(test())


def test_a_request_that_only_the_second_server_refuses() -> None:
    """Its own words end the stream."""

    async def test() -> None:
        wrong = Faults(refuse=400, refusals=1000, code="too_long")
        async with apart(None, wrong) as (router, _, _):
            received = await router.post(BODY)
            assert received.texts == {0: f"<{FIRST}>"}
            assert [error["code"] for error in received.errors] == ["too_long"]
            assert received.done == 1

    run(test())


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"n": 2}, {}),
        ({"prompt": ["abc", "abd"]}, {}),
        ({"max_tokens": 0}, {}),
        ({"stream": False}, {}),
        ({}, {"first_token": "decode"}),
        ({}, {"resume_tokens": 0}),
    ],
)
def test_requests_that_take_the_other_way(more: dict[str, Any], options: dict[str, Any]) -> None:
    """The prefill server's token is not used."""

    async def test() -> None:
        async with apart(None, **options) as (router, prefill, (decode,)):
            body = {**BODY, **more}
            if isinstance(body["prompt"], list):
                prefill.faults = Faults(refuse=400)
                decode.faults = Faults(refuse=400)
            await (router.post if body["stream"] else router.ask)(body)
            (asked,) = prefill.bodies
            assert asked["kv_transfer_params"] == {"do_remote_decode": True}
            assert (asked["stream"], asked["max_tokens"]) == (False, 1)
            assert "rorqual_resume" not in decode.bodies[0]
            await counted(router, **({"decode": 1} if body["stream"] else {}))

    run(test())


def test_a_stream_that_the_client_itself_goes_on_with() -> None:
    async def test() -> None:
        async with apart() as (router, prefill, (decode,)):
            choices = [{"index": 0, "token_ids": [FIRST], "ended": False}]
            given = {"id": "cmpl-x", "created": 3, "choices": choices}
            received = await router.post({**BODY, "rorqual_resume": given})
            assert received.ids == {"cmpl-x@3"}
            assert "first_token" not in prefill.bodies[0]["kv_transfer_params"]
            assert decode.bodies[0]["rorqual_resume"] == given

    run(test())


def test_a_client_that_asks_for_the_lines_gets_no_pages_place() -> None:
    async def test() -> None:
        async with apart() as (router, _, _):
            headers = {"X-Rorqual-Resumable": "1"}
            where = router.url + "/v1/completions"
            async with router.session.post(where, json=BODY, headers=headers) as answer:
                raw = await answer.text()
            named = [line for line in raw.splitlines() if line.startswith(": rorqual 0")]
            assert len(named) == raw.count('"choices"')
            assert f": rorqual 0 {FIRST}\n" in raw
            assert "rorqual_transfer" not in raw

    run(test())


def test_without_a_server_to_go_on_nothing_is_sent() -> None:
    async def test() -> None:
        async with apart() as (router, prefill, (decode,)):
            decode.healthy = 503
            await router.until(lambda: router.server(decode).state != "ready")
            received = await router.post(BODY)
            assert (received.status, received.errors[0]["code"]) == (503, "no_server")
            assert "first_token" not in prefill.bodies[0]["kv_transfer_params"]

    run(test())


def test_a_server_that_does_not_say_it_can_is_not_asked_to() -> None:
    async def test() -> None:
        prefill = FakeServer("prefill")
        decode = FakeServer("decode")
        async with routed(prefill=(prefill,), decode=(decode,)) as router:
            (await router.post(BODY)).assert_whole("abc", 8)
            assert prefill.bodies[0]["kv_transfer_params"] == {"do_remote_decode": True}
            prefill.hands_over = True
            await router.until(lambda: router.server(prefill).hands_over)
            (await router.post(BODY)).assert_whole("abc", 8)
            assert prefill.bodies[1]["kv_transfer_params"]["first_token"]
            await counted(router, prefill=1, decode=1)

    run(test())


def test_where_the_pages_are_cannot_be_read() -> None:
    async def test() -> None:
        async with apart() as (router, prefill, (decode,)):
            right = prefill.first_events
            prefill.first_events = (
                lambda body: [  # type: ignore[method-assign]
                    *right(body)[:-1],
                    b": rorqual_transfer [1]\n\n",
                ]
            )
            (await router.post(BODY)).assert_whole("abc", 8)
            assert "kv_transfer_params" not in decode.bodies[0]

    run(test())


def test_the_router_ends_while_a_stream_waits_for_its_second_token() -> None:
    async def test() -> None:
        faults = Faults(hang_after=0)
        async with apart(None, faults, stall_timeout=60.0) as (router, _, (decode,)):
            asking = asyncio.create_task(router.post(BODY))
            await router.until(lambda: bool(decode.bodies))
            router.router.cut()
            received = await asking
            assert received.texts == {0: f"<{FIRST}>"}
            assert [error["code"] for error in received.errors] == ["router_ending"]

    run(test())
