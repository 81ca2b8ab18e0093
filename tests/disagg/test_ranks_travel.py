"""Prompts computed by an engine of some ranks and answered by one of others: the tokens of one
engine, whatever the layouts and page sizes, and whatever becomes of a rank other than 0."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers")

from rorqual.disagg.leases import Found
from tests.child_process import stand_still
from tests.disagg.apart import LEASE, Apart, Engine
from tests.models.checkpoints import save

pytestmark = pytest.mark.exhaustive

PROMPT = [7 + (31 * i * i + 5 * i) % 120 for i in range(100)]
FULL = 96  # tokens in full pages, of whatever size
MTP = {"num_speculative_tokens": 2}


class Pair(NamedTuple):
    first: Apart
    second: Apart


def prompt(number: int) -> list[int]:
    return [number, *PROMPT[1:]]


@contextmanager
def started(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Pair]:
    with Apart("both", **first) as one, Apart("both", **second) as other:
        one.end()
        other.end()
        yield Pair(one, other)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model with two key-value heads."""
    folder = tmp_path_factory.mktemp("heads")
    save("qwen", folder)
    return {"model": str(folder)}


def nothing_is_held(side: Apart) -> None:
    side.wait_for(lambda state: not (state["used"] or state["held"] or state["waiting"]))


def travels(keeper: Apart, reader: Apart, number: int, cached: int, count: int = 1) -> None:
    ids = prompt(number)
    given = keeper.ask("prefill", ids)
    found = reader.ask("answer", ids, given, count)
    ((want, alone, _),) = keeper.ask("answer", ids, None, salt="alone")
    assert alone == 0
    # the last page, which is not full, is for one request alone
    assert found == [[want, cached, ""], *[[want, FULL, ""]] * (count - 1)]
    nothing_is_held(keeper)
    nothing_is_held(reader)


def both_ways(pair: Pair, cached: int) -> None:
    travels(pair.first, pair.second, 1, cached)
    travels(pair.second, pair.first, 2, cached, count=2)
    # some of it is there already
    ids = prompt(3)
    pair.second.ask("answer", ids[:50], None)
    travels(pair.first, pair.second, 3, cached)


def recomputes(pair: Pair, ids: list[int], given: Any, why: str) -> None:
    ((tokens, cached, error),) = pair.second.ask("answer", ids, given)
    ((want, _, _),) = pair.second.ask("answer", ids, None, salt="alone")
    assert (tokens, cached) == (want, 0)
    assert why in error


def test_latents_and_prediction_modules_between_two_ranks_and_one() -> None:
    with started({"tp": 2, **MTP}, MTP) as pair:
        both_ways(pair, 99)


@pytest.mark.longest
@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        ({"tp": 2, **MTP}, {"tp": 2, "dp": 2, **MTP}, 99),
        ({"pp": 2, "page_size": 16, **MTP}, {"tp": 2, **MTP}, 99),
        ({"mla_prefill": "CD", "mla_decode": "CD", "tp": 2}, {"mla_decode": "CD"}, 99),
    ],
    ids=["data-parallel", "stages", "decompressed"],
)
def test_latents_between_layouts(first: Any, second: Any, cached: int) -> None:
    if "mla_decode" in second:
        second = {"mla_prefill": "CD", **second}
    with started(first, second) as pair:
        both_ways(pair, cached)


@pytest.mark.longest
@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        ({"tp": 4, "page_size": 16, "kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int8"}, 99),
        ({"dp": 2, "page_size": 32}, {"tp": 2, "pp": 2, "page_size": 4}, 99),
        ({"page_size": 4, "kv_cache_dtype": "fp8"}, {"tp": 4, "kv_cache_dtype": "fp8"}, 99),
    ],
    ids=["more-ranks-than-heads", "stages", "fp8"],
)
def test_heads_between_layouts(heads: dict[str, Any], first: Any, second: Any, cached: int) -> None:
    with started({**heads, **first, "num_pages": 320}, {**heads, **second}) as pair:
        both_ways(pair, cached)


@pytest.fixture(scope="module")
def cut(heads: dict[str, Any]) -> Iterator[Pair]:
    """Two ranks with a head each, and one with both; pages of 16 and of 8 tokens."""
    first = {"tp": 2, "page_size": 16, "overlap": True, "chunked_prefill_size": 16}
    with started({**heads, **first}, heads) as pair:
        yield pair


def test_heads_between_two_ranks_and_one(cut: Pair) -> None:
    both_ways(cut, 99)


def test_a_keepers_rank_that_is_stopped_and_continued(cut: Pair) -> None:
    """In the midst of a transfer: its part comes late."""
    ids = prompt(20)
    given = cut.first.ask("prefill", ids)
    (rank,) = cut.first.ask("ranks")
    stand_still(rank)
    try:
        cut.second.begin("answer", ids, given)
        cut.first.wait_for(lambda state: state["held"] > 0)
        time.sleep(0.3)
        assert cut.second.lines.empty(), "it has not all of the heads"
    finally:
        os.kill(rank, signal.SIGCONT)
    ((tokens, cached, error),) = cut.second.end()
    assert (cached, error) == (99, "")
    assert tokens == cut.first.ask("answer", ids, None, salt="alone")[0][0]
    nothing_is_held(cut.first)


def test_a_lease_that_runs_out_on_a_stopped_rank(cut: Pair) -> None:
    ids = prompt(30)
    before = cut.first.ask("state")["expired"]
    given = cut.first.ask("prefill", ids)
    (rank,) = cut.first.ask("ranks")
    stand_still(rank)
    try:
        cut.first.wait_for(lambda state: state["expired"] > before, 10 * LEASE)
        assert cut.first.ask("state")["held"] == 0
    finally:
        os.kill(rank, signal.SIGCONT)
    # its pages become others'
    for number in range(31, 36):
        cut.first.ask("answer", prompt(number), None)
    recomputes(cut, ids, given, "the pages are kept no more")
    nothing_is_held(cut.first)
    nothing_is_held(cut.second)


def test_a_readers_rank_that_is_stopped_and_continued(cut: Pair) -> None:
    ids = prompt(40)
    given = cut.second.ask("prefill", ids)
    (rank,) = cut.first.ask("ranks")
    stand_still(rank)
    try:
        cut.first.begin("answer", ids, given)
        time.sleep(0.3)
        assert cut.first.lines.empty(), "rank 0 waits for the other's part"
    finally:
        os.kill(rank, signal.SIGCONT)
    ((tokens, cached, error),) = cut.first.end()
    assert (cached, error) == (99, "")
    assert tokens == cut.second.ask("answer", ids, None, salt="alone")[0][0]
    nothing_is_held(cut.second)


def test_requests_that_go_away_leave_nothing(cut: Pair) -> None:
    for number in range(50, 54):
        ids = prompt(number)
        keeper, reader = (cut.first, cut.second) if number % 2 else (cut.second, cut.first)
        assert reader.ask("abandon", ids, keeper.ask("prefill", ids))
    nothing_is_held(cut.first)
    nothing_is_held(cut.second)
    travels(cut.first, cut.second, 50, 99)


def test_page_sizes_that_are_no_multiples(cut: Pair) -> None:
    ids = prompt(60)
    given = cut.first.ask("prefill", ids)
    recomputes(cut, ids, {**given, "remote_page_size": 12}, "page_size is 12 at the other engine")
    ids = prompt(61)
    given = cut.first.ask("prefill", ids)
    # one that the keeper does not have
    recomputes(cut, ids, {**given, "remote_page_size": 4}, "kept no more")


def test_leases_are_closed_before_a_step_that_follows_on_an_error() -> None:
    side = Engine("both", {"overlap": True, "chunked_prefill_size": 16})
    try:
        transfers = side.transfers
        given = [side.prefill(prompt(1)), side.begin(prompt(2))]
        names = [bytes.fromhex(one["remote_request_id"]) for one in given]
        keys = [next(iter(transfers.leases.open[name].pages)) for name in names]

        def found() -> list[Found]:
            table = transfers.pages.leases
            return [
                table.read(name, key, lambda page: None)
                for name, key in zip(names, keys, strict=True)
            ]

        assert found() == [Found.HERE] * 2
        with pytest.raises(ZeroDivisionError), side.engine.changing():
            raise ZeroDivisionError
        assert found() == [Found.HERE] * 2, "nothing has been written since"
        with side.engine.changing():
            assert found() == [Found.GONE] * 2
        side.go_on(40)
        assert not side.engine.has_work, "who was answered is computed to the end all the same"
        assert side.state()["used"] == side.state()["held"] == 0
        assert not transfers.offers.begun
    finally:
        side.transfers.close()
        side.engine.close()


def waits(side: Apart, seconds: float = 0.3) -> None:
    time.sleep(seconds)
    assert side.lines.empty(), "it waits"


def test_pages_leave_while_their_prompt_is_computed(cut: Pair) -> None:
    ids = prompt(90)
    nothing_is_held(cut.first)
    given = cut.first.ask("begin", ids)
    assert given["remote_num_pages"] == 7
    cut.second.begin("answer", ids, given)
    waits(cut.second)
    held, left = cut.first.ask("go_on", 1)
    assert 0 < held < 7
    assert left
    waits(cut.second)
    # longer than a lease lasts, and than a reader is told to wait
    waits(cut.second, LEASE + 1)
    cut.first.ask("go_on", 20)
    ((tokens, cached, error),) = cut.second.end()
    assert (cached, error) == (99, "")
    assert tokens == cut.first.ask("answer", ids, None, salt="alone")[0][0]
    nothing_is_held(cut.first)
    nothing_is_held(cut.second)


def test_a_prompt_that_is_given_up_while_its_pages_leave(cut: Pair) -> None:
    ids = prompt(91)
    nothing_is_held(cut.first)
    given = cut.first.ask("begin", ids)
    cut.second.begin("answer", ids, given)
    held, _ = cut.first.ask("go_on", 1)
    cut.first.ask("give_up")
    cut.first.ask("state")
    ((tokens, cached, error),) = cut.second.end()
    assert 16 <= cached <= held * 16
    assert "kept no more" in error
    assert tokens == cut.second.ask("answer", ids, None, salt="alone")[0][0]
    nothing_is_held(cut.first)
    nothing_is_held(cut.second)


# The last of this pair.
def test_a_keepers_rank_that_is_killed(cut: Pair) -> None:
    ids = prompt(70)
    given = cut.first.ask("prefill", ids)
    (rank,) = cut.first.ask("ranks")
    stand_still(rank)
    cut.second.begin("answer", ids, given)
    time.sleep(0.3)
    os.kill(rank, signal.SIGKILL)
    ((tokens, cached, error),) = cut.second.end()
    assert cached == 0
    assert error.startswith("0 of 13 pages of the prompt came")
    assert tokens == cut.second.ask("answer", ids, None, salt="alone")[0][0]
    nothing_is_held(cut.second)
    with pytest.raises(RuntimeError, match=r"EngineError: rank 1 .* ended with status -9"):
        cut.first.ask("answer", ids, None)


@pytest.mark.longest
def test_a_readers_rank_that_is_killed(heads: dict[str, Any]) -> None:
    with started({**heads, "tp": 2}, heads) as pair:
        ids = prompt(80)
        given = pair.second.ask("prefill", ids)
        (rank,) = pair.first.ask("ranks")
        stand_still(rank)
        pair.first.begin("answer", ids, given)
        time.sleep(0.3)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"EngineError: rank 1 .* ended with status -9"):
            pair.first.end()
        pair.second.wait_for(lambda state: state["expired"] == 1, 10 * LEASE)
        nothing_is_held(pair.second)
