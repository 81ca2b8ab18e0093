"""Which server takes a request, and what is kept of streams."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from rorqual.errors import ConfigError
from rorqual.route.calls import RoutedCall, prompt_key
from rorqual.route.config import RouteConfig
from rorqual.route.events import BadStream, EventSplitter, StreamRecord
from rorqual.route.policies import BLOCK, NAMED, Prefix, beginnings


@dataclass(eq=False)
class One:
    url: str
    in_flight: int = 0


def servers(*loads: int) -> list[One]:
    return [One(f"http://{i}", load) for i, load in enumerate(loads)]


def test_round_robin_takes_turns() -> None:
    policy = NAMED["round_robin"]()
    some = servers(9, 0, 0)
    assert Counter(policy.choose(some, b"").url for _ in range(9)) == dict.fromkeys(
        (one.url for one in some), 3
    )


def test_least_loaded() -> None:
    assert NAMED["least_loaded"]().choose(servers(3, 1, 2), b"").in_flight == 1


def test_power_of_two_keeps_loads_even() -> None:
    random.seed(0)
    some = servers(*[0] * 10)
    policy = NAMED["power_of_two"]()
    for _ in range(1000):
        policy.choose(some, b"").in_flight += 1
    assert max(one.in_flight for one in some) <= 105


def test_prompts_go_where_their_beginning_went() -> None:
    random.seed(0)
    policy = Prefix()
    some = servers(0, 0, 0, 0)
    systems = [bytes([65 + i]) * 3 * BLOCK for i in range(8)]
    first = {system: policy.choose(some, system + b"first").url for system in systems}
    assert len(set(first.values())) > 1
    for system in systems:
        for turn in range(5):
            assert policy.choose(some, system + b"x" * BLOCK * turn).url == first[system]
    # a conversation that spilled over goes on where it went last
    conversation = systems[0] + b"y" * 4 * BLOCK
    other = next(one for one in some if one.url != first[systems[0]])
    for block in beginnings(conversation)[3:]:
        policy.seen[block] = other.url
    assert policy.choose(some, conversation + b"more").url == other.url


def test_a_prefix_does_not_overload_a_server() -> None:
    random.seed(0)
    policy = Prefix()
    some = servers(0, 0, 0, 0)
    for _ in range(400):
        policy.choose(some, b"the same for all").in_flight += 1
    assert max(one.in_flight for one in some) <= 1.25 * 100 + 3


def test_servers_that_come_and_go_move_few_prompts() -> None:
    keys = [str(i).encode() * 40 for i in range(400)]

    def placed(some: list[One]) -> dict[bytes, str]:
        policy = Prefix()
        return {key: policy.choose(some, key).url for key in keys}

    four = servers(0, 0, 0, 0)
    before = placed(four)
    after = placed([*four, One("http://new")])
    moved = [key for key in keys if before[key] != after[key]]
    assert {after[key] for key in moved} == {"http://new"}
    assert 0.1 < len(moved) / len(keys) < 0.3
    policy = Prefix()
    for key in keys:
        policy.choose(four, key)
    policy.remove_server(four[0])
    assert four[0].url not in policy.seen.values()


def test_the_memory_of_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rorqual.route.policies.REMEMBERED", 100)
    policy = Prefix()
    for i in range(500):
        policy.choose(servers(0, 0), str(i).encode() * BLOCK)
    assert len(policy.seen) == 100


def test_equal_beginnings_of_prompts_have_equal_beginnings() -> None:
    chat = [{"role": "system", "content": "s" * 3000}, {"role": "user", "content": "hi"}]
    longer = [*chat, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "more"}]
    one, two = (beginnings(prompt_key({"messages": it})) for it in (chat, longer))
    shared = sum(a == b for a, b in zip(one, two, strict=False))
    assert shared >= 3000 // BLOCK
    assert prompt_key({"prompt": ["abc", "d"]}) == prompt_key({"prompt": "abc"}) == b"abc"
    assert prompt_key({"prompt": [[1, 2], [3]]})
    assert len(prompt_key({"prompt": "é" * (1 << 18)})) == 1 << 17


# ---- events


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


STREAM = (
    b': rorqual 0 \ndata: {"id":"a","created":3,"choices":[{"index":0}]}\n\n'
    b': rorqual 0 5,6\ndata: {"id":"a","created":3,"choices":[{"index":0}]}\n\n'
    b": keep-alive\n\n"
    b': rorqual 1 7\ndata: {"id":"a","created":3,"choices":[{"index":1}]}\n\n'
    b': rorqual 0  end\ndata: {"id":"a","created":3,"choices":[{"index":0}]}\n\n'
    b'data: {"id":"a","created":3,"choices":[],"usage":{}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_events_pass_whole_and_without_their_lines(size: int) -> None:
    record = StreamRecord(100)
    splitter = EventSplitter(record, False)
    found = [splitter.feed(piece) for piece in pieces(STREAM, size)]
    out = b"".join(item.out for item in found)
    wanted = b"\n".join(x for x in STREAM.split(b"\n") if not x.startswith(b": rorqual"))
    assert out == wanted
    assert [item.done for item in found] == [False] * (len(found) - 1) + [True]
    assert all(item.out.endswith(b"\n\n") for item in found if item.out)
    assert record.can_go_on
    assert record.resume() == {
        "id": "a",
        "created": 3,
        "choices": [
            {"index": 0, "token_ids": [5, 6], "ended": True},
            {"index": 1, "token_ids": [7], "ended": False},
        ],
    }
    assert not record.finished(2, False)
    assert record.finished(1, True)


def test_an_event_without_a_line_ends_it() -> None:
    record = StreamRecord(100)
    splitter = EventSplitter(record, False)
    splitter.feed(STREAM[: STREAM.index(b": keep")])
    splitter.feed(b'data: {"id":"a","created":3,"choices":[{"index":0}]}\n\n')
    assert not record.can_go_on


@pytest.mark.parametrize("line", [b"x 1", b"0 a,b", b"", b"0 1 2", b"-1 5"])
def test_lines_that_say_nothing(line: bytes) -> None:
    splitter = EventSplitter(StreamRecord(100), False)
    with pytest.raises(BadStream):
        splitter.feed(b": rorqual " + line + b"\ndata: {}\n\n")


def test_an_event_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rorqual.route.events.MAX_EVENT_BYTES", 1000)
    splitter = EventSplitter(StreamRecord(100), False)
    for _ in range(10):
        splitter.feed(b"x" * 100)
    with pytest.raises(BadStream, match="more than 1000 bytes"):
        splitter.feed(b"x")


@pytest.mark.parametrize(
    ("code", "lost"), [("engine_dead", True), ("shutting_down", True), ("request_timeout", False)]
)
def test_which_errors_another_server_can_mend(code: str, lost: bool) -> None:
    record = StreamRecord(100)
    found = EventSplitter(record, False).feed(
        b': rorqual 0 1\ndata: {"id":"a","created":1,"choices":[{"index":0}]}\n\n'
        b'data: {"error":{"message":"m","code":"' + code.encode() + b'"}}\n\ndata: [DONE]\n\n'
    )
    assert (found.lost is not None) == lost
    assert found.done == (not lost)
    assert (b"error" in found.out) == (not lost)


# ---- what a user may write


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no server is named"),
        ({"prefill": ("http://a",)}, "need each other"),
        ({"replicas": ("a:1",)}, "no address of a server"),
        ({"replicas": ("http://a?b=c",)}, "no address of a server"),
        ({"replicas": ("http://a",), "port": 70000}, "port=70000"),
        ({"replicas": ("http://a",), "policy": "best"}, "policy='best'"),
        ({"replicas": ("http://a",), "stall_timeout": 0.0}, "^--stall-timeout=0"),
        ({"replicas": ("http://a",), "tries": 0}, "tries=0"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouteConfig(**options)


def test_secrets_are_read_before_anything_listens(tmp_path: Any) -> None:
    path = tmp_path / "secret"
    config = RouteConfig(replicas=("http://a",), admin_secret_file=str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        config.secret()
    path.write_text("short")
    with pytest.raises(ConfigError, match="fewer than 16"):
        config.secret()


def test_only_routes_that_generate_are_read() -> None:
    call = RoutedCall.of("POST", "/v1/embeddings", "/v1/embeddings", {}, b'{"stream":true}')
    assert not call.streams
    assert call.fields is None
