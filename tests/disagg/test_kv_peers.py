"""Pages that an engine may not fetch: their server is not among kv_peers, as its own settings say.
The sender of the request cannot know that."""

from __future__ import annotations

import dataclasses
import itertools
import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

from rorqual.disagg.kv_transfers import MAX_BARRED
from rorqual.errors import RequestError
from tests.disagg.apart import Engine

PROMPT = [7 + (31 * i * i + 5 * i) % 120 for i in range(100)]
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    found = Engine("decode", {})
    found.transfers.config = dataclasses.replace(found.transfers.config, peers=("127.0.0.1:1",))
    yield found
    found.transfers.close()
    found.engine.close()


@pytest.fixture
def engine(one: Engine) -> Engine:
    one.transfers.barred.clear()
    return one


def prompt() -> list[int]:
    return [next(NUMBERS), *PROMPT]


def given(port: int, *ranks: int, **more: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "remote_request_id": "ab" * 32,
        "remote_engine_id": "first",
        "remote_ranks": [["127.0.0.1", rank] for rank in ranks or (port,)],
        "tp_size": len(ranks) or 1,
        **more,
    }


def test_the_prompt_is_computed_here(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing connects to the address; each is logged once, however many requests name it."""
    before = engine.transfers.figures()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        # rank 0 may be asked, the second rank may not
        for where in (given(port), given(1, 1, port), given(1, 1, port + 1), given(port)):
            ids = prompt()
            ((found, cached, why),) = engine.answer(ids, where)
            assert cached == 0
            assert why.startswith("0 of 13 pages of the prompt came")
            assert "127.0.0.1" not in why, "clients of a router get this message"
            ((want, _, _),) = engine.answer(ids, salt="alone")
            assert found == want
        assert not select.select([listener], [], [], 0)[0]
    requests, failures, *_ = engine.transfers.figures()
    assert (requests - before[0], failures - before[1]) == (4, 4)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"pages of prompts are not fetched from 127.0.0.1:{one}: not among kv_peers"
        for one in (port, port + 1)
    ]


def test_a_prompt_that_is_cached_needs_no_pages(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt()[:97]  # full pages, and the last token
    engine.answer(ids)
    before = engine.transfers.figures()
    ((_, cached, why),) = engine.answer(ids, given(9))
    assert (cached, why) == (len(ids) - 1, "")
    assert engine.transfers.figures() == before
    assert caplog.records == []


def test_addresses_that_a_client_makes_up_fill_no_log(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    for first in range(100, 100 + 2 * MAX_BARRED, 20):
        engine.answer(prompt(), given(1, *range(first, first + 16)))
    text = caplog.text
    assert text.count("127.0.0.1:") == MAX_BARRED
    assert text.count("further addresses are not logged") == 1
    name = "a\n" * 10_000
    engine.transfers.barred.clear()
    caplog.clear()
    engine.answer(prompt(), given(1, remote_host=name))
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 500


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"remote_request_id": "x"}, "remote_request_id"),
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_port": 0}, "name no address"),
        ({"tp_size": 2}, "names 1 addresses"),
    ],
)
def test_what_is_malformed_is_the_callers_mistake_all_the_same(
    engine: Engine, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        engine.answer(prompt(), given(9, **wrong))
