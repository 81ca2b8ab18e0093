"""A request of any size is answered while the API process goes on with the others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.http.test_api_errors import CHAT, COMPLETE, TURN, check_shape
from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive(but_first=True)

MOST = 4 << 20  # the default limit of a body
STALL = 1.0  # seconds /live may take on a busy machine; each of these took 2 to 27


@pytest.fixture(scope="module")
def roomy() -> Iterator[Running]:
    options = ("--dtype", "float32", "--max-num-seqs", "2", "--no-structured-output")
    with start_server(*options, "--max-model-len", "512") as running:
        yield running


def slowest_live(server: Running, path: str, body: dict[str, Any]) -> tuple[float, int, Any]:
    """(seconds of the slowest /live while the request was under way, its status, its answer)"""
    data = json.dumps(body).encode()
    assert len(data) <= MOST
    done: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: done.append(server.request("POST", path, data)))
    asking.start()
    slowest = 0.0
    while asking.is_alive():
        start = time.monotonic()
        server.get("/live")
        slowest = max(slowest, time.monotonic() - start)
        time.sleep(0.01)
    return slowest, *done[0]


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "text": (COMPLETE, {"prompt": "word " * 830_000}, "maximum context length is 512 tokens"),
    "texts": (
        COMPLETE,
        {"prompt": ["word " * 3_900] * 200},
        "maximum context length is 512 tokens",
    ),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "word " * 830_000}]}, "512"),
    "ids": (COMPLETE, {"prompt": [7] * 1_300_000}, "maximum context length is 512 tokens"),
    "one wrong id": (COMPLETE, {"prompt": [7] * 1_300_000 + [-1]}, "prompt"),
    "tools": (CHAT, {"messages": TURN, "tools": [0] * 1_300_000}, "tools"),
    "messages": (CHAT, {"messages": [{}] * 900_000}, "messages"),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{}] * 900_000}]}, "content"),
    "fields": (COMPLETE, {"prompt": "a", **{f"x{i}": 0 for i in range(300_000)}}, "not known"),
    "biases": (COMPLETE, {"prompt": "a", "logit_bias": dict.fromkeys(range(300000), "")}, "bias"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_nobody_waits_for_a_long_request(roomy: Running, case: str) -> None:
    path, body, words = CASES[case]
    slowest, status, answer = slowest_live(roomy, path, body)
    assert status == 400
    assert words in check_shape(answer)["message"]
    assert len(answer["error"]["message"]) < 1000
    assert slowest < STALL


def test_what_just_fits_is_not_refused_early(roomy: Running) -> None:
    """Tokens may be long: 32 spaces are one in the bundled vocabulary."""
    text = " " * (32 * 400)
    status, answer = roomy.request("POST", COMPLETE, {"prompt": text, "max_tokens": 2})
    assert status == 200
    assert answer["usage"]["prompt_tokens"] < 512
