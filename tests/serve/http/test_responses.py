"""OpenAI's Responses API: items and events as the official client reads them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rorqual.serve.errors import engine_died
from tests.serve.conftest import MODEL
from tests.serve.http.test_api_fuzz import ODD_NUMBERS, ODD_STRINGS, with_value
from tests.serve.running import Running
from tests.serve.scripted import CALL, JSON, NAME, THOUGHT, Scripted, scripted

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
NAMED = {"type": "function"}
TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "Looks a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    "strict": None,
}


def whole(server: Scripted, **body: Any) -> Any:
    found = server.ask(PATH, **{"input": "Hi", **body})
    Response.model_validate(found, strict=True)
    return found


def events(server: Scripted, **body: Any) -> list[dict[str, Any]]:
    found = server.stream(PATH, **{"input": "Hi", **body})
    for number, event in enumerate(found):
        EVENT.validate_json(json.dumps(event), strict=True)
        assert event["sequence_number"] == number
    return found


def kinds(found: list[dict[str, Any]]) -> list[str]:
    """Names of the events, deltas in a row as one."""
    names = [event["type"].removeprefix("response.") for event in found]
    return [
        name
        for i, name in enumerate(names)
        if not (name.endswith(".delta") and i and names[i - 1] == name)
    ]


def without_names(response: Any) -> Any:
    """What two answers to the same request have in common."""
    changing = ("id", "created_at", "completed_at", "call_id")
    if isinstance(response, dict):
        return {k: without_names(v) for k, v in response.items() if k not in changing}
    return [without_names(one) for one in response] if isinstance(response, list) else response


# ---- answers


def test_a_text_whole(plain: Scripted) -> None:
    plain.engine.cached = 2
    found = whole(plain, temperature=0.5, top_p=0.9, metadata={"a": "b"}, user="u")
    assert found["id"].startswith("resp_")
    assert (found["object"], found["status"], found["model"]) == ("response", "completed", NAME)
    (item,) = found["output"]
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert item["content"] == [part]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert (found["temperature"], found["top_p"]) == (0.5, 0.9)
    assert (found["metadata"], found["user"], found["store"]) == ({"a": "b"}, "u", False)
    assert found["error"] is found["incomplete_details"] is None
    count = len(plain.engine.seen[0].prompt)
    tokens = len(plain.engine.tokenizer.encode("Hello", False)) + 1
    assert found["usage"] == {
        "input_tokens": count,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": count + tokens,
    }


def test_a_text_streamed(plain: Scripted) -> None:
    plain.engine.text = "Well, there is nothing to be said of that."
    found = events(plain)
    assert kinds(found) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    deltas = [event["delta"] for event in found if event["type"].endswith("text.delta")]
    assert len(deltas) > 5
    assert "".join(deltas) == plain.engine.text == found[-4]["text"]
    assert found[2]["item"]["content"] == []
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["usage"] is None
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert without_names(found[-1]["response"]) == without_names(whole(plain))


def test_an_answer_cut_short(plain: Scripted) -> None:
    plain.engine.finish = "length"
    for found in (whole(plain), events(plain)[-1]["response"]):
        assert found["status"] == found["output"][0]["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}
        assert found["completed_at"] is None
    assert events(plain)[-1]["type"] == "response.incomplete"


def test_an_empty_answer_has_an_empty_text(plain: Scripted) -> None:
    plain.engine.text = ""
    assert Response.model_validate(whole(plain)).output_text == ""
    assert kinds(events(plain))[2:4] == ["output_item.added", "content_part.added"]


def test_reasoning_is_an_item_of_its_own(thinks: Scripted) -> None:
    thinks.engine.text = THOUGHT + "Yes."
    found = whole(thinks)
    thought, text = found["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert text["content"][0]["text"] == "Yes."
    tokens = found["usage"]["output_tokens_details"]["reasoning_tokens"]
    encode = thinks.engine.tokenizer.encode
    assert tokens == len(encode("<think>\nLet me see.\n</think>", False))
    streamed = events(thinks)
    assert kinds(streamed)[2:9] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
    ]
    assert without_names(streamed[-1]["response"]) == without_names(found)


def test_reasoning_tokens_where_no_token_ends_it() -> None:
    with scripted(reasoning=False) as server:
        object.__setattr__(server.api.served, "reasoning", True)
        server.engine.text = THOUGHT + "Yes."
        details = whole(server)["usage"]["output_tokens_details"]
        encode = server.engine.tokenizer.encode
        assert details["reasoning_tokens"] == len(encode("Let me see.", False))
        server.engine.text = "No thought."
        assert whole(server)["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_calls_after_reasoning_and_text(thinks: Scripted) -> None:
    thinks.engine.text = f"{THOUGHT}I look.\n{CALL}\n{CALL}"
    found = whole(thinks, tools=[TOOL])
    assert [item["type"] for item in found["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    first, second = found["output"][2:]
    assert (first["name"], json.loads(first["arguments"])) == ("look_up", {"word": "a"})
    assert first["call_id"] != second["call_id"]
    assert first["id"] != second["id"]
    streamed = events(thinks, tools=[TOOL])
    assert kinds(streamed)[-9:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    deltas = [event for event in streamed if event["type"].endswith("arguments.delta")]
    arguments = "".join(event["delta"] for event in deltas if event["output_index"] == 2)
    assert json.loads(arguments) == {"word": "a"}
    assert without_names(streamed[-1]["response"]) == without_names(found)


@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_log_probabilities_are_those_of_the_text(thinks: Scripted, thought: str) -> None:
    thinks.engine.text = thought + "Yes, indeed."
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    tokens = [*thinks.engine.tokenizer.encode("Yes, indeed.", False), 1]
    found = whole(thinks, **body)["output"][-1]["content"][0]["logprobs"]
    streamed = events(thinks, **body)
    streamed_logprobs = [
        entry
        for event in streamed
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    assert (
        found
        == streamed_logprobs
        == streamed[-1]["response"]["output"][-1]["content"][0]["logprobs"]
    )
    # the newlines after </think> are tokens behind it, though their text is not shown
    streamed_tokens = [entry["token"] for entry in found][len(found) - len(tokens) :]
    assert "".join(streamed_tokens[:-1]) == "Yes, indeed."
    assert len(found) - len(tokens) <= (2 if thought else 0)
    assert all(len(entry["top_logprobs"]) == 1 and entry["bytes"] for entry in found[:-1])
    assert whole(thinks)["output"][-1]["content"][0]["logprobs"] == []


def test_an_error_in_a_stream(plain: Scripted) -> None:
    plain.engine.error = engine_died()
    found = events(plain)
    assert kinds(found)[-2:] == ["error", "failed"]
    assert found[-2]["code"] == "engine_dead"
    response = found[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["output"][0]["status"] == "incomplete"
    answer = plain.client.post(PATH, json={"input": "Hi"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_dead"


# ---- requests


def test_instructions_and_items_are_a_chat(
    thinks: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [
        {"role": "user", "content": "One"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Two", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "x"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "y"}],
        },
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Z"}]},
    ]
    template = thinks.api.served.template
    seen: list[Any] = []
    render = template.render

    def kept(messages: Any, tools: Any, *more: Any) -> str:
        seen.append((messages, tools))
        return render(messages, tools, *more)

    monkeypatch.setattr(template, "render", kept)
    whole(thinks, input=items, instructions="Be brief.", tools=[TOOL])
    messages, tools = seen[0]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert messages[1] == {"role": "user", "content": "One"}
    turn = messages[2]
    assert (turn["role"], turn["content"], turn["reasoning_content"]) == ("assistant", "Two", "Hm")
    called = [(call["id"], call["function"]["arguments"]) for call in turn["tool_calls"]]
    assert called == [("c1", "{}"), ("c2", '{"a": 1}')]
    assert messages[3:] == [
        {"role": "tool", "content": "x", "tool_call_id": "c1"},
        {"role": "tool", "content": "y", "tool_call_id": "c2"},
        {"role": "system", "content": "Z"},
    ]
    assert tools[0]["function"]["name"] == "look_up"
    whole(thinks, tools=[TOOL], tool_choice="none")
    assert seen[1][1] == []


def test_an_answer_may_be_sent_back(thinks: Scripted) -> None:
    thinks.engine.text = f"{THOUGHT}I look.\n{CALL}"
    found = whole(thinks, tools=[TOOL])
    output = {"type": "function_call_output", "call_id": found["output"][2]["call_id"]}
    items = [{"role": "user", "content": "Hi"}, *found["output"], {**output, "output": "letter"}]
    dumped = Response.model_validate(found).model_dump()["output"]
    dumped[2]["a_field"] = None  # as of an object of which a client dumped every field
    for output in (found["output"], dumped):
        whole(thinks, input=[items[0], *output, items[-1]])
        assert thinks.engine.prompt.endswith("assistant: I look.\ntool: letter\nassistant:")


def test_parameters_that_cannot_be_enforced(plain: Scripted) -> None:
    wrong = {**TOOL, "name": "wrong", "parameters": {"type": "object", "not": {}}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{**NAMED, "name": "wrong"}]}
    for choice in ("required", {**NAMED, "name": "wrong"}, allowed):
        body = {"input": "Hi", "tools": [TOOL, wrong], "tool_choice": choice}
        answer = plain.client.post(PATH, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "tools.1.parameters")
        assert error["message"] == "tools.1.parameters: 'not' cannot be enforced"


def test_allowed_tools(plain: Scripted) -> None:
    other = {**TOOL, "name": "other"}
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "look_up"}],
    }
    plain.engine.text = CALL
    found = whole(plain, tools=[TOOL, other], tool_choice=choice)
    assert found["tool_choice"] == choice
    assert len(found["tools"]) == 2
    structured = plain.engine.seen[0].params.structured
    assert structured is not None
    assert "look_up" in structured.value
    assert "other" not in structured.value


@pytest.mark.parametrize("form", ["text", "json_object", "json_schema"])
def test_the_format_of_the_text(plain: Scripted, form: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given: dict[str, Any] = {"type": form}
    if form == "json_schema":
        given |= {"name": "n", "schema": schema, "strict": True}
    found = whole(plain, text={"format": given, "verbosity": "low"})
    assert found["text"] == {"format": given, "verbosity": "low"}
    structured = plain.engine.seen[0].params.structured
    assert (structured.kind if structured else "text") == form
    if form == "json_schema":
        assert structured is not None
        assert json.loads(structured.value) == schema


def test_fields_without_effect_and_those_of_vllm(plain: Scripted) -> None:
    whole(
        plain,
        store=False,
        background=False,
        previous_response_id=None,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        truncation="auto",
        max_tool_calls=3,
        service_tier="auto",
        max_output_tokens=7,
        top_k=3,
        seed=5,
        stop=["x"],
        tools=[],
    )
    params = plain.engine.seen[0].params
    assert (params.max_tokens, params.top_k, params.seed, params.stop) == (7, 3, 5, ("x",))


def test_unknown_fields_are_ignored_and_named(plain: Scripted) -> None:
    answer = plain.client.post(PATH, json={"input": "Hi", "moderation": {}})
    assert answer.headers["x-rorqual-ignored"] == "moderation"


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "should be a string or an array"),
    ({"input": 5}, "input", "should be a string or an array"),
    ({"input": []}, "input", "has 0 items"),
    ({"input": [5]}, "input.0", "should be an object"),
    ({"input": [{}]}, "input.0.type", "is required"),
    ({"input": [{"type": 5}]}, "input.0.type", "should be a string"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type", "not supported"),
    ({"input": [{"role": "robot", "content": ""}]}, "input.0.role", "should be 'user'"),
    ({"input": [{"role": "user"}]}, "input.0.content", "is required"),
    ({"input": [{"role": "user", "content": 5}]}, "input.0.content", "a string or an array"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0.type",
        "'input_image' is not supported here; accepted: input_text",
    ),
    ({"input": [{"role": "user", "content": "", "a": 1}]}, "input.0.a", "not known"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]},
        "input.0.output",
        "a string or an array",
    ),
    (
        {"input": [{"type": "reasoning", "encrypted_content": "abc"}]},
        "input.0.encrypted_content",
        "cannot be read",
    ),
    ({"store": True}, "store", "keeps no responses"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"background": True}, "background", "not supported"),
    ({"prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    ({"messages": []}, "messages", "use input"),
    ({"n": 2}, "n", "one answer"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "use /v1/chat/completions"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"tools": 5}, "tools", "should be an array"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search' is not supported"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name", "pattern"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading", "should be"),
    ({"tool_choice": "any"}, "tool_choice", "should be 'none'"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "not supported"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}},
        "tool_choice",
        "not among",
    ),
    (
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "b"}],
            },
        },
        "tool_choice.tools.0",
        "not among",
    ),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "not supported"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is required"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {"$ref": "http://a"}}}},
        "text.format",
        "",
    ),
    ({"include": ["a"]}, "include.0", "should be"),
    ({"top_logprobs": 2}, "top_logprobs", "needs include"),
    (
        {"top_logprobs": 21, "include": ["message.output_text.logprobs"]},
        "top_logprobs",
        "at most 20",
    ),
    ({"metadata": {"a": 5}}, "metadata.a", "should be a string"),
    ({"truncation": "some"}, "truncation", "should be 'auto'"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "needs stream"),
    ({"temperature": 10**400}, "temperature", ""),
    ({"instructions": "\ud800"}, "instructions", "surrogate"),
    ({"priority": 500}, "priority", ""),
]


@pytest.mark.parametrize(("fields", "param", "words"), MISTAKES)
def test_mistakes_are_named(plain: Scripted, fields: Any, param: str, words: str) -> None:
    error = plain.refusal(PATH, **{"input": "Hi", **fields})
    assert error["param"] == param
    assert words in error["message"]
    assert not plain.engine.seen


PLACES: list[tuple[Any, ...]] = [
    *((name,) for name in ("input", "instructions", "tools", "tool_choice", "text", "include")),
    *((name,) for name in ("reasoning", "metadata", "truncation", "user", "top_logprobs", "stop")),
    *(
        (name,)
        for name in ("max_output_tokens", "temperature", "top_p", "top_k", "stream", "model")
    ),
    ("input", 0),
    ("input", 0, "type"),
    ("input", 0, "role"),
    ("input", 0, "content"),
    ("input", 0, "content", 0),
    ("input", 0, "content", 0, "text"),
    ("input", 0, "content", 0, "annotations"),
    ("tools", 0),
    ("tools", 0, "name"),
    ("tools", 0, "parameters"),
    ("tools", 0, "parameters", "minimum"),
    ("tools", 0, "strict"),
    ("tool_choice", "type"),
    ("text", "format"),
    ("text", "format", "type"),
    ("text", "verbosity"),
    ("reasoning", "effort"),
    ("metadata", "a"),
]
BASE = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "look_up"},
}


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize("where", PLACES, ids=lambda where: ".".join(map(str, where)))
def test_odd_values_anywhere(plain: Scripted, where: tuple[Any, ...]) -> None:
    plain.engine.text = CALL
    for value in (*ODD_NUMBERS, *ODD_STRINGS, None, [[]], [None], {"a": []}):
        body = with_value(BASE, where, value)
        answer = plain.client.post(PATH, content=json.dumps(body), headers=JSON)
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert (error["param"] or where[0]).split(".")[0] in (where[0], "tool_choice", "body")


# ---- the official client


def test_the_official_client(client: openai.OpenAI, server: Running) -> None:
    asked: Any = {
        "model": MODEL,
        "temperature": 0,
        "max_output_tokens": 8,
        "input": "Who is there?",
    }
    found = client.responses.create(**asked, instructions="Be brief.")
    assert found.status == "incomplete"
    assert found.usage is not None
    assert found.usage.output_tokens == 8
    lines = "system: Be brief.\nuser: Who is there?\nassistant:"
    plain = client.completions.create(model=MODEL, prompt=lines, max_tokens=8, temperature=0)
    assert found.output_text == plain.choices[0].text
    with client.responses.stream(**asked, instructions="Be brief.") as stream:
        received = list(stream)
    assert received[-1].type == "response.incomplete"
    assert received[-1].response.output_text == found.output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(**asked, previous_response_id="resp_1")
