"""A minute of the soak (make soak has an hour), and that it finds what it looks for."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any

import pytest

if importlib.util.find_spec("fastapi") is None:
    pytest.skip("needs the extra `serve`", allow_module_level=True)

from tests.serve import soak
from tests.serve.footprint import MIB, Footprint, open_files, resident
from tests.serve.running import start_server
from tests.serve.soak import Watch
from tests.serve.soak_requests import COMPLETE, Ask, fits, matches, read, wrong


@pytest.mark.longest
@pytest.mark.exhaustive
def test_half_a_minute() -> None:
    with start_server(*soak.OPTIONS) as server:
        assert soak.soak(server, 0.5) == []


def watched(memory: list[float], files: list[int]) -> list[str]:
    watch = Watch()
    for turn, (size, count) in enumerate(zip(memory, files, strict=True)):
        rest = Footprint({"api": count}, {"api": int(size * MIB)}, 3)
        watch.note(60.0 * turn, rest)
    return watch.leaks()


def test_a_leak_is_found() -> None:
    steady = [100.0, 160, 180, 190, 192, 189, 193, 190, 194, 191, 190, 195]
    files = [20] * 12
    assert watched(steady, files) == [], "what grows at first and then stays is none"
    grows = [size + 6 * turn for turn, size in enumerate(steady)]
    assert "api gains" in watched(grows, files)[0]
    assert "MiB" in watched(grows, files)[0]
    assert watched(steady, [20 + turn for turn in range(12)])[0].endswith(
        "open files over the run's second half"
    )


def test_what_a_server_holds_more_is_found() -> None:
    before = Footprint({"api": 20}, {"api": 100 * MIB}, 3)
    limits = {"api": 5 * MIB}
    assert Footprint({"api": 22}, {"api": 105 * MIB}, 3).grown(before, 2, limits) == []
    found = Footprint({"api": 23}, {"api": 106 * MIB}, 3).grown(before, 2, limits)
    assert found == ["api: 20 open files, then 23", "api: 100 MiB, then 106"]
    here = os.getpid()
    count = open_files(here)
    with open(os.devnull):
        assert open_files(here) == count + 1
    assert resident(here) > MIB


def http(body: Any, stream: bool = False) -> bytes:
    events = [f"data: {json.dumps(it)}\n\n".encode() for it in body] if stream else []
    data = b"".join(events) + b"data: [DONE]\n\n" if stream else json.dumps(body).encode()
    if not stream:
        return b"HTTP/1.1 200 OK\r\n\r\n" + data
    chunks = [data[i : i + 7] for i in range(0, len(data), 7)] + [b""]
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded


def choice(text: str, finish: str | None = "stop", index: int = 0) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish}


def test_wrong_answers_are_found() -> None:
    asked = Ask("regex", COMPLETE, {}, matches("[a-f]+"))
    assert wrong(asked, http({"choices": [choice("fade")]})) is None
    assert wrong(asked, http({"choices": [choice("whale")]}))
    assert wrong(asked, http({"choices": [choice("whale", "length")]})) is None
    assert wrong(asked, http({"choices": [choice("fade", None)]})), "it never ended"
    assert wrong(asked, http({"choices": [choice("fade"), choice("a", index=1)]}))
    assert wrong(asked, http({"error": {}}))
    streamed = Ask("regex", COMPLETE, {"stream": True}, asked.right)
    parts = [{"choices": [choice("fa", None)]}, {"choices": [choice("de")]}]
    assert wrong(streamed, http(parts, True)) is None
    assert wrong(streamed, http(parts[:1], True))
    cut = http(parts, True).replace(b"[", b"(")
    assert wrong(streamed, cut), "no [DONE]"


def test_calls_are_put_together() -> None:
    parts = [
        {"index": 0, "delta": {"tool_calls": [{"function": {"arguments": part}}]}}
        for part in ('{"name": "a", ', '"big": true}')
    ]
    parts.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    (found,) = read(http([{"choices": [part]} for part in parts], True), True)
    assert found.finish == "tool_calls"
    assert fits(found.arguments)
    assert not fits('{"name": "a"}')
    assert not fits('{"name": "a", "big": 1}')
    assert not fits("{")
