"""The process of `rorqual route`: routes, signals, and shutdown. Exit status 0 after SIGTERM or
SIGINT, 1 where a second signal or the drain timeout cut off requests."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rorqual.config.listen import bound_socket
from rorqual.config.process import freeze_loaded
from rorqual.errors import quoted
from rorqual.registry.address import etcd_address
from rorqual.route.admin import Admin
from rorqual.route.answers import RouteError, body_too_long, ending, too_large_together, too_many
from rorqual.route.calls import LONG_BODY, REQUEST_ID, RoutedCall
from rorqual.route.config import RouteConfig, server_url
from rorqual.route.connection import HEADER_BYTES, LimitedRunner, send
from rorqual.route.forward import LAST_WORDS, Forwarder
from rorqual.route.health import HealthChecks
from rorqual.route.metrics import RouteMetrics
from rorqual.route.policies import NAMED
from rorqual.route.registry import RegistryWatch
from rorqual.route.servers import DOWN, PREFILL, ServerList
from rorqual.route.spans import note_call, request_span
from rorqual.telemetry.spans import RequestSpan, RequestTracer
from rorqual.telemetry.start import start_tracer

log = logging.getLogger("rorqual.route")

READ_BYTES = 1 << 16
SPARE_FILES = 64  # for the process itself
CUT_SECONDS = 5.0  # after which a cut-off request ends without a last event
BODY_SECONDS = 60.0  # for a request's body to arrive
METRICS = "text/plain; version=0.0.4; charset=utf-8"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """State shared by the routes. Created inside a running loop. tracer: not closed here."""

    def __init__(self, config: RouteConfig, tracer: RequestTracer | None = None):
        self.config = config
        self.tracer = tracer or RequestTracer()
        self.metrics = RouteMetrics()
        policy = NAMED[config.policy]
        self.servers = ServerList(
            policy(), policy(), config.breaker_failures, config.breaker_seconds
        )
        for role, urls in (
            ("replica", config.replicas),
            (PREFILL, config.prefill),
            ("decode", config.decode),
        ):
            for url in urls:
                self.servers.add(server_url(url), role)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=10),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BYTES,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
        )
        self.checks = HealthChecks(config, self.servers, self.session, self.metrics)
        self.forwarder = Forwarder(config, self.servers, self.session, self.metrics)
        secret = config.secret()
        self.registry: RegistryWatch | None = None
        if config.registry is not None and secret is not None:
            where = etcd_address(config.registry)
            self.registry = RegistryWatch(where, secret, self.servers, self.checks, self.session)
        self.watch: asyncio.Task[None] | None = None
        self.open = 0
        self.held = 0  # bytes of requests' bodies, and of answers that are sent in one piece
        self.tasks: set[asyncio.Task[Any]] = set()  # of open requests

    async def start(self) -> None:
        """Check every server once before the first request."""
        if self.registry is not None:
            await self.registry.start()
            self.watch = asyncio.create_task(self.registry.run())
        await asyncio.gather(*(self.checks.look(server) for server in self.servers))
        for server in self.servers:
            self.checks.start(server)
            if server.state == DOWN:
                log.warning("%s does not answer yet", server.url)

    async def close(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
            await asyncio.gather(self.watch, return_exceptions=True)
        await self.checks.close()
        await self.session.close()

    def app(self) -> web.Application:
        app = web.Application(
            middlewares=[self._errors], client_max_size=self.config.max_body_bytes
        )
        app.on_response_prepare.append(_hide_server_header)
        app.router.add_get("/live", _live)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.show_metrics)
        secret = self.config.secret()
        if secret is not None:
            Admin(secret, self.servers, self.checks).add_routes(app)
        app.router.add_route("*", "/v1/{rest:.*}", self.forward)
        return app

    def cut(self) -> int:
        """End all open requests, each with an error to its client. Returns their number."""
        self.forwarder.ending = True
        for task in list(self.tasks):
            task.cancel()
        return len(self.tasks)

    # ---- routes

    async def health(self, request: web.Request) -> web.Response:
        """200 if a server is usable."""
        ready = len(self.servers.usable(prefill=False))
        body = {"status": "ready" if ready else "no server", "servers_ready": ready}
        return web.json_response(body, status=200 if ready else 503)

    async def show_metrics(self, request: web.Request) -> web.Response:
        self.metrics.open.set(self.open)
        if self.registry is not None:
            self.metrics.registry_up.set(not self.registry.away)
        body = self.metrics.text(list(self.servers), self.config.breaker_failures)
        return web.Response(body=body, headers={"Content-Type": METRICS})

    async def forward(self, request: web.Request) -> web.StreamResponse:
        span = request_span(self.tracer, request)
        try:
            answer = await self._forward(request, span)
            span.set({"http.response.status_code": answer.status})
            if answer.status >= 500:
                span.fail(str(answer.status))
            return answer
        except RouteError as error:
            span.set({"http.response.status_code": error.status})
            if error.status >= 500:
                span.fail(error.code, error.message)
            raise
        except BaseException as error:
            left = isinstance(error, asyncio.CancelledError | ConnectionError)
            span.fail("left" if left else type(error).__name__)
            raise
        finally:
            span.end()

    async def _forward(self, request: web.Request, span: RequestSpan) -> web.StreamResponse:
        if {".", ".."} & set(request.path.split("/")):
            raise RouteError(404, "a path has no dots of its own", "no_route")
        if self.open >= self.config.max_in_flight:
            raise too_many(self.open)
        self.open += 1
        held = HeldBytes(self)
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            body = await self._body(request, held)
            target = request.rel_url.raw_path_qs  # also where the client sent an absolute URL
            read = partial(
                RoutedCall.of, request.method, request.path, target, request.headers, body
            )
            call = read() if len(body) < LONG_BODY else await asyncio.to_thread(read)
            call.span = span
            note_call(call)
            answer = await self.forwarder.answer(call, request)
            if isinstance(answer, web.Response) and isinstance(answer.body, bytes):
                held.add(len(answer.body))
            return await self._send(request, answer)
        except asyncio.CancelledError:
            if not self.forwarder.ending:
                raise
            task.uncancel()
            raise ending() from None
        finally:
            self.held -= held.size
            self.open -= 1
            self.tasks.discard(task)

    async def _send(self, request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
        ending = self.forwarder.ending
        return await send(request, answer, LAST_WORDS if ending else self.config.reader_timeout)

    async def _body(self, request: web.Request, held: HeldBytes) -> bytes:
        """Counts what has come of a body, since many may arrive at once; not what has been
        announced, which a client may never send."""
        if request.body_exists:
            _check_encoding(request)
        length = request.content_length
        try:
            async with asyncio.timeout(BODY_SECONDS):
                if length is not None:
                    self._check_length(length, held)
                return await self._parts(request, held)
        except TimeoutError:
            raise RouteError(
                408, f"the body did not come within {BODY_SECONDS:g} s", "body_timeout"
            ) from None
        except (web.RequestPayloadError, HttpProcessingError):
            raise RouteError(400, "the body is malformed", "bad_body") from None

    def _check_length(self, length: int, held: HeldBytes) -> None:
        """Refuse a body before any of it is read, if all of it will be too much."""
        if length > self.config.max_body_bytes:
            raise body_too_long(self.config.max_body_bytes)
        held.check(length)

    async def _parts(self, request: web.Request, held: HeldBytes) -> bytes:
        parts = []
        while part := await request.content.readany():
            held.reserve(len(part))
            parts.append(part)
            if held.size > self.config.max_body_bytes:
                raise body_too_long(self.config.max_body_bytes)
        return b"".join(parts)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turns every failure into an error response in the format of the path's API."""
        try:
            answer = await handler(request)
        except RouteError as error:
            answer = _error_response(error, request)
        except web.HTTPException as error:
            found = RouteError(error.status, f"{request.path}: {error.reason}", "no_route")
            answer = _error_response(found, request)
        except (ConnectionError, aiohttp.ClientError) as error:
            if request.transport is None or request.transport.is_closing():
                raise  # the client has disconnected
            log.exception("a request failed")
            found = RouteError(500, f"internal error: {type(error).__name__}", "internal")
            answer = _error_response(found, request)
        self.metrics.answers.labels(str(answer.status)).inc()
        return answer if answer.prepared else await self._send(request, answer)


class HeldBytes:
    """What one request holds of the bytes that all may hold."""

    def __init__(self, router: Router):
        self.router = router
        self.size = 0

    def reserve(self, size: int) -> None:
        """Raises RouteError where that is too much."""
        self.check(size)
        self.add(size)

    def check(self, size: int) -> None:
        """Likewise, and adds nothing."""
        if self.router.held + size > self.router.config.max_held_bytes:
            raise too_large_together(self.router.open)

    def add(self, size: int) -> None:
        self.router.held += size
        self.size += size


def _check_encoding(request: web.Request) -> None:
    """Bodies are forwarded as they came, and no server takes compressed ones."""
    given = ",".join(request.headers.getall("Content-Encoding", ()))
    if any(name.strip().lower() not in ("", "identity") for name in given.split(",")):
        raise RouteError(
            415,
            f"the header Content-Encoding should be identity, or left out; given: {quoted(given)}",
            "unsupported_encoding",
        )


def app_runner(router: Router, shutdown_timeout: float) -> web.AppRunner:
    return LimitedRunner(
        router.app(),
        handler_cancellation=True,  # a client's disconnect cancels its request
        shutdown_timeout=shutdown_timeout,
    )


async def _hide_server_header(request: web.Request, response: web.StreamResponse) -> None:
    """Do not reveal the library and its version."""
    response.headers.pop("Server", None)


async def _live(request: web.Request) -> web.Response:
    return web.json_response({"status": "live"})


def _error_response(error: RouteError, request: web.Request) -> web.Response:
    body = error.body(request.path, request.headers.get(REQUEST_ID, ""))
    return web.Response(status=error.status, headers=error.headers(), body=body)


def run(config: RouteConfig, version: str = "") -> int:
    """Route until a signal; returns the exit status."""
    config.secret()  # raises ConfigError before anything listens
    tracer = start_tracer(config.otlp_endpoint, "rorqual-router", version)
    allow_open_files(config.max_in_flight)
    sock = bound_socket(config.host, config.port)
    factory: Any = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(route(config, sock, tracer))


async def route(config: RouteConfig, sock: socket.socket, tracer: RequestTracer) -> int:
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, on_signal)
    router = Router(config, tracer)
    await router.start()
    runner = app_runner(router, config.drain_timeout + CUT_SECONDS)
    await runner.setup()
    await web.SockSite(runner, sock, backlog=1024).start()
    freeze_loaded()
    host, port = sock.getsockname()[:2]
    log.info(
        "routing %d servers on http://%s:%d",
        len(router.servers.servers),
        f"[{host}]" if ":" in host else host,
        port,
    )
    await stop.wait()
    log.info(
        "ending: %d open requests have %g s; a second signal ends them now",
        router.open,
        config.drain_timeout,
    )
    done = asyncio.create_task(runner.cleanup())
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait(
        {done, hurried}, timeout=config.drain_timeout, return_when=asyncio.FIRST_COMPLETED
    )
    hurried.cancel()
    cut = 0 if done.done() else router.cut()
    if cut:
        log.warning("%d open requests are cut off", cut)
    await done
    await router.close()
    await asyncio.to_thread(tracer.close)
    return 1 if cut else 0


def allow_open_files(requests: int) -> None:
    """Raise the limit of open files: each request has two connections, and without files healthy
    servers look dead."""
    needed = 2 * requests + SPARE_FILES
    most, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= needed:
        return
    most = needed if allowed == resource.RLIM_INFINITY else min(needed, allowed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, allowed))
    if most < needed:
        log.warning(
            "at most %d files may be open, but %d requests have two connections each: raise the "
            "limit (ulimit -Hn %d), or lower --max-in-flight",
            most,
            requests,
            needed,
        )
