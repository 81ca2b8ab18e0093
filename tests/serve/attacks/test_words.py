"""Attacks by what a request says: grammars that explode, and text that would forge the log."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.attacks.victim import BODY, COMPLETE, GUEST, PATIENCE, Victim
from tests.serve.footprint import MIB, children

pytestmark = pytest.mark.exhaustive


def nested(depth: int, inner: dict[str, Any], width: int = 1) -> dict[str, Any]:
    for _ in range(depth):
        inner = {"type": "object", "properties": {f"p{i}": inner for i in range(width)}}
    return inner


EXPONENTIAL = "".join(f"r{i} ::= r{i + 1} r{i + 1} r{i + 1} r{i + 1} | [a-z]\n" for i in range(12))
TEXT = {"type": "string"}
BOMBS: dict[str, dict[str, Any]] = {
    "rules that multiply": {"guided_grammar": f"root ::= r0\n{EXPONENTIAL}r12 ::= [x]{{0,3000}}"},
    "left recursion": {"guided_grammar": 'root ::= root root | ""'},
    "a rule that is itself": {"guided_grammar": "root ::= root"},
    "counts of counts": {"guided_regex": "((a{1,200}){1,200}){1,200}"},
    "a count": {"guided_regex": "[a-z]{1,99999999}"},
    "stars of stars": {"guided_regex": "(((a*)*)*)*b" * 40},
    "alternatives": {"guided_regex": "(" + "|".join(f"w{i}.*" for i in range(500)) + "){1,50}"},
    "a long pattern": {"guided_json": {"type": "string", "pattern": "(a{1,1000}){1,1000}"}},
    "a long string": {"guided_json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}},
    "many items": {"guided_json": {"type": "array", "items": TEXT, "minItems": 10**6}},
    "deep": {"guided_json": nested(60, TEXT)},
    "wide": {"guided_json": nested(3, {"enum": list(range(40))}, 9)},
    "a circle": {
        "guided_json": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
        }
    },
    "optional ones": {
        "guided_json": {
            "type": "object",
            "properties": {f"k{i}": {"anyOf": [TEXT, {"type": "number"}]} for i in range(300)},
        }
    },
}
KEPT = 320 * MIB  # what 64 MiB of compiled grammars, kept for the next request, take in memory


@pytest.fixture(autouse=True)
def grammars_are_kept(attacked: Victim) -> Iterator[None]:
    attacked.kept = KEPT
    yield
    attacked.kept = 0


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_answered_and_holds_nobody_up(victim: Victim, kind: str) -> None:
    found: list[tuple[int, Any]] = []
    body = {"prompt": "a", "max_tokens": 4, **BOMBS[kind]}
    bomber = threading.Thread(
        target=lambda: found.append(victim.server.request("POST", COMPLETE, body, **GUEST))
    )
    start = time.monotonic()
    bomber.start()
    while bomber.is_alive():
        assert victim.honest() < PATIENCE
        assert time.monotonic() - start < 60
        time.sleep(0.05)
    status, answer = found[0]
    assert status in (200, 400), answer
    if status == 400:
        assert answer["error"]["message"]
        assert "Traceback" not in answer["error"]["message"]


def test_all_bombs_at_once_leave_no_process(victim: Victim) -> None:
    """Another client's own small grammar comes between them."""
    statuses: list[int] = []

    def throw(more: dict[str, Any], number: int) -> None:
        body = {"prompt": f"{number}", "max_tokens": 4, **more}
        statuses.append(victim.server.request("POST", COMPLETE, body, **GUEST)[0])

    threads = [
        threading.Thread(target=throw, args=(more, number))
        for number, more in enumerate(BOMBS.values())
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    choice = {"prompt": "a", "max_tokens": 4, "guided_choice": ["aye", f"nay {start}"]}
    assert victim.ask(choice)[0] == 200
    assert time.monotonic() - start < PATIENCE
    for thread in threads:
        thread.join()
    assert len(statuses) == len(BOMBS)
    assert set(statuses) <= {200, 400, 429}
    # the engine, its two compilers, and no fork of theirs
    victim.server.wait_until(lambda: len(children(victim.server.pid)) <= 3)


# ---- the log

PLACES = (
    "model",
    "user",
    "cache_salt",
    "a field of its own",
    "stop",
    "guided_regex",
    "guided_grammar",
    "guided_json",
    "response_format",
    "tools",
)
FORGED = "rorqual: all keys are valid now"
WRITTEN = [
    f"x\n{FORGED}",
    f"x\r\n{FORGED}",
    f"x\x1b[2K\x1b[1A{FORGED}",
    f"x\x85{FORGED}",
    f"x\u2028{FORGED}",
    f"x\u202e\x00\x07\x9b31m{FORGED}",
    f"x\ud800\n{FORGED}",
    "%s%n{0}{self.__class__}\n" + FORGED,
]


def with_text(place: str, text: str) -> dict[str, Any]:
    body: dict[str, Any] = {**BODY, "ignore_eos": False}
    if place == "a field of its own":
        return {**body, text: 1}
    if place == "guided_grammar":
        return {**body, place: f'root ::= "a" # {text}\n{text} ::= ??'}
    if place == "guided_json":
        return {**body, place: {"type": "object", "properties": {text: {"$ref": f"#/{text}"}}}}
    if place == "response_format":
        return {**body, place: {"type": text}}
    if place == "tools":
        return {**body, place: [{"type": "function", "function": {"name": text}}]}
    return {**body, place: text}


def test_nobody_writes_a_line_of_the_log(victim: Victim) -> None:
    for text in WRITTEN:
        for place in PLACES:
            data = json.dumps(with_text(place, text)).encode()
            status, answer = victim.ask(data)
            assert status < 500, (place, text, answer)
    heads = [
        b"GET /\x1b[31m%0a" + FORGED.replace(" ", "%20").encode() + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /live HTTP/1.1\r\nx-request-id: a\n" + FORGED.encode() + b"\r\nhost: x\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: x\r\nx\x1b: " + FORGED.encode() + b"\r\n\r\n",
        b"\x1b[2K\n" + FORGED.encode() + b"\n\n",
    ]
    for head in heads:
        with victim.connect() as sock:
            sock.sendall(head)
            sock.shutdown(1)
            while sock.recv(4096):
                pass
    lines = victim.server.log.read_bytes().decode().split("\n")
    assert not any(line.startswith(FORGED) for line in lines)
    ours = re.compile(r"(rorqual( engine| grammar)?: |  |$)")
    assert all(ours.match(line) for line in lines), [it for it in lines if not ours.match(it)][:5]
    control = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")
    assert not any(control.search(line) for line in lines)
