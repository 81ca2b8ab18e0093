"""Anthropic's Messages API by its own client, `pip install anthropic`:

python demo/clients/anthropic_messages.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import json
import sys
import urllib.request

from anthropic import Anthropic, BadRequestError

TOOL = {
    "name": "weather",
    "description": "The weather at a place.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 20}},
        "required": ["place"],
    },
}


def main(address: str) -> None:
    with urllib.request.urlopen(f"{address}/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    client = Anthropic(base_url=address.removesuffix("/v1"), api_key="none")
    asked = {"model": model, "messages": [{"role": "user", "content": "Who is there?"}]}

    count = client.messages.count_tokens(**asked, system="Be brief.")
    made = client.messages.create(**asked, system="Be brief.", max_tokens=24)
    print(
        f"create: {made.stop_reason}, {made.usage.output_tokens} tokens: {made.content[0].text!r}"
    )
    print(f"count_tokens: {count.input_tokens}, as {made.usage}")

    with client.messages.stream(**asked, max_tokens=24, stop_sequences=["."]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    print(f"stream: {final.stop_reason} {final.stop_sequence!r}: {text!r}")

    called = client.messages.create(
        **asked, max_tokens=200, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}
    )
    calls = [block for block in called.content if block.type == "tool_use"]
    print(f"call: {called.stop_reason}: {[(call.name, call.input) for call in calls]}")
    if called.stop_reason == "tool_use":
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls
        ]
        turns = [
            *asked["messages"],
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": results},
        ]
        answer = client.messages.create(model=model, messages=turns, tools=[TOOL], max_tokens=16)
        print(f"its result: {answer.content[0].text!r}")

    try:
        source = {"type": "url", "url": "http://127.0.0.1/picture.png"}
        picture = {"role": "user", "content": [{"type": "image", "source": source}]}
        client.messages.create(model=model, messages=[picture], max_tokens=5)
    except BadRequestError as error:
        print(f"refused: {error.body['error']['message']}")


if __name__ == "__main__":
    main(sys.argv[1])
