"""The engine processes of one API process: starts, watches, restarts them, and distributes
requests. No torch.

An engine's end is detected through a pidfd, which becomes readable as soon as the process has
ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import subprocess
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from rorqual.cache.prefix import next_key, root_key
from rorqual.config.locked_folder import LockedFolder
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.errors import RorqualError
from rorqual.request import Request
from rorqual.serve.engines.begin import EarlyEngines
from rorqual.serve.engines.client import ClientUsage, EngineClient
from rorqual.serve.engines.job import EngineJob, NullEngine
from rorqual.serve.errors import not_ready
from rorqual.serve.kv_events_config import KVEventsConfig
from rorqual.serve.limits import ServerLimits

log = logging.getLogger("rorqual.serve")

# seconds before each restart in a row; then the server gives up
BACKOFF = (1.0, 2.0, 4.0, 8.0, 16.0)
CALM = 300.0  # seconds an engine must serve before its restart count is reset
WATCH_SECONDS = 0.25
AFFINITY_BLOCK = 64  # tokens of a prompt per block of prefix affinity
AFFINITY_BLOCKS = 32
AFFINITY_KEPT = 50_000
SLACK = 4096  # tokens by which the engine with a cached prefix may be busier than the least busy
# most output tokens that a request counts for: few reach their limit, and many set none
EXPECTED = 1024


def expected_tokens(request: Request) -> int:
    """The load that a request counts for while it is open."""
    most = request.params.max_tokens or EXPECTED
    return len(request.prompt) + min(most, EXPECTED)


class EngineFailure(RorqualError):
    """An engine could not start, or died and is not to be restarted."""


class EngineSlot:
    """One place in the pool: the process now in it and its client."""

    def __init__(self, index: int):
        self.index = index
        self.client: EngineClient | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self.deaths = 0

    @property
    def serving(self) -> EngineClient | None:
        return self.client if self.client is not None and self.client.ready.is_set() else None


class EnginePool:
    """`run` keeps every engine alive until `stop`; it raises EngineFailure when that is no
    longer possible."""

    def __init__(
        self,
        options: list[dict[str, Any]],
        limits: ServerLimits,
        restart: bool = False,
        stall: float = 300.0,
        structured: bool = True,
        tokenizer: Path | None = None,
        transfer: TransferConfig | None = None,
        events: KVEventsConfig | None = None,
        early: EarlyEngines | None = None,
    ):
        """tokenizer: the folder of the tokenizer for grammars; the model's if None. transfer,
        events: of the first engine; each further one has the next port. early: processes already
        started."""
        self.early = early or EarlyEngines()
        self.transfer = transfer
        self.events = events
        self.options = options
        self.limits = limits
        self.restart = restart
        self.stall = stall
        self.structured = structured
        self.tokenizer = tokenizer
        self.engines = [EngineSlot(index) for index in range(len(options))]
        self.sockets = LockedFolder()
        self.folder = self.sockets.path
        self.usage = ClientUsage()
        self.ids = itertools.count()
        self.lives = itertools.count()
        self.known: dict[bytes, int] = {}
        self.stopping = False
        self.restarts = 0

    @property
    def began(self) -> float:
        """Age of this process, in seconds, when it started its first engine."""
        return self.early.began or 0.0

    # ---- processes

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(self._supervise(engine))

    async def _supervise(self, engine: EngineSlot) -> None:
        while not self.stopping:
            since = time.monotonic()
            status = await self._run_process(engine)
            if self.stopping:
                return
            died = engine.client.dying if engine.client else None
            reason = died.message if died else f"exit status {status}"
            engine.deaths = 1 if time.monotonic() - since > CALM else engine.deaths + 1
            if not self.restart or (died and died.user) or engine.deaths > len(BACKOFF):
                raise EngineFailure(f"engine {engine.index} ended: {reason}")  # logged by run
            log.error("engine %d ended: %s", engine.index, reason)
            self.restarts += 1
            await asyncio.sleep(BACKOFF[engine.deaths - 1])

    async def _run_process(self, engine: EngineSlot) -> int:
        """Start the process, wait for its end, fail its requests. Returns its exit status."""
        client = engine.client = EngineClient(
            self.folder, f"engine-{engine.index}-{next(self.lives)}", engine.index, self.usage
        )
        listener = asyncio.create_task(client.listen())
        engine.child = self._spawn(engine, client)
        try:
            await self._wait_exit(engine.child, client)
            await asyncio.sleep(0.05)  # its last messages may still be arriving
        finally:
            listener.cancel()
            client.ready.clear()
            client.close()
            _kill(engine.child)
            # the next process has no cached prefix
            self.known = {key: index for key, index in self.known.items() if index != engine.index}
        return engine.child.returncode

    def _spawn(self, engine: EngineSlot, client: EngineClient) -> subprocess.Popen[bytes]:
        child = self.early.take()
        config = {
            "parent": os.getpid(),
            "inbox": client.inbox,
            "outbox": client.outbox,
            "engine": self.options[engine.index],
            "grammar": self.limits.grammar,
            "structured": self.structured,
            "tokenizer": None if self.tokenizer is None else str(self.tokenizer),
            "transfer": self._transfer(engine.index),
            "events": None if self.events is None else self.events.of_engine(engine.index),
        }
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.write(msgspec.json.encode(config) + b"\n")
            child.stdin.flush()
        return child

    def _transfer(self, index: int) -> TransferConfig | None:
        given = self.transfer
        if given is None or not given.port:
            return given
        options = self.options[index]
        ranks = prod(options.get(name, 1) for name in ("tp", "dp", "pp"))
        return replace(given, port=given.port + index * ranks)

    async def _wait_exit(self, child: subprocess.Popen[bytes], client: EngineClient) -> None:
        """Return when the process has ended. One that has open requests and sends nothing for
        `stall` seconds is killed here."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        pidfd = os.pidfd_open(child.pid)
        loop.add_reader(pidfd, gone.set)
        try:
            while not gone.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(gone.wait(), WATCH_SECONDS)
                if client.live and time.monotonic() - client.last_heard > self.stall:
                    log.error(
                        "engine %d has said nothing for %g s; its threads:",
                        client.index,
                        self.stall,
                    )
                    child.send_signal(signal.SIGUSR1)
                    await asyncio.sleep(0.5)
                    child.kill()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        child.wait()

    async def stop(self) -> None:
        """Ask every engine to exit, then kill those that do not."""
        self.stopping = True
        for engine in self.engines:
            if (
                engine.client is not None
                and engine.child is not None
                and engine.child.poll() is None
            ):
                engine.client.shut_down()
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and any(
            e.child is not None and e.child.poll() is None for e in self.engines
        ):
            await asyncio.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        for engine in self.engines:
            if engine.child is not None:
                _kill(engine.child)
        self.sockets.remove()

    # ---- state

    @property
    def clients(self) -> list[EngineClient]:
        return [engine.serving for engine in self.engines if engine.serving is not None]

    @property
    def complete(self) -> bool:
        """Whether every engine serves."""
        return len(self.clients) == len(self.engines)

    @property
    def fault(self) -> str:
        """Why requests are refused or would fail; empty where every engine serves, and reaches
        every expert that it needs."""
        if not self.complete:
            return "an engine is not ready"
        return next(filter(None, (one.snapshot.experts_missing for one in self.clients)), "")

    @property
    def healthy(self) -> bool:
        return not self.fault

    @property
    def live(self) -> int:
        return sum(len(client.live) for client in self.clients)

    @property
    def rows(self) -> int:
        """Most sequences that the engines that serve run at once."""
        return sum(map(self._rows, self.clients))

    @property
    def most_rows(self) -> int:
        """The same of all engines, also while some of them start again."""
        return max(map(self._rows, self.clients), default=0) * len(self.engines)

    def _rows(self, client: EngineClient) -> int:
        """An engine's max_num_seqs is that of each of its data-parallel ranks."""
        if client.info is None:
            return 0
        ranks: int = self.options[client.index].get("dp", 1)
        return client.info.max_num_seqs * ranks

    @property
    def room(self) -> int:
        """Most open sequences: those that can run and those that may wait."""
        return self.limits.waiting + self.rows

    # ---- requests

    def new_id(self) -> str:
        return str(next(self.ids))

    def submit(
        self,
        requests: list[Request],
        every_step: bool,
        job: EngineJob,
        over: Collection[int] = (),
    ) -> None:
        """Send a job's sequences, choice by choice; the job cancels them. over: choices that are
        already complete."""
        elsewhere = frozenset(request.id for request in requests if request.goes_on_elsewhere)
        if len(elsewhere) > 1:
            job.share(elsewhere)
        for choice, request in enumerate(requests):
            if choice in over:
                job.placed.append((NullEngine(), request.id))
                continue
            client = self._choose(request)
            job.placed.append((client, request.id))
            client.add(request, every_step, job, choice, expected_tokens(request))

    def _choose(self, request: Request) -> EngineClient:
        """The engine that last had the longest prefix of this prompt, unless its load in tokens is
        much higher than the lowest."""
        clients = self.clients
        if not clients:
            raise not_ready("no engine is ready")
        if len(self.engines) == 1:
            return clients[0]
        least = min(clients, key=lambda client: client.load)
        keys = _keys(request)
        known = next((self.known[key] for key in reversed(keys) if key in self.known), None)
        holder = next((client for client in clients if client.index == known), least)
        chosen = holder if holder.load <= least.load + SLACK else least
        for key in keys:
            self.known.pop(key, None)
            self.known[key] = chosen.index
        while len(self.known) > AFFINITY_KEPT:
            del self.known[next(iter(self.known))]
        return chosen


def _keys(request: Request) -> list[bytes]:
    """Chain keys of the prompt's first blocks, within the request's salt."""
    key = root_key(request.cache_salt)
    keys = []
    for start in range(
        0,
        min(len(request.prompt) - AFFINITY_BLOCK, AFFINITY_BLOCK * AFFINITY_BLOCKS) + 1,
        AFFINITY_BLOCK,
    ):
        key = next_key(key, request.prompt[start : start + AFFINITY_BLOCK])
        keys.append(key)
    return keys


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()
    if child.stdin is not None:
        child.stdin.close()
