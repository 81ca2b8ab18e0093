"""Anthropic's Messages API by its own client.

Tried with anthropic 2.14.0 (PyPI): `python demo/clients/anthropic_messages.py http://127.0.0.1:8000`
"""

from __future__ import annotations

import json
import sys
import urllib.request

from anthropic import Anthropic, BadRequestError, beta_tool

TOOL = {
    "name": "weather",
    "description": "The weather at a place.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 20}},
        "required": ["place"],
    },
}


@beta_tool
def sky() -> str:
    """The weather here."""
    return "rain"


def run_tools(client: Anthropic, asked: dict) -> None:
    """The runner asks for a thread, which the server does not keep: it must send the whole
    conversation. Its second turn is longer than the first, then."""
    runner = client.beta.messages.tool_runner(
        **asked,
        max_tokens=100,
        tools=[sky],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
    )
    sizes = []
    for message in runner:
        sizes.append(message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0))
        runner.set_messages_params(lambda given: {**given, "tool_choice": {"type": "auto"}})
    assert len(sizes) == 2, sizes
    assert sizes[1] > sizes[0], sizes
    print(f"tool_runner: {sizes[0]}, then {sizes[1]} tokens of prompt")


def main(address: str) -> None:
    with urllib.request.urlopen(f"{address}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    client = Anthropic(base_url=address, api_key="none", max_retries=0)
    asked = {"model": model, "messages": [{"role": "user", "content": "Who is there?"}]}

    count = client.messages.count_tokens(**asked, system="Be brief.")
    made = client.messages.create(**asked, system="Be brief.", max_tokens=24)
    print(
        f"create: {made.stop_reason}, {made.usage.output_tokens} tokens: {made.content[0].text!r}"
    )
    found = made.usage
    read = found.cache_read_input_tokens or 0
    assert count.input_tokens == found.input_tokens + read, (count, found)
    assert found.output_tokens == 24 or made.stop_reason != "max_tokens", made
    print(f"count_tokens: {count.input_tokens}, as {made.usage}")

    with client.messages.stream(**asked, max_tokens=24, stop_sequences=["."]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in final.content), final
    assert "." not in text
    print(f"stream: {final.stop_reason} {final.stop_sequence!r}: {text!r}")

    forced = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    called = client.messages.create(**asked, max_tokens=200, tools=[TOOL], tool_choice=forced)
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert called.stop_reason == "tool_use", called
    assert isinstance(call.input["place"], str), call
    print(f"call: {called.stop_reason}: {call.name} {call.input}")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [
        *asked["messages"],
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(model=model, messages=turns, tools=[TOOL], max_tokens=16)
    print(f"its result: {answer.stop_reason}: {len(answer.content)} blocks")

    run_tools(client, asked)

    refusal = ""
    try:
        source = {"type": "url", "url": "http://127.0.0.1/picture.png"}
        picture = {"role": "user", "content": [{"type": "image", "source": source}]}
        client.messages.create(model=model, messages=[picture], max_tokens=5)
    except BadRequestError as error:
        refusal = error.body["error"]["message"]
    assert "image" in refusal
    print(f"refused: {refusal}")
    print(f"measured: {count.input_tokens} tokens counted, {final.usage.output_tokens} streamed")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/").removesuffix("/v1"))
