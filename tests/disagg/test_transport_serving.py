"""Servers whose pages a library carries: the tokens of one server, whatever happens in between."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.disagg.test_pages_travel import (
    CACHED,
    Pair,
    ask,
    cached,
    prefilled,
    prompt,
    tokens,
)
from tests.disagg.test_pages_travel import OPTIONS as SERVER_OPTIONS
from tests.disagg.test_transport_libraries import skip_without
from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive
# libraries may stand behind this tree in PYTHONPATH
ENVIRONMENT = {"PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd()))}


def server(role: str, folder: Path, transport: str, *more: str) -> Running:
    secret = folder / "secret"
    secret.write_text("a secret that is long enough\n")
    options = (*SERVER_OPTIONS, "--role", role, "--kv-secret-file", str(secret))
    chosen = ("--kv-transport", transport, "--kv-staging-mb", "64")
    return start_server(*options, *chosen, *more, environment=ENVIRONMENT)


def metric(where: Running, name: str, transport: str) -> float:
    text = where.request("GET", "/metrics")[1]
    start = f"rorqual:{name}{{"
    lines = [one for one in text.splitlines() if one.startswith(start)]
    (line,) = [one for one in lines if f'transport="{transport}"' in one]
    return float(line.rsplit(" ", 1)[1])


def check_tokens(pair: Pair, transport: str) -> None:
    ids = prompt(10)
    given = prefilled(pair.prefill, ids)
    found = ask(pair.decode, ids, given)
    assert cached(found) == CACHED
    assert tokens(found) == tokens(ask(pair.prefill, ids, cache_salt="alone"))
    seeded = {"temperature": 0.9, "seed": 5, "top_k": 20}
    ids = prompt(11)
    given = prefilled(pair.prefill, ids, **seeded)
    found = ask(pair.decode, ids, given, **seeded)
    assert cached(found) == CACHED
    assert tokens(found) == tokens(ask(pair.prefill, ids, cache_salt="alone", **seeded))
    name = "kv_transfer_bytes_received_total"
    pair.decode.wait_until(lambda: metric(pair.decode, name, transport) > 0)
    received = metric(pair.decode, name, transport)
    name = "kv_transfer_bytes_sent_total"
    pair.prefill.wait_until(lambda: metric(pair.prefill, name, transport) == received)
    assert metric(pair.decode, "kv_transfer_errors_total", transport) == 0
    assert metric(pair.decode, "kv_transfer_seconds_total", transport) > 0


def check_a_keeper_that_stops(pair: Pair, transport: str) -> None:
    """Its library's process goes on serving; that alone makes no page come."""
    ids = prompt(20)
    given = prefilled(pair.prefill, ids)
    (engine,) = pair.prefill.engine_pids()
    os.kill(engine, signal.SIGSTOP)
    try:
        found = ask(pair.decode, ids, given)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert cached(found) == 0
    want = tokens(ask(pair.prefill, ids, cache_salt="alone"))
    assert tokens(found) == want
    name = "kv_transfer_errors_total"
    pair.decode.wait_until(lambda: metric(pair.decode, name, transport) == 1)
    given = prefilled(pair.prefill, ids)
    assert tokens(ask(pair.decode, ids, given, cache_salt="late")) == want
    other = prompt(21)
    found = ask(pair.decode, other, prefilled(pair.prefill, other))
    assert cached(found) == CACHED, "they come again"


def test_tokens_are_those_of_one_server(tmp_path: Path) -> None:
    skip_without("nixl")
    with (
        server("prefill", tmp_path, "nixl") as prefill,
        server("decode", tmp_path, "nixl") as decode,
    ):
        check_tokens(Pair(prefill, decode), "nixl")


@pytest.mark.longest
@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_a_keeper_that_stops_and_goes_on(tmp_path: Path, transport: str) -> None:
    skip_without(transport)
    with (
        server("prefill", tmp_path, transport) as prefill,
        server("decode", tmp_path, transport) as decode,
    ):
        pair = Pair(prefill, decode)
        check_tokens(pair, transport)
        check_a_keeper_that_stops(pair, transport)


@pytest.mark.longest
def test_servers_with_other_transports_and_one_that_is_killed(tmp_path: Path) -> None:
    skip_without("nixl")
    with (
        server("both", tmp_path, "nixl", "--restart") as prefill,
        server("both", tmp_path, "nixl") as decode,
        server("decode", tmp_path, "tcp") as plain,
    ):
        ids = prompt(30)
        given = prefilled(prefill, ids)
        found = ask(plain, ids, given)
        assert cached(found) == 0
        assert "at the keeper, 'tcp' here" in plain.text()
        os.kill(prefill.engine_pids()[0], signal.SIGKILL)
        assert cached(ask(decode, ids, given)) == 0
        prefill.wait_until(lambda: prefill.healthy())
        again = prefilled(prefill, prompt(31))
        found = ask(decode, prompt(31), again)
        assert cached(found) == CACHED
        want = ask(prefill, prompt(31), cache_salt="alone")
        assert tokens(found) == tokens(want)
