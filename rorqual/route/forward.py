"""Forwards requests to servers and their responses back: whole responses, retried on other servers
until one is complete, and streams, which other servers can continue."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp import web

from rorqual.config.api_errors import is_anthropic
from rorqual.route.answers import (
    DONE,
    RouteError,
    ending,
    no_connection,
    no_server,
    reader_too_slow,
    server_lost,
    stream_lost,
)
from rorqual.route.attempt import Attempt, OwnFault, ServerLost
from rorqual.route.calls import LONG_BODY, REQUEST_ID, RESUMABLE, RoutedCall, Transfer, passed_on
from rorqual.route.config import RouteConfig
from rorqual.route.events import (
    FULL,
    LOST,
    MAX_ERROR_BYTES,
    BadStream,
    EventSplitter,
    StreamRecord,
    error_code,
    refuses_pages,
)
from rorqual.route.metrics import RouteMetrics
from rorqual.route.servers import UNREADY, Server, ServerList
from rorqual.route.spans import attempt_span

log = logging.getLogger("rorqual.route")

RETRIED = frozenset((502, 503))  # nothing was done there; another server may have capacity
EVENTS = "text/event-stream"
LAST_WORDS = 1.0  # seconds to send a last event before a stream is cut
NO_ROOM_SECONDS = 0.25  # between two tries of full servers, for a stream with a first token
SLOW_READER = 10.0  # seconds that a stream has waited for its client, and most of its time


class SlowReader(Exception):
    """A server closed the stream while the router mostly waited for the client: servers do that to
    slow readers, and so would the next."""


def has_no_room(status: int, headers: Mapping[str, str], body: bytes) -> bool:
    """Whether another server may have capacity. Not for a client over its share, which every server
    would reject."""
    return status in RETRIED or (status == 429 and error_code(headers, body) in FULL)


def check_lost(status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Raises ServerLost where a response reports a lost engine."""
    if status == 500 and error_code(headers, body) in LOST:
        raise ServerLost(f"it answers {body[:200]!r}", UNREADY)


async def beside(call: RoutedCall, make: Callable[..., bytes], *arguments: Any) -> bytes:
    """The result of `make`, on a thread where the body is long, so as not to block the event
    loop."""
    if len(call.body) < LONG_BODY:
        return make(*arguments)
    return await asyncio.to_thread(make, *arguments)


class Forwarder:
    def __init__(
        self,
        config: RouteConfig,
        servers: ServerList,
        session: aiohttp.ClientSession,
        metrics: RouteMetrics,
    ):
        self.config = config
        self.servers = servers
        self.session = session
        self.metrics = metrics
        self.ending = False  # shutting down: open requests end with an error
        self.refusers: WeakSet[Server] = WeakSet()  # logged as refusing pages

    async def answer(self, call: RoutedCall, request: web.Request) -> web.StreamResponse:
        """Respond to a call. Raises RouteError only if nothing was sent to the client yet."""
        try:
            return await self._answer(call, request)
        except OwnFault as error:
            log.warning("no connection can be opened: %s", error)
            raise no_connection() from None

    async def _answer(self, call: RoutedCall, request: web.Request) -> web.StreamResponse:
        if call.streams:
            return await RoutedStream(self, call, request).run()
        prefill = self.prefill_server(call)
        if prefill is not None:
            call.transfer = await self.prefill(call, prefill)
        return await self.whole(call)

    async def pick(
        self, call: RoutedCall, failed: set[Server], started: bool = False
    ) -> Server | None:
        """Choose a server. A request that failed on one, and especially a started stream, waits for
        a server to become usable."""
        seconds = self.config.resume_wait if failed or started else 0.0
        return await self.servers.wait(False, call.key, failed, seconds)

    def note(self, server: Server, error: BaseException | None, status: int = 0) -> None:
        """Record how an attempt ended."""
        if not self.servers.knows(server):
            return  # it was removed meanwhile, with its metrics
        if isinstance(error, OwnFault):
            self.metrics.note(server, "left")
        elif isinstance(error, ServerLost):
            self.metrics.note(server, "lost")
            self.servers.failed(server, error.state)
            log.warning("%s lost a request: %s", server.url, error)
        elif error is not None:
            self.metrics.note(server, "left")
        elif status >= 500:
            self.metrics.note(server, "error")
            self.servers.failed(server)  # checks /health: this request itself may be the cause
        else:
            self.metrics.note(server, "ok")
            self.servers.worked(server)

    # ---- prefill

    def prefill_server(self, call: RoutedCall) -> Server | None:
        """A server to compute the prompt first, where that is worth it and there is one."""
        if not call.wants_prefill(self.config.prefill_from):
            return None
        return self.servers.pick(True, call.key)

    async def prefill(self, call: RoutedCall, server: Server) -> Transfer | None:
        """kv_transfer_params of a prefilled prompt; None where that failed, and the decoding server
        computes it."""
        try:
            found = await self._prefilled(call, server)
        except (ServerLost, OwnFault, ValueError) as error:
            log.warning("%s did not compute a prompt: %s", server.url, error)
            found = None
        self.note_prefill(found is not None)
        return found

    def note_prefill(self, ok: bool) -> None:
        self.metrics.prefills.labels("ok" if ok else "failed").inc()

    async def _prefilled(self, call: RoutedCall, server: Server) -> Transfer | None:
        error: BaseException | None = None
        status = 0
        headers = {name: value for name, value in call.headers.items() if name != RESUMABLE}
        try:
            with Attempt(server, attempt_span(call, server.url, "prefill")) as attempt:
                body = await beside(call, call.prefill_body)
                answer = await attempt.begin(
                    self.session, "POST", call.target, headers, body, self.prefill_timeout
                )
                status = answer.status
                data = await attempt.read_all(self.config.max_answer_bytes)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.note(server, error, status)
        return call.transfer_of(json.loads(data)) if status == 200 else None

    @property
    def prefill_timeout(self) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(
            total=self.config.prefill_timeout, sock_connect=self.config.connect_timeout
        )

    def drops_pages(self, call: RoutedCall, server: Server, status: int, body: bytes) -> bool:
        """Whether the server refuses kv_transfer_params that the router added: the client did not
        send them, so the request goes on without. Each server is logged once."""
        short = len(body) < MAX_ERROR_BYTES
        if call.transfer is None or status != 400 or not short or not refuses_pages(body):
            return False
        call.transfer = None
        if server not in self.refusers:
            self.refusers.add(server)
            log.warning("%s refuses pages of prompts: %r", server.url, body[:300])
        return True

    # ---- responses without streaming

    async def whole(self, call: RoutedCall) -> web.Response:
        """The whole response; nothing is sent before it is complete."""
        failed: set[Server] = set()
        refused: web.Response | None = None
        after: BaseException | str = ""
        for number in range(self.config.tries):
            server = await self.pick(call, failed) if refused is None else self._other(call, failed)
            if server is None:
                break
            if number:
                self.metrics.retries.inc()
            try:
                found = await self._fetch(call, server, after)
                assert isinstance(found.body, bytes)
                if self.drops_pages(call, server, found.status, found.body):
                    found = await self._fetch(call, server, "it refuses the pages")
            except ServerLost as error:
                after = error
                failed.add(server)
                call.transfer = None
                continue
            assert isinstance(found.body, bytes)
            if not has_no_room(found.status, found.headers, found.body):
                return found
            if error_code(found.headers, found.body) in LOST:
                call.transfer = None
            refused = found
            after = f"it answers {found.status}"
            failed.add(server)
        if refused is not None:
            return refused
        raise server_lost() if failed else no_server()

    def _other(self, call: RoutedCall, failed: set[Server]) -> Server | None:
        """A server that has not rejected the request, without waiting: the client got a
        Retry-After."""
        server = self.servers.pick(False, call.key, failed)
        return None if server in failed else server

    async def _fetch(
        self, call: RoutedCall, server: Server, after: BaseException | str
    ) -> web.Response:
        error: BaseException | None = None
        status = 0
        span = attempt_span(call, server.url, "retry" if after else "first", after)
        try:
            with Attempt(server, span) as attempt:
                body = await beside(call, call.answer_body, None)
                answer = await attempt.begin(
                    self.session, call.method, call.target, call.headers, body
                )
                data = await attempt.read_all(self.config.max_answer_bytes)
                status = answer.status
                check_lost(status, answer.headers, data)
                return web.Response(
                    status=answer.status, headers=passed_on(answer.headers), body=data
                )
        except ValueError as caught:
            raise RouteError(502, str(caught), "answer_too_long") from None
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.note(server, error, status)


class RoutedStream:
    """One client's stream, by several servers in turn if needed: where a prefill server computes
    the prompt, it may also send the first token, and a server that answers continues.

    handed_over: the prefill server has sent the first token, and no other server more yet.
    no_room_since: when a server first refused to continue because it was full; waits_for_room: the
    last one did."""

    def __init__(self, forwarder: Forwarder, call: RoutedCall, request: web.Request):
        self.forwarder = forwarder
        self.config = forwarder.config
        self.metrics = forwarder.metrics
        self.call = call
        self.request = request
        given = call.fields.get("rorqual_resume") if call.fields else None
        self.record = StreamRecord(self.config.resume_tokens if call.can_go_on else 0, given)
        self.record.marked = self.record.marked and call.can_go_on
        self.response: web.StreamResponse | None = None  # None until headers are sent
        self.failed: set[Server] = set()
        self.tries = 0
        self.resumes = 0
        self.refused: web.Response | None = None
        self.loss: bytes | None = None
        self.after: BaseException | str = ""  # how the previous attempt ended
        self.began = 0.0  # of the current attempt
        self.unread = 0.0  # seconds of it spent waiting for the client
        self.handed_over = False
        self.waits_for_room = False
        self.no_room_since: float | None = None

    async def run(self) -> web.StreamResponse:
        try:
            return await self._run()
        except asyncio.CancelledError:
            if self.response is None or not self.forwarder.ending:
                raise
            return await self._send_error(ending())
        except OwnFault:
            if self.response is None:
                raise
            self.metrics.streams_lost.inc()
            return await self._send_error(stream_lost())
        except SlowReader:
            return await self._send_error(reader_too_slow())

    async def _send_error(self, error: RouteError) -> web.StreamResponse:
        """Send the error as the last event, without waiting for a client that does not read."""
        task = asyncio.current_task()
        assert self.response is not None
        assert task is not None
        task.uncancel()
        self.call.span.fail(error.code, error.message)
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(LAST_WORDS):
                await self.response.write(self._last_event(error))
        return self.response

    async def _run(self) -> web.StreamResponse:
        prefill = self.forwarder.prefill_server(self.call)
        if prefill is not None:
            found = await self._prefill(prefill)
            if found is not None:
                return found
        while True:
            before = self.record.events
            server = await self._next()
            if server is None:
                return await self._end()
            try:
                found = await self._attempt(server)
            except ServerLost as error:
                self.after = error
                self.failed.add(server)
                self.call.transfer = None  # pages are leased to one reader
                if self.record.events > before:
                    self.tries = 0
                if self._completed():
                    assert self.response is not None
                    await self.response.write(DONE)
                    return self.response
                continue
            if found is not None:
                return found

    # ---- the prompt

    async def _prefill(self, server: Server) -> web.StreamResponse | None:
        """Have the prompt computed on a prefill server: returns the response to the client where
        its first token was all of it."""
        forwarder = self.forwarder
        if not self._takes_first_token(server):
            self.call.transfer = await forwarder.prefill(self.call, server)
            self.metrics.first_tokens.labels("decode").inc()
            return None
        found = None
        try:
            found = await self._attempt(server, prefill=True)
        except (ServerLost, OwnFault, RouteError) as error:
            log.warning("%s did not compute a prompt: %s", server.url, error)
            self.after = error if self.record.events else ""
            self.loss = None
            if self._completed():
                assert self.response is not None
                await self.response.write(DONE)
                found = self.response
        forwarder.note_prefill(found is not None or self.handed_over)
        sent = self.record.tokens > 0 or found is not None
        self.metrics.first_tokens.labels("prefill" if sent else "decode").inc()
        return found

    def _takes_first_token(self, server: Server) -> bool:
        """Once a token was sent, no server may refuse the request: so one must be able to
        continue."""
        return (
            self.config.first_token == "prefill"
            and server.hands_over
            and self.call.takes_first_token()
            and self.config.resume_tokens > 0
            and bool(self.forwarder.servers.usable(prefill=False))
        )

    # ---- the answer

    async def _next(self) -> Server | None:
        """The server for the rest of the stream; None where there is none."""
        started = self.record.events > 0  # a comment alone need not be continued
        moves = started and not self.handed_over
        if started and not self.record.can_go_on:
            return None
        if moves and self.resumes >= self.config.resumes:
            return None
        if self.waits_for_room:
            self.waits_for_room = False
            self.tries -= 1
            await asyncio.sleep(NO_ROOM_SECONDS)
        if self.tries >= self.config.tries:
            return None
        forwarder = self.forwarder
        if self.refused is not None and not started:
            server = forwarder._other(self.call, self.failed)
        else:
            server = await forwarder.pick(self.call, self.failed, started)
        if server is not None and moves:
            self.resumes += 1
            self.metrics.resumes.inc()
        elif server is not None and self.tries:
            self.metrics.retries.inc()
        self.tries += 1
        return server

    async def _attempt(self, server: Server, prefill: bool = False) -> web.StreamResponse | None:
        """The rest of the stream from one server, or with `prefill` its first token: returns the
        response to the client, or None where another server must be tried, or is to continue."""
        call = self.call
        resume = self.record.resume() if self.record.events else None
        headers = {**call.headers, **({RESUMABLE: "1"} if call.can_go_on else {})}
        if prefill:
            body = await beside(call, call.first_token_body)
        else:
            body = await beside(call, call.answer_body, resume)
        error: BaseException | None = None
        status = 0
        self.began = time.monotonic()
        self.unread = 0.0
        timeout = self.forwarder.prefill_timeout if prefill else None
        span = attempt_span(call, server.url, self._why(prefill), self.after)
        try:
            with Attempt(server, span) as attempt:
                answer = await attempt.begin(
                    self.forwarder.session, call.method, call.target, headers, body, timeout
                )
                status = answer.status
                if status != 200 or answer.content_type != EVENTS:
                    data = await attempt.read_all(self.config.max_answer_bytes)
                    if prefill:
                        log.warning("%s: %d %r", server.url, status, data[:300])
                        return None
                    check_lost(status, answer.headers, data)
                    return self._no_stream(server, answer, data)
                return await self._pass(attempt, answer, prefill)
        except ServerLost as caught:
            error = SlowReader() if self._reads_slowly() else caught
            raise error from None
        except BadStream as caught:
            error = ServerLost(str(caught))
            raise error from None
        except ValueError as caught:
            if self.response is not None:  # the client already has part of the stream
                error = ServerLost(str(caught))
                raise error from None
            raise RouteError(502, str(caught), "answer_too_long") from None
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.forwarder.note(server, error, status)

    def _why(self, prefill: bool) -> str:
        if prefill:
            return "prefill"
        if self.record.events and not self.handed_over:
            return "resume"
        return "retry" if self.after else "first"

    def _no_stream(
        self, server: Server, answer: aiohttp.ClientResponse, data: bytes
    ) -> web.StreamResponse | None:
        """Handle a response that is not a stream. A rejected continuation is not passed to the
        client, which has part of the stream. Lost pages are not requested again."""
        call = self.call
        if self.forwarder.drops_pages(call, server, answer.status, data):
            self.after = "it refuses the pages"
            self.tries -= 1
            return None
        self.failed.add(server)
        if self.response is not None:
            log.warning("%s does not go on: %d %r", server.url, answer.status, data[:300])
            self.after = f"it does not go on: {answer.status}"
            if self.handed_over:
                self._refused_after_first(answer, data)
            return None
        found = web.Response(status=answer.status, headers=passed_on(answer.headers), body=data)
        if not has_no_room(answer.status, answer.headers, data):
            return found
        if error_code(answer.headers, data) in LOST:
            call.transfer = None
        self.after = f"it answers {answer.status}"
        self.refused = found
        return None

    def _refused_after_first(self, answer: aiohttp.ClientResponse, data: bytes) -> None:
        """A server refuses a request of which the client has the first token. While it is full,
        wait, as the request would have waited in its queue; otherwise its error ends the stream."""
        if not has_no_room(answer.status, answer.headers, data):
            with suppress(ValueError, RecursionError):
                self.loss = b"data: " + json.dumps(json.loads(data)).encode()
            return
        if error_code(answer.headers, data) in LOST:
            self.call.transfer = None
        now = time.monotonic()
        self.no_room_since = self.no_room_since or now
        if now - self.no_room_since < self.config.resume_wait:
            self.waits_for_room = True

    async def _pass(
        self, attempt: Attempt, answer: aiohttp.ClientResponse, prefill: bool
    ) -> web.StreamResponse | None:
        call = self.call
        splitter = EventSplitter(self.record, call.keeps_marks, prefill, is_anthropic(call.path))
        read = answer.content.readany
        while data := await attempt.of_server(read):
            passed = splitter.feed(data)
            if passed.out:
                if self.response is None:
                    await self._begin(answer)
                await self._write(passed.out)
                self.handed_over = False
            if passed.transfer is not None:
                call.transfer = passed.transfer
                self.handed_over = self.record.events > 0
                return None
            if passed.done:
                assert self.response is not None
                return self.response
            if passed.lost is not None:
                self.loss = passed.lost
                raise ServerLost(f"its stream ended with {passed.lost[:200]!r}", UNREADY)
        if self.record.marked or not self.record.events:
            raise ServerLost("its stream ended before its last line")
        # a foreign stream, which may end without a [DONE] line
        assert self.response is not None
        if splitter.rest:
            await self.response.write(splitter.rest)
        return self.response

    async def _write(self, data: bytes) -> None:
        assert self.response is not None
        before = time.monotonic()
        await self.response.write(data)
        self.unread += time.monotonic() - before

    def _reads_slowly(self) -> bool:
        return self.unread > max(SLOW_READER, (time.monotonic() - self.began) / 2)

    async def _begin(self, answer: aiohttp.ClientResponse) -> None:
        response = web.StreamResponse(status=200, headers=passed_on(answer.headers))
        await response.prepare(self.request)
        self.response = response

    def _completed(self) -> bool:
        """Whether all choices have ended, so that only the stream's end is missing."""
        return self.response is not None and self.record.finished(
            max(1, self.call.choices()), self.call.wants_usage()
        )

    async def _end(self) -> web.StreamResponse:
        """No server can continue: end the stream."""
        if self.response is None:
            if self.refused is not None:
                return self.refused
            raise server_lost() if self.failed else no_server()
        self.metrics.streams_lost.inc()
        self.call.span.fail("stream_lost", str(self.after))
        lost = self._last_event(stream_lost())
        await self.response.write(lost if self.loss is None else self.loss + b"\n\n" + DONE)
        return self.response

    def _last_event(self, error: RouteError) -> bytes:
        return error.event(self.call.path, self.call.headers[REQUEST_ID])
