"""Kills between the first token, which the prefill server has sampled and the client has, and the
second, of a decode server. Servers of their own: one restarts its engine five times in a row."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("fastapi")

from tests.route.test_apart_deaths import Apart, Client, apart, right
from tests.route.test_real_servers import Read

pytestmark = pytest.mark.exhaustive

__all__ = ["apart", "right"]  # fixtures


def with_first_token(apart: Apart, number: int, salt: str, **more: Any) -> Client:
    """It has the prefill server's token, and the engines that could answer are stopped."""
    has = threading.Event()
    apart.signal(apart.decodes, signal.SIGSTOP)
    client = Client(apart, number, salt, lambda count: has.set(), **more)
    assert has.wait(60)
    return client


@pytest.mark.parametrize("victims", ["prefill", "decode", "both"])
def test_killed_between_the_first_token_and_the_second(
    apart: Apart, right: dict[int, Read], victims: str
) -> None:
    apart.rest()
    client = with_first_token(apart, 0, f"first {victims}")
    if victims != "prefill":
        apart.router.wait_until(lambda: len(apart.busy()) == 1)
        apart.signal([apart.with_work()], signal.SIGKILL)
    if victims != "decode":
        apart.signal([apart.prefill], signal.SIGKILL)
    for server in apart.decodes:
        for pid in server.engine_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert client.ended() == right[0]
    apart.rest()


def test_a_first_token_that_another_server_would_not_draw(apart: Apart) -> None:
    """Without a seed, where the server that goes on computes the prompt: the token is kept."""
    apart.rest()
    sampling = {"temperature": 100.0, "seed": None, "max_tokens": 6, "return_token_ids": True}
    client = with_first_token(apart, 0, "no seed", **sampling)
    apart.signal([apart.prefill], signal.SIGKILL)
    apart.signal(apart.decodes, signal.SIGCONT)
    read = client.ended()
    assert read.ends == {0: "length"}
    assert len(read.ids[0]) == 6
    apart.rest()
