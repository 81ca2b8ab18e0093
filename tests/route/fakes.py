"""Servers that speak as `rorqual serve` does and break off where a test says so, and a router in
this process before them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from rorqual.config.api_errors import anthropic_error, anthropic_event, is_anthropic
from rorqual.route.app import Router, app_runner
from rorqual.route.config import RouteConfig

EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}
QUICK = {
    "health_interval": 0.05,
    "health_timeout": 0.2,
    "stall_timeout": 0.3,
    "resume_wait": 2.0,
    "breaker_seconds": 0.3,
    "prefill_from": 0,
}


def token_of(prompt: str, choice: int, place: int) -> int:
    """The model: what it says depends on the prompt, the choice and the place alone."""
    return 1000 * (choice + 1) + (sum(prompt.encode()) + 7 * place) % 997


def said(prompt: str, choice: int, count: int) -> str:
    return "".join(f"<{token_of(prompt, choice, place)}>" for place in range(count))


@dataclass
class Faults:
    """Each is done once, and then no more. die_after, hang_after, error_after: events of a stream
    after which it breaks off, is silent, or tells of a dead engine; half: with half an event
    behind. refuse: a status instead of an answer, as often as `refusals` says."""

    die_after: int | None = None
    half: bool = False
    hang_after: int | None = None
    again: int | None = None  # die_after of the streams that follow
    error_after: int | None = None
    error_code: str = "engine_dead"
    before_head: bool = False
    refuse: int | None = None
    refusals: int = 1
    code: str = "busy"
    param: str | None = None
    one_transfer: bool = False  # kv_transfer_params of one prompt, however many there are
    unmarked: bool = False  # as a server of another make
    comment: bool = False  # before the first event
    flood: int = 0  # MiB of comments before the first event
    line_ends: bytes = b"\n"
    strange: bool = False  # an answer that is JSON, but no object
    slow: float = 0.0  # seconds between events
    big: int = 0  # MiB of an answer that does not stream


class FakeServer:
    """hands_over: as a prefill server that streams the first token."""

    def __init__(self, name: str = "fake", faults: Faults | None = None, hands_over: bool = False):
        self.name = name
        self.hands_over = hands_over
        self.faults = faults or Faults()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.targets: list[str] = []
        self.peers: set[Any] = set()  # connections of requests under /v1/
        self.left = 0  # requests whose client went away
        self.wrong: list[str] = []
        self.healthy = 200
        self.hangs = False
        self.url = ""
        self.runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_route("*", "/v1/{rest:.*}", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        found = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{found}"

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def health(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(30)
        more = {"X-Rorqual-First-Token": "1"} if self.hands_over else {}
        return web.Response(status=self.healthy, headers=more)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        try:
            body = json.loads(data) if data else {}
        except (ValueError, RecursionError):
            return web.json_response({"error": {"message": "no JSON"}}, status=400)
        self.bodies.append(body)
        self.targets.append(request.raw_path)
        self.peers.add(request.transport.get_extra_info("peername"))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        faults = self.faults
        if faults.before_head:
            faults.before_head = False
            request.transport.abort()
            return web.Response()
        if faults.refuse is not None and faults.refusals:
            faults.refusals -= 1
            if is_anthropic(request.path):
                answer = anthropic_error(faults.refuse, f"{self.name} refuses", "")
                more = {"X-Rorqual-Error": faults.code}
                return web.json_response(answer, status=faults.refuse, headers=more)
            about = {"code": faults.code, "param": faults.param}
            error = {"error": {"message": f"{self.name} refuses", **about}}
            return web.json_response(error, status=faults.refuse, headers={"Retry-After": "7"})
        try:
            if body.get("stream"):
                return await self.stream(request, body)
            if body.get("slow"):
                await asyncio.sleep(5)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        if faults.strange:
            return web.json_response([self.name])
        prompt = body.get("prompt", "")
        count = body.get("max_tokens", 8)
        found: dict[str, Any] = {"server": self.name, "text": said(str(prompt), 0, count)}
        if faults.big:
            found["big"] = "x" * (faults.big << 20)
        transfer = body.get("kv_transfer_params") or {}
        if isinstance(transfer, dict) and transfer.get("do_remote_decode"):
            one = {"from": self.name, "lease": len(self.bodies)}
            several = isinstance(prompt, list) and not faults.one_transfer
            each = [{**one, "prompt": place} for place in range(len(prompt))]
            found["kv_transfer_params"] = each if several else one
        return web.json_response(found, headers={"X-From": self.name})

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(request)
        faults = self.faults
        marked = request.headers.get("X-Rorqual-Resumable") == "1"
        for _ in range(faults.flood):
            await response.write(b": " + b"x" * (1 << 20) + b"\n\n")
        if faults.comment:
            await response.write(b": patience\n\n")
            await asyncio.sleep(0.02)
        anthropic = is_anthropic(request.path)
        events = self.anthropic_events(body) if anthropic else self.events(body, marked)
        for number, event in enumerate(events):
            if number == faults.die_after:
                faults.die_after = faults.again
                if faults.half:
                    await response.write(event[: len(event) // 2])
                    await asyncio.sleep(0.02)
                request.transport.abort()
                return response
            if number == faults.hang_after:
                faults.hang_after = None
                self.hangs = True
                await asyncio.sleep(30)
            if number == faults.error_after:
                faults.error_after = None
                if anthropic:
                    lost = json.dumps(anthropic_error(500, "lost", "")).encode()
                    await response.write(anthropic_event(lost))
                    return response
                error = {"message": "lost", "type": "server_error", "code": faults.error_code}
                await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
                await response.write(b"data: [DONE]\n\n")
                return response
            await response.write(event.replace(b"\n", faults.line_ends))
            await asyncio.sleep(faults.slow)
        return response

    def events(self, body: dict[str, Any], marked: bool) -> list[bytes]:
        """Two tokens an event at most, the choices in turns; or the first token alone."""
        if (body.get("kv_transfer_params") or {}).get("first_token") and self.hands_over:
            return self.first_events(body)
        marked = marked and not self.faults.unmarked
        prompt = body["prompt"]
        count = body.get("max_tokens", 8)
        given = body.get("rorqual_resume") or {
            "id": f"cmpl-{self.name}",
            "created": 5,
            "choices": [],
        }
        head = {"id": given["id"], "created": given["created"]}
        found = []
        before = {choice["index"]: choice for choice in given["choices"]}
        places = {}
        choices = int(body.get("n", 1))
        for choice in range(choices):
            ids = before[choice]["token_ids"] if choice in before else []
            if ids != [token_of(prompt, choice, place) for place in range(len(ids))]:
                self.wrong.append(f"choice {choice} goes on behind {ids}")
            if choice in before and before[choice]["ended"]:
                continue
            places[choice] = len(ids)
            if choice not in before:
                found.append(self._event(head, choice, [], "", None, marked))
        while places:
            for choice, place in list(places.items()):
                more = [token_of(prompt, choice, at) for at in range(place, min(place + 2, count))]
                places[choice] += len(more)
                if more:
                    text = "".join(f"<{token}>" for token in more)
                    found.append(self._event(head, choice, more, text, None, marked))
                else:
                    found.append(self._event(head, choice, [], "", "length", marked))
                    del places[choice]
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"completion_tokens": count * choices}
            event = json.dumps({**head, "choices": [], "usage": usage}, separators=(",", ":"))
            found.append(b"data: " + event.encode() + b"\n\n")
        return [*found, b"data: [DONE]\n\n"]

    def anthropic_events(self, body: dict[str, Any]) -> list[bytes]:
        """An answer in Anthropic's API, one token an event."""
        found = [anthropic("message_start", message={"id": f"msg_{self.name}"})]
        for place in range(body.get("max_tokens", 8)):
            text = f"<{token_of(body['prompt'], 0, place)}>"
            found.append(anthropic("content_block_delta", delta={"text": text}))
        return [*found, anthropic("message_stop")]

    def first_events(self, body: dict[str, Any]) -> list[bytes]:
        """The role's event, the first token's, and where the pages are or the end."""
        prompt = body["prompt"]
        head = {"id": f"cmpl-{self.name}", "created": 5}
        token = token_of(prompt, 0, 0)
        found = [
            self._event(head, 0, [], "", None, True),
            self._event(head, 0, [token], f"<{token}>", None, True),
        ]
        if body.get("max_tokens", 8) == 1:
            return [*found, self._event(head, 0, [], "", "length", True), b"data: [DONE]\n\n"]
        params = json.dumps({"from": self.name, "lease": len(self.bodies), "first_token": True})
        return [*found, b": rorqual_transfer " + params.encode() + b"\n\n"]

    def _event(
        self,
        head: dict[str, Any],
        choice: int,
        tokens: list[int],
        text: str,
        finish: str | None,
        marked: bool,
    ) -> bytes:
        line = f": rorqual {choice} {','.join(map(str, tokens))}{' end' if finish else ''}\n"
        event = {**head, "choices": [{"index": choice, "text": text, "finish_reason": finish}]}
        return (line if marked else "").encode() + b"data: " + json.dumps(event).encode() + b"\n\n"


def anthropic(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


@dataclass
class StreamedAnswer:
    """What a client read of a stream."""

    status: int
    raw: str
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    errors: list[dict[str, Any]] = field(default_factory=list)
    usages: int = 0
    done: int = 0

    @staticmethod
    def of(status: int, raw: str) -> StreamedAnswer:
        answer = StreamedAnswer(status, raw)
        if status != 200:
            answer.errors.append(json.loads(raw)["error"])
            return answer
        for block in raw.split("\n\n"):
            if not block or block == "data: [DONE]":
                answer.done += block != ""
                continue
            assert block.startswith("data: "), block
            event = json.loads(block.removeprefix("data: "))
            if "error" in event:
                answer.errors.append(event["error"])
                continue
            answer.ids.add(f"{event['id']}@{event['created']}")
            answer.usages += "usage" in event
            for choice in event["choices"]:
                index = choice["index"]
                assert index not in answer.ends, "nothing follows the end"
                answer.texts[index] = answer.texts.get(index, "") + choice["text"]
                if choice["finish_reason"]:
                    answer.ends[index] = choice["finish_reason"]
        return answer

    def assert_whole(self, prompt: str, count: int, choices: int = 1, usage: bool = False) -> None:
        """No token missing or repeated, one end each, one id, one last line."""
        assert self.status == 200
        assert self.errors == []
        assert self.texts == {i: said(prompt, i, count) for i in range(choices)}
        assert self.ends == dict.fromkeys(range(choices), "length")
        assert (self.done, self.usages, len(self.ids)) == (1, int(usage), 1)


class RouterUnderTest:
    def __init__(
        self, router: Router, url: str, session: aiohttp.ClientSession, runner: web.AppRunner
    ):
        self.router = router
        self.url = url
        self.session = session
        self.runner = runner

    def connections(self) -> int:
        """Of clients."""
        return len(self.runner._server.connections)

    async def post(
        self, body: Any, path: str = "/v1/completions", **headers: str
    ) -> StreamedAnswer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as answer:
            return StreamedAnswer.of(answer.status, await answer.text())

    async def ask(self, body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def until(self, condition: Any, seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    def server(self, fake: FakeServer) -> Any:
        return self.router.servers.servers[fake.url]

    def at_rest(self) -> bool:
        """Nothing is counted that is not there."""
        servers = list(self.router.servers)
        return self.router.open == 0 and all(
            server.in_flight == 0 and not server.attempts for server in servers
        )


@asynccontextmanager
async def routed(
    *replicas: FakeServer,
    prefill: tuple[FakeServer, ...] = (),
    decode: tuple[FakeServer, ...] = (),
    **options: Any,
) -> AsyncIterator[RouterUnderTest]:
    """A router before servers, which are started where they are not."""
    fakes = [*replicas, *prefill, *decode]
    for fake in fakes:
        if fake.runner is None:
            await fake.start()
    config = RouteConfig(
        replicas=tuple(fake.url for fake in replicas),
        prefill=tuple(fake.url for fake in prefill),
        decode=tuple(fake.url for fake in decode),
        **{**QUICK, "policy": "round_robin", **options},
    )
    router = Router(config)
    await router.start()
    runner = app_runner(router, 0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            under = RouterUnderTest(router, url, session, runner)
            yield under
            await under.until(under.at_rest)
            assert [wrong for fake in fakes for wrong in fake.wrong] == []
    finally:
        await runner.cleanup()
        await router.close()
        for fake in fakes:
            await fake.stop()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))
