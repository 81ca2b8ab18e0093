"""A few hundred requests of the soak (tests/serve/soak.py), against the session's server."""

from __future__ import annotations

import asyncio

import pytest

from tests.serve import soak
from tests.serve.running import Running

pytestmark = pytest.mark.exhaustive


@pytest.mark.longest
def test_mixed_load_leaves_nothing_behind(server: Running):
    seen = asyncio.run(soak.run(server.port, 400, 48))
    assert soak.problems(server, seen) == []
    assert seen["200"] > 180
    assert seen["left"] > 80
    assert seen["400"] > 20


def test_many_who_leave_at_once(server: Running):
    """Everybody goes before the first token; the next request finds an idle engine."""

    async def leave(i: int) -> None:
        _, writer = await soak.send(
            server.port,
            "/v1/completions",
            b'{"prompt": "a", "max_tokens": 400, "ignore_eos": true}',
            99,
        )
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async def all_of_them() -> None:
        await asyncio.gather(*(leave(i) for i in range(100)))

    asyncio.run(all_of_them())
    assert soak.problems(server, soak.Counter()) == []
    assert server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
