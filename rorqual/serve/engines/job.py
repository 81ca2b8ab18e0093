"""One HTTP request's outputs from the engines: a queue between engine client and request task. No
torch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Protocol

from rorqual.serve.engines.phases import note_phase
from rorqual.serve.engines.read_tokens import ReadTokens
from rorqual.serve.errors import ApiError, engine_busy, too_slow
from rorqual.serve.messages import Counting, Output
from rorqual.telemetry.spans import NO_SPAN, RequestSpan


class PlacedEngine(Protocol):
    """See EngineClient."""

    def cancel(self, ids: list[str]) -> None: ...

    def answered(self, ids: list[str], lost: bool) -> None: ...

    def read(self, name: str, times: list[float], count: int) -> None: ...

    def end_text(self, name: str, stopped: bool) -> ReadTokens | None: ...


class NullEngine:
    """Stands in for the engine of a choice that needs none."""

    def cancel(self, ids: list[str]) -> None:
        """There is nothing to cancel."""

    def answered(self, ids: list[str], lost: bool) -> None:
        """It holds no pages."""

    def read(self, name: str, times: list[float], count: int) -> None:
        """It sends no tokens."""

    def end_text(self, name: str, stopped: bool) -> None:
        """It has no text."""


class EngineJob:
    """`feed` is called by the engine's client, `take` by the request's task, which gets everything
    queued at once.

    `structure`: the parameter that gave the structure of the answer.

    `placed` holds, choice by choice, the engine and the id each sequence went to. More than
    `buffered` queued tokens mean a client slower than the engine: the job fails and the connection
    is aborted, since a task blocked on its socket would not notice.

    sharing: of several sequences whose pages another engine will fetch, once the answer names them
    all; computing: those of them that have not ended.
    """

    def __init__(self, buffered: int):
        self.buffered = buffered
        self.placed: list[tuple[PlacedEngine, str]] = []
        self.items: list[tuple[int, Output]] = []
        self.tokens = 0
        self.structure: str | None = None
        self.sharing: frozenset[str] = frozenset()
        self.computing: set[str] = set()
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.abort_connection: Callable[[], None] | None = None
        self.span: RequestSpan = NO_SPAN
        self.counting = Counting.SENT
        # Called first while the task waits in `take`: handles an output directly and returns True,
        # or leaves it to the task.
        self.sink: Callable[[int, Output], bool] | None = None

    def share(self, ids: frozenset[str]) -> None:
        """Call before the sequences are sent."""
        self.sharing = ids
        self.computing = set(ids)

    def feed(self, choice: int, output: Output) -> None:
        if output.finish is not None and output.id in self.computing:
            self.computing.discard(output.id)
            if not self.computing:
                self._answered(lost=False)
        if self.sink is not None and self._parked and self._try_sink(self.sink, choice, output):
            return
        self.items.append((choice, output))
        self.tokens += len(output.tokens)
        if self.tokens > self.buffered and self.abort_connection is not None:
            self.fail(too_slow(self.tokens))
            self.abort_connection()
        self._wake()

    @property
    def _parked(self) -> bool:
        """Whether the task waits in `take` with nothing queued."""
        return self.waiter is not None and not self.waiter.done() and self.error is None

    def _try_sink(self, sink: Callable[[int, Output], bool], choice: int, output: Output) -> bool:
        try:
            return sink(choice, output)
        except Exception as error:  # only this request fails; others are fed from the same loop
            self.sink = None
            self.fail(error)
            return True

    def fail(self, error: Exception) -> None:
        """Fail the request; only the first error counts. Its sequences are cancelled now, not when
        the task wakes."""
        if self.error is None:
            self.error = error
            self.close()
        self._wake()

    def refuse(self, message: str, busy: bool = False, structured: bool = False) -> None:
        """The engine rejected this request: the caller's mistake, unless busy. structured: the
        message is about `structure`, unless it names another parameter."""
        if busy:
            self.fail(engine_busy(message))
            return
        param = parameter_of(message) or (self.structure if structured else None)
        self.fail(ApiError(400, message, param=param))

    def read(self, choice: int, times: list[float], count: int) -> None:
        """With Counting.READ: `count` of a choice's new tokens belong to its text."""
        client, name = self.placed[choice]
        client.read(name, times, count)

    def end_text(self, choice: int, stopped: bool) -> None:
        """With Counting.READ: a choice's text has ended; stopped: by a stop string."""
        client, name = self.placed[choice]
        read = client.end_text(name, stopped)
        if read is not None and self.span.recording:
            note_phase(self.span, choice, read.decode_phase(name))

    def close(self) -> None:
        """Cancel whatever has not ended."""
        for client, name in self.placed:
            client.cancel([name])
        if self.computing:
            self.computing.clear()
            self._answered(lost=True)

    def _answered(self, lost: bool) -> None:
        ids: dict[PlacedEngine, list[str]] = {}
        for client, name in self.placed:
            if name in self.sharing:
                ids.setdefault(client, []).append(name)
        for client, names in ids.items():
            client.answered(names, lost)

    async def take(self) -> list[tuple[int, Output]]:
        """All queued outputs, waiting for at least one. Raises the job's error once there is
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
    """The parameter a message is about: such messages begin with its name, `top_p=3 is out of
    range`, `kv_transfer_params: ...` or `tools.0.function.parameters: ...`."""
    name = re.split("=|: ", message, maxsplit=1)[0]
    first, *parts = name.split(".")
    named = first.isidentifier() and all(part.isidentifier() or part.isdigit() for part in parts)
    return name if named and name != message else None
