"""Publishes prefix cache events to external routers over ZeroMQ, in vLLM's format.

A message has three parts: topic, a number that counts up from 0 (8 bytes, big endian), and a batch
in MessagePack. A subscriber that missed some requests those from a number on at the replay address,
and receives one message each, then an empty one with the number -1. A block's hash is the first 8
bytes of its key as an unsigned number. A batch that was dropped leaves a gap in the numbers, also
at the replay address: a subscriber that finds one no longer knows what is cached.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import Full, Queue

import msgspec
import zmq

from rorqual.cache.events import (
    CacheEvent,
    HostPageRemoved,
    HostPageStored,
    PageRemoved,
    PageStored,
)
from rorqual.errors import ConfigError
from rorqual.serve.kv_events_config import KVEventsConfig

log = logging.getLogger(__name__)
KEPT_BATCHES = 10_000  # kept for replay
WAITING_BATCHES = 10_000  # batches that this process has not encoded yet; more are dropped
UNSENT = 10_000  # batches queued for a slow subscriber, which then misses some
MEDIUM = "GPU"
HOST_MEDIUM = "CPU"
END = (-1).to_bytes(8, "big", signed=True)
POLL_MS = 100
SHORTEST_REQUEST = 8  # bytes


# The names are vLLM's: they are the tags on the wire.
class BlockStored(msgspec.Struct, array_like=True, tag=True, omit_defaults=True):
    """token_ids: of all blocks, concatenated."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def block_hash(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def to_vllm_events(
    events: Sequence[CacheEvent],
) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Events in vLLM's format: consecutive pages of one chain are one event. Events of host memory
    have another medium and no tokens, which were published when the device stored the page."""
    found: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    last: bytes | None = None
    for event in events:
        if isinstance(event, PageStored):
            chain = found[-1] if found else None
            if isinstance(chain, BlockStored) and last is not None and event.previous == last:
                chain.block_hashes.append(block_hash(event.key))
                chain.token_ids.extend(event.tokens)
            else:
                parent = None if event.previous is None else block_hash(event.previous)
                size = len(event.tokens)
                hashes = [block_hash(event.key)]
                found.append(
                    BlockStored(hashes, parent, list(event.tokens), size, None, MEDIUM, None)
                )
            last = event.key
            continue
        last = None
        if isinstance(event, HostPageStored):
            _append(
                found, BlockStored([], None, [], event.page_size, None, HOST_MEDIUM, None), event
            )
        elif isinstance(event, PageRemoved | HostPageRemoved):
            medium = MEDIUM if isinstance(event, PageRemoved) else HOST_MEDIUM
            _append(found, BlockRemoved([], medium), event)
        else:
            found.append(AllBlocksCleared())
    return found


def _append(
    found: list[BlockStored | BlockRemoved | AllBlocksCleared],
    fresh: BlockStored | BlockRemoved,
    event: PageRemoved | HostPageStored | HostPageRemoved,
) -> None:
    """Append to the last event, if that equals `fresh` except for its blocks."""
    last = found[-1] if found else None
    if (
        isinstance(last, BlockStored | BlockRemoved)
        and type(last) is type(fresh)
        and last.medium == fresh.medium
    ):
        fresh = last
    else:
        found.append(fresh)
    fresh.block_hashes.append(block_hash(event.key))


class KVEventPublisher:
    """Encodes and sends on its own thread; the engine's thread only queues. Raises ConfigError
    where an address is in use."""

    def __init__(self, config: KVEventsConfig):
        self.config = config
        self.queue: Queue[tuple[int, int, list[CacheEvent]] | None] = Queue(WAITING_BATCHES)
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self.number = 0  # of the next batch
        self.dropped = 0
        self.counting = threading.Lock()
        self.context = zmq.Context(1)
        self.sender = self.context.socket(zmq.PUB)
        self.sender.set_hwm(UNSENT)
        self.replayer = None if config.replay is None else self.context.socket(zmq.ROUTER)
        self._bind(self.sender, config.endpoint)
        if self.replayer is not None and config.replay is not None:
            self._bind(self.replayer, config.replay)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self.thread.start()

    def _bind(self, sock: zmq.Socket[bytes], address: str) -> None:
        sock.linger = 0
        try:
            sock.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"kv_events: cannot listen on {address}: {error.strerror}") from None

    def publish(self, rank: int, events: list[CacheEvent]) -> None:
        """Never waits: drops what does not fit into the queue."""
        number = self.number
        self.number += 1
        try:
            self.queue.put_nowait((number, rank, events))
        except Full:
            self._drop(f"{WAITING_BATCHES} batches wait to be encoded")

    def close(self) -> None:
        """What is queued is still sent, if that takes less than 5 s."""
        try:
            self.queue.put(None, timeout=1)
        except Full:
            self.ended.set()
        self.thread.join(5)
        self.context.destroy(0)

    def _run(self) -> None:
        replaying = None
        if self.replayer is not None:
            replaying = threading.Thread(target=self._replay, name="kv-replay", daemon=True)
            replaying.start()
        while (item := self.queue.get()) is not None and not self.ended.is_set():
            try:
                self._send(*item)
            except Exception as error:  # the batches after it are still of use
                self._drop(f"{type(error).__name__}: {error}")
        self.ended.set()
        if replaying is not None:
            replaying.join(2)

    def _send(self, number: int, rank: int, events: list[CacheEvent]) -> None:
        data = msgspec.msgpack.encode(KVEventBatch(time.time(), to_vllm_events(events), rank))
        self.kept.append((number, data))
        topic = self.config.topic.encode()
        self.sender.send_multipart((topic, number.to_bytes(8, "big"), data))

    def _drop(self, why: str) -> None:
        """Count a batch that was dropped; log the first, the tenth, the hundredth and so on."""
        with self.counting:
            self.dropped += 1
            count = self.dropped
        if str(count).strip("0") == "1":
            log.warning("kv_events: %d batches were dropped; the last: %s", count, why)

    def _replay(self) -> None:
        assert self.replayer is not None
        sock = self.replayer
        while not self.ended.is_set():
            try:
                if sock.poll(POLL_MS):
                    self._answer(sock, sock.recv_multipart())
            except zmq.ContextTerminated:
                return
            except zmq.ZMQError as error:  # of one client; others may still ask
                log.warning("kv_events: a replay was not sent: %s", error.strerror)

    def _answer(self, sock: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != SHORTEST_REQUEST:
            return  # not a valid request
        client, _, wanted = frames
        first = int.from_bytes(wanted, "big")
        for number, data in list(self.kept):
            if number >= first:
                sock.send_multipart((client, b"", number.to_bytes(8, "big"), data))
        sock.send_multipart((client, b"", END, b""))
