"""Every feature of the API, as the `openai` client sees it."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest

from tests.serve.conftest import MODEL
from tests.serve.running import Running

Client = openai.OpenAI

PROMPT = "The old gentleman looked at her and said"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Who is there?"}]},
]


def text(client: Client, **given: Any) -> Any:
    return client.completions.create(**{**GREEDY, "prompt": PROMPT, "max_tokens": 12, **given})


def chat(client: Client, **given: Any) -> Any:
    return client.chat.completions.create(**{**GREEDY, "messages": CHAT, "max_tokens": 12, **given})


# ---- models and state


def test_models(client: Client, server: Running):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_state_routes(client: Client, server: Running):
    text(client)
    assert server.get("/live") == {"status": "ok"}
    assert server.get("/health") == {"status": "ok"}
    assert server.get("/version")["version"]
    info = server.get("/server_info")
    assert info["engines"][0]["max_model_len"] == 512
    assert info["config"]["engine"]["dtype"] == "float32"
    server.wait_until(lambda: server.get("/stats")["recent"]["count"] > 0)
    stats = server.get("/stats")
    assert stats["recent"]["ttft"]["p50"] > 0
    engine = stats["engines"][0]
    assert engine["kv"]["pages"] > 0
    layers = engine["expert_load"]
    assert (len(layers), len(layers[0])) == (12, 16)
    assert sum(layers[0]) == sum(layers[5]) > 0


def test_metrics_are_prometheus_text(client: Client, server: Running):
    from prometheus_client.parser import text_string_to_metric_families

    text(client)
    server.wait_until(lambda: server.get("/stats")["engines"][0]["finished"].get("length", 0) > 0)
    _, body = server.request("GET", "/metrics")
    found = {family.name: family for family in text_string_to_metric_families(body)}
    for name in (
        "num_requests_running",
        "kv_cache_usage_perc",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_hits",
        "request_success",
    ):
        assert found[f"rorqual:{name}"].samples, name
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    ):
        samples = {
            sample.name.rsplit("_", 1)[1]: sample.value
            for sample in found[f"rorqual:{name}"].samples
        }
        assert samples["count"] > 0, name
        assert samples["bucket"] == samples["count"], "the last bucket holds everything"
    assert len(found["rorqual:expert_tokens"].samples) == 12 * 16


# ---- completions


def test_completion_shape(client: Client):
    out = text(client)
    assert out.id.startswith("cmpl-")
    assert out.object == "text_completion"
    assert out.model == MODEL
    assert (out.choices[0].finish_reason, out.choices[0].index) == ("length", 0)
    assert out.usage.completion_tokens == 12
    assert out.usage.total_tokens == out.usage.prompt_tokens + 12


def test_prompts_as_text_list_and_token_ids(client: Client):
    from rorqual.models.hub import BUNDLED
    from rorqual.text.tokenizer import Tokenizer

    ids = Tokenizer(BUNDLED).encode(PROMPT)
    one = text(client)
    assert one.usage.prompt_tokens == len(ids)
    several = text(client, prompt=[PROMPT, PROMPT])
    tokens = text(client, prompt=ids)
    lists = text(client, prompt=[ids, ids[:3]])
    assert [choice.text for choice in several.choices] == [one.choices[0].text] * 2
    assert several.usage.prompt_tokens == 2 * len(ids)
    assert tokens.choices[0].text == lists.choices[0].text == one.choices[0].text
    assert [choice.index for choice in lists.choices] == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: Client, stream: bool):
    plain = text(client).choices[0].text
    out = text(client, echo=True, stream=stream)
    shown = "".join(chunk.choices[0].text for chunk in out) if stream else out.choices[0].text
    assert shown == PROMPT + plain


def test_stream_equals_whole(client: Client):
    whole = text(client, max_tokens=40)
    chunks = list(text(client, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 40
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 10


def test_continuous_usage(client: Client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in text(client, stream=True, extra_body={"stream_options": options})
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_streams_of_several_choices(client: Client):
    whole = text(client, prompt=[PROMPT, "In the beginning"], n=2, temperature=0.9, seed=3)
    found = ["", "", "", ""]
    for chunk in text(
        client, prompt=[PROMPT, "In the beginning"], n=2, temperature=0.9, seed=3, stream=True
    ):
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == [choice.text for choice in whole.choices]
    assert found[0] != found[1]


def test_seed_repeats_and_n_differs(client: Client):
    out = [
        text(client, n=3, temperature=1.0, seed=5, extra_body={"ignore_eos": True})
        for _ in range(2)
    ]
    texts = [[choice.text for choice in one.choices] for one in out]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    assert out[0].usage.completion_tokens == 36
    assert text(client, n=2).choices[1].text == text(client).choices[0].text, (
        "greedy samples are equal"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: Client, stream: bool):
    plain = text(client, max_tokens=40).choices[0].text
    stop = plain[21:27]
    end = plain.index(stop)
    for include in (False, True):
        extra = {"include_stop_str_in_output": include}
        out = text(client, max_tokens=40, stop=["\x00no", stop], stream=stream, extra_body=extra)
        choices = [chunk.choices[0] for chunk in out] if stream else [out.choices[0]]
        assert "".join(choice.text for choice in choices) == plain[: end + len(stop) * include]
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].model_dump()["stop_reason"] == stop


def test_stop_strings_count_only_what_was_needed(client: Client):
    plain = text(client, max_tokens=40).choices[0].text
    assert text(client, max_tokens=40, stop=plain[10:14]).usage.completion_tokens < 20


def test_eos_ignore_eos_min_tokens_and_stop_ids(client: Client):
    eos = {"1": 100}
    out = text(client, logit_bias=eos)
    assert (out.choices[0].text, out.choices[0].finish_reason, out.usage.completion_tokens) == (
        "",
        "stop",
        1,
    )
    assert (
        text(client, logit_bias=eos, extra_body={"ignore_eos": True}).usage.completion_tokens == 12
    )
    assert text(client, logit_bias=eos, extra_body={"min_tokens": 5}).usage.completion_tokens == 6
    stopped = text(client, logit_bias={"50": 100}, extra_body={"stop_token_ids": [50]})
    assert stopped.choices[0].model_dump()["stop_reason"] == 50


def test_sampling_fields_take_effect(client: Client):
    plain = text(client, max_tokens=24).choices[0].text
    for extra in (
        {"repetition_penalty": 1.8},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
    ):
        assert text(client, max_tokens=24, extra_body=extra).choices[0].text != plain, extra
    for extra in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert (
            text(client, max_tokens=24, temperature=1.5, extra_body=extra).choices[0].text == plain
        ), extra


def test_logprobs(client: Client):
    found = text(client, logprobs=3).choices[0]
    assert "".join(found.logprobs.tokens) == found.text
    assert found.logprobs.text_offset == [
        sum(len(t) for t in found.logprobs.tokens[:i]) for i in range(12)
    ]
    for token, logprob, top in zip(
        found.logprobs.tokens,
        found.logprobs.token_logprobs,
        found.logprobs.top_logprobs,
        strict=True,
    ):
        assert len(top) <= 3
        assert top[token] == logprob == max(top.values())
    streamed = [chunk.choices[0].logprobs for chunk in text(client, logprobs=3, stream=True)]
    assert [
        token for logprobs in streamed if logprobs for token in logprobs.tokens
    ] == found.logprobs.tokens
    assert [
        offset for logprobs in streamed if logprobs for offset in logprobs.text_offset
    ] == found.logprobs.text_offset


def test_log_probabilities_by_token_id(client: Client):
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    named = text(client, logprobs=2, extra_body=extra).choices[0]
    ids = [f"token_id:{token}" for token in named.model_dump()["token_ids"]]
    assert named.logprobs.tokens == ids
    assert all(name in top for name, top in zip(ids, named.logprobs.top_logprobs, strict=True))
    plain = text(client, logprobs=2).choices[0].logprobs
    assert named.logprobs.text_offset == plain.text_offset
    assert named.logprobs.token_logprobs == plain.token_logprobs
    for stream in (False, True):
        out = chat(client, logprobs=True, top_logprobs=1, stream=stream, extra_body=extra)
        choices = [chunk.choices[0] for chunk in out] if stream else [out.choices[0]]
        ids = [i for choice in choices for i in choice.model_dump().get("token_ids") or ()]
        entries = [e for choice in choices if choice.logprobs for e in choice.logprobs.content]
        assert [entry.token for entry in entries] == [f"token_id:{token}" for token in ids]
        assert [entry.top_logprobs[0].token for entry in entries] == [e.token for e in entries]


def test_tokens_and_words_that_are_left_out(client: Client):
    ids = {"return_token_ids": True}
    said = text(client, extra_body=ids).choices[0]
    tokens = said.model_dump()["token_ids"]
    allowed = sorted(set(tokens[:3]))
    for given in ({"temperature": 0}, {"temperature": 1.0, "n": 3}, {"temperature": 2, "seed": 1}):
        extra = {**ids, "allowed_token_ids": allowed, "ignore_eos": True}
        for choice in text(client, **given, extra_body=extra).choices:
            assert set(choice.model_dump()["token_ids"]) <= set(allowed)
    word = next(word for word in said.text.split() if word.isalpha())
    other = text(client, extra_body={"bad_words": [word]}).choices[0].text
    assert word not in other.split()
    assert other[: said.text.index(word) - 1] == said.text[: said.text.index(word) - 1]


def test_a_structure_of_some_tokens(client: Client):
    """Both hold, and where they leave nothing the answer ends."""
    yes = text(client, extra_body={"guided_choice": ["yes"], "return_token_ids": True})
    tokens = yes.choices[0].model_dump()["token_ids"]
    for allowed, found in ((tokens[:-1], "yes"), ([4000], "")):
        extra = {"guided_choice": ["yes", "no"], "allowed_token_ids": allowed}
        choice = text(client, temperature=1.0, extra_body=extra).choices[0]
        assert (choice.text, choice.finish_reason) == (found, "stop")


def test_cached_tokens_and_salts(client: Client, server: Running):
    prompt = (
        "A long beginning that fills several pages of the cache, so that it can be found "
        "again when it is sent once more. "
    ) * 2
    server.request("POST", "/reset_prefix_cache")
    cached = [
        text(
            client, prompt=prompt, max_tokens=2, extra_body=salt
        ).usage.prompt_tokens_details.cached_tokens
        for salt in ({}, {}, {"cache_salt": "tenant"}, {"cache_salt": "tenant"})
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] >= 16
    server.request("POST", "/reset_prefix_cache")
    both = [
        text(client, prompt=[prompt, "A" + prompt], max_tokens=2, n=2).usage.prompt_tokens_details
        for _ in range(2)
    ]
    assert both[0].cached_tokens == 0, "a prompt's second choice finds what its first one computed"
    assert both[1].cached_tokens >= 2 * cached[1] - 16, "of both prompts"


# ---- chat


def test_chat_shape(client: Client):
    out = chat(client)
    assert out.id.startswith("chatcmpl-")
    assert out.object == "chat.completion"
    message = out.choices[0].message
    assert (message.role, out.choices[0].finish_reason, out.usage.completion_tokens) == (
        "assistant",
        "length",
        12,
    )
    assert message.content
    assert message.tool_calls is None


def test_chat_of_a_base_model_is_plain_lines(client: Client):
    """What the built-in template makes of a conversation is what a plain completion of that text
    gives."""
    lines = "system: Be brief.\nuser: Who is there?\nassistant:"
    assert chat(client).choices[0].message.content == text(client, prompt=lines).choices[0].text


def test_chat_stream(client: Client):
    whole = chat(client).choices[0].message.content
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12


def test_chat_limits_and_defaults(client: Client):
    assert chat(client, max_tokens=None, max_completion_tokens=7).usage.completion_tokens == 7
    unbounded = chat(client, max_tokens=None, extra_body={"ignore_eos": True})
    assert unbounded.usage.total_tokens == 512, "without a limit the context is"


def test_chat_logprobs(client: Client):
    found = chat(client, logprobs=True, top_logprobs=2).choices[0]
    entries = found.logprobs.content
    assert "".join(entry.token for entry in entries) == found.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert bytes(entry.bytes).decode() == entry.token
    streamed = list(chat(client, logprobs=True, top_logprobs=2, stream=True))
    tokens = [
        entry.token
        for chunk in streamed
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert tokens == [entry.token for entry in entries]
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == found.message.content
    )


def test_fields_without_effect_are_accepted(client: Client):
    plain = chat(client).choices[0].message.content
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "verbosity": "low",
    }
    more = {
        "prompt_cache_key": "k",
        "reasoning_effort": "low",
        "modalities": ["text"],
        "parallel_tool_calls": True,
    }
    assert chat(client, extra_body={**fields, **more}).choices[0].message.content == plain


def test_async_client_with_many_streams(server: Running):
    import asyncio

    async def one(async_client: openai.AsyncOpenAI, i: int) -> str:
        stream = await async_client.completions.create(
            **GREEDY, prompt=f"{PROMPT} {i}", max_tokens=20, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as async_client:
            return await asyncio.gather(*(one(async_client, i) for i in range(40)))

    assert all(asyncio.run(all_of_them()))
    server.wait_until(lambda: server.held_pages() == 0)


# ---- tools and reasoning, the text forced by a grammar

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "The weather to come.",
            "parameters": PARAMETERS,
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
NAMED = {"type": "function", "function": {"name": "forecast"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_tool_call(client: Client, choice: Any):
    out = chat(
        client,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=1.0,
        seed=4,
    ).choices[0]
    assert out.finish_reason == "tool_calls"
    assert out.message.content is None
    (call,) = out.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    if choice is NAMED:
        assert call.function.name == "forecast"
    assert set(arguments) == ({"city", "days"} if call.function.name == "forecast" else set())


def test_forced_tool_call_streams_arguments_as_they_come(client: Client):
    given = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200, "seed": 4, "temperature": 1.0}
    chunks = list(chat(client, stream=True, **given))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == "forecast"
    assert all(delta.function.name is None and delta.index == 0 for delta in deltas[1:])
    streamed = "".join(delta.function.arguments for delta in deltas)
    assert len(deltas) > 4
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert streamed == chat(client, **given).choices[0].message.tool_calls[0].function.arguments


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_cut_short_is_no_content(client: Client, stream: bool):
    out = chat(client, tools=TOOLS, tool_choice=NAMED, max_tokens=3, stream=stream)
    parts = [chunk.choices[0].delta for chunk in out] if stream else [out.choices[0].message]
    assert not any(part.content or part.tool_calls for part in parts)


def test_auto_finds_calls_in_the_text(client: Client):
    """The grammar stands for a model that has learnt the format."""
    calls = (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>{"name": '
        '"now", "arguments": {"a": 1}}</tool_call>'
    )
    said = "Let me see. " + calls
    body = {
        "tools": TOOLS,
        "tool_choice": "auto",
        "max_tokens": 200,
        "extra_body": {"guided_choice": [said]},
    }
    out = chat(client, **body).choices[0]
    assert out.finish_reason == "tool_calls"
    assert out.message.content == "Let me see."
    assert [(call.function.name, call.function.arguments) for call in out.message.tool_calls] == [
        ("now", "{}"),
        ("now", '{"a": 1}'),
    ]
    assert len({call.id for call in out.message.tool_calls}) == 2
    chunks = list(chat(client, stream=True, **body))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me see."
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [delta.function.name for delta in deltas if delta.function.name] == ["now", "now"]
    unread = chat(client, **{**body, "tool_choice": "none"}).choices[0]
    assert unread.message.content == said, "with tool_choice none the text is only text"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_nobody_forced_is_cut_like_one(client: Client, stream: bool):
    said = 'So. <tool_call>\n{"name": "now", "arguments": {"where": "here"}}\n</tool_call>'
    seen = set()
    for most in (8, 16, 24, 40):
        extra = {"guided_choice": [said]}
        out = chat(client, tools=TOOLS, max_tokens=most, stream=stream, extra_body=extra)
        choices = [chunk.choices[0] for chunk in out] if stream else [out.choices[0]]
        parts = [choice.delta if stream else choice.message for choice in choices]
        text = "".join(part.content or "" for part in parts)
        calls = [call for part in parts for call in part.tool_calls or ()]
        reason = choices[-1].finish_reason
        assert reason == "length" or (reason == "tool_calls" and calls)
        assert "{" not in text
        seen.add((text, bool(calls)))
    assert ("So.", True) in seen


def test_the_last_message_goes_on(client: Client):
    begun = [*CHAT, {"role": "assistant", "content": "It is the old"}]
    lines = "system: Be brief.\nuser: Who is there?\nassistant: It is the old"
    wanted = text(client, prompt=lines).choices[0].text
    for extra in ({}, {"add_generation_prompt": False}):
        extra = {**extra, "continue_final_message": True}
        assert chat(client, messages=begun, extra_body=extra).choices[0].message.content == wanted
    bare = text(client, prompt=lines.rpartition("\n")[0]).choices[0].text
    extra = {"add_generation_prompt": False, "chat_template_kwargs": {"unused": [1, {"a": "b"}]}}
    assert chat(client, extra_body=extra).choices[0].message.content == bare


def test_an_answer_with_tool_calls_can_be_sent_back(client: Client):
    message = chat(client, tools=TOOLS, tool_choice=NAMED, max_tokens=200).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    assert (
        chat(client, messages=[*CHAT, message.model_dump(), result], tools=TOOLS)
        .choices[0]
        .finish_reason
    )


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_split_off(client: Client, stream: bool):
    body = {
        "max_tokens": 100,
        "stream": stream,
        "extra_body": {"guided_choice": ["<think>\nfirst this\n</think>\n\nthen that"]},
    }
    out = chat(client, **body)
    parts = [chunk.choices[0].delta for chunk in out] if stream else [out.choices[0].message]
    assert (
        "".join(part.model_dump().get("reasoning_content") or "" for part in parts) == "first this"
    )
    assert "".join(part.content or "" for part in parts) == "then that"
    hidden = (
        chat(client, max_tokens=100, extra_body={**body["extra_body"], "include_reasoning": False})
        .choices[0]
        .message
    )
    assert "reasoning_content" not in hidden.model_dump()


# ---- structure


@pytest.mark.parametrize(
    "extra",
    [
        {"guided_regex": "[ab]{3}-[0-9]{2}"},
        {"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}},
        {"guided_grammar": 'root ::= [ab] [ab] [ab] "-" [0-9] [0-9]'},
        {"structured_outputs": {"grammar": 'root ::= [ab] [ab] [ab] "-" [0-9] [0-9]'}},
    ],
)
def test_regex_and_grammar(client: Client, extra: dict[str, Any]):
    import re

    out = text(client, temperature=1.0, max_tokens=30, n=4, extra_body=extra)
    assert all(
        re.fullmatch("[ab]{3}-[0-9]{2}", choice.text) and choice.finish_reason == "stop"
        for choice in out.choices
    )


def test_choice(client: Client):
    for extra in (
        {"guided_choice": ["yes", "no", "perhaps"]},
        {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    ):
        out = text(client, temperature=1.0, n=6, max_tokens=20, extra_body=extra)
        assert {choice.text for choice in out.choices} <= {"yes", "no", "perhaps"}


def test_response_format(client: Client):
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "f", "schema": PARAMETERS, "strict": True},
    }
    found = chat(client, response_format=schema, max_tokens=200, temperature=1.0).choices[0]
    assert found.finish_reason == "stop"
    assert set(json.loads(found.message.content)) == {"city", "days"}
    free = chat(client, response_format={"type": "json_object"}, max_tokens=400, seed=1).choices[0]
    if free.finish_reason == "stop":
        assert isinstance(json.loads(free.message.content), dict)
    assert free.message.content.startswith("{")


def test_structure_with_logprobs_and_penalties(client: Client):
    out = text(
        client,
        logprobs=1,
        presence_penalty=1.0,
        temperature=1.0,
        max_tokens=30,
        extra_body={"guided_regex": "[xyz]{6}"},
    )
    found = out.choices[0]
    assert "".join(found.logprobs.tokens[:-1]) == found.text, (
        "the last token is the end of sequence"
    )
    assert all(math.isfinite(p) for p in found.logprobs.token_logprobs)
