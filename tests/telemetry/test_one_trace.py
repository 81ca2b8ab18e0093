"""Router, prefill and decode servers in processes of their own, told to one collector: a request is
one trace, also where its stream moves; and a collector that never answers keeps nobody waiting."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("fastapi")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from tests.route.running import start_router
from tests.route.test_real_servers import body, stream
from tests.serve.http.test_stop_metrics import rested
from tests.serve.running import Running, start_server
from tests.telemetry.collector import CLIENT, ENVIRONMENT, SERVER, Collected, Collector

pytestmark = pytest.mark.exhaustive

ENGINE = ("--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
ROUTER, HTTP = "rorqual-router", "rorqual-server"
ROUTE = "POST /v1/completions"


@dataclass
class Site:
    collector: Collector
    router: Running
    prefill: Running
    decode: list[Running]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    secret = tmp_path_factory.mktemp("secrets") / "kv"
    secret.write_text("of all who exchange pages")
    with ExitStack() as stack:
        collector = stack.enter_context(Collector())
        endpoint = ("--otlp-endpoint", collector.url)

        def serve(*options: str) -> Running:
            every = (*ENGINE, "--kv-secret-file", str(secret), *endpoint, *options)
            return stack.enter_context(start_server(*every, environment=ENVIRONMENT))

        prefill = serve("--role", "prefill")
        decode = [serve("--role", "decode", "--restart") for _ in range(2)]
        urls = [word for server in decode for word in ("--decode", server.url)]
        options = ("--prefill-from", "20", "--health-interval", "0.1", *endpoint)
        router = stack.enter_context(
            start_router("--prefill", prefill.url, *urls, *options, environment=ENVIRONMENT)
        )
        router.wait_until(router.healthy)
        yield Site(collector, router, prefill, decode)


@dataclass
class Trace:
    """The spans of one; `root` is the router's."""

    spans: list[Collected]

    @property
    def root(self) -> Collected:
        (found,) = [span for span in self.spans if (span.service, span.kind) == (ROUTER, SERVER)]
        return found

    def children(self, of: Collected) -> list[Collected]:
        found = [span for span in self.spans if span.parent == of.id]
        return sorted(found, key=lambda span: span.start)

    def served(self, attempt: Collected) -> tuple[Collected, list[Collected]]:
        """What the server made of an attempt: its span, and the phases in it."""
        assert (attempt.service, attempt.kind) == (ROUTER, CLIENT)
        (http,) = self.children(attempt)
        assert (http.service, http.name, http.kind) == (HTTP, ROUTE, SERVER)
        assert attempt.start <= http.start
        return http, self.children(http)


def port(server: Running) -> dict[str, Any]:
    return {"server.address": "127.0.0.1", "server.port": server.port}


@pytest.mark.longest
def test_a_prompt_that_travels(site: Site) -> None:
    header = f"00-{TRACE}-{PARENT}-01"
    asked = body(0)
    status, answer = site.router.request("POST", "/v1/completions", asked, traceparent=header)
    assert status == 200
    site.collector.wait_until(
        lambda spans: any(span.parent == PARENT and span.service == ROUTER for span in spans)
    )
    site.collector.wait_until(lambda spans: sum(span.trace == TRACE for span in spans) >= 12)
    trace = Trace(site.collector.of_trace(TRACE))
    assert trace.root.parent == PARENT
    first, second = trace.children(trace.root)
    assert [one.attributes["rorqual.attempt.why"] for one in (first, second)] == [
        "prefill",
        "first",
    ]
    assert first.attributes.items() >= port(site.prefill).items()
    prompt, phases = trace.served(first)
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    offered = prompt.attributes["rorqual.kv.pages_offered"]
    length = prompt.attributes["gen_ai.usage.input_tokens"]
    assert offered == -(-(length - 1) // 16), "all but the last token travels"
    reply, phases = trace.served(second)
    assert [phase.name for phase in phases] == ["kv_transfer", "queue", "prefill", "decode"]
    transfer, queue, prefill, decode = phases
    assert transfer.attributes["rorqual.kv.pages"] == offered > 0
    assert transfer.attributes["rorqual.kv.bytes"] % offered == 0
    assert transfer.attributes["rorqual.kv.bytes"] > 1000 * offered
    assert prefill.attributes["gen_ai.usage.cache_read.input_tokens"] == length - 1
    assert decode.attributes["gen_ai.usage.output_tokens"] == asked["max_tokens"]
    assert reply.attributes["gen_ai.response.id"] == answer["id"]
    assert reply.attributes["gen_ai.usage.output_tokens"] == asked["max_tokens"]
    ends = [transfer.end, queue.start, queue.end, prefill.start, prefill.end, decode.start]
    assert ends == sorted(ends)
    assert prefill.end == decode.start
    assert not any(span.failed for span in trace.spans)
    assert len(trace.spans) == 12  # none for a token


def counted(servers: list[Running]) -> Counter[str]:
    """Of engines at rest: requests by how they ended, and tokens."""
    found: Counter[str] = Counter()
    for server in servers:
        rested(server)
        for engine in server.get("/stats")["engines"]:
            found.update({**engine["finished"], "tokens": engine["output_tokens"]})
    return found


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_decode_span(site: Site, streamed: bool) -> None:
    """And is counted as such by the server that decodes. The other one has the first token, which
    is handed over where the answer is streamed, and computed again where not."""
    asked = body(1, cache_salt="stopped")
    text = site.router.request("POST", "/v1/completions", asked)[1]["choices"][0]["text"]
    asked["stop"] = [text[60:70]]
    assert text.index(text[60:70]) == 60
    status, answer = site.router.request("POST", "/v1/completions", asked)
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "stop"
    tokens = answer["usage"]["completion_tokens"]
    before = [counted([site.prefill]), counted(site.decode)]

    name = f"{streamed + 1:032x}"
    asked |= {"stream": streamed, "cache_salt": f"streamed: {streamed}"}
    header = f"00-{name}-{PARENT}-01"
    status, _ = site.router.request("POST", "/v1/completions", asked, traceparent=header)
    assert status == 200
    own = tokens - streamed
    assert counted([site.prefill]) - before[0] == {"length": 1, "tokens": 1}
    assert counted(site.decode) - before[1] == {"stop": 1, "tokens": own}

    def served(spans: list[Collected]) -> int:
        """A server's span comes after its phases."""
        return sum((span.trace, span.service, span.name) == (name, HTTP, ROUTE) for span in spans)

    site.collector.wait_until(lambda spans: served(spans) == 2)
    found = sorted(site.collector.of_trace(name), key=lambda span: span.start)
    spans = [span for span in found if span.name == "decode"]
    assert [span.attributes["gen_ai.usage.output_tokens"] for span in spans] == [1, own]
    answers = [span for span in found if (span.service, span.name) == (HTTP, ROUTE)]
    for span, answered in zip(spans, answers, strict=True):
        assert span.parent == answered.id
        seconds = (span.end - span.start) / 1e9
        said = answered.attributes
        assert said["gen_ai.latency.time_in_model_decode"] == pytest.approx(seconds, abs=1e-6)
        assert said["gen_ai.latency.e2e"] >= seconds


def test_a_stream_that_moves(site: Site) -> None:
    """Its decode server's engine is killed under it."""

    def kill(count: int) -> None:
        if count != 5:
            return
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for server in site.decode:
                if server.get("/stats")["engines"][0].get("running", 0):
                    os.kill(server.engine_pids()[0], signal.SIGKILL)
                    return
        raise AssertionError("the stream ended before its engine was found")

    before = {span.trace for span in site.collector.spans}
    read = stream(site.router.url, body(3, max_tokens=300), kill)  # for long enough
    assert read.error is None

    def moved(spans: list[Collected]) -> bool:
        return any(
            span.service == ROUTER and span.kind == SERVER and span.trace not in before
            for span in spans
        )

    site.collector.wait_until(moved)
    (name,) = {span.trace for span in site.collector.spans} - before

    def served(spans: list[Collected]) -> int:
        """A server's span comes after its phases."""
        return sum((span.trace, span.service, span.name) == (name, HTTP, ROUTE) for span in spans)

    site.collector.wait_until(lambda spans: served(spans) == 3)
    trace = Trace(site.collector.of_trace(name))
    assert trace.root.parent == ""
    assert not trace.root.failed
    attempts = trace.children(trace.root)
    why = [one.attributes["rorqual.attempt.why"] for one in attempts]
    assert why == ["prefill", "first", "resume"]
    assert [one.failed for one in attempts] == [False, True, False]
    lost, rest = attempts[1:]
    assert rest.attributes["rorqual.attempt.after"] == lost.said
    assert "engine_dead" in lost.said
    assert lost.attributes["url.full"] != rest.attributes["url.full"]
    begun, phases = trace.served(lost)
    assert begun.failed
    assert begun.attributes["error.type"] == "engine_dead"
    assert "decode" not in {phase.name for phase in phases}  # nobody is left to tell of it
    ended, phases = trace.served(rest)
    choices = body(3)["n"]
    names = Counter(phase.name for phase in phases)
    assert names == {"queue": choices, "prefill": choices, "decode": choices}
    assert ended.attributes["rorqual.resumed_tokens"] > 0
    assert begun.attributes["gen_ai.response.id"] == ended.attributes["gen_ai.response.id"]


@pytest.mark.longest
def test_a_collector_that_never_answers() -> None:
    with socket.socket() as silent, ExitStack() as stack:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = ("--otlp-endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}")
        many = {
            **ENVIRONMENT,
            "OTEL_BSP_MAX_QUEUE_SIZE": "16",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8",
        }
        server = stack.enter_context(start_server(*ENGINE, *endpoint, environment=many))
        router = stack.enter_context(
            start_router("--replica", server.url, *endpoint, environment=many)
        )
        router.wait_until(router.healthy)
        before = time.monotonic()
        for _ in range(30):
            short = {"prompt": "A", "max_tokens": 1}
            assert router.request("POST", "/v1/completions", short)[0] == 200
        # one that waited for the collector would wait for ten seconds
        assert time.monotonic() - before < 60
        for running in (router, server):
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(30) == 0
            lines = [line for line in running.text().splitlines() if "span" in line.lower()]
            assert len(lines) <= 4, lines
