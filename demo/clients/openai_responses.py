"""OpenAI's Responses API by its own client.

Tried with openai 3.57.0 (PyPI): `python demo/clients/openai_responses.py http://127.0.0.1:8000`
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
    client = OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id

    made = client.responses.create(
        model=model, instructions="Be brief.", input="Who is there?", max_output_tokens=24
    )
    assert made.usage.output_tokens == 24 or made.status == "completed", made
    print(f"create: {made.status}, {made.usage.output_tokens} tokens: {made.output_text!r}")

    with client.responses.stream(model=model, input="Go on.", max_output_tokens=24) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created", kinds
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
    print(f"stream: {len(kinds)} events, {kinds[0]} to {kinds[-1]}")

    parsed = client.responses.parse(
        model=model, input="The weather in Bath?", text_format=Weather, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Weather), parsed
    print(f"parse: {parsed.status}: {parsed.output_parsed!r}")

    function = pydantic_function_tool(Weather)["function"]
    tool = {"type": "function", **function}
    called = client.responses.create(
        model=model,
        input="The weather?",
        tools=[tool],
        tool_choice={"type": "function", "name": "Weather"},
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    calls = [item for item in called.output if item.type == "function_call"]
    (call,) = calls
    Weather.model_validate_json(call.arguments)
    print(f"call: {called.status}: {call.name} {call.arguments}")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps("rain")}
    history = [{"role": "user", "content": "The weather?"}, *called.output, result]
    answer = client.responses.create(model=model, input=history, tools=[tool], max_output_tokens=16)
    assert answer.usage.input_tokens > called.usage.input_tokens, answer
    print(f"its result: {answer.output_text!r}")

    refusal = ""
    try:
        client.responses.create(model=model, input="Go on.", previous_response_id=made.id)
    except BadRequestError as error:
        refusal = error.body["message"]
    assert "previous_response_id" in refusal
    print(f"refused: {refusal}")
    print(f"measured: {len(kinds)} events of a stream")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/").removesuffix("/v1"))
