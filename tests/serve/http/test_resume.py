"""A stream that ends early goes on at a server with the same model, as if nothing had been: the
parts of both, put together, are the undisturbed stream's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.resuming import check_resumed, resume_field, stream
from tests.serve.running import Running, start_server

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = {"prompt": "My dear Elizabeth,", "max_tokens": 20}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SEEDED = {"seed": 7, "temperature": 1.0}

COUNTRY = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "maxLength": 6},
                "day": {"enum": ["now", "later"]},
            },
            "required": ["town", "day"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WHALES = "The 鯨 and the 🐋 met — twice."
THOUGHT = "<think>[a-z]{3,9}</think>[a-z]{3,9}"

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, {**PROMPT, "temperature": 0, **COUNTED}),
    "greedy chat": (CHAT, {**HELLO, "temperature": 0, **COUNTED}),
    "filters": (TEXT, {**PROMPT, **SEEDED, "top_p": 0.9, "top_k": 40, "min_p": 0.02}),
    "penalties": (
        CHAT,
        {
            **HELLO,
            **SEEDED,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.7,
        },
    ),
    "bias and bans": (
        TEXT,
        {**PROMPT, **SEEDED, "logit_bias": {"300": 4, "11": -5}, "bad_words": ["the", "my dear"]},
    ),
    "held end": (TEXT, {**PROMPT, **SEEDED, "min_tokens": 8, "logit_bias": {"1": 100}}),
    "length": (TEXT, {**PROMPT, "temperature": 0, "max_tokens": 3}),
    "the end": (CHAT, {**HELLO, "temperature": 0, "logit_bias": {"1": 14}, **COUNTED}),
    "stop token": (CHAT, {**HELLO, **SEEDED, "stop_token_ids": list(range(260, 324))}),
    "schema": (
        CHAT,
        {
            **HELLO,
            **SEEDED,
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA},
            },
        },
    ),
    "several": (
        TEXT,
        {**PROMPT, **SEEDED, "n": 3, "max_tokens": 8, "logit_bias": {"1": 9}, **COUNTED},
    ),
    "several chats": (CHAT, {**HELLO, **SEEDED, "n": 3, "max_tokens": 8}),
    "two prompts": (
        TEXT,
        {**PROMPT, "prompt": ["Dear", "My own"], "temperature": 0, "max_tokens": 6},
    ),
    "stop string": (
        TEXT,
        {**PROMPT, "temperature": 0, "stop": ["very much pleased", "sorry to hear"], **COUNTED},
    ),
    "stop string kept": (
        CHAT,
        {
            **HELLO,
            **SEEDED,
            "max_tokens": 60,
            "guided_choice": [WHALES],
            "stop": ["met — tw", "met — never"],
            "include_stop_str_in_output": True,
        },
    ),
    "characters": (TEXT, {**PROMPT, **SEEDED, "max_tokens": 60, "guided_choice": [WHALES]}),
    "cut character": (TEXT, {**PROMPT, **SEEDED, "max_tokens": 9, "guided_choice": [WHALES]}),
    "text logprobs": (
        TEXT,
        {**PROMPT, **SEEDED, "logprobs": 2, "echo": True, "return_token_ids": True},
    ),
    "no tokens": (TEXT, {**PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1, "stream": True}),
    "chat logprobs": (
        CHAT,
        {
            **HELLO,
            **SEEDED,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            **COUNTED,
        },
    ),
    "tool call": (
        CHAT,
        {
            **HELLO,
            **SEEDED,
            "max_tokens": 120,
            "tools": [COUNTRY],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    "cut tool call": (
        CHAT,
        {**HELLO, **SEEDED, "max_tokens": 42, "tools": [COUNTRY], "tool_choice": "required"},
    ),
    "reasoning": (CHAT, {**HELLO, **SEEDED, "max_tokens": 60, "guided_regex": THOUGHT, **COUNTED}),
    "reasoning logprobs": (
        CHAT,
        {**HELLO, **SEEDED, "max_tokens": 60, "guided_regex": THOUGHT, "logprobs": True},
    ),
}


# The first runs in `make test` too: it has the most.
FIRST = "several"
NAMES = [FIRST, *(name for name in BODIES if name != FIRST)]


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize("name", NAMES)
def test_a_stream_goes_on_wherever_it_was_cut(
    server: Running, name: str, request: pytest.FixtureRequest
) -> None:
    path, body = BODIES[name]
    some = request.config.getoption("--exhaustive") == "no"
    check_resumed(server.url, path, body, some)


ELSEWHERE = ("greedy", "penalties", "several", "chat logprobs", "tool call", "stop string")
SMALL = ("--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--num-speculative-tokens", "2", "--no-enable-prefix-caching"), ELSEWHERE),
        (("--dp", "2"), ELSEWHERE[1:3]),
        (("--replicas", "2"), ELSEWHERE[1:3]),
    ],
    ids=["drafts", "ranks", "engines"],
)
def test_it_goes_on_elsewhere(options: tuple[str, ...], names: tuple[str, ...]) -> None:
    with start_server(*SMALL, *options) as server:
        for name in names:
            path, body = BODIES[name]
            check_resumed(server.url, path, body, some=True)


def given(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rorqual_resume": {"id": "cmpl-1", "created": 1, "choices": [*choices], **more}}


def refusal(server: Running, path: str, body: dict[str, Any]) -> str:
    status, answer = server.request("POST", path, {"stream": True, **body})
    assert status == 400, answer
    return str(answer["error"]["message"])


def choice(*tokens: int, index: int = 0) -> dict[str, Any]:
    return {"index": index, "token_ids": [*tokens]}


WRONG: list[tuple[dict[str, Any], str]] = [
    (given(choice(9), index=1), "not known here"),
    (given(choice(4096)), "4096 is no token id; accepted: 0 to 4095"),
    (given(choice(-1)), "greater than or equal to 0"),
    (given(choice(9, index=1)), "there is no choice 1; accepted: 0 to 0"),
    (given(choice(9), choice(8)), "choice 0 is listed twice"),
    (given(choice(*range(300, 321))), "it has 21 tokens, more than max_tokens=20"),
    ({**given(choice(*range(300, 810))), "max_tokens": 600}, "at most 507"),
    (given(choice(300, 1, 301)), "it goes on after its end, which is token 2"),
    ({**given(choice(385, 2538)), "stop": ["all"]}, "it goes on after its end, which is token 1"),
    ({**given(choice(9)), "stream": False}, "rorqual_resume needs stream to be true"),
    ({**given(choice(683)), "guided_regex": "[0-9]{3}"}, "does not allow token id 683 at place 0"),
    ({**given(choice()), "use_beam_search": True}, "use_beam_search is not supported"),
    ({**given(choice()), "n": 9}, "n=9 is out of range"),
    (given(choice(), id="a b"), "rorqual_resume.id"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG)
def test_what_cannot_have_been_is_refused(
    server: Running, fields: dict[str, Any], words: str
) -> None:
    assert words in refusal(server, TEXT, {**PROMPT, **fields})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": HELLO["messages"], "max_tokens": 4}),
    ],
)
def test_other_apis_do_not_go_on(server: Running, path: str, body: dict[str, Any]) -> None:
    assert refusal(server, path, {**body, **given()}) == "rorqual_resume is not supported here"


def test_no_comment_comes_unasked(server: Running) -> None:
    """A stream may go on without them."""
    body = {**PROMPT, "temperature": 0, "max_tokens": 24, "stream": True}
    status, plain = server.request("POST", TEXT, body)
    assert status == 200
    assert ": rorqual" not in plain
    whole = stream(server.url, TEXT, body)
    given = resume_field(whole[:2])
    status, rest = server.request("POST", TEXT, {**body, "rorqual_resume": given})
    events = [json.loads(line[6:]) for line in rest.split("\n\n")[:-2]]
    # a server that is behind puts two tokens into one chunk
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(
        event.data["choices"][0]["text"] for event in whole[2:]
    )
    assert {event["id"] for event in events} == {whole[0].data["id"]}


def test_nothing_is_left_to_say(server: Running) -> None:
    """Every choice has ended: what is left of the stream comes without an engine."""
    body = {**PROMPT, **SEEDED, "n": 2, "max_tokens": 3, "stream_options": {"include_usage": True}}
    whole = stream(server.url, TEXT, body)
    (last,) = stream(server.url, TEXT, body, rorqual_resume=resume_field(whole[:-1]))
    assert last.data["choices"] == []
    assert last.data["usage"]["completion_tokens"] == 6
