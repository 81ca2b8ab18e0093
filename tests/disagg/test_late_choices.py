"""Choices of one call whose pages come from elsewhere: not all of them are there when the pages
come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

pytest.importorskip("transformers")

from rorqual.disagg import arrivals, kv_transfers
from tests.disagg.apart import Engine

PROMPT = [7 + (31 * i * i + 5 * i) % 120 for i in range(100)]
FULL = 96  # tokens in full pages


class Pair(NamedTuple):
    first: Engine
    second: Engine


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    found = Pair(Engine("prefill", {}), Engine("decode", {}))
    yield found
    for one in found:
        one.transfers.close()
        one.engine.close()


def released(keeper: Engine) -> None:
    """Wait until it holds no page for another engine."""
    deadline = time.monotonic() + 60
    while keeper.state()["held"]:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_choice_that_comes_behind_the_pages(pair: Pair) -> None:
    """The server of the pages was told that they are read, and the last page, which is not full,
    has meanwhile another choice's tokens. That is no failure."""
    given = pair.first.prefill(PROMPT)
    ((want, cached, why),) = pair.second.answer(PROMPT, given)
    assert (cached, why) == (len(PROMPT) - 1, "")
    before = pair.second.transfers.figures()
    ((found, cached, why),) = pair.second.answer(PROMPT, given)
    assert (found, cached, why) == (want, FULL, "")
    assert pair.second.transfers.figures() == before


def test_leases_are_forgotten(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_FINISHED", 2)
    for number in range(4):
        ids = [number, *PROMPT]
        ((_, cached, why),) = pair.second.answer(ids, pair.first.prefill(ids))
        assert (cached, why) == (len(ids) - 1, "")
    assert len(pair.second.transfers.arrivals.finished) == 2


def test_prompts_whose_answer_waits_for_others(pair: Pair) -> None:
    """Their leases do not expire before it is sent; if nobody gets it, they end then."""
    transfers = pair.first.transfers
    released(pair.first)
    for number, lost in enumerate((False, True)):
        ids = [50 + number, *PROMPT]
        name = f"r{next(pair.first.names) + 1}"
        transfers.expect_answer(name)
        given = pair.first.prefill(ids)
        (lease,) = transfers.leases.open.values()
        lease.deadline = 0.0
        transfers.settle()
        assert transfers.leases.held > 0
        transfers.answered([name], lost)
        transfers.settle()
        assert (transfers.leases.held > 0) is not lost
        if not lost:
            ((_, cached, why),) = pair.second.answer(ids, given)
            assert (cached, why) == (len(ids) - 1, "")
        released(pair.first)
    assert transfers.offers.unanswered == {}


def check_let_go(keeper: Engine, before: int) -> None:
    """Told by the reader, and not because a lease has run out."""
    released(keeper)
    assert keeper.state()["expired"] == before


def test_pages_that_are_all_here_are_not_kept_elsewhere(pair: Pair) -> None:
    ids = [60, *PROMPT[1 : FULL + 1]]
    expired = pair.first.state()["expired"]
    for want in (FULL, FULL, FULL):
        ((_, cached, why),) = pair.second.answer(ids, pair.first.prefill(ids))
        assert (cached, why) == (want, "")
        check_let_go(pair.first, expired)


def test_pages_that_nobody_waits_for_any_more(pair: Pair) -> None:
    ids = [61, *PROMPT]
    expired = pair.first.state()["expired"]
    assert pair.second.abandon(ids, pair.first.prefill(ids))
    check_let_go(pair.first, expired)


def test_pages_that_are_not_fetched_for_want_of_room(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired = pair.first.state()["expired"]
    for number, most in enumerate((0, 1)):
        monkeypatch.setattr(kv_transfers, "MAX_WAITING", most)
        ids = [62 + number, *PROMPT]
        found = pair.second.answer(ids, pair.first.prefill(ids), count=2)
        # one that is fetched goes on, though another of the same answer is not
        assert max(cached for _, cached, _ in found) >= most * (len(ids) - 1)
        assert all(why == "" for *_, why in found)
        check_let_go(pair.first, expired)


def test_other_addresses_are_not_told(pair: Pair) -> None:
    """What may not be called is not called to let go either."""
    told = []
    ids = [64, *PROMPT[1 : FULL + 1]]
    arrivals_of = pair.second.transfers.arrivals
    given = pair.first.prefill(ids)
    pair.second.answer(ids, given)
    remote = pair.second.transfers._remote(given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals_of, "finish", told.append)
        barred = replace(remote, barred=(remote.address,), lease=b"other")
        arrivals_of.let_go(barred)
        arrivals_of.let_go(remote)  # it has been told
        assert told == []
        arrivals_of.let_go(replace(barred, barred=()))
        assert len(told) == 1
    released(pair.first)
