"""A decode server with host memory behind its cache: what is there does not travel again, also
where it lies between what the device has and what comes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rorqual.cache.prefix import page_keys
from rorqual.engine.cached_pages import CachedPages
from tests.engine.fake_runner import ROOT, Loop, Page, advance, check_pages
from tests.engine.scheduling.test_host_tier import SIZE, ask, fill, finish, host, make, text

PROMPT = [*text(0), *text(7, 13)]
FULL = 13  # pages, of which `fill` leaves THERE in host memory
THERE = 10


def cached_pages(loop: Loop) -> CachedPages:
    scheduler = SimpleNamespace(schedulers=[loop.scheduler])
    return CachedPages(cast(Any, SimpleNamespace(scheduler=scheduler, changing=nullcontext)))


def keep(loop: Loop, prompt: list[int], first: int, count: int) -> int:
    """Pages that come from elsewhere, as a keeper's device wrote them."""
    states = [ROOT]
    for token in prompt[:-1]:
        states.append(advance(states[-1], token))

    def write(pages: list[int], after: int) -> None:
        for place, page in enumerate(pages, first + after):
            start = place * SIZE
            entries = states[start + 1 : start + SIZE + 1]
            loop.runner.pages[page] = Page(0, start, states[start], list(entries))

    return cached_pages(loop).keep(0, prompt, "", first, count, write)


def answer(loop: Loop, name: str, prompt: list[int]) -> int:
    """How many tokens of it were computed, those of its answer among them."""
    before = loop.runner.computed_tokens
    finish(loop, ask(loop, name, prompt))
    return loop.runner.computed_tokens - before


def test_what_host_memory_has_is_brought_and_not_asked_for() -> None:
    loop = make()
    fill(loop)
    assert cached_pages(loop).count(0, PROMPT, "") == THERE
    assert keep(loop, PROMPT, THERE, 3) == 3
    assert cached_pages(loop).count(0, PROMPT, "") == FULL
    brought = host(loop).pages_in
    assert answer(loop, "apart", PROMPT) == 2, "the last token, and the first of the answer"
    assert host(loop).pages_in - brought == THERE


@pytest.mark.parametrize("kept", [0, 1, 3, 8])
def test_between_what_the_device_has_and_what_comes(kept: int) -> None:
    """The device has the first pages, host memory those behind them."""
    loop = make()
    fill(loop)
    begun = ask(loop, "begun", PROMPT[: kept * SIZE + 1], most=1)
    finish(loop, begun)
    pages, _ = loop.scheduler.prefix.match(PROMPT)
    loop.scheduler.prefix.release(pages)
    assert len(pages) == kept
    assert keep(loop, PROMPT, THERE, 3) == 3
    assert answer(loop, "apart", PROMPT) == 2


def test_pages_that_leave_host_memory_meanwhile_leave_all_to_compute() -> None:
    loop = make()
    fill(loop)
    assert cached_pages(loop).count(0, PROMPT, "") == THERE
    host(loop).clear()
    assert keep(loop, PROMPT, THERE, 3) == 0, "nothing is taken in behind a gap"
    assert answer(loop, "apart", PROMPT) == len(PROMPT) + 1


def test_pages_that_leave_host_memory_behind_what_came() -> None:
    loop = make()
    fill(loop)
    assert keep(loop, PROMPT, THERE, 3) == 3
    host(loop).clear()
    assert answer(loop, "apart", PROMPT) == len(PROMPT) + 1


def test_what_came_is_pushed_out_itself() -> None:
    loop = make(host_step_pages=16)
    fill(loop)
    assert keep(loop, PROMPT, THERE, 3) == 3
    for i in range(3):
        finish(loop, ask(loop, f"more{i}", text(10 + i), most=8))
    key = page_keys(PROMPT, "", SIZE, 0)[FULL - 1]
    assert key not in loop.scheduler.prefix.pages
    assert key in host(loop).slots
    assert cached_pages(loop).count(0, PROMPT, "") == FULL
    assert answer(loop, "apart", PROMPT) == 2
    check_pages(loop.scheduler)


def test_asked_for_pages_are_the_newest_in_host_memory() -> None:
    loop = make()
    fill(loop)
    cached_pages(loop).count(0, PROMPT, "")
    newest = list(host(loop).slots)[-THERE:]
    assert newest[::-1] == page_keys(PROMPT, "", SIZE, 0)[:THERE], "a chain goes from its end"


@pytest.mark.exhaustive
def test_engines(tmp_path: Any) -> None:
    """Tokens of one engine, and only what is missing travels."""
    pytest.importorskip("transformers")
    from tests.disagg.test_ranks_travel import nothing_is_held, prompt, started
    from tests.models.checkpoints import save

    save("qwen", tmp_path)
    model = {"model": str(tmp_path), "max_num_seqs": 4}
    with started(model, {**model, "num_pages": 40, "kv_host_memory": 0.01}) as pair:
        keeper, reader = pair
        for number in range(1, 4):
            ids = prompt(number)
            reader.ask("answer", ids[:57], None)
            for other in range(4):
                reader.ask("answer", prompt(10 * number + other), None, salt="others")
            before = reader.ask("state")
            given = keeper.ask("prefill", ids)
            ((tokens, cached, error),) = reader.ask("answer", ids, given)
            after = reader.ask("state")
            assert (cached, error) == (99, "")
            assert tokens == keeper.ask("answer", ids, None, salt="alone")[0][0]
            assert after["came"] - before["came"] == 13 - 7
            assert after["brought"] - before["brought"] == 7
            nothing_is_held(keeper)
            nothing_is_held(reader)
