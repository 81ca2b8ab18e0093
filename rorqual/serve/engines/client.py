"""The API process's side of one engine: its sockets, its open sequences, and its newest snapshot.
No torch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from rorqual.request import Request
from rorqual.serve import messages
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.engines.phases import note_phase
from rorqual.serve.engines.read_tokens import ReadFigures, ReadTokens
from rorqual.serve.errors import engine_died, experts_missing, pages_lost

log = logging.getLogger("rorqual.serve")


class ClientUsage:
    """Each client's open sequences, and the tokens they count for."""

    def __init__(self) -> None:
        self.open: dict[str, tuple[int, int]] = {}

    def of(self, client: str) -> tuple[int, int]:
        return self.open.get(client, (0, 0))

    def change(self, client: str, sequences: int, tokens: int) -> None:
        before = self.of(client)
        after = (before[0] + sequences, before[1] + tokens)
        if after[0]:
            self.open[client] = after
        else:
            self.open.pop(client, None)


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """tokens: its share of `load` and of its client's usage."""

    job: EngineJob
    choice: int
    tokens: int
    client: str


class EngineClient:
    """Bound to one engine process; a restarted engine gets a new client.

    `live` holds what is open by the engine's request id; `load` is the sum of its tokens.
    `unread`: requests with Counting.READ whose text has not ended, on the engine or off it.
    """

    def __init__(self, folder: Path, name: str, index: int, usage: ClientUsage):
        self.usage = usage
        self.index = index
        self.inbox = f"ipc://{folder}/{name}-in"
        self.outbox = f"ipc://{folder}/{name}-out"
        context = zmq.asyncio.Context.instance()
        self.receiver = context.socket(zmq.PULL)
        # blocking socket: without a high-water mark it never blocks
        self.sender = zmq.Context(context).socket(zmq.PUSH)
        for socket, address in ((self.sender, self.inbox), (self.receiver, self.outbox)):
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(address)
        self.encoder = messages.encoder()
        self.decoder = messages.client_decoder()
        self.live: dict[str, OpenSequence] = {}
        self.unread: dict[str, ReadTokens] = {}
        self.figures = ReadFigures()
        self.load = 0
        self.made = time.monotonic()
        self.start_seconds = 0.0  # until it was ready
        self.info: messages.EngineInfo | None = None
        self.snapshot = messages.Snapshot(0.0)
        self.ended: deque[messages.RequestTimes] = deque(maxlen=20_000)
        self.dying: messages.Dying | None = None
        self.trace: asyncio.Future[messages.TraceDone] | None = None  # of the newest one
        self.ready = asyncio.Event()
        self.last_heard = time.monotonic()

    @property
    def startup(self) -> dict[str, float]:
        """Start-up seconds by phase; empty before it is ready."""
        found = dict(self.info.startup) if self.info is not None else {}
        if found:
            # process creation, and the message's transport
            found["process"] = max(0.0, self.start_seconds - sum(found.values()))
        return found

    # ---- to the engine

    def add(
        self, request: Request, every_step: bool, job: EngineJob, choice: int, tokens: int
    ) -> None:
        if not self.live:
            self.last_heard = time.monotonic()
        self.live[request.id] = OpenSequence(job, choice, tokens, request.client)
        self.load += tokens
        self.usage.change(request.client, 1, tokens)
        if job.counting is messages.Counting.READ:
            self.unread[request.id] = ReadTokens(request.arrival)
        shares = request.id in job.sharing
        self._send(messages.Add(request, every_step, job.span.recording, job.counting, shares))

    def cancel(self, ids: list[str]) -> None:
        """Cancel these on the engine too; ids that have ended are ignored."""
        there = [name for name in ids if self._remove(name) | self._forget(name)]
        if there:
            self._send(messages.Cancel(there))

    def answered(self, ids: list[str], lost: bool) -> None:
        """The answer that names where the pages of these are is sent now, or lost."""
        if not self.sender.closed:
            self._send(messages.Answered(ids, lost))

    def read(self, name: str, times: list[float], count: int) -> None:
        """Of new tokens of a request with Counting.READ, which left the engine at these times, the
        first `count` belong to its text."""
        read = self.unread.get(name)
        if read is not None:
            self.figures.add(read, times, count)

    def end_text(self, name: str, stopped: bool) -> ReadTokens | None:
        """The text of a request with Counting.READ has ended, by a stop string if `stopped`."""
        read = self.unread.pop(name, None)
        self._remove(name)
        if read is not None:
            self._send(messages.TextEnded(name, stopped, read.count, read.last))
        return read

    def reset_prefix(self) -> None:
        self._send(messages.ResetPrefix())

    def start_trace(self, prefix: str, steps: int) -> asyncio.Future[messages.TraceDone]:
        """Record the next steps; one trace at a time."""
        self.trace = asyncio.get_running_loop().create_future()
        self._send(messages.StartTrace(prefix, steps))
        return self.trace

    def stop_trace(self) -> None:
        self._send(messages.StopTrace())

    def shut_down(self) -> None:
        self._send(messages.Shutdown())

    def _send(self, message: messages.ToEngine) -> None:
        # after the process has ended nothing receives this; `close` then ends open requests
        with suppress(zmq.Again):
            self.sender.send(self.encoder.encode(message), zmq.NOBLOCK)

    def _remove(self, name: str) -> bool:
        entry = self.live.pop(name, None)
        if entry is not None:
            self.load -= entry.tokens
            self.usage.change(entry.client, -1, -entry.tokens)
        return entry is not None

    def _forget(self, name: str) -> bool:
        return self.unread.pop(name, None) is not None

    # ---- from the engine

    async def listen(self) -> None:
        """Deliver the engine's messages, until cancelled."""
        while True:
            self._handle(self.decoder.decode(await self.receiver.recv()))

    def _handle(self, message: messages.FromEngine) -> None:
        self.last_heard = time.monotonic()
        if isinstance(message, messages.StepOutputs):
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, messages.Snapshot):
            self.ended.extend(message.ended)
            self.figures.add_to(message)
            self.snapshot = message
        elif isinstance(message, messages.Refused):
            entry = self.live.get(message.id)
            self._forget(message.id)
            if self._remove(message.id) and entry is not None:
                if message.pages_lost:
                    entry.job.fail(pages_lost(message.message))
                elif message.experts_missing:
                    entry.job.fail(experts_missing(message.message))
                else:
                    entry.job.refuse(message.message, message.busy, message.structured)
        elif isinstance(message, messages.EngineInfo):
            self.info = message
            self.start_seconds = time.monotonic() - self.made
            self.ready.set()
        elif isinstance(message, messages.RequestPhase):
            entry = self.live.get(message.id)
            if entry is not None:
                note_phase(entry.job.span, entry.choice, message)
        elif isinstance(message, messages.TraceDone):
            self._traced(message)
        else:
            self.dying = message

    def _traced(self, found: messages.TraceDone) -> None:
        if self.trace is not None and not self.trace.done():
            self.trace.set_result(found)

    def _deliver(self, output: messages.Output) -> None:
        entry = self.live.get(output.id)
        if entry is None:
            return  # cancelled while the step ran
        if output.finish is not None:
            self._remove(output.id)
            if not output.tokens:
                self._forget(output.id)  # there is no text to read
        entry.job.feed(entry.choice, output)

    def close(self) -> None:
        """The engine has ended: every open request fails."""
        live = self.live
        self.live = {}
        self.unread = {}
        self.load = 0
        for entry in live.values():
            self.usage.change(entry.client, -1, -entry.tokens)
            entry.job.fail(engine_died())
        self._traced(messages.TraceDone([], ["the engine process ended"]))
        self.sender.close()
        self.receiver.close()
