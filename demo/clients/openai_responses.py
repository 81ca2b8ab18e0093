"""OpenAI's Responses API by its own client, `pip install openai`:

python demo/clients/openai_responses.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import json
import sys
from typing import Literal

from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather at a place."""

    place: Literal["Bath", "Lyme"]
    sky: Literal["rain", "sun"]


def main(address: str) -> None:
    client = OpenAI(base_url=address, api_key="none")
    model = client.models.list().data[0].id

    made = client.responses.create(
        model=model, instructions="Be brief.", input="Who is there?", max_output_tokens=24
    )
    print(f"create: {made.status}, {made.usage.output_tokens} tokens: {made.output_text!r}")

    with client.responses.stream(model=model, input="Go on.", max_output_tokens=24) as stream:
        kinds = [event.type for event in stream]
    print(f"stream: {len(kinds)} events, {kinds[0]} to {kinds[-1]}")

    parsed = client.responses.parse(
        model=model, input="The weather in Bath?", text_format=Weather, max_output_tokens=200
    )
    print(f"parse: {parsed.status}: {parsed.output_parsed!r}")

    function = pydantic_function_tool(Weather)["function"]
    tool = {"type": "function", **function}
    called = client.responses.create(
        model=model,
        input="The weather?",
        tools=[tool],
        tool_choice={"type": "function", "name": "Weather"},
        max_output_tokens=200,
    )
    calls = [item for item in called.output if item.type == "function_call"]
    print(f"call: {called.status}: {[(call.name, call.arguments) for call in calls]}")
    if called.status == "completed":
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps("rain")}
            for call in calls
        ]
        history = [{"role": "user", "content": "The weather?"}, *called.output, *results]
        answer = client.responses.create(
            model=model, input=history, tools=[tool], max_output_tokens=16
        )
        print(f"its result: {answer.output_text!r}")

    try:
        client.responses.create(model=model, input="Go on.", previous_response_id=made.id)
    except BadRequestError as error:
        print(f"refused: {error.body['message']}")


if __name__ == "__main__":
    main(sys.argv[1])
