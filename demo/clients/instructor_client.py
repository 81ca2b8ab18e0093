"""Instructor: objects out of a model, in each mode that an OpenAI-compatible server offers.

Tried with instructor 1.17.0 (PyPI): `python demo/clients/instructor_client.py http://127.0.0.1:8000`
"""

from __future__ import annotations

import sys
import time
from typing import Any, Literal

import instructor
import openai
import pydantic

HELLO: Any = [{"role": "user", "content": "Who comes to Bath?"}]


class Visit(pydantic.BaseModel):
    place: Literal["Bath", "London"]
    guests: Literal[1, 2, 3]


def made_in(mode: instructor.Mode, server: str) -> float:
    """Seconds that three objects took."""
    client = instructor.from_openai(
        openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0), mode=mode
    )
    began = time.perf_counter()
    for seed in range(3):
        visit, raw = client.chat.completions.create_with_completion(
            model="rorqual-bundled",
            messages=HELLO,
            response_model=Visit,
            max_retries=0,
            max_tokens=256,
            seed=seed,
        )
        assert isinstance(visit, Visit)
        assert raw.usage.completion_tokens > 0
    return time.perf_counter() - began


def partial(server: str) -> int:
    """How often a streamed object grew."""
    client = instructor.from_openai(
        openai.OpenAI(base_url=server + "/v1", api_key="none", max_retries=0),
        mode=instructor.Mode.JSON_SCHEMA,
    )
    states = list(
        client.chat.completions.create_partial(
            model="rorqual-bundled", messages=HELLO, response_model=Visit, max_tokens=256
        )
    )
    assert states[-1].place in ("Bath", "London")
    assert states[-1].guests in (1, 2, 3)
    return len(states)


def main(server: str) -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        print(f"{mode.name}: 3 objects in {made_in(mode, server):.2f} s")
    print(f"measured: one object streamed in {partial(server)} states")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
