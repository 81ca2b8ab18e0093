"""One rank's side of page transfers: it serves its part of leased pages, fetches its part of
remotely computed prompts, and writes it to the pages that rank 0 names.

A service of the engine's ranks (engine/rank_service.py), on rank 0 too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.page_parts import held_part, num_heads
from rorqual.cache.written_layers import Mark, WrittenLayers
from rorqual.disagg.handle_reader import fetched_pages
from rorqual.disagg.handle_server import offered_pages
from rorqual.disagg.leases import LeaseTable
from rorqual.disagg.page_reader import PageFetch, PageReader
from rorqual.disagg.page_server import PageServer
from rorqual.disagg.page_sources import CacheShape
from rorqual.disagg.rank_messages import (
    FetchOver,
    FetchPages,
    FromRank,
    LeaseDone,
    LeaseGrown,
    LeaseOpened,
    LeaseRead,
    LeasesClosed,
    LeaseWritten,
    PagesFetched,
    PagesPlaced,
    ServerStarted,
    decode,
    encode,
)
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.disagg.transports.installed import HANDLES, TCP
from rorqual.disagg.transports.start import PageStaging, start_handles, start_staging
from rorqual.engine.execution.worker import Worker
from rorqual.engine.rank_service import ServiceContext
from rorqual.parallel.remote.link import Fingerprint

FORMAT = "5"  # of pages as bytes, of what their keys cover, and of messages about them
SERVICE = f"{__name__}:RankPages"


class RankPages:
    """config: TransferConfig as JSON, with this engine's own secret."""

    def __init__(self, context: ServiceContext, config: bytes):
        self.worker = worker = context.worker
        self.send = context.send
        self.mesh = worker.mesh
        settings = TransferConfig.from_json(config)
        secret = bytes.fromhex(settings.secret)
        self.memory = rank_memory(worker)
        self.leases = LeaseTable(secret)
        self.fetches: dict[int, RankFetch] = {}
        host = context.address or settings.host
        self.staging = start_rank_staging(settings, self.memory, host)
        label = self.staging.label if self.staging is not None else TCP
        mine = self.mine = {**fingerprint(worker), "transport": label}
        self.server: PageServer | None = None
        if settings.sends:
            rank = self.mesh.rank
            here = dataclasses.replace(
                settings,
                host=host,
                port=settings.port + rank if settings.port else 0,
            )
            staged = offered_pages(self.staging, self.leases, self.memory)
            self.server = PageServer(here, secret, self.leases, self.memory, mine, self, staged)
        reads = fetched_pages(self.staging)
        self.reader = PageReader(self.memory, mine, reads) if settings.fetches else None
        where = (self.server.host, self.server.port) if self.server else ("", 0)
        self._send(ServerStarted(*where))

    def _send(self, message: FromRank) -> None:
        self.send(encode(message))

    # ---- called by the page server, on its threads

    def reading(self, lease: bytes, pages: int, size: int) -> None:
        self._send(LeaseRead(lease, pages, size))

    def done(self, lease: bytes) -> None:
        self._send(LeaseDone(lease))

    # ---- messages from rank 0

    def handle(self, data: bytes) -> Callable[[], None] | None:
        message = decode(data)
        if isinstance(message, LeaseOpened | LeaseGrown):
            return self._lease(message)
        if isinstance(message, LeaseWritten):
            self._write(message)
        elif isinstance(message, LeasesClosed):
            self.leases.close(message.leases)
        elif isinstance(message, FetchPages):
            self._fetch(message)
        elif isinstance(message, PagesPlaced):
            self._place(message)
        else:
            assert isinstance(message, FetchOver)
            fetch = self.fetches.pop(message.number, None)
            if fetch is not None:
                fetch.over(self.memory)
        return None

    def _lease(self, message: LeaseOpened | LeaseGrown) -> Callable[[], None] | None:
        if message.dp_rank != self.mesh.dp_rank:
            self.leases.note(message.lease)
            return None
        pages = dict(zip(message.keys, message.pages, strict=True))
        if isinstance(message, LeaseGrown):
            return self.leases.add(message.lease, pages, message.complete)
        return self.leases.open(message.lease, pages, message.complete, message.by_layer)

    def _write(self, message: LeaseWritten) -> None:
        """Messages for several leases about the same step share its WrittenLayers."""
        if message.dp_rank != self.mesh.dp_rank:
            return
        runner = self.worker.runner
        if runner.watch is None:
            layers = len(self.worker.cache_layers)
            runner.watch = WrittenLayers(layers, self.worker.platform.mark, self.leases.changed)
        pages = dict(zip(message.keys, message.pages, strict=True))
        self.leases.write(message.lease, pages, runner.watch)

    def _fetch(self, message: FetchPages) -> None:
        if message.dp_rank != self.mesh.dp_rank:
            return
        assert self.reader is not None, "rank 0 has the same role"
        place = self.mesh.pp_rank * self.mesh.sizes.tp + self.mesh.tp_rank
        mark = None
        if message.pages:
            with self.worker.platform.stream():
                mark = self.worker.platform.mark()  # steps in flight may read the old contents
        fetch = RankFetch(self.reader, message, place, self._send, mark)
        self.fetches[message.number] = fetch
        fetch.start()

    def _place(self, message: PagesPlaced) -> None:
        fetch = self.fetches.get(message.number)
        if fetch is not None:
            fetch.write(self.memory, message.pages, message.skipped)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        if self.reader is not None:
            self.reader.close()
        for fetch in self.fetches.values():
            fetch.cancel()
        if self.staging is not None:
            self.staging.close()


class RankFetch:
    """Fetches this rank's part of a prompt from all ranks that hold some of it, concurrently: its
    progress is that of the slowest."""

    def __init__(
        self,
        reader: PageReader,
        message: FetchPages,
        place: int,
        send: Callable[[FromRank], None],
        before: Mark | None,
    ):
        self.reader = reader
        self.number = message.number
        self.send = send
        self.lock = threading.Lock()
        self.parts = [
            PageFetch(
                *(address, message.secret, message.lease, message.keys, part, message.page_size),
                message.pages or None,
                before,
            )
            for address, part in message.sources[place]
        ]
        self.left = len(self.parts)

    def start(self) -> None:
        for part in self.parts:
            self.reader.start(part, partial(self._done, part))

    def _done(self, part: PageFetch) -> None:
        """On a thread of the reader."""
        if part.error:
            self.cancel()  # the prompt ends at the pages this part has
        with self.lock:
            self.left -= 1
            last = not self.left
        if last:
            found = min(part.found for part in self.parts)
            error = next((part.error for part in self.parts if part.error), "")
            size = sum(part.received for part in self.parts)
            seconds = max(part.seconds for part in self.parts)
            self.send(PagesFetched(self.number, found, error, size, seconds))

    def write(self, memory: PageMemory, pages: list[int], skipped: int) -> None:
        for part in self.parts:
            assert part.rows is not None, "rank 0 places what every rank has found"
            memory.write(pages, part.rows, part.part, part.page_size, skipped)

    def cancel(self) -> None:
        for part in self.parts:
            part.cancelled.set()

    def over(self, memory: PageMemory) -> None:
        """Nothing more is placed; the device may still read what was."""
        self.cancel()
        with memory.platform.stream():
            self.reader.end_placing(self.parts)
            mark = memory.platform.mark()
        for part in self.parts:
            part.release(mark)


def start_rank_staging(config: TransferConfig, memory: PageMemory, host: str) -> PageStaging | None:
    """Raises ConfigError."""
    if config.transport == TCP:
        return None
    sides = (config.sends, config.fetches)
    if config.transport == HANDLES:
        return start_handles(config.staging_mb, memory.size, memory.platform, *sides)
    return start_staging(config.transport, config.staging_mb, memory.size, host, *sides)


def cache_shape(worker: Worker) -> CacheShape:
    modules = worker.mtp_layers
    return CacheShape(worker.model_config.num_layers, modules, num_heads(worker.whole_spec))


def rank_memory(worker: Worker) -> PageMemory:
    mesh = worker.mesh
    heads = num_heads(worker.whole_spec)
    held = held_part(worker.cache_layers, heads, mesh.sizes.tp, mesh.tp_rank)
    return PageMemory(worker.runner.pool, worker.platform, held)


def fingerprint(worker: Worker) -> Fingerprint:
    """Everything that must be equal for two engines to exchange pages, whatever their ranks and
    page sizes."""
    config = worker.config
    spec = worker.whole_spec
    planes = [[dataclasses.asdict(plane) for plane in layer] for layer in spec.layers]
    quant = worker.model_config.quant
    return {
        "format": FORMAT,
        "model": _digest(dataclasses.asdict(worker.model_config)),
        "weights": f"random {config.seed}" if config.weights == "random" else "of a checkpoint",
        "dtype": worker.dtype,
        "quantization": quant.describe() if quant is not None else "none",
        "cache": f"{spec.layers[0][0].dtype} {_digest(planes)}",
        "modules": str(worker.mtp_layers),
    }


def _digest(found: Any) -> str:
    data = json.dumps(found, sort_keys=True, default=str).encode()
    return hashlib.sha256(data).hexdigest()[:16]
