"""Prompts are scored: echo with logprobs, max_tokens 0, and prompt_logprobs."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from rorqual.models.hub import BUNDLED
from rorqual.text.tokenizer import Tokenizer
from tests.serve.conftest import MODEL
from tests.serve.running import Running

PROMPT = "The old gentleman looked at her and said"
BODY = {"model": MODEL, "temperature": 0, "prompt": PROMPT, "max_tokens": 12}


def ask(client: openai.OpenAI, **given: Any) -> Any:
    extra = {name: given.pop(name) for name in list(given) if name == "prompt_logprobs"}
    return client.completions.create(**{**BODY, **given}, extra_body=extra)


@pytest.fixture(scope="module")
def said(client: openai.OpenAI) -> tuple[list[int], Any]:
    """Ids of the prompt and its answer, and the answer's log probabilities."""
    tokenizer = Tokenizer(BUNDLED)
    choice = ask(client, logprobs=3).choices[0]
    ids = tokenizer.encode(PROMPT)
    answer = tokenizer.encode(choice.text, False)
    assert [tokenizer.token(token) for token in answer] == choice.logprobs.tokens
    return ids + answer, choice.logprobs


def test_a_text_is_scored_as_it_was_said(client: openai.OpenAI, said: Any) -> None:
    ids, wanted = said
    choice = ask(client, prompt=ids, echo=True, logprobs=3, max_tokens=0).choices[0]
    found = choice.logprobs
    assert choice.finish_reason == "length"
    assert choice.text == "".join(found.tokens)
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(ids)
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert found.tokens[-12:] == wanted.tokens
    assert found.token_logprobs[-12:] == pytest.approx(wanted.token_logprobs, abs=1e-3)
    for ours, theirs in zip(found.top_logprobs[-12:], wanted.top_logprobs, strict=True):
        assert ours.keys() == theirs.keys()
    for offset, token in zip(found.text_offset, found.tokens, strict=True):
        assert choice.text[offset:].startswith(token)


@pytest.mark.parametrize("most", [0, 3])
def test_offsets_of_a_text_without_the_token_it_begins_with(
    client: openai.OpenAI, most: int
) -> None:
    tokenizer = Tokenizer(BUNDLED)
    choice = ask(client, prompt=PROMPT, echo=True, logprobs=1, max_tokens=most).choices[0]
    found = choice.logprobs
    assert choice.text.startswith(PROMPT)
    assert found.tokens[0] == tokenizer.token(tokenizer.encode(PROMPT)[0])
    assert not choice.text.startswith(found.tokens[0])
    assert found.text_offset[:2] == [0, 0]
    for offset, token in zip(found.text_offset[1:], found.tokens[1:], strict=True):
        assert choice.text[offset:].startswith(token)


def test_no_tokens_are_counted_where_none_were_asked_for(client: openai.OpenAI) -> None:
    out = ask(client, max_tokens=0)
    assert (out.choices[0].text, out.choices[0].logprobs) == ("", None)
    assert out.usage.completion_tokens == 0
    assert out.usage.total_tokens == out.usage.prompt_tokens


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("most", [0, 5])
def test_streamed_scores_are_the_whole_ones(client: openai.OpenAI, n: int, most: int) -> None:
    given = {"echo": True, "logprobs": 2, "max_tokens": most, "n": n, "seed": 5, "temperature": 1.0}
    given["prompt"] = [PROMPT, "Once upon"]
    whole = ask(client, **given)
    parts: list[dict[str, list[Any]]] = [{} for _ in whole.choices]
    texts = ["" for _ in whole.choices]
    for chunk in ask(client, stream=True, **given):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                parts[choice.index].setdefault(name, []).extend(values)
    for choice, part, text in zip(whole.choices, parts, texts, strict=True):
        wanted = choice.logprobs.model_dump()
        assert text == choice.text
        assert part["tokens"] == wanted["tokens"]
        assert part["text_offset"] == wanted["text_offset"]
        assert part["token_logprobs"][1:] == pytest.approx(wanted["token_logprobs"][1:], abs=1e-4)


def test_prompt_logprobs_in_both_apis(client: openai.OpenAI, said: Any) -> None:
    ids, wanted = said
    out = ask(client, prompt=ids, prompt_logprobs=0, echo=True, logprobs=1, max_tokens=1)
    choice = out.choices[0]
    found = choice.model_extra["prompt_logprobs"]
    assert found[0] is None
    assert [list(entry) for entry in found[1:]] == [[str(token)] for token in ids[1:]]
    logprobs = [
        entry[str(token)]["logprob"] for token, entry in zip(ids[1:], found[1:], strict=True)
    ]
    assert logprobs[-12:] == pytest.approx(wanted.token_logprobs, abs=1e-3)
    assert logprobs == pytest.approx(choice.logprobs.token_logprobs[1:-1], abs=1e-6)
    assert all(entry.keys() == {"logprob", "rank", "decoded_token"} for entry in found[1].values())
    messages: Any = [{"role": "user", "content": "Who is there?"}]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=2, n=2, extra_body={"prompt_logprobs": 2}
    )
    scored = chat.model_extra["prompt_logprobs"]
    assert len(scored) == chat.usage.prompt_tokens
    assert all(2 <= len(entry) <= 3 for entry in scored[1:])


@pytest.mark.exhaustive
def test_scored_prompts_beside_a_stream(server: Running, client: openai.OpenAI) -> None:
    """Chunks go on coming while the log probabilities of long prompts are written."""
    ids = [7] * 500
    counted = {"include_usage": True}
    stream = ask(client, stream=True, stream_options=counted, max_tokens=200, prompt="Once")
    first = next(iter(stream))
    body = {**BODY, "prompt": [ids] * 20, "echo": True, "logprobs": 20, "max_tokens": 0}
    _, answer = server.request("POST", "/v1/completions", body)
    choices = answer["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [500] * 20
    assert first.id
    assert list(stream)[-1].usage.completion_tokens == 200
