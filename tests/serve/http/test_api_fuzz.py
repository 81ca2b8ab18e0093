"""Every field of a request with every odd value: an answer or a 4xx in OpenAI's shape, never a
5xx, and nothing in the server's log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.http.test_api_errors import CHAT, COMPLETE, TOOL, TURN, check_shape
from tests.serve.running import Running

pytestmark = pytest.mark.exhaustive(but_first=True)

BASE = {COMPLETE: {"prompt": "Hello"}, CHAT: {"messages": TURN}}
SHARED_NUMBERS = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "priority",
    "truncate_prompt_tokens",
)
NUMBERS = [
    *((path, (name,)) for path in (COMPLETE, CHAT) for name in SHARED_NUMBERS),
    (COMPLETE, ("logprobs",)),
    (COMPLETE, ("best_of",)),
    (COMPLETE, ("logit_bias", "5")),
    (COMPLETE, ("stop_token_ids", 0)),
    (COMPLETE, ("allowed_token_ids", 0)),
    (COMPLETE, ("kv_transfer_params", "a")),
    (COMPLETE, ("prompt", 0)),
    (COMPLETE, ("prompt", 0, 0)),
    (CHAT, ("max_completion_tokens",)),
    (CHAT, ("top_logprobs",)),
    (CHAT, ("guided_json", "minLength")),
    (CHAT, ("metadata", "a")),
    (CHAT, ("chat_template_kwargs", "n")),
]
ODD_NUMBERS = [
    2**31,
    2**63,
    2**64,
    2**70,
    -1,
    -(2**70),
    10**400,
    1e300,
    float("nan"),
    float("-inf"),
    0.5,
    16.0,
    "16",
    "\u0661\u0662",
    "\uff11",
    True,
    [1],
    {},
]
STRINGS = [
    *((COMPLETE, (name,)) for name in ("prompt", "stop", "guided_regex", "guided_grammar")),
    *((COMPLETE, (name, 0)) for name in ("prompt", "stop", "guided_choice")),
    *((COMPLETE, ("structured_outputs", name)) for name in ("json", "regex", "grammar")),
    (COMPLETE, ("structured_outputs", "choice", 0)),
    (COMPLETE, ("guided_json",)),
    (COMPLETE, ("guided_json", "enum", 0)),
    *((COMPLETE, (name,)) for name in ("model", "cache_salt", "user", "service_tier", "suffix")),
    (COMPLETE, ("metadata", "a")),
    (COMPLETE, ("bad_words", 0)),
    (COMPLETE, ("kv_transfer_params", "a")),
    (CHAT, ("messages", 0, "role")),
    (CHAT, ("messages", 0, "content")),
    (CHAT, ("messages", 0, "name")),
    (CHAT, ("messages", 0, "reasoning_content")),
    (CHAT, ("messages", 0, "tool_call_id")),
    (CHAT, ("messages", 0, "annotations", 0)),
    (CHAT, ("tools", 0, "function", "name")),
    (CHAT, ("tools", 0, "function", "description")),
    (CHAT, ("tools", 0, "function", "parameters", "pattern")),
    (CHAT, ("tool_choice",)),
    (CHAT, ("tool_choice", "function", "name")),
    (CHAT, ("response_format", "type")),
    (CHAT, ("response_format", "json_schema", "name")),
    (CHAT, ("response_format", "json_schema", "schema", "const")),
    (CHAT, ("chat_template_kwargs", "thinking")),
    (CHAT, ("reasoning_effort",)),
    (CHAT, ("modalities", 0)),
]
ODD_STRINGS = ["\ud800", "a\udfffb", "\x00", "\x1b[31m", "\r\n", "\u202e", "\ufffe", "{", "[a"]


def with_value(body: Any, where: tuple[Any, ...], value: Any) -> Any:
    """A copy of body with value there; what lies on the way is made where it is not."""
    if not where:
        return value
    key, *rest = where
    if isinstance(key, int):
        items = list(body) if isinstance(body, list) else [{}]
        return [with_value(items[0], tuple(rest), value), *items[1:]]
    found = dict(body) if isinstance(body, dict) else {}
    return {**found, key: with_value(found.get(key), tuple(rest), value)}


def start(path: str, where: tuple[Any, ...]) -> dict[str, Any]:
    """A body in which everything else is right."""
    base: dict[str, Any] = {**BASE[path], "max_tokens": 2}
    if where[0] in ("tools", "tool_choice"):
        base["tools"] = [TOOL]
    if where[:2] == ("tool_choice", "function"):
        base["tool_choice"] = {"type": "function", "function": {"name": "f"}}
    if where[:2] == ("response_format", "json_schema"):
        base["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "object"}},
        }
    if where[0] == "top_logprobs":
        base["logprobs"] = True
    return base


def ask(server: Running, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    status, answer = server.request("POST", path, json.dumps(body).encode())
    assert status < 500, (body, status, answer)
    if status != 200:
        error = check_shape(answer)
        assert "Traceback" not in error["message"]
    return status, answer


@pytest.fixture
def quiet(server: Running) -> Iterator[None]:
    """Nothing of the test may be a defect in the server's eyes."""
    before = len(server.text())
    yield
    said = server.text()[before:]
    assert "Traceback" not in said, said
    assert server.request("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 2**64}, "max_tokens"),
        ({"min_tokens": 2**64}, "min_tokens"),
        ({"top_k": 2**70}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
        ({"logit_bias": {" 5": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"guided_choice": ["\ud800"]}, "guided_choice.0"),
        ({"guided_regex": "\ud800"}, "guided_regex"),
        ({"guided_json": {"\ud800": 1}}, "guided_json"),
        ({"prompt": ["a", "\ud800"]}, "prompt.1"),
        ({"\ud800": 1}, None),
        ({"user": "\ud800"}, "user"),
    ],
)
def test_what_was_a_500_is_a_400_that_names_the_field(
    server: Running, quiet: None, fields: dict[str, Any], param: str | None
) -> None:
    status, answer = ask(server, COMPLETE, {"prompt": "Hello", **fields})
    assert status == 400
    assert answer["error"]["param"] == param


def test_a_float_that_is_a_whole_number_counts_as_one(server: Running, quiet: None) -> None:
    status, answer = ask(server, COMPLETE, {"prompt": "Hello", "max_tokens": 3.0, "seed": 7.0})
    assert status == 200
    assert answer["usage"]["completion_tokens"] <= 3
    for value in (3.5, 1e300, True, "3"):
        status, answer = ask(server, COMPLETE, {"prompt": "Hello", "max_tokens": value})
        assert status == 400
        assert answer["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("path", "where"), NUMBERS, ids=[f"{p[4:8]}-{'.'.join(map(str, w))}" for p, w in NUMBERS]
)
def test_odd_numbers(server: Running, quiet: None, path: str, where: tuple[Any, ...]) -> None:
    for value in ODD_NUMBERS:
        ask(server, path, with_value(start(path, where), where, value))


@pytest.mark.parametrize(
    ("path", "where"), STRINGS, ids=[f"{p[4:8]}-{'.'.join(map(str, w))}" for p, w in STRINGS]
)
def test_odd_strings(server: Running, quiet: None, path: str, where: tuple[Any, ...]) -> None:
    for value in ODD_STRINGS:
        status, answer = ask(server, path, with_value(start(path, where), where, value))
        if "\ud800" in value or "\udfff" in value:
            assert status == 400
            assert answer["error"]["param"] == ".".join(map(str, where))
