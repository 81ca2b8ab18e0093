"""Anthropic's Messages API: blocks and events, read by the official client's types where its
package is installed."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from rorqual.config.api_errors import is_anthropic
from rorqual.serve.errors import ApiError, engine_died, not_ready, queue_full, timed_out
from rorqual.serve.http.anthropic.call import input_of
from rorqual.serve.http.anthropic.errors import anthropic_body
from rorqual.serve.http.sse import encode
from tests.serve.http.test_api_fuzz import ODD_NUMBERS, ODD_STRINGS, with_value
from tests.serve.running import Running
from tests.serve.scripted import CALL, JSON, NAME, THOUGHT, Scripted, scripted

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TURN = [{"role": "user", "content": "Hi"}]
TOOL = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}},
}
OFFICIAL = importlib.util.find_spec("anthropic") is not None


def check(kind: str, value: Any) -> None:
    """By the official client's types, where they are there."""
    if OFFICIAL:
        from anthropic import types

        TypeAdapter(getattr(types, kind)).validate_json(json.dumps(value), strict=True)


def whole(server: Scripted, **body: Any) -> Any:
    found = server.ask(PATH, **{"messages": TURN, "max_tokens": 64, **body})
    check("Message", found)
    return found


def events(server: Scripted, **body: Any) -> list[dict[str, Any]]:
    found = server.stream(PATH, **{"messages": TURN, "max_tokens": 64, **body})
    for event in found:
        if event["type"] not in ("ping", "error"):
            check("RawMessageStreamEvent", event)
    return found


def kinds(found: list[dict[str, Any]]) -> list[str]:
    """Names of the events, deltas in a row as one."""
    names = [event["type"] for event in found]
    return [n for i, n in enumerate(names) if not (n.endswith("block_delta") and names[i - 1] == n)]


def put_together(found: list[dict[str, Any]]) -> Any:
    """What a client makes of the events."""
    message: dict[str, Any] = {}
    partial: dict[int, str] = {}
    for event in found:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            block = message["content"][event["index"]]
            if delta["type"] == "input_json_delta":
                index = event["index"]
                partial[index] = partial.get(index, "") + delta["partial_json"]
                continue
            name = delta["type"].removesuffix("_delta")
            block[name] = block[name] + delta[name]
        elif event["type"] == "content_block_stop" and event["index"] in partial:
            block = message["content"][event["index"]]
            block["input"] = json.loads(partial[event["index"]])
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return message


def same(one: Any, other: Any) -> bool:
    """But for names that are made anew."""

    def plainly(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plainly(v) for k, v in value.items() if k != "id"}
        return [plainly(v) for v in value] if isinstance(value, list) else value

    return bool(plainly(one) == plainly(other))


# ---- answers


def test_a_text(plain: Scripted) -> None:
    plain.engine.text = "Well, there is nothing to be said of that."
    plain.engine.cached = 2
    found = whole(plain)
    count = len(plain.engine.seen[0].prompt)
    tokens = len(plain.engine.tokenizer.encode(plain.engine.text, False)) + 1
    assert found == {
        "id": found["id"],
        "type": "message",
        "role": "assistant",
        "model": NAME,
        "content": [{"type": "text", "text": plain.engine.text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": count - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": tokens,
        },
    }
    assert found["id"].startswith("msg_")
    streamed = events(plain)
    assert kinds(streamed) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert sum(event["type"] == "content_block_delta" for event in streamed) > 5
    assert same(put_together(streamed), found)


def test_why_an_answer_ended(plain: Scripted) -> None:
    plain.engine.text = "Hello, there"
    found = whole(plain, stop_sequences=["x", ", th"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", ", th")
    assert found["content"][0]["text"] == "Hello"
    assert same(put_together(events(plain, stop_sequences=["x", ", th"])), found)
    plain.engine.finish = "length"
    assert whole(plain)["stop_reason"] == "max_tokens"


def test_thinking_is_a_block(thinks: Scripted) -> None:
    thinks.engine.text = THOUGHT + "Yes."
    found = whole(thinks)
    thought, text = found["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Let me see.")
    assert thought["signature"]
    assert text == {"type": "text", "text": "Yes."}
    assert same(put_together(events(thinks)), found)
    hidden = whole(thinks, thinking={"type": "adaptive", "display": "omitted"})
    assert hidden["content"] == [text]


def test_calls(thinks: Scripted) -> None:
    thinks.engine.text = f"{THOUGHT}I look.\n{CALL}\n{CALL}"
    found = whole(thinks, tools=[TOOL])
    assert found["stop_reason"] == "tool_use"
    assert [block["type"] for block in found["content"]] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    first, second = found["content"][2:]
    assert (first["name"], first["input"]) == ("look_up", {"word": "a"})
    assert first["id"] != second["id"]
    assert same(put_together(events(thinks, tools=[TOOL])), found)


def test_a_call_that_was_cut(plain: Scripted) -> None:
    plain.engine.text = CALL[:55]
    plain.engine.finish = "length"
    (block,) = whole(plain, tools=[TOOL])["content"]
    assert list(block["input"]) == ["INVALID_JSON"]
    assert block["input"]["INVALID_JSON"].startswith('{"word"')


@pytest.mark.parametrize(
    ("arguments", "is_object"),
    [
        ("", True),
        (" ", True),
        ('{"a": [1, {"b": null}]}', True),
        ("[1]", False),
        ('{"a": NaN}', False),
        ('{"a"', False),
        ('{"a":' * 5000 + "1" + "}" * 5000, False),
    ],
)
def test_arguments_as_an_object(arguments: str, is_object: bool) -> None:
    found = json.loads(encode(input_of(arguments)))
    said = json.loads(arguments) if arguments.strip() and is_object else {}
    assert found == (said if is_object else {"INVALID_JSON": arguments})


def test_an_error_in_a_stream(plain: Scripted) -> None:
    plain.engine.error = engine_died()
    found = events(plain)
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error"
    answer = plain.client.post(PATH, json={"messages": TURN, "max_tokens": 5})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "api_error"
    plain.engine.error = ApiError(400, "max_tokens=9 is too much", param="max_tokens")
    assert events(plain)[-1]["error"]["type"] == "invalid_request_error"


# ---- requests


def test_blocks_are_a_chat(thinks: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One", "cache_control": None}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "abc"},
                {"type": "text", "text": "Two"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {}, "toolset_name": "x"},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {"a": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "x", "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "toolset_name": None,
                    "content": [{"type": "text", "text": "y"}],
                },
                {"type": "text", "text": "Three"},
            ],
        },
    ]
    template = thinks.api.served.template
    seen: list[Any] = []
    render = template.render

    def kept(messages: Any, tools: Any, opens: bool, going_on: bool, variables: Any) -> str:
        seen.append((messages, tools, variables))
        return render(messages, tools, opens, going_on, variables)

    monkeypatch.setattr(template, "render", kept)
    system = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]
    more = {"eager_input_streaming": True, "input_examples": [{"word": "a"}]}
    whole(
        thinks,
        messages=messages,
        system=[*system, {"type": "text", "text": "brief."}],
        tools=[TOOL, {**TOOL, "name": "b", "type": "custom", **more}],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    found, tools, switches = seen[0]
    assert found[:2] == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "One"},
    ]
    turn = found[2]
    assert (turn["role"], turn["content"], turn["reasoning_content"]) == ("assistant", "Two", "Hm")
    called = [(call["id"], call["function"]["arguments"]) for call in turn["tool_calls"]]
    assert called == [("t1", "{}"), ("t2", '{"a": "é"}')]
    assert found[3:] == [
        {"role": "tool", "content": "x", "tool_call_id": "t1"},
        {"role": "tool", "content": "y", "tool_call_id": "t2"},
        {"role": "user", "content": "Three"},
    ]
    assert [tool["function"]["name"] for tool in tools] == ["look_up", "b"]
    assert tools[0]["function"]["parameters"] == TOOL["input_schema"]
    assert tools[1] == {**tools[0], "function": {**tools[0]["function"], "name": "b"}}
    assert switches == {"enable_thinking": True, "thinking": True}
    whole(thinks, tools=[TOOL], tool_choice={"type": "none"})
    assert seen[1][1:] == ([], {})


def test_a_last_turn_of_the_assistants_goes_on(plain: Scripted) -> None:
    turns = [*TURN, {"role": "assistant", "content": [{"type": "text", "text": "I am"}]}]
    assert whole(plain, messages=turns)["content"] == [{"type": "text", "text": "Hello"}]
    assert plain.engine.prompt.endswith("user: Hi\nassistant: I am")
    found = plain.ask(COUNT, messages=turns)
    assert found == {"input_tokens": len(plain.engine.seen[0].prompt)}


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_last_turn_of_the_assistants_is_none(plain: Scripted, content: Any) -> None:
    """Such as an answer that ended at once."""
    counted = plain.ask(COUNT, messages=TURN)
    whole(plain)
    turns = [*TURN, {"role": "assistant", "content": content}]
    whole(plain, messages=turns)
    assert plain.engine.seen[0].prompt == plain.engine.seen[1].prompt
    assert plain.ask(COUNT, messages=turns) == counted


def test_an_answer_may_be_sent_back(thinks: Scripted) -> None:
    thinks.engine.text = f"{THOUGHT}I look.\n{CALL}"
    found = whole(thinks, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": found["content"][2]["id"]}
    found["content"][1]["a_field"] = None  # as of an object of which a client dumped every field
    turns = [*TURN, {"role": "assistant", "content": found["content"]}]
    whole(
        thinks, messages=[*turns, {"role": "user", "content": [{**result, "content": "a letter"}]}]
    )
    assert thinks.engine.prompt.endswith("assistant: I look.\ntool: a letter\nassistant:")


@pytest.mark.parametrize(
    ("choice", "one"),
    [
        ({"type": "any"}, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
        ({"type": "tool", "name": "look_up"}, True),
    ],
)
def test_forced_calls(plain: Scripted, choice: dict[str, Any], one: bool) -> None:
    plain.engine.text = CALL
    found = whole(plain, tools=[TOOL], tool_choice=choice)
    assert found["stop_reason"] == "tool_use"
    structured = plain.engine.seen[0].params.structured
    assert structured is not None
    assert f'"stop_after_first": {json.dumps(one)}' in structured.value


def test_a_schema_for_the_text(plain: Scripted) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    whole(plain, output_config={"effort": "low", "format": form})
    structured = plain.engine.seen[0].params.structured
    assert structured is not None
    assert json.loads(structured.value) == schema


def test_sampling_and_fields_without_effect(plain: Scripted) -> None:
    whole(
        plain,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=5,
        stop_sequences=["x"],
        metadata={"user_id": "me"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        tool_choice={"type": "auto"},
    )
    (request,) = plain.engine.seen
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 3, 5)
    assert (params.max_tokens, params.stop, request.user) == (64, ("x",), "me")
    answer = plain.client.post(
        PATH + "?beta=true", json={"messages": TURN, "max_tokens": 5, "speed": "fast"}
    )
    assert answer.headers["x-rorqual-ignored"] == "speed"


def test_tokens_are_counted_as_a_message_has_them(plain: Scripted) -> None:
    body = {"messages": TURN, "system": "Be brief.", "tools": [TOOL], "model": NAME}
    found = plain.ask(COUNT, **body)
    check("MessageTokensCount", found)
    whole(plain, **body)
    assert found == {"input_tokens": len(plain.engine.seen[0].prompt)}
    answer = plain.client.post(COUNT, json={**body, "speed": "fast"})
    assert answer.headers["x-rorqual-ignored"] == "speed"
    answer = plain.client.post(COUNT, json={**body, "model": "other"})
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: should be an integer"),
    ({"max_tokens": 0}, "max_tokens: should be greater"),
    ({"messages": None}, "messages: should be an array of messages"),
    ({"messages": []}, "messages has 0 items"),
    ({"messages": [5]}, "messages.0: should be an object"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: should be 'user'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content: is required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: should be a string or"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages.0.content.0.type: 'image' is not supported here; accepted: text, tool_result",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "messages.0.content.0.type: 'document' is not supported",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
        "messages.0.content.0.type: 'server_tool_use' is not supported",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}
                    ],
                }
            ]
        },
        "messages.0.content.0.content.0.type: 'image' is not supported",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
        "messages.0.content.0.name: is required",
    ),
    ({"system": 5}, "system: should be a string or an array of blocks"),
    ({"stop_sequences": ["a", 5]}, "stop_sequences.1: should be a string"),
    ({"stop": ["a"]}, "use stop_sequences"),
    ({"tools": 5}, "tools: should be an array"),
    ({"tools": [{"name": "a"}]}, "tools.0.input_schema: is required"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools.0.type: 'web_search_20250305' is not supported here; accepted: custom",
    ),
    ({"tool_choice": "auto"}, "tool_choice: should be an object"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type: 'required' is not supported"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "not among the tools"),
    ({"thinking": {"type": "some"}}, "thinking.type: should be"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id: should be a string"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"container": "a"}, "container is not supported"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "http://a"}}}},
        "output_config.format",
    ),
    ({"temperature": "hot"}, "temperature: should be a number"),
    ({"system": "\ud800"}, "system: the text cannot be encoded"),
    ({"n": 2}, "n is not supported"),
    ({"prompt_logprobs": 1}, "prompt_logprobs is not supported on this route"),
    (
        {
            "messages": [
                *TURN,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                },
            ]
        },
        "a last turn of the assistant's is continued; accepted: one of text without calls",
    ),
    ({"messages": [{"role": "assistant", "content": ""}]}, "messages: a last turn"),
    (
        {
            "messages": [
                *TURN,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]},
            ]
        },
        "messages: a last turn of the assistant's",
    ),
]


@pytest.mark.parametrize(("fields", "words"), MISTAKES)
def test_mistakes_are_named(plain: Scripted, fields: dict[str, Any], words: str) -> None:
    error = plain.refusal(PATH, **{"messages": TURN, "max_tokens": 5, **fields})
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert not plain.engine.seen
    if not {"max_tokens", "tool_choice", "output_config"} & set(fields):  # no matter of a prompt
        assert words in plain.refusal(COUNT, **{"messages": TURN, **fields})["message"]


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, 5]
)
def test_threads_are_refused_in_the_clients_terms(plain: Scripted, thread: Any) -> None:
    """The client sends the whole conversation once it is told; the new messages alone would be
    answered without what was said before."""
    for path, more in ((PATH, {"max_tokens": 5}), (COUNT, {})):
        error = plain.refusal(path, messages=TURN, thread=thread, **more)
        assert error["details"]["error_code"] == "thread_unsupported_request"
        assert error["message"].startswith("thread is not supported")
        assert plain.ask(path, messages=TURN, thread=None, **more)
    assert "details" not in plain.refusal(PATH, messages=[], max_tokens=5)


PLACES: list[tuple[Any, ...]] = [
    *((name,) for name in ("messages", "system", "tools", "tool_choice", "stop_sequences")),
    *((name,) for name in ("max_tokens", "temperature", "top_p", "top_k", "metadata", "thinking")),
    *((name,) for name in ("stream", "model", "output_config", "cache_control")),
    ("messages", 0),
    ("messages", 0, "role"),
    ("messages", 0, "content"),
    ("messages", 0, "content", 0),
    ("messages", 0, "content", 0, "type"),
    ("messages", 0, "content", 0, "text"),
    ("messages", 0, "content", 0, "cache_control"),
    ("system", 0),
    ("system", 0, "text"),
    ("tools", 0),
    ("tools", 0, "name"),
    ("tools", 0, "input_schema"),
    ("tools", 0, "input_schema", "minimum"),
    ("tool_choice", "type"),
    ("tool_choice", "name"),
    ("stop_sequences", 0),
    ("metadata", "user_id"),
    ("thinking", "budget_tokens"),
    ("output_config", "format"),
    ("output_config", "format", "schema"),
]
BASE = {
    "max_tokens": 5,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "look_up"},
}


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize("where", PLACES, ids=lambda where: ".".join(map(str, where)))
def test_odd_values_anywhere(plain: Scripted, where: tuple[Any, ...]) -> None:
    plain.engine.text = CALL
    for value in (*ODD_NUMBERS, *ODD_STRINGS, None, [[]], [None], {"a": []}):
        body = with_value(BASE, where, value)
        answer = plain.client.post(PATH, content=json.dumps(body), headers=JSON)
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["type"] == "error"
            assert where[0] in answer.json()["error"]["message"] or where[0] in (
                "tools",
                "output_config",
                "model",
            )


# ---- errors and keys


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ApiError(400, "a"), "invalid_request_error"),
        (ApiError(401, "a"), "authentication_error"),
        (ApiError(404, "a"), "not_found_error"),
        (ApiError(408, "a"), "invalid_request_error"),
        (ApiError(413, "a"), "request_too_large"),
        (queue_full("full", 1), "rate_limit_error"),
        (engine_died(), "api_error"),
        (not_ready("a"), "overloaded_error"),
        (timed_out(1.0), "timeout_error"),
    ],
)
def test_errors_have_anthropics_shape(error: ApiError, kind: str) -> None:
    found = json.loads(anthropic_body(error))
    assert (found["type"], found["error"]["type"]) == ("error", kind)
    assert found["error"]["message"] == error.message


def test_which_paths_are_anthropics() -> None:
    assert is_anthropic(PATH)
    assert is_anthropic(COUNT)
    assert not is_anthropic("/v1/messages_of_mine")
    assert not is_anthropic("/v1/chat/completions")


def test_a_key_in_either_header() -> None:
    with scripted(reasoning=False, key="sesame") as server:
        body = {"messages": TURN, "max_tokens": 5}

        def status(path: str, body: Any = body, server: Any = server, **headers: str) -> Any:
            return server.client.post(path, json=body, headers=headers).status_code

        assert status(PATH, **{"x-api-key": "sesame"}) == 200
        assert status(COUNT, **{"x-api-key": "sesame"}) == 200
        assert status(PATH, authorization="Bearer sesame") == 200
        assert status(PATH, authorization="Basic abc", **{"x-api-key": "sesame"}) == 200
        assert status(PATH) == status(PATH, **{"x-api-key": "wrong"}) == 401
        assert status(PATH, authorization="Bearer wrong", **{"x-api-key": "sesame"}) == 401
        assert status("/v1/chat/completions", **{"x-api-key": "sesame"}) == 401
        assert server.engine.seen[0].client == "key 0"
        answer = server.client.post(PATH, json=body)
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_other_errors_on_these_paths(plain: Scripted) -> None:
    wrong = [
        (plain.client.get(PATH), 405),
        (plain.client.post(PATH, content=b"{", headers=JSON), 400),
        (plain.client.post(PATH, content=b"{}"), 415),
        (plain.client.post(PATH, content=b"{}", headers={**JSON, "content-length": "9" * 9}), 413),
        (plain.client.post(PATH + "/batches", json={}), 404),
    ]
    for answer, status in wrong:
        assert answer.status_code == status
        assert answer.json()["type"] == "error"
    plain.api.draining = True
    answer = plain.client.post(PATH, json={"messages": TURN, "max_tokens": 5})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
    assert answer.headers["retry-after"]
    assert answer.headers["x-rorqual-error"] == "not_ready", "the format has no code"


def test_a_real_server(server: Running) -> None:
    body = {"messages": TURN, "max_tokens": 6, "temperature": 0}
    status, found = server.request("POST", PATH, body)
    assert status == 200
    assert (found["stop_reason"], found["usage"]["output_tokens"]) == ("max_tokens", 6)
    status, text = server.request("POST", PATH, {**body, "stream": True})
    events = [json.loads(part.split("data: ")[1]) for part in text.strip().split("\n\n")]
    assert put_together(events)["content"] == found["content"]


@pytest.mark.skipif(not OFFICIAL, reason="the package anthropic is not installed")
def test_the_official_client(server: Running) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    asked: Any = {"model": "rorqual-bundled", "max_tokens": 6, "messages": TURN}
    found = client.messages.create(**asked, extra_body={"temperature": 0})
    with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == found.content[0].text  # type: ignore[union-attr]
    count = client.messages.count_tokens(model="rorqual-bundled", messages=asked["messages"])
    usage = found.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.0\.type"):
        client.messages.create(**asked, tools=[{"type": "bash_20250124", "name": "bash"}])
