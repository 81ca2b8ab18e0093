"""Publishes prefix cache events to external routers over ZeroMQ, in vLLM's format.

A message has three parts: topic, a number that counts up from 0 (8 bytes, big endian), and a batch
in MessagePack. A subscriber that missed some requests those from a number on at the replay address,
and receives one message each, then an empty one with the number -1. A block's hash is the first 8
bytes of its key as an unsigned number.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

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

KEPT_BATCHES = 10_000  # kept for replay
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
        self.queue: SimpleQueue[tuple[int, list[CacheEvent]] | None] = SimpleQueue()
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self.number = 0
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
        self.queue.put((rank, events))

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join(5)
        self.context.destroy(0)

    def _run(self) -> None:
        replaying = None
        if self.replayer is not None:
            replaying = threading.Thread(target=self._replay, name="kv-replay", daemon=True)
            replaying.start()
        while (item := self.queue.get()) is not None:
            rank, events = item
            data = msgspec.msgpack.encode(KVEventBatch(time.time(), to_vllm_events(events), rank))
            number = self.number
            self.kept.append((number, data))
            self.number += 1
            topic = self.config.topic.encode()
            self.sender.send_multipart((topic, number.to_bytes(8, "big"), data))
        self.ended.set()
        if replaying is not None:
            replaying.join(2)

    def _replay(self) -> None:
        assert self.replayer is not None
        sock = self.replayer
        while not self.ended.is_set():
            if not sock.poll(POLL_MS):
                continue
            frames = sock.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != SHORTEST_REQUEST:
                continue  # not a valid request
            client, _, wanted = frames
            first = int.from_bytes(wanted, "big")
            for number, data in list(self.kept):
                if number >= first:
                    sock.send_multipart((client, b"", number.to_bytes(8, "big"), data))
            sock.send_multipart((client, b"", END, b""))
