"""A stream that ends early goes on at a server with the same model, as if nothing had been: the
parts of both, put together, are the undisturbed stream's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.resuming import check_resumed, joined, resume_field, stream
from tests.serve.running import Running

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


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_goes_on_wherever_it_was_cut(server: Running, name: str) -> None:
    path, body = BODIES[name]
    want = check_resumed(server.url, path, body, some=False)
    print(want)
