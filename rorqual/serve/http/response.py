"""The HTTP response of a Call: starts its sequences, streams or waits, and releases everything
however it ends."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from rorqual.serve.engines.job import EngineJob
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.errors import ApiError, Disconnected, timed_out
from rorqual.serve.http.anthropic.errors import error_body
from rorqual.serve.http.blocks.tagged import with_names
from rorqual.serve.http.calls import Call
from rorqual.serve.http.spans.answers import note_answer, note_request
from rorqual.serve.messages import Output
from rorqual.telemetry.spans import NO_SPAN

log = logging.getLogger("rorqual.serve")

DIRECT = "rorqual.send"  # scope entry: the `send` that DirectSend received
SPAN = "rorqual.span"  # scope entry: the request's span, with tracing
ABORT = "rorqual.abort"  # scope entry: aborts the connection; see connection.py
GRACE = 5.0  # seconds after its deadline for a stream to deliver its last event
JSON = [(b"content-type", b"application/json")]
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class StreamResponse(Response):
    """The request is sent to the engine when the response starts; headers are sent with the first
    token, so that a rejection by the engine is still an HTTP status."""

    def __init__(
        self,
        call: Call,
        pool: EnginePool,
        counts: Counter[str],
        running: set[EngineJob],
        more_headers: Sequence[tuple[bytes, bytes]] = (),
    ):
        self.call = call
        self.pool = pool
        self.counts = counts
        self.running = running
        self.status_code = 200
        self.background = None
        self.job = EngineJob(pool.limits.buffered)
        self.job.structure = call.structure
        self.started = False
        self.more_headers = more_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self.job
        timeout = self.pool.limits.timeout
        job.span = scope.get(SPAN, NO_SPAN)
        job.counting = self.call.counting
        note_request(job.span, self.call)
        if self.call.stream:
            job.abort_connection = scope.get(ABORT)
        watcher = asyncio.create_task(_watch(receive, job))
        deadline = asyncio.get_running_loop().call_later(timeout, self._late, timeout)
        self.running.add(job)
        try:
            self.pool.submit(self.call.requests, self.call.every_step, job, self.call.over)
            if self.call.stream:
                await self._stream(send, scope.get(DIRECT, send))
            else:
                await self._whole(send)
        except Disconnected:
            self.counts["disconnected"] += 1
            job.span.fail("disconnected", "the client has gone")
        except ApiError as error:
            await self._fail(error, send)
        except Exception as error:
            log.exception("a request failed")
            await self._fail(
                ApiError(500, f"internal error: {type(error).__name__}", "server_error"), send
            )
        finally:
            watcher.cancel()
            deadline.cancel()
            job.close()
            note_answer(job.span, self.call)
            job.error = None  # its traceback holds the job, and so the prompt
            self.running.discard(job)

    def _late(self, timeout: float) -> None:
        self.job.fail(timed_out(timeout))
        if self.job.abort_connection is not None:
            asyncio.get_running_loop().call_later(GRACE, self._abort)

    def _abort(self) -> None:
        if self.job in self.running and self.job.abort_connection is not None:
            self.job.abort_connection()

    async def _stream(self, send: Send, direct: Send) -> None:
        """direct: sends chunks past the layers that only change a response's head."""
        call = self.call
        job = self.job
        early = call.early
        events = early
        while call.open:
            items = await job.take()
            if call.scores:
                await asyncio.to_thread(call.read_scores, items)
            if not self.started:
                await self._start(send)
                self._sink_into(direct)
            events = call.take(items, job)
            if early:
                events = early + events
                early = []
            if events and call.open:
                body = events[0] if len(events) == 1 else b"".join(events)
                await direct({"type": "http.response.body", "body": body, "more_body": True})
        if not self.started:
            await self._start(send)
        await send(
            {
                "type": "http.response.body",
                "body": b"".join([*events, *call.last_events(), call.end]),
                "more_body": False,
            }
        )

    async def _start(self, send: Send) -> None:
        await send(_start(200, [*EVENTS, *self.more_headers]))
        self.started = True

    def _sink_into(self, direct: Send) -> None:
        """From here on ordinary chunks are sent where the engine's message is read, without waking
        this task: all but the last, while the connection accepts them without waiting."""
        cycle = getattr(direct, "__self__", None)
        if not isinstance(cycle, RequestResponseCycle) or not self.call.sinks:
            return
        call = self.call
        job = self.job

        def sink(choice: int, output: Output) -> bool:
            if output.finish is not None or cycle.flow.write_paused:
                return False
            events = call.take([(choice, output)], job)
            if events:
                body = events[0] if len(events) == 1 else b"".join(events)
                message: Any = {"type": "http.response.body", "body": body, "more_body": True}
                _run_at_once(cycle.send(message))
            return True

        job.sink = sink

    async def _whole(self, send: Send) -> None:
        call = self.call
        while call.open:
            items = await self.job.take()
            if call.scores:
                await asyncio.to_thread(call.read_scores, items)
            call.take(items, self.job)
        body = await asyncio.to_thread(call.whole) if call.scores else call.whole()
        await _send_all(send, 200, [*JSON, *self.more_headers], body)

    async def _fail(self, error: ApiError, send: Send) -> None:
        error = with_names(error, self.call.names)
        self.counts[f"failed_{error.status}"] += 1
        if error.status >= 500:
            self.job.span.fail(error.code or str(error.status), error.message)
        with suppress(Exception):
            if self.started:
                await send(
                    {
                        "type": "http.response.body",
                        "body": self.call.failure(error),
                        "more_body": False,
                    }
                )
            else:
                extra = [(name.encode(), value.encode()) for name, value in error.headers().items()]
                await _send_all(send, error.status, [*JSON, *extra], self.call.refusal(error))


async def _watch(receive: Receive, job: EngineJob) -> None:
    """Fail the job as soon as the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    job.fail(Disconnected())


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _send_all(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    await send(_start(status, [*headers, (b"content-length", str(len(body)).encode())]))
    await send({"type": "http.response.body", "body": body})


def error_response(error: ApiError, path: str = "") -> Any:
    """In the error format of the path's API; by default OpenAI's."""
    return Response(error_body(error, path), error.status, error.headers(), "application/json")


def _run_at_once(sending: Coroutine[Any, Any, None]) -> None:
    """Run a send that must not need to wait."""
    try:
        sending.send(None)
    except StopIteration:
        return
    sending.close()
    raise RuntimeError("a connection that takes chunks at once made one wait")
