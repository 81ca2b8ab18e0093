"""JSON from random schemas at temperature 1: it ends by itself and validates, with and without
speculation.

python tests/serve/http/test_structured_output.py 200 [--draft ngram ...]   the same for as many
schemas as wanted
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import httpx
import jsonschema
import pytest

from tests.serve.running import Running, start_server

IN_SUITE = 24


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Strings, arrays and objects all bounded, so that what a model says must come to an end."""
    kinds = ["string", "integer", "boolean", "enum", "null"] + (
        ["array", "object", "object"] if depth < 3 else []
    )
    kind = chance.choice(kinds) if depth else "object"
    if kind == "string":
        least = chance.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 8)}
    if kind == "integer":
        least = chance.randint(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 500)}
    if kind == "enum":
        return {
            "enum": chance.sample(
                ["red", "grün", 'quo"te', 1, 2.5, None, True, "a b"], chance.randint(1, 4)
            )
        }
    if kind == "array":
        least = chance.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(chance, depth + 1),
            "minItems": least,
            "maxItems": least + chance.randint(0, 3),
        }
    if kind == "object":
        names = chance.sample(
            ["name", "age", "tags", "city", "ok", "größe", "x-1"], chance.randint(1, 4)
        )
        required = [name for name in names if chance.random() < 0.6]
        properties = {name: random_schema(chance, depth + 1) for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    return {"type": kind}


async def failures(server: Running, count: int) -> list[str]:
    """What is wrong with the answers to so many schemas."""
    chance = random.Random(7)
    found = []
    room = asyncio.Semaphore(16)

    async def one(client: httpx.AsyncClient, i: int, schema: dict[str, Any]) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        messages = [{"role": "user", "content": f"Number {i}"}]
        body = {
            "messages": messages,
            "response_format": form,
            "temperature": 1.0,
            "seed": i,
            "max_tokens": 1500,
        }
        async with room:
            answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            found.append(f"{i}: {answer.status_code} {answer.text} {schema}")
            return
        choice = answer.json()["choices"][0]
        try:
            assert choice["finish_reason"] == "stop", choice["finish_reason"]
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        except Exception as error:
            found.append(f"{i}: {error!r} {schema} {choice['message']['content'][:200]}")

    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        await asyncio.gather(*(one(client, i, random_schema(chance)) for i in range(count)))
    return found


@pytest.mark.exhaustive
def test_random_schemas(server: Running):
    assert asyncio.run(failures(server, IN_SUITE)) == []


if __name__ == "__main__":
    with start_server("--dtype", "float32", *sys.argv[2:]) as running:
        wrong = asyncio.run(failures(running, int(sys.argv[1])))
        print(f"{sys.argv[1]} schemas, {len(wrong)} wrong", *wrong, sep="\n")
        sys.exit(bool(wrong))
