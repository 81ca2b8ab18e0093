"""A stream that ends early goes on at a server with the same model, as if nothing had been: the
parts of both, put together, are the undisturbed stream's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.resuming import check_resumed, joined, resume_field, stream
from tests.serve.running import Running

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = {"prompt": "My dear Elizabeth,", "max_tokens": 20}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SEEDED = {"seed": 7, "temperature": 1.0}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, {**PROMPT, "temperature": 0, **COUNTED}),
    "greedy chat": (CHAT, {**HELLO, "temperature": 0, **COUNTED}),
    "filters": (TEXT, {**PROMPT, **SEEDED, "top_p": 0.9, "top_k": 40, "min_p": 0.02}),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_goes_on_wherever_it_was_cut(server: Running, name: str) -> None:
    path, body = BODIES[name]
    check_resumed(server.url, path, body, some=True)
