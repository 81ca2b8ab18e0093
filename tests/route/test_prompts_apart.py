"""Real servers behind a router, one computes prompts, one answers and fails where their pages do
not come: several prompts of a request, and servers whose settings do not fit together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("fastapi")

from tests.disagg.test_pages_travel import figure
from tests.route import test_first_token_apart as pair
from tests.route.test_first_token_apart import PAGE, Apart

pytestmark = pytest.mark.exhaustive

TEXT = "/v1/completions"
LEASE = 20
ENDING = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
IDS = [[number, *(7 + (31 * i * i + 5 * i) % 2000 for i in range(60))] for number in range(3)]
PAGES = -(-60 // PAGE)
WORDS = ["The captain of the ship said", "Call me Ishmael. Some years ago, never mind how long"]


def started(stack: ExitStack, folder: Path, peers: str, *options: str) -> Apart:
    """peers, options: of the server that answers."""
    lease = ("--kv-lease-seconds", str(LEASE))
    return pair.started(stack, folder, *lease, decoding=("--kv-peers", peers, *options))


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("prompts")
        yield started(stack, folder, "127.0.0.1", "--kv-load-failure", "fail")


def choices(answer: tuple[int, Any]) -> list[Any]:
    status, found = answer
    assert status == 200, found
    return [(choice["index"], choice["token_ids"]) for choice in found["choices"]]


def prompt_tokens(apart: Apart) -> int:
    """That the server that answers has computed."""
    (engine,) = apart.decode.get("/stats")["engines"]
    return int(engine["prompt_tokens"])


@pytest.mark.parametrize("prompts", [IDS, WORDS, ["Call me"]], ids=["ids", "texts", "one"])
@pytest.mark.parametrize(
    "more",
    [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 3}],
    ids=["greedy", "several choices"],
)
def test_the_pages_of_every_prompt_are_fetched(
    apart: Apart, prompts: list[Any], more: dict[str, Any]
) -> None:
    body = {"prompt": prompts, **ENDING, **more, "cache_salt": f"{len(prompts)} {more}"}
    received = "kv_transfer_pages_received_total"
    failed = "kv_transfer_failures_total"
    before = [figure(apart.decode, name) for name in (received, failed)]
    computed = prompt_tokens(apart)
    found = choices(apart.router.request("POST", TEXT, body))
    assert found == choices(apart.prefill.request("POST", TEXT, {**body, "cache_salt": "alone"}))
    # all were read, so that none is kept to the end of its lease
    apart.prefill.wait_until(
        lambda: figure(apart.prefill, "kv_transfer_pages_held") == 0, LEASE / 2
    )
    if prompts is IDS:
        pages = before[0] + len(IDS) * PAGES
        apart.decode.wait_until(lambda: figure(apart.decode, received) == pages)
    assert figure(apart.decode, failed) == before[1]
    # the first choice of a prompt computes nothing of it, others what the last page has of it
    others = len(found) - len(prompts)
    assert prompt_tokens(apart) - computed <= PAGE * others


def test_the_pages_of_every_prompt_of_a_stream_are_fetched(apart: Apart) -> None:
    body = {"prompt": IDS, **ENDING, "temperature": 0, "cache_salt": "stream"}
    want = choices(apart.prefill.request("POST", TEXT, {**body, "cache_salt": "alone"}))
    computed = prompt_tokens(apart)
    status, raw = apart.router.request("POST", TEXT, {**body, "stream": True})
    assert status == 200
    assert raw.endswith("data: [DONE]\n\n")
    assert '"error"' not in raw
    found: dict[int, list[int]] = {}
    for block in raw.removesuffix("data: [DONE]\n\n").split("\n\n"):
        if block:
            (choice,) = json.loads(block.removeprefix("data: "))["choices"]
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert sorted(found.items()) == want
    assert prompt_tokens(apart) == computed


@pytest.mark.parametrize("failure", ["recompute", "fail"])
def test_a_server_that_may_not_ask_for_the_pages(tmp_path: Path, failure: str) -> None:
    """Its settings are wrong: clients, who sent no kv_transfer_params, do not read of them."""
    with ExitStack() as stack:
        apart = started(stack, tmp_path, "127.0.0.1:9", "--kv-load-failure", failure)
        for number, stream in enumerate((False, True, True)):
            body = {"prompt": IDS[number], **ENDING, "temperature": 0, "stream": stream}
            status, answer = apart.router.request("POST", TEXT, body)
            text = str(answer)
            assert "kv_peers" not in text or failure == "fail"
            assert "127.0.0.1" not in text
            if failure == "fail" and not stream:
                assert (status, answer["error"]["code"]) == (503, "kv_load_failure")
                continue
            # the client of a stream has its first token before the pages are asked for
            assert status == 200
            if stream:
                assert '"error"' not in text
                assert text.endswith("data: [DONE]\n\n")
            else:
                assert len(answer["choices"][0]["token_ids"]) == 12
        apart.decode.wait_until(lambda: figure(apart.decode, "kv_transfer_failures_total") == 3)
        assert apart.decode.text().count("not among kv_peers") == 1
