"""What a body becomes: the prompt's tokens, the sampling parameters, the shape of the answer. No
engine runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from rorqual.errors import RequestError
from rorqual.models.hub import BUNDLED
from rorqual.request import MAX_BAD_WORD_TOKENS, SamplingParams
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.errors import ApiError
from rorqual.serve.http.calls import Call
from rorqual.serve.http.choice import ChatChoiceBuilder
from rorqual.serve.http.protocol import ChatRequest, CompletionRequest
from rorqual.serve.http.request_builder import RequestBuilder, Served
from rorqual.serve.limits import ServerLimits
from rorqual.serve.messages import Output
from rorqual.text.bad_words import with_bad_words
from rorqual.text.chat_template import ChatTemplate
from rorqual.text.generation_config import GenerationDefaults
from rorqual.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(BUNDLED)
LONG = "The old gentleman looked at her and said nothing at all."
TURN = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def served(tokenizer: Tokenizer = TOKENIZER) -> Served:
    defaults = GenerationDefaults((1,), {})
    template = ChatTemplate(tokenizer)
    return Served(("m",), tokenizer, template, defaults, 4096, False, "hermes", "print")


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestBuilder]:
    pool = EnginePool([{}], ServerLimits())
    made = RequestBuilder(served(), pool, ServerLimits())
    monkeypatch.setattr(made, "_most_tokens", lambda: 99)  # max_model_len 100
    yield made
    pool.kill()


def complete(builder: RequestBuilder, prompt: Any = LONG, **given: Any) -> Call:
    body = CompletionRequest.model_validate({"prompt": prompt, **given})
    return asyncio.run(builder.completion(body, "client"))


def chat(builder: RequestBuilder, **given: Any) -> Call:
    body = ChatRequest.model_validate({"messages": TURN, **given})
    return asyncio.run(builder.chat(body, "client"))


def refusal(builder: RequestBuilder, **given: Any) -> tuple[str, str | None]:
    with pytest.raises(ApiError) as caught:
        complete(builder, **given)
    return caught.value.message, caught.value.param


# ---- prompts


def test_the_last_tokens_of_a_prompt_are_kept(builder: RequestBuilder):
    ids = TOKENIZER.encode(LONG)
    for kept in (1, 3, len(ids), 99):
        call = complete(builder, [LONG, "a"], truncate_prompt_tokens=kept)
        assert call.requests[0].prompt == tuple(ids[-kept:])
        assert call.requests[1].prompt == tuple(TOKENIZER.encode("a")[-kept:])
        assert call.prompt_tokens == sum(len(request.prompt) for request in call.requests)
        assert complete(builder, ids, truncate_prompt_tokens=kept).requests[0].prompt == tuple(
            ids[-kept:]
        )
    turns = TOKENIZER.encode("user: Hello\nassistant:")
    assert chat(builder, truncate_prompt_tokens=4).requests[0].prompt == tuple(turns[-4:])


def test_minus_one_leaves_room_for_the_answer(builder: RequestBuilder):
    much = list(range(2, 402))
    for given, kept in (({"max_tokens": 30}, 70), ({}, 84), ({"max_tokens": 500}, 1)):
        call = complete(builder, much, truncate_prompt_tokens=-1, **given)
        assert call.requests[0].prompt == tuple(much[-kept:])
    long = [{"role": "user", "content": LONG * 40}]
    assert len(chat(builder, messages=long, truncate_prompt_tokens=-1).requests[0].prompt) == 99
    assert len(complete(builder, "a" * 100_000, truncate_prompt_tokens=5).requests[0].prompt) == 5
    assert "100000 characters" in refusal(builder, prompt="a" * 100_000)[0]


def test_what_cannot_be_kept(builder: RequestBuilder):
    for kept in (0, 100):
        assert refusal(builder, truncate_prompt_tokens=kept)[1] == "truncate_prompt_tokens"
    with pytest.raises(ValidationError, match="truncate_prompt_tokens"):
        complete(builder, truncate_prompt_tokens=-2)


def test_special_tokens_of_a_chat(builder: RequestBuilder):
    text = "user: Hello\nassistant:"
    for given in (None, False, True):
        call = chat(builder, add_special_tokens=given)
        wanted = TOKENIZER.encode(text, given is not False)  # a base model's lines begin with BOS
        assert call.requests[0].prompt == tuple(wanted)


@pytest.mark.parametrize(
    ("content", "inside"),
    [("<think>\nhm", True), ("<think>", True), ("<think>a</think>\nb", False), ("b", False)],
)
def test_an_open_thought_goes_on(builder: RequestBuilder, content: str, inside: bool):
    builder.served = replace(builder.served, reasoning=True)
    turns = [*TURN, {"role": "assistant", "content": content}]
    call = chat(builder, messages=turns, continue_final_message=True)
    reply = call.replies[0]
    assert isinstance(reply, ChatChoiceBuilder)
    reply.finish = "stop"
    name = "reasoning_content" if inside else "content"
    assert list(reply.fields("more")) == [(name, "more")]


def test_an_echo_is_of_what_was_kept(builder: RequestBuilder):
    call = complete(builder, truncate_prompt_tokens=3, echo=True)
    assert call.echo == [TOKENIZER.decode(TOKENIZER.encode(LONG)[-3:])]  # type: ignore[attr-defined]


# ---- fields of OpenAI's own


def test_counts_may_be_written_with_a_point(builder: RequestBuilder):
    assert complete(builder, max_tokens=16.0).requests[0].params.max_tokens == 16
    assert chat(builder, max_completion_tokens=16.0).requests[0].params.max_tokens == 16
    with pytest.raises(ValidationError, match="max_tokens"):
        complete(builder, max_tokens=16.5)


def test_no_likely_tokens_need_no_log_probabilities(builder: RequestBuilder):
    for given in ({}, {"logprobs": False}, {"logprobs": None}):
        assert chat(builder, top_logprobs=0, **given).top is None
    assert chat(builder, top_logprobs=0, logprobs=True).top == 0
    with pytest.raises(ApiError, match="top_logprobs needs logprobs"):
        chat(builder, top_logprobs=1)


def test_best_of_and_suffix(builder: RequestBuilder):
    """Only the values that ask for nothing."""
    assert len(complete(builder, best_of=2, n=2, temperature=1).requests) == 2
    message, param = refusal(builder, best_of=3, n=2)
    assert message == "best_of=3 is not supported; accepted: the value of n"
    assert param == "best_of"
    for nothing in (None, ""):
        assert complete(builder, suffix=nothing)
        assert chat(builder, suffix=nothing)
    with pytest.raises(ValidationError, match="suffix"):
        complete(builder, suffix="end")
    with pytest.raises(ApiError, match="suffix is not supported here"):
        chat(builder, suffix="end")
    with pytest.raises(ApiError, match="best_of is not supported here"):
        chat(builder, best_of=3)


# ---- tokens


def test_words_are_banned_with_and_without_a_space(builder: RequestBuilder):
    params = complete(builder, bad_words=["gentleman", " old"]).requests[0].params
    texts = ("gentleman", " gentleman", "old", " old")
    assert params.bad_word_ids == tuple(tuple(TOKENIZER.encode(text, False)) for text in texts)
    assert params.bad_words == ()
    assert params.edits_logits
    with pytest.raises(RequestError, match="bad_words need a tokenizer"):
        with_bad_words(SamplingParams(bad_words=["a"]), None)
    message, param = refusal(builder, bad_words=["\x01" * (MAX_BAD_WORD_TOKENS + 1)])
    assert "tokens; accepted: at most 64" in message
    assert param == "bad_words"
    assert refusal(builder, bad_words=["  "])[1] == "bad_words"
    assert refusal(builder, allowed_token_ids=[5, 4096])[1] == "allowed_token_ids"
    params = chat(builder, allowed_token_ids=[5, 9]).requests[0].params
    assert params.allowed_token_ids == (5, 9)


def test_marks_of_calls_that_are_special_tokens_are_not_hidden(builder: RequestBuilder):
    assert chat(builder, tools=TOOLS).requests[0].params.skip_special_tokens
    special = Tokenizer(BUNDLED)
    special.raw.add_special_tokens(["<tool_call>"])
    special.special_ids |= {special.raw.token_to_id("<tool_call>")}
    builder.served = served(special)
    assert not chat(builder, tools=TOOLS).requests[0].params.skip_special_tokens
    for other in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert chat(builder, **other).requests[0].params.skip_special_tokens


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named(*names)}}


def test_allowed_tools_are_the_only_ones_of_the_request(builder: RequestBuilder):
    given = named("unlisted", "second", "third")
    for mode in ("auto", "required"):
        body = ChatRequest.model_validate(
            {"messages": TURN, "tools": given, "tool_choice": allowed(mode, "third", "second")}
        )
        tools, forced = builder._tools(body)
        assert tools == given[1:]
        assert forced == (given[1:] if mode == "required" else [])
        structured = asyncio.run(builder.chat(body, "client")).requests[0].params.structured
        if mode == "auto":
            assert structured is None
        else:
            assert structured is not None
            assert "second" in structured.value
            assert "unlisted" not in structured.value


def chat_refusal(builder: RequestBuilder, **given: Any) -> tuple[str, str | None]:
    with pytest.raises(ApiError) as caught:
        chat(builder, **given)
    return caught.value.message, caught.value.param


def test_allowed_tools_that_are_not_there(builder: RequestBuilder):
    message, param = chat_refusal(builder, tools=TOOLS, tool_choice=allowed("auto", "f", "other\n"))
    assert param == "tool_choice.allowed_tools.tools.1"
    assert message == f"{param}: 'other\\n' is not among the tools"
    for wrong in ({"type": "allowed_tools"}, allowed("none", "f"), allowed("auto")):
        with pytest.raises(ValidationError, match="allowed_tools"):
            chat(builder, tools=TOOLS, tool_choice=wrong)


def test_parameters_that_cannot_be_enforced(builder: RequestBuilder):
    """Only where the tool is forced: an answer that may call it is not held to its schema."""
    tools = named("f", "g")
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tools[1]["function"]["parameters"] = schema
    place = "tools.1.function.parameters"
    for choice in ("required", tools[1], allowed("required", "g")):
        if isinstance(choice, dict) and choice["type"] == "function":
            choice = named("g")[0]
        message, param = chat_refusal(builder, tools=tools, tool_choice=choice)
        assert param == place
        assert message == f"{place}.properties.a: 'not' cannot be enforced"
    for choice in (None, "auto", "none", named("f")[0], allowed("auto", "g")):
        assert chat(builder, tools=tools, tool_choice=choice)


def test_a_format_that_cannot_be_enforced(builder: RequestBuilder):
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message, param = chat_refusal(builder, response_format=form)
    assert (message, param) == ("schema: 'uniqueItems' cannot be enforced", "response_format")


@pytest.mark.parametrize(
    "name",
    [
        "disable_any_whitespace",
        "disable_additional_properties",
        "whitespace_pattern",
        "structural_tag",
    ],
)
def test_other_fields_of_vllms_structured_outputs(builder: RequestBuilder, name: str):
    """Clients of vLLM dump all of them."""
    given = {"regex": "a+", "json": None, "json_object": None}
    plain = chat(builder, structured_outputs=given).requests[0].params.structured
    for nothing in (None, False):
        call = chat(builder, structured_outputs={**given, name: nothing})
        assert call.requests[0].params.structured == plain
    place = f"structured_outputs.{name}"
    if name == "disable_any_whitespace":  # JSON has none but one space after commas and colons
        assert chat(builder, structured_outputs={**given, name: True})
        with pytest.raises(ValidationError, match=name):
            chat(builder, structured_outputs={**given, name: "x"})
        builder.served = replace(builder.served, reasoning=True)
        turns = [*TURN, {"role": "assistant", "content": "<think>"}]
        more = {"messages": turns, "continue_final_message": True}
        for value in (None, False):
            assert chat(builder, structured_outputs={**given, name: value}, **more)
        message, param = chat_refusal(builder, structured_outputs={**given, name: True}, **more)
        assert message == f"{place} is not supported for an answer that begins with reasoning"
        assert param == place
        return
    for value in (True, "x", "", 0, {"a": 1}):
        message, param = chat_refusal(builder, structured_outputs={**given, name: value})
        assert (message, param) == (f"{place} is not supported here", place)


# ---- answers


def fed(call: Call, *outputs: Output) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    job: Any = SimpleNamespace(end_text=lambda choice, stopped: None)
    events = [event for output in outputs for event in call.take([(0, output)], job)]
    return [json.loads(event[6:]) for event in events]


IDS = TOKENIZER.encode("and then <tool", False)


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_every_id_is_in_one_chunk_of_a_chat(builder: RequestBuilder, tools: list[Any]):
    """Also of text that is held, as it may begin a call."""
    call = chat(builder, stream=True, return_token_ids=True, tools=tools)
    last = Output("0", [7, 1], "stop", 1)
    chunks = fed(call, *(Output("0", [token]) for token in IDS), last)
    assert chunks[0]["prompt_token_ids"] == list(call.requests[0].prompt)
    assert "token_ids" not in chunks[0]["choices"][0]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    found = [token for c in chunks for token in c["choices"][0].get("token_ids", [])]
    assert found == [*IDS, 7, 1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_ids_of_completions_and_whole_answers(builder: RequestBuilder):
    call = complete(builder, stream=True, return_token_ids=True)
    chunks = fed(call, Output("0", [5]), Output("0", [6, 1], "stop", 1))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [[5], [6, 1]]
    assert choices[0]["prompt_token_ids"] == TOKENIZER.encode(LONG)
    assert "prompt_token_ids" not in choices[1]
    for make in (chat, complete):
        call = make(builder, return_token_ids=True)
        fed(call, Output("0", [5, 6, 1], "stop", 1))
        answer = json.loads(call.whole())
        choice = answer["choices"][0]
        assert choice["token_ids"] == [5, 6, 1]
        where = answer if make is chat else choice
        assert where["prompt_token_ids"] == list(call.requests[0].prompt)
        plain = make(builder)
        fed(plain, Output("0", [5, 6, 1], "stop", 1))
        assert "token_ids" not in plain.whole().decode()


def test_a_stop_string_ends_the_ids_too(builder: RequestBuilder):
    stop = TOKENIZER.token(IDS[1])
    call = complete(builder, stop=stop, return_token_ids=True)
    fed(call, Output("0", list(IDS), "length"))
    assert json.loads(call.whole())["choices"][0]["token_ids"] == IDS[:2]


def test_kv_transfer_params_are_kept_and_answered(builder: RequestBuilder):
    given = {"do_remote_decode": True, "remote_block_ids": [1, 2], "x": {"y": None}}
    for make in (chat, complete):
        call = make(builder, kv_transfer_params=given)
        assert call.requests[0].kv_transfer_params == given
        fed(call, Output("0", [5], "length"))
        answer = json.loads(call.whole())
        assert "kv_transfer_params" in answer
        assert answer["kv_transfer_params"] is None
    deep: Any = 1
    for _ in range(9):
        deep = [deep]
    for wrong in ({"a": deep}, {"a": "x" * 65_536}, {"a": 2**63}, {"a": float("nan")}):
        assert refusal(builder, kv_transfer_params=wrong)[1] == "kv_transfer_params"


@pytest.mark.parametrize("n", [1, 3])
def test_each_prompt_has_its_own_kv_transfer_params(builder: RequestBuilder, n: int):
    given = [{"remote_request_id": "0"}, None, {"remote_request_id": "2"}]
    call = complete(builder, [LONG, "a", "b"], kv_transfer_params=given, n=n)
    found = [request.kv_transfer_params for request in call.requests]
    assert found == [one for one in given for _ in range(n)]

    asked = {"do_remote_decode": True}
    call = complete(builder, [LONG, "a", "b"], kv_transfer_params=asked, n=n)
    found = [request.kv_transfer_params for request in call.requests]
    assert found == [asked, *[None] * (n - 1)] * 3, "one choice of each prompt leases pages"
    outputs = [Output(str(choice), [5], "length") for choice in range(3 * n)]
    for choice, output in enumerate(outputs[::n]):
        output.transfer = given[choice]
    call.take(list(enumerate(outputs)), SimpleNamespace(cancel=lambda choice: None))  # type: ignore[arg-type]
    assert json.loads(call.whole())["kv_transfer_params"] == given


@pytest.mark.parametrize("many", [False, True])
def test_the_answer_lists_kv_transfer_params_as_the_request(builder: RequestBuilder, many: bool):
    asked = {"do_remote_decode": True}
    for make in (chat, complete):
        call = make(builder, kv_transfer_params=[asked] if many else asked)
        output = Output("0", [5], "length", transfer={"x": 1})
        fed(call, output)
        found = json.loads(call.whole())["kv_transfer_params"]
        assert found == ([{"x": 1}] if many else {"x": 1})


def test_kv_transfer_params_of_other_prompts(builder: RequestBuilder):
    one = {"do_remote_prefill": True}
    message, param = refusal(builder, prompt=["a", "b"], kv_transfer_params=one)
    assert "one prompt, but there are 2" in message
    assert param == "kv_transfer_params"
    message, param = refusal(builder, prompt=["a", "b"], kv_transfer_params=[one])
    assert "1 were given for 2 prompts" in message
    assert param == "kv_transfer_params"
    wrong = [one, {"a": 2**63}]
    assert refusal(builder, prompt=["a", "b"], kv_transfer_params=wrong)[1] == "kv_transfer_params"
    with pytest.raises(ApiError, match="2 were given for 1 prompts"):
        chat(builder, kv_transfer_params=[one, one])


def test_too_many_log_probabilities_are_named_as_they_were_asked_for(builder: RequestBuilder):
    assert refusal(builder, logprobs=21)[1] == "logprobs"
    with pytest.raises(ApiError) as caught:
        chat(builder, logprobs=True, top_logprobs=21)
    assert caught.value.param == "top_logprobs"
