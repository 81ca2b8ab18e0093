"""Fields of a body that the server does not have."""

from __future__ import annotations

import json
import logging
import urllib.request
from typing import Any

import pytest

from rorqual.errors import ConfigError
from rorqual.serve.errors import ApiError
from rorqual.serve.http.unknown_fields import (
    MOST,
    REFUSED,
    UnknownFields,
    set_aside,
    set_aside_within,
)
from rorqual.serve.limits import ServerLimits
from tests.serve.running import Running

COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
TURN = [{"role": "user", "content": "Hello"}]


def ask(server: Running, path: str, fields: dict[str, Any]) -> tuple[str | None, str]:
    """(the header, the text) of an answer that must be a success."""
    body: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    body |= {"prompt": "Once"} if path == COMPLETE else {"messages": TURN}
    request = urllib.request.Request(
        server.url + path,
        json.dumps({**body, **fields}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
        return answer.headers["x-rorqual-ignored"], answer.read().decode()


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_unknown_fields_are_ignored_and_named(server: Running, path: str) -> None:
    fields = {"surprise": 1, "mood": {"a": [1]}, "a b\n\u00e9": True, "nothing": None}
    for stream in (False, True):
        header, _ = ask(server, path, {**fields, "stream": stream})
        assert header == "surprise, mood, a%20b%0A%C3%A9"
        assert ask(server, path, {"stream": stream})[0] is None


def test_unknown_fields_of_messages_and_tools_are_named_by_their_place(server: Running) -> None:
    """What clients add for other servers: LiteLLM sends such fields of an answer back."""
    part = {"type": "text", "text": "Hello", "tone": 1, "prompt_cache_breakpoint": {}}
    call = {"id": "1", "type": "function", "extra": 1, "function": {"name": "f", "arguments": ""}}
    function = {"name": "f", "cache_control": {"type": "ephemeral"}, "examples": []}
    tool = {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [part, part], "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "tool_calls": [call], "provider_specific_fields": {"a": 1}},
        {"role": "tool", "content": "x", "tool_call_id": "1", "mood": None, "prefix": False},
    ]
    header, text = ask(server, CHAT, {"messages": messages, "tools": [tool], "top": 1})
    assert header == (
        "top, messages.content.tone, messages.provider_specific_fields, "
        "messages.tool_calls.extra, tools.function.examples"
    )
    plain = {"type": "function", "function": {"name": "f"}}
    messages[0]["content"] = [{"type": "text", "text": "Hello"}] * 2
    same = ask(server, CHAT, {"messages": messages, "tools": [plain]})[1]
    content = [json.loads(one)["choices"][0]["message"]["content"] for one in (text, same)]
    assert content[0] == content[1], "the model sees nothing of them"
    counted = server.request("POST", "/tokenize", {"messages": messages, "tools": [tool]})
    assert counted[0] == 200
    assert counted == server.request("POST", "/tokenize", {"messages": messages, "tools": [plain]})


def test_text_routes_take_null_for_unknown_fields(server: Running) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert server.request("POST", path, {**body, "chat_template": None})[0] == 200
        status, answer = server.request("POST", path, {**body, "chat_template": "x"})
        assert (status, answer["error"]["param"]) == (400, "chat_template")


def test_values_that_ask_for_nothing_pass(server: Running) -> None:
    fields = {name: values[0] for name, values in REFUSED.items() if values}
    fields |= {name: None for name, values in REFUSED.items() if not values}
    for path in (COMPLETE, CHAT):
        there = {"echo", "best_of"} if path == COMPLETE else set()
        asked = {name: value for name, value in fields.items() if name not in there}
        assert ask(server, path, asked)[0] is None


KNOWN = ("echo", "best_of", "rorqual_resume")  # to some completion


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in KNOWN])
def test_what_would_change_the_answer_is_refused(server: Running, name: str) -> None:
    for path in (COMPLETE, CHAT):
        body: dict[str, Any] = {"prompt": "a"} if path == COMPLETE else {"messages": TURN}
        status, answer = server.request("POST", path, {**body, name: [1, 2]})
        assert status == 400
        assert answer["error"]["param"] == name
        assert "not supported" in answer["error"]["message"]


def test_refusing_all_and_more_than_can_be_meant(caplog: pytest.LogCaptureFixture) -> None:
    set_aside({"prompt": "a", "strange": 1}, {"prompt"})
    with pytest.raises(ApiError, match="the field 'strange' is not known here"):
        UnknownFields(refuse=True).check()
    fields = UnknownFields(refuse=False)
    with caplog.at_level(logging.WARNING, "rorqual.serve"):
        fields.check()
        fields.check()
    assert [record.getMessage() for record in caplog.records] == [
        "a request's unknown field 'strange' is ignored"
    ]
    set_aside({f"x{number}": 0 for number in range(MOST + 1)}, {"prompt"})
    with pytest.raises(ApiError, match="'x0' is not known"):
        fields.check()
    many = {f"x{number}\ud800": 0 for number in range(MOST + 50)}
    set_aside({}, set())
    assert set_aside_within({"role": "user", **many}, {"role"}, "messages") == {"role": "user"}
    assert fields.headers()[0][1].startswith(b"messages.x0%5Cud800, ")
    with pytest.raises(ApiError, match=r"'messages\.x0"):
        fields.check()
    assert set_aside({"prompt": "a"}, {"prompt"}) == {"prompt": "a"}
    assert not fields.headers()


def test_the_option_is_one_of_two() -> None:
    assert ServerLimits(unknown_fields="refuse").unknown_fields == "refuse"
    with pytest.raises(ConfigError, match="unknown_fields='maybe' is not supported"):
        ServerLimits(unknown_fields="maybe")
