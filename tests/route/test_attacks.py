"""What servers and clients do that they should not, and what it must not do to others."""

from __future__ import annotations

import asyncio
import errno
import gzip
import math
import re
import resource
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import TransferEncodingError

from rorqual.errors import ConfigError
from rorqual.route import forward
from rorqual.route.config import RouteConfig
from tests.route.fakes import FakeServer, Faults, routed, run, said
from tests.route.running import start_router

ASK = {"prompt": "abc", "max_tokens": 4}
STREAM = {**ASK, "stream": True}
SECRET = "0123456789abcdef"


def test_errors_of_one_client_do_not_take_the_servers_from_others() -> None:
    """Where every breaker is open, servers that say that they are ready are asked all the same."""

    async def test() -> None:
        fakes = [FakeServer(str(i), Faults(refuse=500, refusals=4)) for i in range(2)]
        async with routed(*fakes, breaker_failures=2, breaker_seconds=60) as router:
            for _ in range(8):
                assert (await router.ask(ASK))[0] == 500
            assert (await router.ask(ASK))[0] == 200
            assert (await router.get("/health"))[0] == 200

    run(test())


def test_a_server_that_dies_behind_a_comment_has_sent_nothing() -> None:
    async def test() -> None:
        bad = FakeServer("bad", Faults(comment=True, die_after=0))
        good = FakeServer("good")
        async with routed(good, bad) as router:
            url = router.url + "/v1/completions"
            async with router.session.post(url, json=STREAM) as answer:
                raw = await answer.text()
            assert raw.startswith(": patience\n\n")
            assert '"error"' not in raw
            assert raw.count("data: [DONE]") == 1
            assert "rorqual_resume" not in good.bodies[0]

    run(test())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_streams_with_the_other_line_ends_pass_as_they_come(path: str) -> None:
    """As other servers write them."""

    async def test() -> None:
        fake = FakeServer("crlf", Faults(unmarked=True, line_ends=b"\r\n", slow=0.05))
        async with routed(fake) as router:
            async with router.session.post(router.url + path, json=STREAM) as answer:
                first = await answer.content.readany()
                rest = await answer.read()
            assert first.startswith(b"data: {")
            assert b"[DONE]" not in first
            assert (first + rest).endswith(b"data: [DONE]\n\n")
            assert len(fake.bodies) == 1

    run(test())


def test_connections_are_used_again() -> None:
    async def test() -> None:
        fake = FakeServer()
        async with routed(fake, health_interval=60.0) as router:
            for _ in range(6):
                (await router.post(STREAM)).assert_whole("abc", 4)
            assert len(fake.peers) == 1, "one connection after another"

    run(test())


@pytest.mark.parametrize(
    "url", ["http://a..b:1", "http://" + "x" * 70 + ":1", "http://h:99999", "http://no.invalid:1"]
)
def test_an_address_that_nobody_has(tmp_path: Path, url: str) -> None:
    """Refused, or down until its lease ends; the health checks go on."""
    path = tmp_path / "secret"
    path.write_text(SECRET)

    async def test() -> None:
        fake = FakeServer()
        async with routed(fake, admin_secret_file=str(path)) as router:
            headers = {"Authorization": f"Bearer {SECRET}"}
            body: dict[str, Any] = {"url": url, "lease_seconds": 1}
            admin = router.url + "/admin/register"
            async with router.session.post(admin, json=body, headers=headers) as answer:
                assert answer.status in (200, 400), await answer.text()
            for _ in range(2):
                assert (await router.ask(ASK))[1]["text"] == said("abc", 0, 4)
            await router.until(lambda: url not in router.router.servers.servers)
            tasks = router.router.checks.tasks
            assert [task for task in tasks.values() if task.done()] == []

    run(test())


def test_bodies_of_any_depth_do_no_harm() -> None:
    async def test() -> None:
        fake = FakeServer("only", Faults(refuse=400))
        async with routed(fake) as router:
            for body in (b"[" * 100_000, b'{"prompt":' * 50_000, b'{"prompt": "\\ud800"}'):
                fake.faults = Faults(refuse=400)
                url = router.url + "/v1/completions"
                async with router.session.post(url, data=body) as answer:
                    assert answer.status == 400, await answer.text()

    run(test())


PLAIN = b'{"prompt": "abc", "max_tokens": 4}'


@pytest.mark.parametrize("given", ["gzip", "deflate", "br", "zstd", "identity, gzip", "x"])
def test_compressed_bodies_are_refused(given: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also those that are not what the header says."""

    async def test() -> None:
        fake = FakeServer()
        async with routed(fake) as router:
            headers = {"Content-Encoding": given}
            url = router.url + "/v1/completions"
            for data in (PLAIN, gzip.compress(PLAIN), gzip.compress(bytes(1 << 20))):
                async with router.session.post(url, data=data, headers=headers) as answer:
                    error = (await answer.json())["error"]
                    assert answer.status == 415
                assert error["code"] == "unsupported_encoding"
                assert error["type"] == "invalid_request_error"
                assert given in error["message"]
            assert fake.bodies == []
            headers["Content-Encoding"] = "Identity"
            async with router.session.post(url, data=PLAIN, headers=headers) as answer:
                assert (await answer.json())["text"] == said("abc", 0, 4)
            async with router.session.get(router.url + "/v1/models", headers=headers) as answer:
                assert answer.status == 200
        assert "Traceback" not in caplog.text

    run(test())


@pytest.mark.parametrize("error", [web.RequestPayloadError, TransferEncodingError])
def test_a_malformed_body_is_its_clients_mistake(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with routed(FakeServer()) as router:

            class Broken:
                async def readany(self) -> bytes:
                    raise error("half a chunk")

            monkeypatch.setattr(web.BaseRequest, "content", property(lambda request: Broken()))
            status, body = await router.ask(ASK)
            assert (status, body["error"]["code"]) == (400, "bad_body")

    run(test())


def test_a_name_that_cannot_be_looked_up_does_not_end_the_looks() -> None:
    """What a resolver raises is no reason to forget a server."""

    async def test() -> None:
        fake = FakeServer()
        async with routed(fake) as router:
            checks = router.router.checks
            server = router.router.servers.add("http://a..b:1", "replica")
            checks.start(server)
            await router.until(lambda: server.missed > 2)
            assert server.state == "down"
            checks.leave(server, "a test says so")
            await router.until(lambda: server not in checks.tasks)

    run(test())


def test_a_refusal_of_one_request_is_not_the_servers_state() -> None:
    """As of a request whose pages did not come, with --kv-load-failure fail."""

    async def test() -> None:
        fake = FakeServer("only", Faults(refuse=503, code="kv_load_failure"))
        async with routed(fake, health_interval=60.0) as router:
            assert [(await router.ask(ASK))[0] for _ in range(2)] == [503, 200]

    run(test())


def test_pages_that_one_server_could_not_read_are_not_asked_for_again() -> None:
    async def test() -> None:
        prefill = FakeServer("prefill")
        for body in (ASK, STREAM):
            bad = FakeServer("bad", Faults(refuse=503, code="kv_load_failure"))
            good = FakeServer("good")
            async with routed(prefill=(prefill,), decode=(good, bad)) as router:
                assert await router.post(body) if body is STREAM else await router.ask(body)
                assert "kv_transfer_params" in bad.bodies[0]
                assert good.bodies == [body]

    run(test())


def test_a_client_that_does_not_read_is_let_go() -> None:
    """It holds a place at a server, and its server has done nothing wrong."""

    async def test() -> None:
        fake = FakeServer("flood", Faults(flood=40))
        async with routed(fake, FakeServer(), reader_timeout=0.3) as router:
            router.router.servers.policies[False].turn = 1  # the first is next
            port = int(router.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            body = b'{"prompt": "abc", "stream": true}'
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: router\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            await reader.readline()
            await router.until(lambda: fake.left == 1)
            await router.until(router.at_rest)
            assert router.server(fake).strikes == 0
            assert 'outcome="lost"' not in (await router.get("/metrics"))[1]
            writer.close()

    run(test())


def test_a_reader_that_is_too_slow_for_a_server_is_not_moved_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server broke off because of the client, as all others would."""
    monkeypatch.setattr(forward, "SLOW_READER", 0.3)

    async def test() -> None:
        first = FakeServer("first", Faults(flood=40, die_after=2))
        second = FakeServer("second")
        async with routed(first, second) as router:
            router.router.servers.policies[False].turn = 1  # the first is next
            port = int(router.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b'{"prompt": "abc", "stream": true}'
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            await reader.readline()
            rest = b""
            pause = 1.0
            while not reader.at_eof():
                await asyncio.sleep(pause)
                before = time.monotonic()
                try:
                    rest = await reader.readexactly(4 << 20)
                except asyncio.IncompleteReadError as end:
                    rest += end.partial
                pause = 3 * (time.monotonic() - before)  # slow on a machine of any speed
            assert b"reader_too_slow" in rest[-500:]
            assert b"data: [DONE]" in rest[-500:]
            await router.until(router.at_rest)
            assert router.server(first).strikes == 0
            assert second.bodies == []
            writer.close()

    run(test())


@pytest.mark.parametrize("how", ["lease", "leave"])
def test_a_server_that_left_and_is_silent_is_given_up(tmp_path: Path, how: str) -> None:
    """Its last streams are watched like all others."""
    path = tmp_path / "secret"
    path.write_text(SECRET)

    async def test() -> None:
        bad = FakeServer("bad", Faults(hang_after=2))
        good = FakeServer("good")
        options = {"admin_secret_file": str(path), "stall_timeout": 1.2}
        async with routed(good, bad, **options) as router:
            asking = asyncio.create_task(router.post(STREAM))
            await router.until(lambda: bad.hangs)
            server = router.server(bad)
            if how == "lease":
                server.leases = dict.fromkeys(server.leases, 0.0)
            else:
                router.router.checks.leave(server, "a test says so")
            (await asyncio.wait_for(asking, 60)).assert_whole("abc", 4)
            await router.until(lambda: server not in router.router.checks.tasks)
            assert bad.url not in (await router.get("/metrics"))[1]

    run(test())


def test_a_second_signal_ends_open_requests_now() -> None:
    """With at most as many open files as the hard limit allows, which is said."""
    with ExitStack() as stack:
        fake, url = stack.enter_context(beside())
        fake.faults.slow = 0.2
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
        try:
            router = stack.enter_context(start_router("--replica", url))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        limits = Path(f"/proc/{router.pid}/limits").read_text()
        soft = int(limits.partition("Max open files")[2].split()[0])
        assert soft >= min(8192, limit[1])
        body = b'{"prompt": "abc", "stream": true, "max_tokens": 1000}'
        stack.enter_context(
            urllib.request.urlopen(urllib.request.Request(f"{router.url}/v1/completions", body))
        ).readline()
        router.process.send_signal(signal.SIGINT)
        router.wait_until(lambda: "a second signal ends them now" in router.text())
        assert router.process.poll() is None
        router.process.send_signal(signal.SIGINT)
        assert router.process.wait(60) == 1
        assert "1 open requests are cut off" in router.text()
        assert "Traceback" not in router.text()


def test_requests_that_do_not_end_in_time_are_told_so() -> None:
    """A stream gets a last event, any other request a status; neither is just cut off."""
    with ExitStack() as stack:
        fake, url = stack.enter_context(beside())
        fake.faults.slow = 0.2
        router = stack.enter_context(start_router("--replica", url, "--drain-timeout", "0.5"))
        target = f"{router.url}/v1/completions"
        body = b'{"prompt": "abc", "stream": true, "max_tokens": 1000}'
        stream = stack.enter_context(urllib.request.urlopen(urllib.request.Request(target, body)))
        stream.readline()
        answers: list[tuple[int, bytes]] = []

        def ask() -> None:
            whole = urllib.request.Request(target, b'{"prompt": "abc", "slow": true}')
            try:
                urllib.request.urlopen(whole)
            except urllib.error.HTTPError as error:
                answers.append((error.code, error.read()))

        asking = threading.Thread(target=ask)
        asking.start()
        router.wait_until(lambda: b"rorqual_router_open_requests 2.0" in metrics_of(router.url))
        router.process.send_signal(signal.SIGTERM)
        rest = stream.read()
        asking.join(60)
        assert router.process.wait(60) == 1
        events = rest.split(b"\n\n")
        assert b"router_ending" in events[-3]
        assert events[-2] == b"data: [DONE]"
        assert [status for status, _ in answers] == [503]
        assert b"router_ending" in answers[0][1]
        assert "Traceback" not in router.text()


def metrics_of(url: str) -> bytes:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        found: bytes = answer.read()
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_router_without_files_blames_no_server(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        fake = FakeServer()
        async with routed(fake) as router:
            connector = router.router.session.connector
            looks = 0

            async def full(request: Any, *_: Any, **__: Any) -> Any:
                nonlocal looks
                looks += 1
                raise aiohttp.ClientConnectorError(
                    request.connection_key, OSError(errno.EMFILE, "Too many open files")
                )

            with monkeypatch.context() as patch:
                patch.setattr(connector, "connect", full)
                status, body = await router.ask({**ASK, "stream": stream})
                assert status == 503
                assert "router_full" in str(body)
                seen = looks
                await router.until(lambda: looks > seen + 3)
            server = router.server(fake)
            assert (server.state, server.strikes, server.missed) == ("ready", 0, 0)
            assert (await router.ask(ASK))[0] == 200

    run(test())


@contextmanager
def beside() -> Iterator[tuple[FakeServer, str]]:
    """A server on a thread of its own."""
    fake = FakeServer()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(fake.start(), loop).result(60)
        yield fake, fake.url
    finally:
        asyncio.run_coroutine_threadsafe(fake.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("name", ["resumes", "drain_timeout", "resume_wait", "prefill_from"])
def test_numbers_below_zero_are_refused(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=rf"^{flag}=-1 is out of range"):
        RouteConfig(replicas=("http://127.0.0.1:1",), **{name: -1})


TIMES = [item.name for item in fields(RouteConfig) if item.type == "float"]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("name", TIMES)
def test_times_that_no_clock_counts_are_refused(name: str, value: float) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=rf"^{flag}={re.escape(str(value))} is "):
        RouteConfig(replicas=("http://127.0.0.1:1",), **{name: value})
