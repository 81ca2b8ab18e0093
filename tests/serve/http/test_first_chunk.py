"""What a stream sends for each output of the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rorqual.models.hub import BUNDLED
from rorqual.request import Request, SamplingParams
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.http.calls import Call, ChatCall, TextCall
from rorqual.serve.http.choice import ChatChoiceBuilder, ChoiceBuilder
from rorqual.serve.http.sse import ChunkHead
from rorqual.serve.messages import Output
from rorqual.text.reasoning import Reasoning
from rorqual.text.tokenizer import Tokenizer
from rorqual.text.tool_calls import HermesParser

TOKENIZER = Tokenizer(BUNDLED)
HALVES = TOKENIZER.encode("\N{SMILING CAT FACE WITH OPEN MOUTH}", add_special_tokens=False)
PARAMS = SamplingParams(max_tokens=len(HALVES))


def streaming(call: Call, *replies: ChoiceBuilder) -> Call:
    call.replies.extend(replies)
    call.stream = call.include_usage = call.continuous_usage = True
    return call


def parts(kind: str) -> tuple[Any, ...]:
    head = ChunkHead("id", kind, 0, "model", "print")
    return head, [Request("0", (1,), PARAMS)], 1, TOKENIZER, None


def text_call() -> Call:
    return streaming(TextCall(*parts("text_completion")), ChoiceBuilder(0, PARAMS, TOKENIZER))


def chat_call(
    reasoning: Reasoning | None = None, tools: HermesParser | None = None, shown: bool = True
) -> Call:
    call = ChatCall(*parts("chat.completion.chunk"), include_reasoning=shown)
    return streaming(call, ChatChoiceBuilder(0, PARAMS, TOKENIZER, reasoning, tools))


def sent(call: Call, tokens: list[int], finish: str | None = None) -> list[dict[str, Any]]:
    events = call.take([(0, Output("0", tokens, finish))], EngineJob(1))
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


@pytest.mark.parametrize("make", [text_call, chat_call])
def test_each_token_has_a_chunk_though_it_ends_inside_a_character(make: Any):
    assert len(HALVES) > 2, "the character is of several tokens"
    call = make()
    for i, token in enumerate(HALVES[:-1]):
        chunks = sent(call, [token])
        choice = chunks[-1]["choices"][0]
        assert choice.get("text", choice.get("delta", {}).get("content")) == ""
        assert choice["finish_reason"] is None
        assert chunks[-1]["usage"]["completion_tokens"] == i + 1
    last = sent(call, HALVES[-1:], "length")
    assert last[-1]["choices"][0]["finish_reason"] == "length"
    total = json.loads(call.last_events()[0].removeprefix(b"data: "))["usage"]
    assert total["completion_tokens"] == len(HALVES)


def test_the_first_chunk_of_a_chat_is_its_role_and_the_second_its_first_token():
    first, second = sent(chat_call(), HALVES[:1])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert second["choices"][0]["delta"] == {"content": ""}


@pytest.mark.parametrize(
    "make",
    [
        lambda: chat_call(reasoning=Reasoning(True)),
        lambda: chat_call(reasoning=Reasoning(True), shown=False),
        lambda: chat_call(tools=HermesParser()),
    ],
    ids=["reasoning", "hidden reasoning", "tools"],
)
def test_the_first_token_has_a_chunk_also_where_it_is_held_or_hidden(make: Any):
    assert [chunk["choices"][0]["delta"] for chunk in sent(make(), HALVES[:1])][1:] == [
        {"content": ""}
    ]
