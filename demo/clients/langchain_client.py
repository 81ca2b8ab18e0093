"""LangChain's ChatOpenAI and OpenAI.

Tried with langchain-openai 1.7.4 (PyPI): `python demo/clients/langchain_client.py http://127.0.0.1:8000`
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, Literal

import pydantic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

HELLO: Any = [SystemMessage("You write letters."), HumanMessage("How is Bath?")]


class Visit(pydantic.BaseModel):
    """Who comes where."""

    place: Literal["Bath", "London"]
    guests: Literal[1, 2, 3]


@tool
def get_weather(city: Literal["Bath", "London"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def connect(server: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=server + "/v1", api_key="none", model="rorqual-bundled", max_retries=0, **more
    )


def chat(server: str) -> None:
    model = connect(server, temperature=0, max_tokens=12, stream_usage=True)
    whole = model.invoke(HELLO)
    assert whole.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["finish_reason"] == "length"
    total: Any = None
    for chunk in model.stream(HELLO):
        total = chunk if total is None else total + chunk
    assert total.content == whole.content
    assert total.usage_metadata["output_tokens"] == 12
    counted = connect(server, logprobs=True, top_logprobs=2, max_tokens=3).invoke(HELLO)
    assert len(counted.response_metadata["logprobs"]["content"]) == 3


def tools(server: str) -> None:
    model = connect(server, max_tokens=256, temperature=0).bind_tools(
        [get_weather], tool_choice="any", parallel_tool_calls=False
    )
    called: AIMessage = model.invoke(HELLO)
    (call,) = called.tool_calls
    answer: ToolMessage = get_weather.invoke(call)
    assert answer.content in ("rain in Bath", "rain in London")
    again = connect(server, max_tokens=8).invoke([*HELLO, called, answer])
    assert again.usage_metadata["output_tokens"] > 0


def structure(server: str) -> None:
    for method in ("json_schema", "function_calling"):
        more = {"parallel_tool_calls": False} if method == "function_calling" else {}
        model = connect(server, max_tokens=256).with_structured_output(
            Visit, method=method, include_raw=False, **more
        )
        assert isinstance(model.invoke(HELLO), Visit), method


def responses(server: str) -> None:
    """By /v1/responses in place of chats."""
    model = connect(server, use_responses_api=True, max_tokens=64)
    assert model.invoke(HELLO).usage_metadata["output_tokens"] <= 64
    assert sum(bool(chunk.text) for chunk in model.stream(HELLO)) > 1
    assert isinstance(model.with_structured_output(Visit).invoke(HELLO), Visit)


def text(server: str) -> None:
    model = OpenAI(
        base_url=server + "/v1",
        api_key="none",
        model="rorqual-bundled",
        max_tokens=8,
        max_retries=0,
    )
    results = model.generate(["It was", "She had"])
    assert [len(found) for found in results.generations] == [1, 1]
    assert results.llm_output["token_usage"]["completion_tokens"] <= 16


def batch(server: str, count: int) -> float:
    """Tokens a second of answers awaited at once."""
    model = connect(server, max_tokens=16, extra_body={"ignore_eos": True})
    began = time.perf_counter()
    answers = asyncio.run(model.abatch([HELLO] * count))
    tokens = [answer.usage_metadata["output_tokens"] for answer in answers]
    assert tokens == [16] * count, tokens
    return sum(tokens) / (time.perf_counter() - began)


def main(server: str) -> None:
    for part in (chat, tools, structure, responses, text):
        part(server)
        print(f"{part.__name__}: as it should be")
    print(f"measured: {batch(server, 8):.0f} tokens/s in a batch of 8")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
