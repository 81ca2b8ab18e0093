"""Events of the prefix cache: whoever follows them knows what it holds, and nothing of prompts with
a salt."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import msgspec
import zmq

from rorqual import LLM, SamplingParams
from rorqual.cache.events import CacheCleared, PageRemoved, PageStored
from rorqual.cache.host_tier import HostTier
from rorqual.cache.pages import PageAllocator
from rorqual.cache.prefix import PrefixCache, root_key
from rorqual.errors import ConfigError
from rorqual.serve.config import ServeConfig
from rorqual.serve.engines import kv_events
from rorqual.serve.engines.kv_events import (
    END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventPublisher,
    block_hash,
    to_vllm_events,
)
from rorqual.serve.kv_events_config import KVEventsConfig

DECODE = msgspec.msgpack.Decoder(KVEventBatch).decode


class Follower:
    """What a router knows from events: by hash the tokens from the prompt's first on."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[int, ...]] = {}

    def follow(self, events: Any) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.texts.clear()
            elif isinstance(event, BlockRemoved):
                for number in event.block_hashes:
                    del self.texts[number]
            else:
                before = () if event.parent_block_hash is None else self.known(event)
                size = event.block_size
                for place, number in enumerate(event.block_hashes):
                    before += tuple(event.token_ids[place * size : (place + 1) * size])
                    assert number not in self.texts
                    self.texts[number] = before

    def known(self, event: BlockStored) -> tuple[int, ...]:
        assert event.parent_block_hash is not None
        return self.texts[event.parent_block_hash]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_events_tell_what_the_cache_holds(lookahead: int) -> None:
    """Random prompts that share beginnings, in a cache that is too small."""
    draw = random.Random(lookahead)
    cache = PrefixCache(PageAllocator(24), 4, lookahead=lookahead)
    events = cache.record()
    follower = Follower()
    for turn in range(400):
        tokens = [7] * 8 + [draw.randrange(2) for _ in range(draw.randrange(1, 20))]
        salt = draw.choice(["", "", "tenant"])
        pages, key = cache.match(tokens, salt)
        for place in range(len(pages), (len(tokens) - lookahead) // 4):
            page = cache.take()
            pages.append(page)
            key = cache.insert(key, cache.covered(tokens, place), page)
        cache.release(pages)
        if turn % 50 == 49:
            cache.clear()
        follower.follow(to_vllm_events(events.drain()))
        # what is held and begins at the root without a salt, found by asking for every prompt
        held = {block_hash(key) for key in cache.pages if key in events.announced}
        assert set(follower.texts) == held
        for number, text in follower.texts.items():
            assert len(text) % 4 == 0
            assert text[:4] == (7,) * 4
            assert number in held
    assert any(key not in events.announced for key in cache.pages) or not cache.pages


@pytest.mark.parametrize("lookahead", [0, 1])
def test_events_tell_what_each_tier_holds(lookahead: int) -> None:
    """By medium, and a page that both hold is told of twice."""
    draw = random.Random(lookahead)
    cache = PrefixCache(PageAllocator(24), 4, lookahead=lookahead)
    tier = cache.host = HostTier(30, 3)
    events = cache.record()
    held: dict[str | None, set[int]] = {"GPU": set(), "CPU": set()}
    seen: set[str] = set()
    for turn in range(400):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(8, 30))]
        tier.begin()
        pages, key = cache.match(tokens, draw.choice(["", "", "tenant"]))
        for place in range(len(pages), (len(tokens) - lookahead) // 4):
            page = cache.take()
            pages.append(page)
            key = cache.insert(key, cache.covered(tokens, place), page)
        cache.release(pages)
        cache.copy_ahead(2)
        tier.end(launched=True)
        if turn % 50 == 49:
            cache.clear()
        for event in to_vllm_events(events.drain()):
            assert not isinstance(event, AllBlocksCleared)
            blocks = held[event.medium]
            for number in event.block_hashes:
                assert (number in blocks) == isinstance(event, BlockRemoved)
            if isinstance(event, BlockRemoved):
                blocks.difference_update(event.block_hashes)
                seen.add(f"{event.medium} removed")
                continue
            blocks.update(event.block_hashes)
            assert (event.block_size, event.lora_id, event.lora_name) == (4, None, None)
            if event.medium == "CPU":
                assert (event.token_ids, event.parent_block_hash) == ([], None)
        salted = (set(cache.pages) | set(tier.slots)) - events.announced - events.announced_host
        assert held["GPU"] == {block_hash(key) for key in cache.pages if key in events.announced}
        assert held["CPU"] == {
            block_hash(key) for key in tier.slots if key in events.announced_host
        }
        assert not salted & events.announced_host
    assert seen == {"GPU removed", "CPU removed"}


def test_salted_prompts_are_not_told_of() -> None:
    cache = PrefixCache(PageAllocator(9), 2)
    events = cache.record()
    key = cache.insert(root_key("tenant"), [1, 2], cache.take())
    cache.insert(key, [3, 4], cache.take())
    assert events.drain() == []
    first = cache.insert(root_key(), [1, 2], cache.take())
    assert events.drain() == [PageStored(first, None, (1, 2))]


def test_pages_of_a_chain_are_one_event() -> None:
    one, two, three = (bytes([i]) * 32 for i in range(3))
    found = to_vllm_events(
        [
            PageStored(one, None, (1, 2)),
            PageStored(two, one, (3, 4)),
            PageStored(three, None, (5, 6)),
            PageRemoved(two),
            PageRemoved(one),
            CacheCleared(),
        ]
    )
    assert found == [
        BlockStored([block_hash(one), block_hash(two)], None, [1, 2, 3, 4], 2, None, "GPU", None),
        BlockStored([block_hash(three)], None, [5, 6], 2, None, "GPU", None),
        BlockRemoved([block_hash(two), block_hash(one)], "GPU"),
        AllBlocksCleared(),
    ]
    # the bytes on the wire: an array with the name first
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(1.5, found, 3))) == [
        1.5,
        [
            ["BlockStored", [0, 0x0101010101010101], None, [1, 2, 3, 4], 2, None, "GPU", None],
            ["BlockStored", [0x0202020202020202], None, [5, 6], 2, None, "GPU", None],
            ["BlockRemoved", [0x0101010101010101, 0], "GPU"],
            ["AllBlocksCleared"],
        ],
        3,
    ]


def test_an_engine_that_begins_anew_says_so() -> None:
    llm = LLM(dtype="float32", max_model_len=128, max_num_seqs=2)
    (scheduler,) = llm.engine.scheduler.schedulers
    events = scheduler.prefix.record()
    prompt = [5] * 40
    llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
    (stored,) = to_vllm_events(events.drain())
    assert isinstance(stored, BlockStored)
    size = stored.block_size
    assert stored.token_ids == prompt[: len(prompt) // size * size]
    scheduler.restart()
    assert events.drain() == [CacheCleared()]
    llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
    assert to_vllm_events(events.drain()) == [stored]


# ---- the sockets


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def config() -> KVEventsConfig:
    first, second = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    return KVEventsConfig(first, second, "pages")


@pytest.fixture
def context() -> Iterator[Any]:
    made = zmq.Context()
    yield made
    made.destroy(0)


def subscribed(context: Any, config: KVEventsConfig) -> Any:
    sock = context.socket(zmq.SUB)
    sock.connect(config.endpoint)
    sock.setsockopt_string(zmq.SUBSCRIBE, config.topic)
    return sock


def replayed(context: Any, config: KVEventsConfig, first: int) -> list[tuple[int, Any]]:
    sock = context.socket(zmq.DEALER)
    sock.connect(config.replay)
    sock.send_multipart((b"", first.to_bytes(8, "big")))
    found = []
    while True:
        assert sock.poll(5000), "no answer"
        _, number, data = sock.recv_multipart()
        if number == END:
            assert data == b""
            return found
        found.append((int.from_bytes(number, "big"), DECODE(data)))


def test_batches_are_told_and_told_again(config: KVEventsConfig, context: Any) -> None:
    publisher = KVEventPublisher(config)
    try:
        sock = subscribed(context, config)
        deadline = 200
        while not sock.poll(50):  # until the subscription is there
            publisher.publish(1, [CacheCleared()])
            deadline -= 1
            assert deadline
        topic, number, data = sock.recv_multipart()
        assert topic == b"pages"
        batch = DECODE(data)
        assert (batch.events, batch.data_parallel_rank) == ([AllBlocksCleared()], 1)
        count = int.from_bytes(number, "big") + 1
        publisher.publish(0, [PageStored(b"k" * 32, None, (1, 2, 3))])
        while sock.poll(5000):
            _, number, data = sock.recv_multipart()
            if isinstance(DECODE(data).events[0], BlockStored):
                break
            count += 1
        assert int.from_bytes(number, "big") == count
        again = replayed(context, config, 0)
        assert [number for number, _ in again] == list(range(count + 1))
        assert again[-1][1] == DECODE(data)
        assert replayed(context, config, count) == again[-1:]
        assert replayed(context, config, count + 9) == []
        stranger = context.socket(zmq.DEALER)
        stranger.connect(config.replay)
        stranger.send_multipart((b"what", b"is", b"this", b"?"))
        assert replayed(context, config, count) == again[-1:]
    finally:
        publisher.close()


def test_batches_that_are_dropped_leave_gaps(
    config: KVEventsConfig,
    context: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that cannot be encoded, and those for which the queue has no room: those after them are
    sent, with their own numbers, and the engine's thread never waits."""
    going_on = threading.Event()
    begun = threading.Event()
    plain = kv_events.to_vllm_events

    def held(events: Any) -> Any:
        begun.set()
        assert going_on.wait(30)
        if any(isinstance(event, CacheCleared) for event in events):
            raise ValueError("no such event")
        return plain(events)

    monkeypatch.setattr(kv_events, "WAITING_BATCHES", 2)
    monkeypatch.setattr(kv_events, "to_vllm_events", held)
    publisher = KVEventPublisher(config)
    try:
        stored = [PageStored(b"k" * 32, None, (1, 2, 3))]
        publisher.publish(0, stored)
        assert begun.wait(30)
        publisher.publish(0, [CacheCleared()])
        publisher.publish(0, stored)  # the queue is full
        publisher.publish(0, stored)
        publisher.publish(0, stored)
        going_on.set()
        deadline = time.monotonic() + 30
        while publisher.queue.qsize() or publisher.dropped < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        publisher.publish(0, stored)
        while [number for number, _ in replayed(context, config, 0)] != [0, 2, 5]:
            assert time.monotonic() < deadline
        assert publisher.dropped == 3
        assert "1 batches were dropped; the last: 2 batches wait to be encoded" in caplog.text
        assert caplog.text.count("dropped") == 1
    finally:
        publisher.close()
    assert not publisher.thread.is_alive()


def test_an_address_that_is_taken(config: KVEventsConfig) -> None:
    publisher = KVEventPublisher(config)
    try:
        with pytest.raises(ConfigError, match="cannot listen on"):
            KVEventPublisher(config)
    finally:
        publisher.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_events": "tcp://*:5557"}, "is no address"),
        ({"kv_events": "tcp://0.0.0.0:5557"}, "is public"),
        ({"kv_events": "tcp://8.8.8.8:5557"}, "is public"),
        ({"kv_events": "127.0.0.1:5557"}, "is no address"),
        ({"kv_events": "tcp://127.0.0.1"}, "is no address"),
        ({"kv_events_replay": "tcp://127.0.0.1:1"}, "needs kv_events"),
        (
            {"kv_events": "tcp://127.0.0.1:1", "engine": {"enable_prefix_caching": False}},
            "needs enable_prefix_caching",
        ),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**options)


def test_replicas_have_the_next_ports() -> None:
    config = KVEventsConfig("tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557")
    assert config.of_engine(2) == KVEventsConfig("tcp://127.0.0.1:5559", "tcp://127.0.0.1:6559")


@pytest.mark.exhaustive
def test_a_server_tells(config: KVEventsConfig, context: Any, tmp_path: Path) -> None:
    from tests.serve.running import start_server

    assert config.replay is not None
    options = ("--kv-events", config.endpoint, "--kv-events-replay", config.replay)
    options += ("--kv-events-topic", config.topic, "--dtype", "float32", "--restart")
    with start_server(*options, "--max-model-len", "256", "--max-num-seqs", "4") as server:
        server.wait_until(server.healthy)
        prompt = [9, 8, 7, 6] * 20
        body = {"model": "rorqual-bundled", "prompt": prompt, "max_tokens": 2}
        assert server.request("POST", "/v1/completions", {**body, "cache_salt": "mine"})[0] == 200
        assert server.request("POST", "/v1/completions", body)[0] == 200
        follower = Follower()
        batches = replayed(context, config, 0)
        follower.follow(event for _, batch in batches for event in batch.events)
        assert isinstance(batches[0][1].events[0], AllBlocksCleared)
        longest = max(follower.texts.values(), key=len)
        assert len(longest) >= 64
        assert longest == tuple(prompt[: len(longest)])
        assert len(follower.texts) == len(longest) // batches[1][1].events[0].block_size
        assert server.request("POST", "/reset_prefix_cache")[0] == 200
        server.wait_until(
            lambda: any(
                isinstance(event, BlockRemoved)
                for _, batch in replayed(context, config, len(batches))
                for event in batch.events
            )
        )
        (pid,) = server.engine_pids()
        os.kill(pid, signal.SIGKILL)
        server.wait_until(lambda: server.engine_pids() != [pid])
        server.wait_until(server.healthy)
        assert [batch.events for _, batch in replayed(context, config, 0)] == [[AllBlocksCleared()]]
