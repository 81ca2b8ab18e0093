"""A request is one trace: the client's span, the router's, and one for each attempt at a server,
whose child is what the server makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace import ReadableSpan

from tests.route.fakes import FakeServer, Faults, RouterUnderTest, routed, run
from tests.telemetry.recorded import (
    PARENT,
    TRACE,
    TRACEPARENT,
    Recorded,
    attributes,
    failed,
    id_of,
    parent_of,
    trace_of,
)

COUNT = 8
BODY = {"model": "m", "prompt": "of whales", "max_tokens": COUNT, "stream": True}
ROOT = "POST /v1/completions"
Ask = Callable[[RouterUnderTest], Awaitable[None]]


def traced(
    ask: Ask,
    *servers: FakeServer,
    prefill: tuple[FakeServer, ...] = (),
    decode: tuple[FakeServer, ...] = (),
) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The router's span of the one request that `ask` sends, and its attempts in order."""
    recorded = Recorded()

    async def test() -> None:
        async with routed(*servers, prefill=prefill, decode=decode) as router:
            router.router.tracer = recorded.tracer
            await ask(router)
            await router.until(lambda: recorded.named(ROOT))

    run(test())
    (root,) = recorded.named(ROOT)
    rest = [span for span in recorded.spans if span is not root]
    assert {parent_of(span) for span in rest} <= {id_of(root)}
    assert {trace_of(span) for span in recorded.spans} == {trace_of(root)}
    return root, sorted(rest, key=lambda span: span.start_time or 0)


def carried(server: FakeServer) -> list[str]:
    """By each request that the server got: the span that it is a child of."""
    return [headers["traceparent"].split("-")[2] for headers in server.headers]


def test_a_stream_that_moves() -> None:
    servers = [FakeServer("a", Faults(die_after=2)), FakeServer("b", Faults(die_after=2))]

    async def ask(router: RouterUnderTest) -> None:
        answer = await router.post(BODY, traceparent=TRACEPARENT, tracestate="k=v")
        answer.assert_whole("of whales", COUNT)

    root, attempts = traced(ask, *servers)
    assert (trace_of(root), parent_of(root)) == (TRACE, PARENT)
    assert not failed(root)
    assert attributes(root)["gen_ai.request.model"] == "m"
    assert attributes(root)["http.response.status_code"] == 200
    why = [attributes(span)["rorqual.attempt.why"] for span in attempts]
    assert why == ["first", "resume", "resume"]
    assert [failed(span) for span in attempts] == [True, True, False]
    assert [attributes(span)["rorqual.attempt.number"] for span in attempts] == [1, 2, 3]
    for before, after in itertools.pairwise(attempts):
        assert attributes(before)["error.type"] == "lost"
        assert attributes(after)["rorqual.attempt.after"] == before.status.description
    urls = [attributes(span)["url.full"] for span in attempts]
    by_url = {server.url + "/v1/completions": carried(server) for server in servers}
    there = [name for names in by_url.values() for name in names]
    assert sorted(there) == sorted(id_of(span) for span in attempts)
    assert all(id_of(span) in by_url[url] for span, url in zip(attempts, urls, strict=True))
    assert servers[0].headers[0]["tracestate"] == "k=v"


def test_a_prompt_computed_elsewhere_and_a_refusal() -> None:
    prompts = FakeServer("p")
    answers = [FakeServer(name, Faults(refuse=503)) for name in "ab"]
    answers[1].faults.refusals = 0

    async def ask(router: RouterUnderTest) -> None:
        for server in answers:
            server.faults.refusals = 0
        router.router.servers.policies[False].turn = 1  # the first is next
        answers[0].faults.refusals = 1
        status, _ = await router.ask({**BODY, "stream": False})
        assert status == 200

    root, attempts = traced(ask, prefill=(prompts,), decode=(answers[0], answers[1]))
    why = [attributes(span)["rorqual.attempt.why"] for span in attempts]
    assert why == ["prefill", "first", "retry"]
    assert attributes(attempts[2])["rorqual.attempt.after"] == "it answers 503"
    assert [failed(span) for span in attempts] == [False, True, False]
    assert carried(prompts) == [id_of(attempts[0])]
    assert not failed(root)
    assert parent_of(root) is None


def test_a_stream_that_nobody_goes_on_with() -> None:
    server = FakeServer("a", Faults(die_after=2, unmarked=True))

    async def ask(router: RouterUnderTest) -> None:
        answer = await router.post(BODY)
        assert answer.errors[-1]["code"] == "stream_lost"

    root, (attempt,) = traced(ask, server)
    assert failed(root)
    assert attributes(root)["error.type"] == "stream_lost"
    assert failed(attempt)


def test_without_a_tracer_the_clients_own_header_goes_through() -> None:
    server = FakeServer("a")

    async def test() -> None:
        async with routed(server) as router:
            await router.post(BODY, traceparent=TRACEPARENT)

    run(test())
    assert server.headers[0]["traceparent"] == TRACEPARENT
