"""A prompt computed by one server and answered by another: the tokens of one server, whatever
happens in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("fastapi")

from tests.child_process import stand_still
from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive

PAGE = 8
LEASE = 2.0
PROMPT = [7 + (31 * i * i + 5 * i) % 2000 for i in range(100)]
PAGES = 13  # of 100 tokens, the last of them not full
CACHED = 99  # the last token is computed where the answer is, as if it had been drawn
OPTIONS = (
    "--dtype", "float32", "--page-size", str(PAGE), "--max-model-len", "256", "--max-num-seqs", "4",
    "--num-pages", "160", "--threads", "1", "--kv-lease-seconds", str(LEASE),
)  # fmt: skip


class Pair(NamedTuple):
    prefill: Running
    decode: Running


def server(role: str, folder: Path, *more: str) -> Running:
    secret = folder / "secret"
    secret.write_text("a secret that is long enough\n")
    return start_server(*OPTIONS, "--role", role, "--kv-secret-file", str(secret), *more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("apart")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    more = ("--num-speculative-tokens", "2")
    with server("both", folder, *more) as prefill, server("decode", folder, *more) as decode:
        yield Pair(prefill, decode)


def ask(where: Running, prompt: list[int], transfer: Any = None, **more: Any) -> dict[str, Any]:
    body = {
        "model": "rorqual-bundled",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": transfer,
        **more,
    }
    status, answer = where.request("POST", "/v1/completions", body)
    assert status == 200, answer
    return answer


def tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def prompt(number: int) -> list[int]:
    return [number, *PROMPT[1:]]


def prefilled(where: Running, ids: list[int], **more: Any) -> dict[str, Any]:
    found = ask(where, ids, {"do_remote_decode": True}, max_tokens=1, **more)
    assert len(tokens(found)) == 1
    return found["kv_transfer_params"]


def shown(where: Running, name: str) -> float | None:
    """A figure in /metrics; None before an engine that was just started has told it."""
    text = where.request("GET", "/metrics")[1]
    lines = text.splitlines()
    found = [one for one in lines if one.startswith(f"rorqual:{name}") and "{" in one]
    assert len(found) <= 1
    return float(found[0].rsplit(" ", 1)[1]) if found else None


def figure(where: Running, name: str) -> float:
    found = shown(where, name)
    assert found is not None, name
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.9, "seed": 5, "top_k": 20},
        {"presence_penalty": 0.8, "logprobs": 2},
        {"stop_token_ids": list(range(0, 4000, 64)), "ignore_eos": False},
    ],
    ids=["greedy", "seeded", "penalties", "stops"],
)
def test_tokens_are_those_of_one_server(pair: Pair, sampling: dict[str, Any]) -> None:
    ids = prompt(10 + len(str(sampling)) % 80)
    given = prefilled(pair.prefill, ids, **sampling)
    assert given["do_remote_prefill"]
    assert given["remote_num_pages"] == PAGES
    before = figure(pair.decode, "kv_transfer_pages_received_total")
    found = ask(pair.decode, ids, given, **sampling)
    want = ask(pair.prefill, ids, cache_salt="alone", **sampling)
    assert tokens(found) == tokens(want)
    assert cached(found) == CACHED
    assert cached(want) == 0
    pair.decode.wait_until(
        lambda: figure(pair.decode, "kv_transfer_pages_received_total") == before + PAGES
    )
    # who has read them says so, and they need not be kept for the whole lease
    pair.prefill.wait_until(lambda: figure(pair.prefill, "kv_transfer_pages_held") == 0, LEASE)


def test_pages_that_are_here_do_not_travel_again(pair: Pair) -> None:
    ids = prompt(100)
    ask(pair.decode, ids[:50], max_tokens=1)
    given = prefilled(pair.prefill, ids)
    before = figure(pair.decode, "kv_transfer_pages_received_total")
    assert cached(ask(pair.decode, ids, given)) == CACHED
    pair.decode.wait_until(
        lambda: figure(pair.decode, "kv_transfer_pages_received_total") == before + PAGES - 6
    )


def test_bytes_are_counted_on_both_sides(pair: Pair) -> None:
    ids = prompt(120)
    received, sent = "kv_transfer_bytes_received_total", "kv_transfer_bytes_sent_total"
    given = prefilled(pair.prefill, ids)
    before = figure(pair.decode, received), figure(pair.prefill, sent)
    ask(pair.decode, ids, given)
    pair.decode.wait_until(lambda: figure(pair.decode, received) > before[0])
    pair.prefill.wait_until(lambda: figure(pair.prefill, sent) > before[1])
    came = figure(pair.decode, received) - before[0]
    assert came == figure(pair.prefill, sent) - before[1]
    assert came % PAGES == 0
    assert 'transport="tcp"' in pair.decode.request("GET", "/metrics")[1]
    assert figure(pair.decode, "kv_transfer_seconds_total") > 0


def test_choices_of_one_call_share_their_pages(pair: Pair) -> None:
    ids = prompt(150)
    given = prefilled(pair.prefill, ids)
    before = figure(pair.decode, "kv_transfer_pages_received_total")
    options = {"n": 3, "temperature": 0.9, "seed": 4}
    found = ask(pair.decode, ids, given, **options)
    want = ask(pair.prefill, ids, cache_salt="alone", **options)
    assert [c["token_ids"] for c in found["choices"]] == [c["token_ids"] for c in want["choices"]]
    pair.decode.wait_until(
        lambda: figure(pair.decode, "kv_transfer_pages_received_total") == before + PAGES
    )


def test_a_lease_that_ran_out_is_a_prompt_to_compute(pair: Pair) -> None:
    ids = prompt(200)
    before = figure(pair.prefill, "kv_transfer_leases_expired_total")
    given = prefilled(pair.prefill, ids)
    pair.prefill.wait_until(
        lambda: figure(pair.prefill, "kv_transfer_leases_expired_total") > before
    )
    assert figure(pair.prefill, "kv_transfer_pages_held") == 0
    found = ask(pair.decode, ids, given)
    assert cached(found) == 0
    assert tokens(found) == tokens(ask(pair.prefill, ids, cache_salt="alone"))
    assert "the pages are kept no more" in pair.decode.text()


def test_a_keeper_that_is_stopped_and_continued(pair: Pair) -> None:
    """It sleeps for longer than the lease, and than a reader waits."""
    ids = prompt(300)
    given = prefilled(pair.prefill, ids)
    (engine,) = pair.prefill.engine_pids()
    stand_still(engine)
    try:
        found = ask(pair.decode, ids, given)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert cached(found) == 0
    want = ask(pair.prefill, ids, cache_salt="alone")
    assert tokens(found) == tokens(want)
    # and now all of its pages are others'
    for number in range(301, 306):
        ask(pair.prefill, prompt(number), max_tokens=100)
    assert cached(ask(pair.decode, [1, *ids], given)) == 0
    assert tokens(ask(pair.decode, ids, given, cache_salt="late")) == tokens(want)


def test_what_a_request_may_not_ask_for(pair: Pair) -> None:
    ids = prompt(400)
    given = prefilled(pair.prefill, ids)

    def refused(where: Running, transfer: dict[str, Any]) -> str:
        body = {"model": "rorqual-bundled", "prompt": ids, "kv_transfer_params": transfer}
        status, answer = where.request("POST", "/v1/completions", body)
        assert status == 400, answer
        return str(answer["error"]["message"])

    assert "role='decode'" in refused(pair.decode, {"do_remote_decode": True})
    assert "remote_request_id" in refused(pair.decode, {**given, "remote_request_id": "x"})
    assert "name no address" in refused(pair.decode, {**given, "remote_port": "80"})
    assert "remote_engine_id" in refused(pair.decode, {**given, "remote_engine_id": None})
    assert "whole numbers" in refused(pair.decode, {**given, "tp_size": "2"})
    assert "out of range" in refused(pair.decode, {**given, "pp_size": 0})
    assert "names 1 addresses" in refused(pair.decode, {**given, "tp_size": 2})
    assert "no [host, port]" in refused(pair.decode, {**given, "remote_ranks": [["a", "b"]]})
    unknown = {**given, "remote_request_id": "ab" * 32}
    assert cached(ask(pair.decode, ids, unknown)) == 0


def test_pages_of_a_server_that_may_not_be_asked(pair: Pair) -> None:
    """The request is right, the settings of the server are not: the prompt is computed there."""
    ids = prompt(450)
    given = prefilled(pair.prefill, ids)
    want = tokens(ask(pair.prefill, ids, cache_salt="alone"))
    before = figure(pair.decode, "kv_transfer_failures_total")
    other = {**given, "remote_host": "192.168.3.4", "remote_port": 8}
    far = {**given, "remote_ranks": [["192.168.3.4", 9]]}
    for number, barred in enumerate((other, far, other)):
        found = ask(pair.decode, ids, barred, cache_salt=f"barred {number}")
        assert cached(found) == 0
        assert tokens(found) == want
    pair.decode.wait_until(lambda: figure(pair.decode, "kv_transfer_failures_total") == before + 3)
    for port in (8, 9):
        line = f"pages of prompts are not fetched from 192.168.3.4:{port}: not among kv_peers"
        assert pair.decode.text().count(line) == 1


def test_each_prompt_of_a_request_has_its_pages(pair: Pair) -> None:
    held = "kv_transfer_pages_held"
    expired = "kv_transfer_leases_expired_total"
    pair.prefill.wait_until(lambda: figure(pair.prefill, held) == 0)  # of earlier tests
    ended = figure(pair.prefill, expired)
    several = [prompt(460), prompt(461)[:50], prompt(462)]
    asked = ask(pair.prefill, several, {"do_remote_decode": True}, max_tokens=1)
    given = asked["kv_transfer_params"]
    assert [one["remote_num_pages"] for one in given] == [PAGES, 7, PAGES]
    received = "kv_transfer_pages_received_total"
    before = figure(pair.decode, received)
    found = ask(pair.decode, several, given)
    pair.decode.wait_until(lambda: figure(pair.decode, received) == before + 2 * PAGES + 7)
    want = ask(pair.prefill, several, cache_salt="alone")
    assert [c["token_ids"] for c in found["choices"]] == [c["token_ids"] for c in want["choices"]]
    pair.prefill.wait_until(lambda: figure(pair.prefill, held) == 0)
    assert figure(pair.prefill, expired) == ended, "kept until their leases ended"
    # a prompt without pages is computed
    again = ask(pair.prefill, several, [{"do_remote_decode": True}, None, None], max_tokens=1)
    assert [one is not None for one in again["kv_transfer_params"]] == [True, False, False]
    salted = {"cache_salt": "again"}
    again = ask(pair.prefill, several, {"do_remote_decode": True}, max_tokens=1, **salted)
    first, _, third = again["kv_transfer_params"]
    before = figure(pair.decode, received)
    found = ask(pair.decode, several, [first, None, third], **salted)
    pair.decode.wait_until(lambda: figure(pair.decode, received) == before + 2 * PAGES)
    assert [c["token_ids"] for c in found["choices"]] == [c["token_ids"] for c in want["choices"]]


def test_a_prompt_that_needs_the_pages_of_another_of_its_request(folder: Path) -> None:
    """The other's lease waits for the answer, and the answer for this prompt."""
    several = [prompt(470), [*prompt(471), *prompt(472), *prompt(473)[:50]]]
    with server("prefill", folder, "--num-pages", "40") as small:
        asked = ask(small, several, {"do_remote_decode": True}, max_tokens=1)
        small.wait_until(lambda: figure(small, "kv_transfer_leases_expired_total") == 1)
        given = asked["kv_transfer_params"]
        assert [one["do_remote_prefill"] for one in given] == [True, False], "too many to hold"


def test_servers_that_differ_say_in_what(pair: Pair, folder: Path) -> None:
    ids = prompt(500)
    given = prefilled(pair.prefill, ids)
    want = tokens(ask(pair.prefill, ids, cache_salt="alone"))
    with server("decode", folder) as other:
        found = ask(other, ids, given)
        assert cached(found) == 0
        assert tokens(found) == want
        assert "modules is '1' at the keeper, '0' here" in other.text()


def test_a_keeper_that_dies(folder: Path, pair: Pair) -> None:
    ids = prompt(600)
    with server("prefill", folder, "--num-speculative-tokens", "2") as dying:
        given = prefilled(dying, ids)
        os.kill(dying.engine_pids()[0], signal.SIGKILL)
        dying.process.wait(30)
    found = ask(pair.decode, ids, given)
    assert cached(found) == 0
    assert tokens(found) == tokens(ask(pair.prefill, ids, cache_salt="alone"))
    assert "refused" in pair.decode.text()


def test_a_request_may_fail_instead(folder: Path) -> None:
    with server("decode", folder, "--kv-load-failure", "fail") as strict:
        given = {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": 9,
            "remote_request_id": "ab" * 32,
            "remote_engine_id": "gone",
        }
        body = {"model": "rorqual-bundled", "prompt": PROMPT, "kv_transfer_params": given}
        status, answer = strict.request("POST", "/v1/completions", body)
        assert status == 503
        assert "0 of 13 pages of the prompt came" in answer["error"]["message"]
        barred = {**given, "remote_host": "192.168.3.4"}
        status, answer = strict.request(
            "POST", "/v1/completions", {**body, "kv_transfer_params": barred}
        )
        assert (status, answer["error"]["code"]) == (503, "kv_load_failure")
        assert "0 of 13 pages of the prompt came" in answer["error"]["message"]
        assert "192.168.3.4" not in answer["error"]["message"]
        assert "192.168.3.4:9" in strict.text()
        assert strict.held_pages() == 0


@pytest.mark.longest
def test_pages_leave_while_the_prompt_is_computed(folder: Path, pair: Pair) -> None:
    more = ("--num-speculative-tokens", "2", "--kv-overlap", "--chunked-prefill-size", "8")
    with server("prefill", folder, *more) as early:
        for number in range(3):
            ids = [50 + number, *(PROMPT[1:] * 2)]
            given = ask(early, ids, {"do_remote_decode": True}, max_tokens=1)
            assert tokens(given) == [], "it was answered before there was one"
            found = ask(pair.decode, ids, given["kv_transfer_params"])
            whole = given["kv_transfer_params"]["remote_num_pages"]
            assert (whole, cached(found)) == (25, len(ids) - 1)
            assert tokens(found) == tokens(ask(pair.prefill, ids, cache_salt="alone"))
        # one chunk is a prompt in full
        short = ask(early, PROMPT[:9], {"do_remote_decode": True}, max_tokens=1)
        assert len(tokens(short)) == 1
        assert short["kv_transfer_params"]["remote_num_pages"] == 1
        early.wait_until(lambda: figure(early, "kv_transfer_pages_held") == 0)
        early.wait_until(lambda: early.held_pages() == 0)


def test_pages_leave_layer_by_layer(folder: Path, pair: Pair) -> None:
    """Prompts of one chunk and of several: none is answered with a token."""
    more = ("--num-speculative-tokens", "2", "--kv-by-layer", "--chunked-prefill-size", "64")
    with server("prefill", folder, *more) as early:
        for length in (20, 100, 200):
            ids = [length % 90, *(PROMPT * 2)[1:length]]
            given = ask(early, ids, {"do_remote_decode": True}, max_tokens=1)
            assert tokens(given) == []
            found = ask(pair.decode, ids, given["kv_transfer_params"])
            assert cached(found) == length - 1
            assert tokens(found) == tokens(ask(pair.prefill, ids, cache_salt="alone"))
        several = [[91 + i, *PROMPT[1:50]] for i in range(3)]
        given = ask(early, several, {"do_remote_decode": True}, max_tokens=1)
        assert [one["remote_num_pages"] for one in given["kv_transfer_params"]] == [7] * 3
        received = "kv_transfer_pages_received_total"
        before = figure(pair.decode, received)
        found = ask(pair.decode, several, given["kv_transfer_params"])
        pair.decode.wait_until(lambda: figure(pair.decode, received) == before + 3 * 7)
        want = ask(pair.prefill, several, cache_salt="alone")
        for one, other in zip(found["choices"], want["choices"], strict=True):
            assert one["token_ids"] == other["token_ids"]
        early.wait_until(lambda: figure(early, "kv_transfer_pages_held") == 0)
        early.wait_until(lambda: early.held_pages() == 0)


def test_another_secret_reads_nothing(pair: Pair, tmp_path: Path) -> None:
    ids = prompt(700)
    given = prefilled(pair.prefill, ids)
    secret = tmp_path / "other"
    secret.write_text("quite another one, and as long\n")
    more = ("--num-speculative-tokens", "2", "--role", "decode", "--kv-secret-file", str(secret))
    with start_server(*OPTIONS, *more) as other:
        assert cached(ask(other, ids, given)) == 0
        assert "the secrets differ" in other.text()
