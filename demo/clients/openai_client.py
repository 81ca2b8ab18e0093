"""OpenAI's own Python client: models, completions, chat, streams, tools, structured output, errors.

Tried with openai 3.57.0 (PyPI): `python demo/clients/openai_client.py http://127.0.0.1:8000`
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, Literal

import openai
import pydantic

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Bath", "London"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
HELLO: Any = [{"role": "user", "content": "Tell me of the weather at Bath."}]


class Visit(pydantic.BaseModel):
    place: Literal["Bath", "London"]
    guests: Literal[1, 2, 3]


def models(client: openai.OpenAI) -> str:
    found = client.models.list().data
    assert found, "no model is listed"
    assert client.models.retrieve(found[0].id).id == found[0].id
    assert found[0].created > 0
    return found[0].id


def completions(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(
        model=model, prompt="My dear Elizabeth,", max_tokens=16, temperature=0, logprobs=2
    )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == whole.choices[0].text
    assert all(value <= 0 for value in logprobs.token_logprobs or [])

    several = client.completions.create(
        model=model, prompt=["It was", "She had"], n=2, max_tokens=8, seed=7, temperature=1
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    again = client.completions.create(
        model=model, prompt=["It was", "She had"], n=2, max_tokens=8, seed=7, temperature=1
    )
    assert [one.text for one in several.choices] == [one.text for one in again.choices]

    ids = client.completions.create(
        model=model, prompt=[5, 6, 7], max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert ids.usage is not None
    assert (ids.usage.prompt_tokens, ids.usage.completion_tokens) == (3, 4)

    parts = []
    usage = None
    for chunk in client.completions.create(
        model=model,
        prompt="My dear Elizabeth,",
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        parts += [choice.text for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(parts) == whole.choices[0].text
    assert usage is not None
    assert usage.completion_tokens == 16


def chat(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(
        model=model,
        messages=HELLO,
        max_completion_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        n=2,
    )
    assert len(whole.choices) == 2
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content or []) == 12
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content or [])

    deltas = []
    finish = None
    for chunk in client.chat.completions.create(
        model=model, messages=HELLO, max_completion_tokens=12, temperature=0, stream=True
    ):
        deltas.append(chunk.choices[0].delta.content or "")
        finish = chunk.choices[0].finish_reason or finish
    assert "".join(deltas) == whole.choices[0].message.content
    assert finish == "length"


def tools(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(
        model=model,
        messages=HELLO,
        tools=[TOOL],
        tool_choice="required",
        temperature=0,
        parallel_tool_calls=False,
    )
    assert whole.choices[0].finish_reason == "tool_calls"
    calls: Any = whole.choices[0].message.tool_calls
    assert calls[0].function.name == "get_weather"
    arguments = json.loads(calls[0].function.arguments)
    assert arguments["city"] in ("Bath", "London")
    assert 1 <= arguments["days"] <= 9

    with client.chat.completions.stream(
        model=model,
        messages=HELLO,
        tools=[TOOL],
        tool_choice="required",
        temperature=0,
        parallel_tool_calls=False,
    ) as stream:
        streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed[0].function.arguments == calls[0].function.arguments

    # what the client got goes back as it came, with the tool's answer
    history = [*HELLO, whole.choices[0].message]
    history.append({"role": "tool", "tool_call_id": calls[0].id, "content": "rain"})
    after = client.chat.completions.create(
        model=model, messages=history, tools=[TOOL], tool_choice="none", max_tokens=4
    )
    assert after.choices[0].message.tool_calls is None


def structure(client: openai.OpenAI, model: str) -> None:
    parsed = client.chat.completions.parse(model=model, messages=HELLO, response_format=Visit)
    assert isinstance(parsed.choices[0].message.parsed, Visit)
    called = client.chat.completions.parse(
        model=model,
        messages=HELLO,
        tools=[openai.pydantic_function_tool(Visit)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    calls: Any = called.choices[0].message.tool_calls
    assert isinstance(calls[0].function.parsed_arguments, Visit)


def raw_and_errors(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=HELLO, max_tokens=2, extra_headers={"x-request-id": "asked-for"}
    )
    assert raw.headers["x-request-id"] == "asked-for"
    assert raw.parse().choices[0].message.role == "assistant"
    unknown: Any = refusal(client, model="nobody")
    assert isinstance(unknown, openai.NotFoundError)
    assert unknown.code == "model_not_found"
    wrong: Any = refusal(client, model=model, temperature=-1)
    assert isinstance(wrong, openai.BadRequestError)
    assert wrong.param == "temperature"


def refusal(client: openai.OpenAI, **fields: Any) -> openai.APIStatusError:
    try:
        client.chat.completions.create(messages=HELLO, **fields)
    except openai.APIStatusError as error:
        return error
    raise AssertionError(f"answered: {fields}")


async def concurrent(url: str, model: str, count: int) -> float:
    """Tokens a second of streams that run at once."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def one(i: int) -> int:
            stream = await client.completions.create(
                model=model,
                prompt=f"Chapter {i}.",
                max_tokens=32,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            usages = [chunk.usage async for chunk in stream if chunk.usage]
            return usages[-1].completion_tokens

        began = time.perf_counter()
        tokens = await asyncio.gather(*map(one, range(count)))
        assert tokens == [32] * count, tokens
        return sum(tokens) / (time.perf_counter() - began)


def main(server: str) -> None:
    client = openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0)
    model = models(client)
    for part in (completions, chat, tools, structure, raw_and_errors):
        part(client, model)
        print(f"{part.__name__}: as it should be")
    rate = asyncio.run(concurrent(server + "/v1", model, 16))
    print(f"measured: {rate:.0f} tokens/s in 16 streams at once")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
