"""Routes about tokens, and those that balancers ask."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from rorqual.models.hub import BUNDLED
from rorqual.serve.engines.pool import EnginePool, EngineSlot
from rorqual.serve.http.app import Api, create_app
from rorqual.serve.http.request_builder import Served
from rorqual.serve.limits import ServerLimits
from rorqual.serve.messages import Snapshot
from rorqual.text.chat_template import ChatTemplate
from rorqual.text.generation_config import GenerationDefaults
from rorqual.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(BUNDLED)
TURN = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def api() -> Iterator[Api]:
    template = ChatTemplate(TOKENIZER)
    defaults = GenerationDefaults((1,), {})
    served = Served(("m",), TOKENIZER, template, defaults, 4096, False, "hermes", "print")
    pool = EnginePool([{}], ServerLimits())
    yield Api(served, pool, ServerLimits(), "1", {"engine": {}})
    pool.kill()


@pytest.fixture
def client(api: Api) -> TestClient:
    return TestClient(create_app(api, None))


def ask(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("text", ["Hello, world", "", "é \N{SMILING CAT FACE WITH OPEN MOUTH}"])
def test_there_and_back(client: TestClient, text: str):
    found = ask(client, "/tokenize", prompt=text, add_special_tokens=False, model="m")
    assert found == {
        "count": len(found["tokens"]),
        "max_model_len": None,
        "tokens": TOKENIZER.encode(text, False),
        "token_strs": None,
    }
    assert ask(client, "/detokenize", tokens=found["tokens"], model="m") == {"prompt": text}
    shown = ask(client, "/tokenize", prompt=text, return_token_strs=True)
    assert shown["tokens"] == TOKENIZER.encode(text)
    assert [TOKENIZER.raw.token_to_id(word) for word in shown["token_strs"]] == shown["tokens"]


def test_messages_are_what_a_chat_begins_with(client: TestClient):
    found = ask(client, "/tokenize", messages=TURN)
    assert found["tokens"] == TOKENIZER.encode("user: Hello\nassistant:", True)
    found = ask(client, "/tokenize", messages=TURN, add_generation_prompt=False)
    assert found["tokens"] == TOKENIZER.encode("user: Hello", True)


def test_messages_that_go_on(client: TestClient):
    turns = [*TURN, {"role": "assistant", "content": "Well, "}]
    found = ask(client, "/tokenize", messages=turns, continue_final_message=True)
    assert found["tokens"] == TOKENIZER.encode("user: Hello\nassistant: Well, ", True)


GOES_ON = {"messages": TURN, "continue_final_message": True}
EMPTY = [*TURN, {"role": "assistant", "content": None}]


def with_variables(**given: Any) -> dict[str, Any]:
    return {"messages": TURN, "chat_template_kwargs": given}


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth - 1):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({**GOES_ON, "add_generation_prompt": True}, "continue_final_message", "exclude each"),
        ({**GOES_ON, "messages": EMPTY}, "continue_final_message", "a last message of text"),
        (with_variables(messages=[]), "chat_template_kwargs", "the template's own"),
        (with_variables(tools=[]), "chat_template_kwargs", "the template's own"),
        (with_variables(range=5), "chat_template_kwargs", "the template's own"),
        (with_variables(add_generation_prompt=False), "chat_template_kwargs", "a field of"),
        (with_variables(**{"a b": 1}), "chat_template_kwargs", "no name of a variable"),
        (with_variables(__class__=1), "chat_template_kwargs", "no name of a variable"),
        (with_variables(n=10**7), "chat_template_kwargs", "too large a number"),
        (with_variables(n={"x": [-2e9]}), "chat_template_kwargs", "too large a number"),
        (with_variables(n=nested(8)), "chat_template_kwargs", "nests deeper than 8"),
        (with_variables(n="x" * 4096), "chat_template_kwargs", "at most 4096"),
    ],
)
def test_what_a_template_may_not_be_asked(
    client: TestClient, body: dict[str, Any], param: str, message: str
):
    answer = client.post("/tokenize", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_variables_within_the_limits_pass(client: TestClient):
    fine = with_variables(thinking=True, n=10**6, text="x" * 3000, deep=nested(7), none=None)
    assert (
        ask(client, "/tokenize", **fine)["tokens"]
        == ask(client, "/tokenize", messages=TURN)["tokens"]
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": TURN}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ("/tokenize", {"prompt": "a", "surprise": 1}, "surprise"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_mistakes_are_named(client: TestClient, path: str, body: Any, param: str):
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert client.post(path, json={**body, "model": "other"}).status_code in (400, 404)


def test_another_model_is_404(client: TestClient):
    assert client.post("/tokenize", json={"prompt": "a", "model": "x"}).status_code == 404
    assert client.post("/detokenize", json={"tokens": [5], "model": "x"}).status_code == 404


def test_ping_is_health(api: Api, client: TestClient, monkeypatch: pytest.MonkeyPatch):
    asked = (client.get, client.head, client.post)
    assert {ask("/ping").status_code for ask in asked} == {503}
    engine = SimpleNamespace(info=None, snapshot=Snapshot(0.0))
    monkeypatch.setattr(EngineSlot, "serving", property(lambda self: engine))
    assert {ask("/ping").status_code for ask in asked} == {200}


def test_load_counts_open_requests(api: Api, client: TestClient):
    assert client.get("/load").json() == {"server_load": 0}
    api.running.add(object())  # type: ignore[arg-type]
    assert client.get("/load").json() == {"server_load": 1}
