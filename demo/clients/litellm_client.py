"""LiteLLM, by its two ways to such a server: the providers `hosted_vllm` and `openai`.

Tried with litellm 1.106.12 (PyPI): `python demo/clients/litellm_client.py http://127.0.0.1:8000`
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no table of prices from the network

import litellm
import pydantic

litellm.suppress_debug_info = True
HELLO = [{"role": "user", "content": "Tell me of the weather at Bath."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bath", "London"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Visit(pydantic.BaseModel):
    place: Literal["Bath", "London"]
    guests: Literal[1, 2, 3]


def chat(model: str, **where: str) -> None:
    whole: Any = litellm.completion(
        model=model, messages=HELLO, max_tokens=12, temperature=0, **where
    )
    assert whole.usage.completion_tokens == 12
    chunks = list(
        litellm.completion(
            model=model,
            messages=HELLO,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **where,
        )
    )
    built: Any = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.choices[0].finish_reason == "length"
    assert built.usage.completion_tokens == 12
    assert built.usage.prompt_tokens == whole.usage.prompt_tokens


def tools_and_structure(model: str, **where: str) -> None:
    called: Any = litellm.completion(
        model=model,
        messages=HELLO,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        **where,
    )
    assert called.choices[0].finish_reason == "tool_calls"
    function = called.choices[0].message.tool_calls[0].function
    assert json.loads(function.arguments)["city"] in ("Bath", "London")
    made: Any = litellm.completion(model=model, messages=HELLO, response_format=Visit, **where)
    Visit.model_validate_json(made.choices[0].message.content)


def text(model: str, **where: str) -> None:
    provider, _, name = model.partition("/")
    kind = {"openai": "text-completion-openai"}.get(provider, provider)
    done: Any = litellm.text_completion(
        model=f"{kind}/{name}", prompt="It was", max_tokens=6, n=2, logprobs=2, **where
    )
    assert len(done.choices) == 2
    assert all(len(choice.logprobs.tokens) == 6 for choice in done.choices)


def responses(model: str, **where: str) -> None:
    """By /v1/responses, or what LiteLLM makes of a chat in its place."""
    found: Any = litellm.responses(model=model, input="How is Bath?", max_output_tokens=16, **where)
    assert found.output[-1].content[0].text
    kinds = [
        event.type.value
        for event in litellm.responses(
            model=model, input="How is Bath?", max_output_tokens=16, stream=True, **where
        )
    ]
    assert kinds[-1] == "response.completed", kinds


def errors(model: str, **where: str) -> None:
    refusal = ""
    try:
        litellm.completion(model=model, messages=HELLO, temperature=-1, **where)
    except litellm.BadRequestError as error:
        refusal = str(error)
    assert "temperature" in refusal, "a negative temperature was accepted"


async def concurrent(model: str, count: int, **where: str) -> float:
    """Tokens a second of answers awaited at once."""

    async def one() -> int:
        answer: Any = await litellm.acompletion(
            model=model, messages=HELLO, max_tokens=16, extra_body={"ignore_eos": True}, **where
        )
        return answer.usage.completion_tokens

    began = time.perf_counter()
    tokens = await asyncio.gather(*(one() for _ in range(count)))
    assert tokens == [16] * count, tokens
    return sum(tokens) / (time.perf_counter() - began)


def main(server: str) -> None:
    where = {"api_base": server + "/v1", "api_key": "none"}
    for provider in ("hosted_vllm", "openai"):
        model = f"{provider}/rorqual-bundled"
        for part in (chat, tools_and_structure, text, responses, errors):
            part(model, **where)
        print(f"{provider}: chats, streams, tools, structure, text, responses and errors pass")
    rate = asyncio.run(concurrent("hosted_vllm/rorqual-bundled", 8, **where))
    print(f"measured: {rate:.0f} tokens/s in 8 answers at once")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
