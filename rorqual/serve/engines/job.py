"""One HTTP request's share of the engines: what has come for it and not yet been taken. No
torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from rorqual.serve.errors import ApiError, engine_busy, too_slow
from rorqual.serve.messages import Output
from rorqual.telemetry.spans import NO_SPAN, RequestSpan


class Canceller(Protocol):
    def cancel(self, ids: list[str]) -> None: ...


class Nowhere:
    """In place of an engine, of a choice that none of them works on."""

    def cancel(self, ids: list[str]) -> None:
        """Nothing is under way."""


class EngineJob:
    """`feed` from the engine's link, `take` from the request's task: whatever came in between is
    taken at once.

    `placed` holds, choice by choice, the engine and the id each sequence went to. More than
    `buffered` tokens untaken mean a reader slower than the engine: the job fails and the connection
    is aborted, for a task that waits for its socket would not notice.
    """

    def __init__(self, buffered: int):
        self.buffered = buffered
        self.placed: list[tuple[Canceller, str]] = []
        self.items: list[tuple[int, Output]] = []
        self.tokens = 0
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.abort_connection: Callable[[], None] | None = None
        self.span: RequestSpan = NO_SPAN
        # Asked first while the task waits in `take`, and so has nothing under way: deals with an
        # output at once and says so, or leaves it to the task.
        self.sink: Callable[[int, Output], bool] | None = None

    def feed(self, choice: int, output: Output) -> None:
        if self.sink is not None and self._parked and self._sunk(self.sink, choice, output):
            return
        self.items.append((choice, output))
        self.tokens += len(output.tokens)
        if self.tokens > self.buffered and self.abort_connection is not None:
            self.fail(too_slow(self.tokens))
            self.abort_connection()
        self._wake()

    @property
    def _parked(self) -> bool:
        """Whether the task waits in `take`, for the first of what is to come."""
        return self.waiter is not None and not self.waiter.done() and self.error is None

    def _sunk(self, sink: Callable[[int, Output], bool], choice: int, output: Output) -> bool:
        try:
            return sink(choice, output)
        except Exception as error:  # of this request; others are fed from the same loop
            self.sink = None
            self.fail(error)
            return True

    def fail(self, error: Exception) -> None:
        """End the request with this error; the first one counts. Its sequences are cancelled
        now, not when the task wakes."""
        if self.error is None:
            self.error = error
            self.close()
        self._wake()

    def refuse(self, message: str, busy: bool = False) -> None:
        """The engine will not serve this request: the caller's mistake, unless it is busy."""
        if busy:
            self.fail(engine_busy(message))
            return
        self.fail(ApiError(400, message, param=parameter_of(message)))

    def cancel(self, choice: int) -> None:
        client, name = self.placed[choice]
        client.cancel([name])

    def close(self) -> None:
        """Cancel whatever has not ended."""
        for client, name in self.placed:
            client.cancel([name])

    async def take(self) -> list[tuple[int, Output]]:
        """Everything that has come, at least one output. Raises the job's error once there is
        one."""
        while not self.items and self.error is None:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.error is not None:
            raise self.error
        items = self.items
        self.items = []
        self.tokens = 0
        return items

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


def parameter_of(message: str) -> str | None:
    """Messages about one parameter begin with its name: `top_p=3 is out of range`."""
    name = message.split("=", 1)[0]
    return name if name.isidentifier() and name != message else None
