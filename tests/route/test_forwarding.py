"""Whole answers, retries, headers, limits, prompts computed elsewhere, and what a client is told
when nobody can answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from rorqual.route.calls import RoutedCall
from tests.route.fakes import FakeServer, Faults, routed, run, said

ASK = {"prompt": "abc", "max_tokens": 4}
STREAM = {**ASK, "stream": True}


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "fault",
    [
        {"before_head": True},
        {"refuse": 503},
        {"refuse": 502},
        {"refuse": 500, "code": "engine_dead"},
        {"refuse": 429, "code": "queue_full"},
        {"die_after": 0},
    ],
    ids=str,
)
def test_what_one_server_did_not_begin_another_answers(body: Any, fault: dict[str, Any]) -> None:
    if body is ASK and "die_after" in fault:
        pytest.skip("of streams")

    async def test() -> None:
        bad = FakeServer("bad", Faults(**fault))
        good = FakeServer("good")
        async with routed(good, bad) as router:
            if body is STREAM:
                (await router.post(body)).assert_whole("abc", 4)
            else:
                status, found = await router.ask(body)
                assert (status, found["server"]) == (200, "good")
            assert "rorqual_router_retries_total 1.0" in (await router.get("/metrics"))[1]

    run(test())


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500])
def test_other_errors_are_the_clients(body: Any, status: int) -> None:
    """They are told as they come, and nobody else is asked."""

    async def test() -> None:
        bad = FakeServer("bad", Faults(refuse=status))
        good = FakeServer("good")
        async with routed(good, bad) as router:
            found, response = await router.ask(body)
            assert (found, response["error"]["message"]) == (status, "bad refuses")
            assert good.bodies == []

    run(test())


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
def test_when_all_are_full_the_client_is_told_when_to_ask_again(body: Any) -> None:
    async def test() -> None:
        fakes = [FakeServer(str(i), Faults(refuse=503, refusals=9)) for i in range(2)]
        async with routed(*fakes) as router:
            async with router.session.post(router.url + "/v1/completions", json=body) as answer:
                assert answer.status == 503
                assert answer.headers["Retry-After"] == "7"
                assert "refuses" in await answer.text()
            assert [len(fake.bodies) for fake in fakes] == [1, 1]

    run(test())


def test_no_server_at_all() -> None:
    async def test() -> None:
        fake = FakeServer()
        fake.healthy = 503
        async with routed(fake) as router:
            for body in (ASK, STREAM):
                status, response = await router.ask(body)
                assert (status, response["error"]["code"]) == (503, "no_server")
            assert (await router.get("/health"))[0] == 503
            assert (await router.get("/live"))[0] == 200
            fake.healthy = 200
            await router.until(lambda: router.server(fake).state == "ready")
            assert (await router.get("/health"))[0] == 200
            assert (await router.ask(ASK))[0] == 200

    run(test())


def test_a_breaker_opens_and_one_request_tries_it() -> None:
    async def test() -> None:
        bad = FakeServer("bad", Faults(refuse=500, refusals=3))
        good = FakeServer("good")
        async with routed(good, bad, breaker_failures=3) as router:
            for _ in range(6):
                await router.ask(ASK)
            assert not router.server(bad).usable(3)
            response = (await router.get("/metrics"))[1]
            assert f'breaker_open{{server="{bad.url}"}} 1.0' in response
            assert f'breaker_open{{server="{good.url}"}} 0.0' in response
            before = len(bad.bodies)
            for _ in range(4):
                assert (await router.ask(ASK))[1]["server"] == "good"
            assert len(bad.bodies) == before
            await asyncio.sleep(0.35)
            found = {(await router.ask(ASK))[1]["server"] for _ in range(2)}
            assert found == {"good", "bad"}
            assert router.server(bad).strikes == 0

    run(test())


def test_headers_and_bodies_arrive_as_they_were() -> None:
    async def test() -> None:
        fake = FakeServer()
        async with routed(fake) as router:
            body = b'{"prompt": "abc",  "max_tokens": 4, "big": 123456789012345678901234567890}'
            headers = {
                "Authorization": "Bearer key",
                "X-Mine": "1",
                "Connection": "keep-alive, X-Hop",
                "X-Hop": "not yours",
            }
            url = router.url + "/v1/completions?a=b%20c"
            async with router.session.post(url, data=body, headers=headers) as answer:
                assert answer.status == 200
                assert answer.headers["X-From"] == "fake"
                assert (await answer.json())["text"] == said("abc", 0, 4)
            (got,) = fake.headers
            assert got["authorization"] == "Bearer key"
            assert got["x-mine"] == "1"
            assert "x-hop" not in got
            assert got["x-request-id"].startswith("route-")
            assert fake.bodies[0]["big"] == 123456789012345678901234567890
            await router.post(STREAM, **{"X-Request-Id": "mine"})
            assert fake.headers[-1]["x-request-id"] == "mine"

    run(test())


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff\xfe", b'{"stream": true}'])
def test_bodies_that_only_the_server_can_judge(body: bytes) -> None:
    async def test() -> None:
        fake = FakeServer("only", Faults(refuse=400))
        async with routed(fake) as router:
            url = router.url + "/v1/chat/completions"
            async with router.session.post(url, data=body) as answer:
                assert answer.status == 400
            fake.faults = Faults()
            assert (await router.ask(ASK))[0] == 200

    run(test())


def test_one_server_whose_engine_died_is_waited_for() -> None:
    async def test() -> None:
        only = FakeServer("only", Faults(refuse=500, code="engine_dead"))
        async with routed(only) as router:
            assert (await router.ask(ASK))[0] == 200
            only.faults = Faults(refuse=500, code="engine_dead")
            (await router.post(STREAM)).assert_whole("abc", 4)

    run(test())


def test_long_bodies_go_through_threads() -> None:
    async def test() -> None:
        prefill, decode = FakeServer("prefill"), FakeServer("decode")
        prompt = "word " * (1 << 17)
        async with routed(prefill=(prefill,), decode=(decode,)) as router:
            for more in ({}, {"stream": True}):
                body = {"prompt": prompt, "max_tokens": 1, **more}
                url = router.url + "/v1/completions"
                async with router.session.post(url, json=body) as answer:
                    assert answer.status == 200
                    assert "Server" not in answer.headers
            assert [body["prompt"] for body in decode.bodies] == [prompt] * 2
            assert all("kv_transfer_params" in body for body in decode.bodies)

    run(test())


def test_limits() -> None:
    async def test() -> None:
        fake = FakeServer("slow", Faults(slow=0.05))
        async with routed(fake, max_body_bytes=1000, max_in_flight=2) as router:
            status, response = await router.ask({"prompt": "x" * 2000})
            assert (status, response["error"]["code"]) == (413, "body_too_long")
            streams = [
                asyncio.create_task(router.post({**STREAM, "max_tokens": 20})) for _ in range(2)
            ]
            await router.until(lambda: router.router.open == 2)
            status, response = await router.ask(ASK)
            assert (status, response["error"]["code"]) == (503, "router_full")
            for stream in streams:
                (await stream).assert_whole("abc", 20)
            assert (await router.ask(ASK))[0] == 200
            assert (await router.get("/other"))[0] == 404
            assert router.router.held == 0
            router.router.held = 1 << 30
            assert (await router.ask(ASK))[0] == 503
            router.router.held = 0
            assert (await router.get("/admin/servers"))[0] == 404, "there is no secret"

    run(test())


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v1/../health", 404),
        ("/v1/%2e%2e/health", 404),
        ("/v1/x/..%2f..%2fhealth", 404),
        ("/v1/a%20b?x=%2f", 200),
        ("http://elsewhere/v1/models?x=1", 200),
    ],
)
def test_nothing_but_v1_is_passed_on_and_that_as_it_was(target: str, status: int) -> None:
    async def test() -> None:
        fake = FakeServer()
        async with routed(fake) as router:
            port = int(router.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"GET {target} HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            line = await reader.readline()
            await reader.read()
            writer.close()
            assert int(line.split()[1]) == status
            expected = [target.removeprefix("http://elsewhere")] if status == 200 else []
            assert fake.targets == expected
            assert router.server(fake).strikes == 0

    run(test())


# ---- prompts computed elsewhere


@pytest.mark.parametrize("body", [ASK, {**STREAM, "stop": ["x"], "logprobs": 1}])
def test_a_prompt_goes_to_a_prefill_server_first(body: dict[str, Any]) -> None:
    async def test() -> None:
        prefill = FakeServer("prefill")
        decode = FakeServer("decode")
        async with routed(prefill=(prefill,), decode=(decode,)) as router:
            await router.post(body) if body.get("stream") else await router.ask(body)
            (asked,) = prefill.bodies
            assert asked["prompt"] == "abc"
            assert (asked["max_tokens"], asked["n"], asked["stream"]) == (1, 1, False)
            assert asked["kv_transfer_params"] == {"do_remote_decode": True}
            assert "stop" not in asked
            assert "logprobs" not in asked
            params = {"from": "prefill", "lease": 1}
            assert decode.bodies == [{**body, "kv_transfer_params": params}]

    run(test())


BATCHES: list[list[Any]] = [["abc", "de"], [[5, 6, 7], [8]]]


@pytest.mark.parametrize("prompts", BATCHES, ids=["texts", "ids"])
def test_several_prompts_have_pages_of_their_own(prompts: list[Any]) -> None:
    async def test() -> None:
        prefill = FakeServer("prefill")
        decode = FakeServer("decode")
        body = {"prompt": prompts, "max_tokens": 4}
        async with routed(prefill=(prefill,), decode=(decode,)) as router:
            assert (await router.ask(body))[0] == 200
            (asked,) = prefill.bodies
            assert asked["prompt"] == prompts
            assert asked["kv_transfer_params"] == {"do_remote_decode": True}
            params = [{"from": "prefill", "lease": 1, "prompt": place} for place in (0, 1)]
            assert decode.bodies == [{**body, "kv_transfer_params": params}]

    run(test())


@pytest.mark.parametrize("prompts", BATCHES, ids=["texts", "ids"])
def test_pages_of_one_prompt_are_not_those_of_several(
    prompts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        prefill = FakeServer("prefill", Faults(one_transfer=True))
        decode = FakeServer("decode")
        body = {"prompt": prompts, "max_tokens": 4}
        async with routed(prefill=(prefill,), decode=(decode,)) as router:
            assert (await router.ask(body))[0] == 200
            assert decode.bodies == [body]
            metrics = (await router.get("/metrics"))[1]
            assert 'rorqual_router_prefills_total{outcome="failed"} 1.0' in metrics
        assert "are not those of 2 prompts" in caplog.text

    run(test())


@pytest.mark.parametrize(
    ("answer", "prompts"),
    [([{}], 2), ([{}, {}, {}], 2), ([{}, 1], 2), ([{}], 1), ({}, 2)],
)
def test_what_pages_an_answer_may_name(answer: Any, prompts: int) -> None:
    call = RoutedCall("POST", "", "", {}, b"", {"prompt": ["a"] * prompts})
    with pytest.raises(ValueError, match="its kv_transfer_params"):
        call.transfer_of({"kv_transfer_params": answer})
    assert call.transfer_of({"kv_transfer_params": None}) is None
    assert call.transfer_of([]) is None


@pytest.mark.parametrize("body", [ASK, STREAM])
@pytest.mark.parametrize("tries", [1, 3])
def test_a_server_that_refuses_pages(
    body: dict[str, Any], tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has not sent kv_transfer_params: what is wrong with them is not its mistake."""
    faults = Faults(refuse=400, refusals=2, param="kv_transfer_params")

    async def test() -> None:
        prefill = FakeServer("prefill")
        decode = FakeServer("decode", faults)
        async with routed(prefill=(prefill,), decode=(decode,), tries=tries) as router:
            for _ in range(2):
                faults.refusals = 1
                if body is STREAM:
                    (await router.post(body)).assert_whole("abc", 4)
                else:
                    assert (await router.ask(body))[1]["text"] == said("abc", 0, 4)
            with_pages = ["kv_transfer_params" in asked for asked in decode.bodies]
            assert with_pages == [True, False, True, False]
            assert router.server(decode).strikes == 0
            faults.refusals = 1
            own = {**body, "kv_transfer_params": {"mine": 1}}
            answer = await router.post({**own, "stream": True})
            assert (answer.status, answer.errors[0]["param"]) == (400, "kv_transfer_params")
        assert caplog.text.count("refuses pages of prompts") == 1

    run(test())


@pytest.mark.parametrize(
    ("faults", "down"),
    [
        (Faults(before_head=True), False),
        (Faults(refuse=503), False),
        (Faults(strange=True), False),
        (Faults(), True),
    ],
)
def test_without_a_prefill_server_the_other_computes_the_prompt(faults: Faults, down: bool) -> None:
    async def test() -> None:
        prefill = FakeServer("prefill", faults)
        prefill.healthy = 503 if down else 200
        decode = FakeServer("decode")
        async with routed(prefill=(prefill,), decode=(decode,)) as router:
            (await router.post(STREAM)).assert_whole("abc", 4)
            assert decode.bodies == [STREAM]

    run(test())


@pytest.mark.parametrize(
    "more",
    [
        {"echo": True},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": -1},
        {"kv_transfer_params": {"mine": 1}},
        {"prompt": "a"},
    ],
)
def test_prompts_that_are_not_worth_it(more: dict[str, Any]) -> None:
    async def test() -> None:
        prefill = FakeServer("prefill")
        decode = FakeServer("decode")
        async with routed(prefill=(prefill,), decode=(decode,), prefill_from=2) as router:
            assert (await router.ask({**ASK, **more}))[0] == 200
            assert prefill.bodies == []
            assert decode.bodies == [{**ASK, **more}]

    run(test())


def test_pages_are_asked_for_once() -> None:
    """A stream that goes on elsewhere has no pages waiting for it there."""

    async def test() -> None:
        prefill = FakeServer("prefill")
        decodes = (FakeServer("a", Faults(die_after=2)), FakeServer("b", Faults(die_after=3)))
        async with routed(prefill=(prefill,), decode=decodes) as router:
            (await router.post({**STREAM, "max_tokens": 9})).assert_whole("abc", 9)
            bodies = [body for fake in decodes for body in fake.bodies]
            assert len(bodies) == 3
            with_pages = [body for body in bodies if "kv_transfer_params" in body]
            assert len(with_pages) == 1
            assert "rorqual_resume" not in with_pages[0]

    run(test())


# ---- servers that join and leave


SECRET = "0123456789abcdef"


def test_servers_join_drain_and_leave(tmp_path: Any) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")

    async def test() -> None:
        first, second = FakeServer("first"), FakeServer("second")
        await second.start()
        async with routed(first, admin_secret_file=str(path)) as router:

            async def admin(what: str, secret: str = SECRET, **fields: Any) -> tuple[int, Any]:
                headers = {"Authorization": f"Bearer {secret}"}
                url = f"{router.url}/admin/{what}"
                async with router.session.post(url, json=fields, headers=headers) as answer:
                    return answer.status, json.loads(await answer.text())

            assert (await admin("register", "wrong", url=second.url))[0] == 401
            for bad in (
                {"url": "ftp://x"},
                {"url": second.url, "role": "king"},
                {"url": second.url, "lease_seconds": 1e9},
                {},
            ):
                assert (await admin("register", **bad))[0] == 400
            status, response = await admin("register", url=second.url, lease_seconds=1)
            assert (status, response["roles"]) == (200, ["replica"])
            await router.until(lambda: router.server(second).state == "ready")
            assert {(await router.ask(ASK))[1]["server"] for _ in range(4)} == {"first", "second"}
            assert (await admin(f"drain?server={first.url}"))[0] == 200
            assert {(await router.ask(ASK))[1]["server"] for _ in range(4)} == {"second"}
            await admin("undrain", url=first.url)
            await router.until(lambda: second.url not in router.router.servers.servers)
            assert {(await router.ask(ASK))[1]["server"] for _ in range(3)} == {"first"}
            assert second.url not in (await router.get("/metrics"))[1]
            assert (await admin("leave", url=second.url))[0] == 404
            await admin("register", url=second.url, lease_seconds=30)
            assert (await admin("leave", url=first.url))[0] == 200
            await router.until(lambda: router.server(second).state == "ready")
            assert {(await router.ask(ASK))[1]["server"] for _ in range(3)} == {"second"}
            await second.stop()

    run(test())


def test_a_server_that_comes_back_in_another_role_loses_the_first(tmp_path: Any) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)

    async def test() -> None:
        first, second = FakeServer("first"), FakeServer("second")
        await second.start()
        async with routed(first, admin_secret_file=str(path)) as router:

            async def register(server: FakeServer, role: str, seconds: float) -> list[str]:
                fields = {"url": server.url, "role": role, "lease_seconds": seconds}
                headers = {"Authorization": f"Bearer {SECRET}"}
                url = f"{router.url}/admin/register"
                async with router.session.post(url, json=fields, headers=headers) as answer:
                    return list(json.loads(await answer.text())["roles"])

            assert await register(second, "prefill", 1) == ["prefill"]
            assert await register(second, "decode", 30) == ["decode", "prefill"]
            assert await register(first, "decode", 1) == ["decode", "replica"]
            known = router.router.servers.servers
            await router.until(lambda: sorted(known[second.url].roles) == ["decode"])
            await router.until(lambda: sorted(known[first.url].roles) == ["replica"])
            assert known[second.url].lease is not None
            assert known[first.url].lease is None
            await second.stop()

    run(test())
