"""Requests of which all but the last token is cached: their first step holds no chunk of a prompt.

So they begin behind a prompt that was computed elsewhere, and where a prompt that is cached ends
one token behind a page.
"""

from __future__ import annotations

from typing import Any

import pytest

from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.engine.scheduling.sequence import InFlight
from rorqual.request import Request, SamplingParams
from tests.engine.fake_runner import FakeRunner, Loop, check_idle, check_pages, expected

VOCAB = 97
SIZE = 8
PROMPT = tuple((7 * i * i + 3 * i) % VOCAB for i in range(64))


def loop(depth: int = 1, **changes: Any) -> Loop:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "num_pages": 129,
        "page_size": SIZE,
    }
    scheduler = Scheduler(SchedulerConfig(**{**values, **changes}))
    return Loop(scheduler, FakeRunner.of(scheduler, VOCAB), depth)


def request(name: str, length: int, elsewhere: bool = False, **params: Any) -> Request:
    transfer = {"do_remote_decode": True} if elsewhere else None
    asked = SamplingParams(**{"max_tokens": 12, **params})
    return Request(name, PROMPT[:length], asked, kv_transfer_params=transfer)


def run(loop: Loop, *requests: Request) -> list[InFlight]:
    """Until all have ended, rightly; the steps, in order."""
    steps = []
    schedule = loop.scheduler.schedule

    def noted() -> InFlight | None:
        step = schedule()
        if step is not None:
            steps.append(step)
        return step

    loop.scheduler.schedule = noted  # type: ignore[method-assign]
    for one in requests:
        loop.scheduler.add(one)
    loop.plans = 0
    loop.drain(400)
    check_pages(loop.scheduler)
    loop.scheduler.schedule = schedule  # type: ignore[method-assign]
    for one in requests:
        assert loop.outputs.pop(one.id) == expected(one, 256, VOCAB)
    return steps


def prompts(steps: list[InFlight]) -> list[int]:
    return [len(chunk.tokens) for step in steps for chunk in step.output.chunks]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("length", [2, 8, 9, 15, 16, 31, 63])
def test_after_a_prompt_that_went_elsewhere(
    length: int, lookahead: int, drafts: int, depth: int
) -> None:
    here = loop(depth, lookahead=lookahead, num_speculative_tokens=drafts)
    assert prompts(run(here, request("first", length, elsewhere=True, max_tokens=1))) == [length]
    steps = run(here, request("second", length))
    whole = length % SIZE == 0  # its last page is a full one, which others may read
    assert prompts(steps) == ([SIZE] if whole else [])
    if not whole:
        row = steps[0].output.new_requests[0]
        assert (row.length, row.last_token) == (length - 1, PROMPT[length - 1])
        assert steps[0].output.decode_slots == [row.slot]


def test_a_cached_prompt_that_ends_one_token_behind_a_page() -> None:
    here = loop()
    run(here, request("first", 32))
    assert prompts(run(here, request("second", 33))) == []
    assert prompts(run(here, request("third", 34))) == [2]


def test_a_page_that_is_not_full_is_taken_by_one_alone() -> None:
    here = loop()
    run(here, request("first", 29, elsewhere=True, max_tokens=1))
    steps = run(here, request("second", 29), request("third", 29))
    assert prompts(steps) == [29 - 24]
    assert len(steps[0].output.decode_slots) == 1


def test_one_that_begins_beside_prompts_and_others_that_decode() -> None:
    here = loop(num_speculative_tokens=1)
    run(here, request("first", 29, elsewhere=True, max_tokens=1))
    other = Request("other", tuple(reversed(PROMPT)), SamplingParams(max_tokens=20))
    third = Request("third", (5, *PROMPT[:40]), SamplingParams(max_tokens=20))
    steps = run(here, other, request("second", 29), third)
    (step,) = [s for s in steps if any(row.length for row in s.output.new_requests)]
    assert step.output.chunks
    assert step.output.num_tokens <= 64


@pytest.mark.parametrize(
    ("changes", "params"),
    [
        ({"lookahead": 2}, {}),  # a second module has to see the token before as well
        ({}, {"prompt_logprobs": 0}),
        ({"prefix_caching": False}, {}),
    ],
    ids=["two modules", "scored", "no cache"],
)
def test_where_a_chunk_is_needed(changes: dict[str, Any], params: dict[str, Any]) -> None:
    here = loop(**changes)
    run(here, request("first", 29, elsewhere=True, max_tokens=1))
    assert sum(prompts(run(here, request("second", 29, **params)))) >= 5


def test_where_the_step_has_no_room_for_drafts_beside_the_token() -> None:
    here = loop(num_speculative_tokens=3)
    run(here, request("first", 29, elsewhere=True, max_tokens=1))
    here.scheduler.prompt_budget = 3
    assert sum(prompts(run(here, request("second", 29)))) == 5


def test_what_is_kept_for_others_gives_way_like_any_page() -> None:
    here = loop(num_pages=1 + 8)
    run(here, request("first", 29, elsewhere=True, max_tokens=1))
    assert len(here.scheduler.prefix.tails) == 1
    other = Request("other", tuple(reversed(PROMPT[:50])), SamplingParams(max_tokens=14))
    run(here, other)
    assert not here.scheduler.prefix.tails
    assert here.scheduler.prefix.available == 8


def test_an_aborted_request_leaves_nothing() -> None:
    here = loop()
    here.scheduler.add(request("first", 29, elsewhere=True))
    here.launch()
    here.scheduler.abort("first")
    here.collect()
    assert not here.scheduler.prefix.tails
    check_idle(here.scheduler)
