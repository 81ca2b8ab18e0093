"""Real servers behind a router, one computes prompts and streams first tokens, one answers: each
stream is that of one server alone, and the answer goes on in a decode step."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("fastapi")

from tests.disagg.test_pages_travel import figure
from tests.route.running import start_router
from tests.serve.http.test_resume import BODIES, CHAT, HELLO, PROMPT, SEEDED, TEXT
from tests.serve.resuming import Event, joined, near, parsed, stream
from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive

PAGE = 8
OPTIONS = (
    "--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "256", "--threads", "1",
    "--page-size", str(PAGE), "--num-pages", "200", "--reasoning", "on",
)  # fmt: skip
MANY = [7 + (31 * i * i + 5 * i) % 2000 for i in range(64)]
SEVERAL = {"several", "several chats", "two prompts"}
# prompts with log probabilities of their own are computed where they are answered
WHOLE = {"text logprobs", "no tokens"}
# what the first token alone decides, beside the bodies of streams that are continued
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "one token": (TEXT, {**PROMPT, "temperature": 0, "max_tokens": 1}),
    "one token of a chat": (CHAT, {**HELLO, "temperature": 0, "max_tokens": 1, "logprobs": True}),
    "the end at once": (TEXT, {**PROMPT, "temperature": 0, "logit_bias": {"1": 100}}),
    "the end at once, held": (
        CHAT,
        {**HELLO, "temperature": 0, "logit_bias": {"1": 100}, "min_tokens": 1},
    ),
    "a stop token at once": (
        TEXT,
        {**PROMPT, **SEEDED, "stop_token_ids": [300], "logit_bias": {"300": 100}},
    ),
    "half a character": (TEXT, {**PROMPT, **SEEDED, "guided_choice": ["鯨鯨"], "logprobs": 1}),
    "a stop string at once": (
        CHAT,
        {**HELLO, **SEEDED, "guided_choice": ["whale"], "stop": ["w", "wh", "whale"]},
    ),
    "a stop string that begins": (
        TEXT,
        {**PROMPT, **SEEDED, "guided_choice": ["whales meet"], "stop": ["whales m"]},
    ),
    "a stop string that does not go on": (
        TEXT,
        {**PROMPT, **SEEDED, "guided_choice": ["whales meet"], "stop": ["whales x"]},
    ),
    "ids": (CHAT, {**HELLO, **SEEDED, "return_token_ids": True}),
    "cut prompt": (TEXT, {**PROMPT, "temperature": 0, "truncate_prompt_tokens": 3}),
}
EVERY = {**BODIES, **MORE}


@dataclass
class Apart:
    prefill: Running
    decode: Running
    router: Running

    def counted(self) -> dict[str, float]:
        """First tokens so far, by role of the server."""
        start = 'rorqual_router_first_tokens_total{role="'
        lines = [one for one in self.router.get("/metrics").splitlines() if one.startswith(start)]
        pairs = (line.removeprefix(start).split('"} ') for line in lines)
        return {role: float(count) for role, count in pairs}


PEERS = ("--kv-peers", "127.0.0.1")


def started(
    stack: ExitStack, folder: Path, *options: str, decoding: tuple[str, ...] = PEERS
) -> Apart:
    """decoding: further options of the server that answers."""
    secret = folder / "kv-secret"
    secret.write_text("of all who exchange pages")
    given = (*OPTIONS, "--kv-secret-file", str(secret), *options)
    prefill = stack.enter_context(start_server(*given, "--role", "both"))
    decode = stack.enter_context(start_server(*given, "--role", "decode", *decoding))
    router = stack.enter_context(
        start_router("--prefill", prefill.url, "--decode", decode.url, "--prefill-from", "1")
    )
    router.wait_until(router.healthy)
    return Apart(prefill, decode, router)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with ExitStack() as stack:
        yield started(stack, tmp_path_factory.mktemp("first"))


def whole(events: list[Event]) -> dict[str, Any]:
    """All that a client has, but for the stream's id and its time."""
    found = joined(events)
    del found["head"]
    return found


def check_opening(found: list[Event], want: list[Event]) -> None:
    """The first events are those of one server, and not only the text that they add up to: the
    role's, and the one that names the first token, unless the server put more into it."""
    for one, other in zip(found, want, strict=False):
        tokens = [len(event.named[0][0]) for event in (one, other)]
        if tokens[0] == tokens[1]:
            assert near(one.data["choices"], other.data["choices"])
            assert one.named == other.named
        else:
            assert tokens[0] == 1
        if tokens[0]:
            return


@pytest.mark.parametrize("name", list(EVERY))
def test_a_stream_is_that_of_one_server(apart: Apart, name: str) -> None:
    path, body = EVERY[name]
    want = stream(apart.prefill.url, path, body, cache_salt="alone")
    before = apart.counted()
    found = stream(apart.router.url, path, body, cache_salt=f"apart {name}")
    assert near(whole(found), whole(want))
    if name not in SEVERAL:
        check_opening(found, want)
    after = apart.counted()
    role = "decode" if name in SEVERAL else "prefill"
    for one in ("prefill", "decode"):
        added = after.get(one, 0.0) - before.get(one, 0.0)
        assert added == (one == role and name not in WHOLE)


def test_a_plain_client_sees_no_comments(apart: Apart) -> None:
    path, body = BODIES["greedy chat"]
    asked = {**body, "stream": True, "cache_salt": "plain"}
    made = urllib.request.Request(
        apart.router.url + path, json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(made, timeout=60) as answer:
        raw = answer.read().decode()
    assert ": rorqual" not in raw
    blocks = raw.removesuffix("\n\n").split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
    want = stream(apart.prefill.url, path, body, cache_salt="alone")
    text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
    assert text == joined(want)[0]["content"]
    assert events[-1]["usage"]["completion_tokens"] == 20


def check_lengths(apart: Apart, lengths: range) -> None:
    """Prompts that end before, at and behind a page's end: the answer starts from the first token,
    and the server that answers computes nothing of the prompt."""
    for length in lengths:
        ids = [length, *MANY[1:length]]
        body = {"prompt": ids, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        usage = {"stream_options": {"include_usage": True}, "ignore_eos": True}
        found = stream(apart.router.url, TEXT, {**body, **usage})
        want = stream(apart.prefill.url, TEXT, {**body, **usage}, cache_salt="alone")
        assert whole(found) == whole(want)
        details = found[-1].data["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": length}
    assert figure(apart.decode, "kv_transfer_failures_total") == 0
    (engine,) = apart.decode.get("/stats")["engines"]
    assert engine["prompt_tokens"] == 0
    apart.prefill.wait_until(lambda: figure(apart.prefill, "kv_transfer_pages_held") == 0, 20)


@pytest.mark.longest
def test_the_answer_goes_on_in_a_decode_step(tmp_path: Path) -> None:
    with ExitStack() as stack:
        check_lengths(started(stack, tmp_path), range(2, 3 * PAGE + 3))


@pytest.mark.longest
def test_the_answer_goes_on_in_a_decode_step_with_drafts(tmp_path: Path) -> None:
    """Entries of a prediction module depend on the token after theirs."""
    with ExitStack() as stack:
        apart = started(stack, tmp_path, "--num-speculative-tokens", "2")
        check_lengths(apart, range(2, 3 * PAGE + 3))


@pytest.mark.longest
def test_with_pages_sent_early_the_other_server_sends_the_token(tmp_path: Path) -> None:
    """There is none yet when the pages are offered."""
    for option in ("--kv-overlap", "--kv-by-layer"):
        with ExitStack() as stack:
            apart = started(stack, tmp_path, option)
            path, body = BODIES["greedy"]
            found = stream(apart.router.url, path, body)
            want = stream(apart.prefill.url, path, body, cache_salt="alone")
            assert whole(found) == whole(want)
            assert apart.counted() == {"decode": 1.0}


def asked(where: Running, transfer: dict[str, Any], header: bool, **more: Any) -> str:
    """Why a server does not stream a first token."""
    body = {**PROMPT, "stream": True, "kv_transfer_params": transfer, **more}
    headers = {"x-rorqual-resumable": "1"} if header else {}
    status, answer = where.request("POST", TEXT, body, **headers)
    assert status == 400, answer
    return str(answer["error"]["message"])


def test_what_a_server_does_not_hand_over(apart: Apart) -> None:
    first = {"do_remote_decode": True, "first_token": True}
    server = apart.prefill
    assert "X-Rorqual-Resumable" in asked(server, first, header=False)
    assert "one choice" in asked(server, first, True, n=2, temperature=1)
    assert "a new stream" in asked(server, first, True, stream=False)
    assert "a new stream" in asked(server, first, True, max_tokens=0)
    resumed = {"id": "x", "created": 1, "choices": []}
    assert "a new stream" in asked(server, first, True, rorqual_resume=resumed)
    assert "--role prefill" in asked(apart.decode, first, True)


def test_the_lines_of_a_stream_that_is_handed_over(apart: Apart) -> None:
    # pages that nobody fetched after another test are kept until their lease ends
    apart.prefill.wait_until(lambda: figure(apart.prefill, "kv_transfer_pages_held") == 0)
    first = {"do_remote_decode": True, "first_token": True}
    body = {**PROMPT, "stream": True, "temperature": 0, "kv_transfer_params": first}
    headers = {"x-rorqual-resumable": "1"}
    status, raw = apart.prefill.request("POST", TEXT, {**body, "cache_salt": "x"}, **headers)
    assert status == 200
    *events, last = raw.removesuffix("\n\n").split("\n\n")
    assert last.startswith(": rorqual_transfer {")
    given = json.loads(last.removeprefix(": rorqual_transfer "))
    assert given["do_remote_prefill"]
    assert given["first_token"]
    (event,) = parsed("\n\n".join([*events, "data: [DONE]"]) + "\n\n")
    assert len(event.named[0][0]) == 1

    # an answer that ends with its token is one, and no pages are kept for it
    def ended() -> int:
        return sum(apart.prefill.get("/stats")["engines"][0]["finished"].values())

    apart.prefill.wait_until(lambda: figure(apart.prefill, "kv_transfer_pages_held") == 1, 20)
    before = ended()
    for more in ({"max_tokens": 1}, {"logit_bias": {"1": 100}}):
        _, raw = apart.prefill.request("POST", TEXT, {**body, **more}, **headers)
        assert raw.endswith("data: [DONE]\n\n")
    apart.prefill.wait_until(lambda: ended() == before + 2)
    assert figure(apart.prefill, "kv_transfer_pages_held") == 1
