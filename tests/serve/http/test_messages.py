"""What a caller reads of a body that is refused, before any engine is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from starlette.testclient import TestClient

from rorqual.errors import ECHOED
from rorqual.models.hub import BUNDLED
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.errors import ApiError
from rorqual.serve.http.app import Api, create_app
from rorqual.serve.http.protocol import ChatRequest, CompletionRequest
from rorqual.serve.http.request_builder import RequestBuilder, Served
from rorqual.serve.http.validation import FORMS
from rorqual.serve.launch import _uvicorn
from rorqual.serve.limits import ServerLimits
from rorqual.text.chat_template import ChatTemplate
from rorqual.text.generation_config import GenerationDefaults
from rorqual.text.tokenizer import Tokenizer

COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
TURN = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def api() -> Iterator[Api]:
    pool = EnginePool([{}], ServerLimits())
    names = SimpleNamespace(names=("model",))
    yield Api(names, pool, ServerLimits(), "1.2.3", {"engine": {}})  # type: ignore[arg-type]
    pool.kill()


@pytest.fixture
def client(api: Api) -> TestClient:
    return TestClient(create_app(api, None))


def refusal(client: TestClient, path: str, body: Any) -> tuple[str, str]:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    for inner in ("constrained", "list[", "dict[", "literal[", "NamedTool", "TextPart", "instance"):
        assert inner not in answer.text, "a name of the library's or of a class"
    return error["param"], error["message"]


PROMPT = FORMS["prompt"]
CONTENT = FORMS["messages.content"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": 5}, "prompt", f"prompt: should be {PROMPT}"),
        ({"prompt": {}}, "prompt", f"prompt: should be {PROMPT}"),
        ({"prompt": [1, "a"]}, "prompt.1", "prompt.1: should be an integer (prompt takes"),
        ({"prompt": ["a", 1]}, "prompt.1", "prompt.1: should be a string (prompt takes"),
        ({"prompt": [[1], []]}, "prompt.1", "prompt.1: List should have at least 1 item, not 0"),
        ({"prompt": []}, "prompt", "prompt: List should have at least 1 item, not 0"),
        ({"stop": 5}, "stop", "stop: should be a string or an array of strings"),
        ({"stop": ""}, "stop", "stop: String should have at least 1 character"),
        ({"stop": ["a", 5]}, "stop.1", "stop.1: should be a string"),
        ({"guided_json": 5}, "guided_json", "guided_json: should be an object or a string"),
        (
            {"structured_outputs": {"json": 5}},
            "structured_outputs.json",
            "structured_outputs.json: should be an object or a string",
        ),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "logit_bias.5: should be a number"),
        ({"stream_options": 5}, "stream_options", "stream_options: should be an object"),
        ({"temperature": "hot"}, "temperature", "temperature: should be a number"),
    ],
)
def test_a_completion(client: TestClient, fields: dict[str, Any], param: str, message: str):
    found = refusal(client, COMPLETE, {"prompt": "a", **fields})
    assert found[0] == param
    assert found[1].startswith(message)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content",
            f"messages.0.content: should be {CONTENT}",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "messages.0.content.0.type: should be 'text' (messages.0.content takes",
        ),
        ({"messages": [{"content": "a"}]}, "messages.0.role", "messages.0.role: is required"),
        ({"messages": [5]}, "messages.0", "messages.0: should be an object"),
        ({"tool_choice": 5}, "tool_choice", f"tool_choice: should be {FORMS['tool_choice']}"),
        ({"tool_choice": "any"}, "tool_choice", f"tool_choice: should be {FORMS['tool_choice']}"),
        ({"tool_choice": {}}, "tool_choice.type", "tool_choice.type: is required (tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any"}}},
            "tool_choice.allowed_tools.mode",
            "tool_choice.allowed_tools.mode: should be 'auto' or 'required' (tool_choice takes",
        ),
        (
            {"tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools",
            "tool_choice.allowed_tools: is required",
        ),
    ],
)
def test_a_chat(client: TestClient, fields: dict[str, Any], param: str, message: str):
    found = refusal(client, CHAT, {"messages": TURN, **fields})
    assert found[0] == param
    assert found[1].startswith(message)


def test_a_body_without_its_prompt(client: TestClient):
    assert refusal(client, COMPLETE, {}) == ("prompt", "prompt: is required")
    assert refusal(client, CHAT, [])[1] == "the body: should be an object"


def test_every_field_of_several_forms_says_which():
    def unions(model: type[BaseModel], name: str = "") -> Iterator[str]:
        for field, info in model.model_fields.items():
            path = f"{name}{info.alias or field}"
            origin = get_origin(info.annotation)
            kinds = [kind for kind in get_args(info.annotation) if kind is not type(None)]
            if origin in (Union, UnionType) and len(kinds) > 1:
                yield path
            for kind in models_in(info.annotation):
                yield from unions(kind, f"{path}.")

    def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        for kind in get_args(annotation):
            yield from models_in(kind)

    assert {*unions(ChatRequest), *unions(CompletionRequest)} == set(FORMS)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/jsonp", "x" * 9999])
@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_a_body_that_is_not_said_to_be_json_is_415(client: TestClient, path: str, kind: str | None):
    answer = client.post(path, content=b"{}", headers={"content-type": kind} if kind else {})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    assert len(answer.content) < 1000


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_by_any_of_its_names(client: TestClient, kind: str):
    answer = client.post(COMPLETE, content=b"{}", headers={"content-type": kind})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


# ---- what a request asks for


@pytest.fixture(scope="module")
def served() -> Served:
    tokenizer = Tokenizer(BUNDLED)
    defaults = GenerationDefaults((2,), {})
    return Served(
        ("model",), tokenizer, ChatTemplate(tokenizer), defaults, 4096, False, "hermes", "print"
    )


def refused(served: Served, api: Api, **fields: Any) -> ApiError:
    builder = RequestBuilder(served, api.pool, api.limits)
    with pytest.raises(ApiError) as found:
        asyncio.run(builder.completion(CompletionRequest(prompt="a", **fields), "me"))
    return found.value


@pytest.mark.parametrize("key", ["1_0", "٣", " 5", "+5", "-1", "", "x", "9" * 5000, "²"])
def test_a_key_of_logit_bias_is_digits(served: Served, api: Api, key: str):
    error = refused(served, api, logit_bias={key: 1.0})
    assert (error.status, error.param) == (400, "logit_bias")
    assert "token ids" in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {"4096": 1.0}}, {"stop_token_ids": [1, 4096]}], ids=["bias", "stop"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_ids_beyond_the_vocabulary_name_their_parameter(
    served: Served, api: Api, fields: dict[str, Any], stream: bool
):
    error = refused(served, api, **fields, stream=stream)
    assert (error.status, error.param) == (400, next(iter(fields)))
    assert "4096" in error.message
    assert "0 to 4095" in error.message


def test_what_is_said_back_is_short(served: Served, api: Api, client: TestClient):
    long = "x" * 100_000
    error = refused(served, api, model=long)
    assert error.status == 404
    assert len(error.message) < 2 * ECHOED
    assert len(client.get(f"/v1/models/{long[:9999]}").content) < 1000
    assert len(client.post(COMPLETE, json={"prompt": "a", long: 1}).content) < 1000
    assert (
        len(client.post(COMPLETE, json={"prompt": "a", "logit_bias": {long: "a"}}).content) < 1000
    )
    choice = {"type": "function", "function": {"name": long}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    builder = RequestBuilder(served, api.pool, api.limits)
    with pytest.raises(ApiError) as found:
        builder._tools(ChatRequest(messages=TURN, tools=tools, tool_choice=choice))  # type: ignore[arg-type]
    assert len(found.value.message) < 3 * ECHOED


FOREIGN = {"type": "object", "properties": {"a": {"$ref": "http://example.org/a.json"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": FOREIGN}, "guided_json"),
        ({"guided_json": json.dumps(FOREIGN)}, "guided_json"),
        ({"structured_outputs": {"json": FOREIGN}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": FOREIGN}}},
            "response_format",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": FOREIGN}}],
                "tool_choice": "required",
            },
            "tools.0.function.parameters",
        ),
    ],
    ids=["object", "string", "structured_outputs", "response_format", "tools"],
)
def test_a_schema_elsewhere_is_refused(
    served: Served, api: Api, fields: dict[str, Any], param: str
):
    builder = RequestBuilder(served, api.pool, api.limits)
    with pytest.raises(ApiError) as found:
        asyncio.run(builder.chat(ChatRequest.model_validate({"messages": TURN, **fields}), "me"))
    assert (found.value.status, found.value.param) == (400, param)
    assert "example.org" in found.value.message


def test_the_http_library_logs_as_everything_else():
    found = _uvicorn(None, ServerLimits())
    assert found.log_config is None
