"""The scheduler when a step may bring several tokens: pages for the worst case, accounts put
right when the truth is known."""

from __future__ import annotations

import random

import pytest

from rorqual.engine.scheduling.scheduler_output import StepResult
from rorqual.errors import ConfigError
from tests.engine.fake_runner import check_idle, expected
from tests.engine.scheduling.test_scheduler import (
    ask,
    assert_expected,
    loop_of,
    make,
    random_requests,
    run_all,
    run_with_cancels,
)

DEPTHS = [1, 2, 3]


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_outputs_do_not_depend_on_drafts(depth: int, num_speculative_tokens: int) -> None:
    """Right drafts, wrong ones, and those of the step after may be written wherever the plan
    gave pages, and nowhere else."""
    requests = random_requests(
        60, seed=11, longest_prompt=90, most_tokens=60, stop_token_ids=(1, 2, 3)
    )
    loop = loop_of(make(num_speculative_tokens=num_speculative_tokens, lookahead=1), depth)
    run_all(loop, requests)
    assert_expected(loop, requests)
    assert set(loop.finishes.values()) == {"stop", "length"}
    assert loop.runner.most_in_flight == depth
    scheduler = loop.scheduler
    assert len(scheduler.drafted) == num_speculative_tokens
    assert all(
        0.2 * d < a < d for d, a in zip(scheduler.drafted[:1], scheduler.accepted, strict=False)
    )
    assert scheduler.accepted == sorted(scheduler.accepted, reverse=True)


@pytest.mark.parametrize("num_speculative_tokens", [1, 3])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_few_pages(depth: int, num_speculative_tokens: int, prefix_caching: bool) -> None:
    requests = random_requests(80, seed=7, longest_prompt=60, most_tokens=100, stop_token_ids=(1,))
    loop = loop_of(
        make(
            num_pages=25,
            num_speculative_tokens=num_speculative_tokens,
            prefix_caching=prefix_caching,
        ),
        depth,
    )
    run_all(loop, requests)
    assert_expected(loop, requests)
    assert loop.scheduler.num_preemptions > 20


@pytest.mark.parametrize("depth", DEPTHS)
def test_next_n_may_change_with_every_plan(depth: int) -> None:
    rng = random.Random(depth)
    scheduler = make(
        num_speculative_tokens=3,
        num_pages=41,
        max_num_seqs=16,
        max_num_batched_tokens=96,
        max_model_len=128,
    )
    loop = loop_of(scheduler, depth)
    requests = random_requests(
        300, seed=depth, longest_prompt=40, most_tokens=80, stop_token_ids=(5,)
    )

    def draft() -> None:
        scheduler.num_speculative_tokens = rng.randint(0, 3)

    alive = run_with_cancels(loop, requests, rng, draft)
    assert scheduler.num_preemptions > 10
    assert_expected(loop, alive)
    check_idle(scheduler)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_that_needs_every_page_ends_among_others(depth: int) -> None:
    # 128 entries
    loop = loop_of(
        make(num_pages=17, page_size=8, max_model_len=200, num_speculative_tokens=3), depth
    )
    requests = [
        ask("small", range(9), 40),
        ask("all", range(30), 99),
        ask("other", range(40, 60), 60),
    ]
    run_all(loop, requests)
    assert_expected(loop, requests)


def test_pages_are_there_for_what_a_step_may_write() -> None:
    """Drafts to verify and drafts made in turn: a page ahead of the boundary by 2
    num_speculative_tokens, and never one past the request's end."""
    scheduler = make(num_speculative_tokens=3, page_size=8)
    loop = loop_of(scheduler)
    scheduler.add(ask("a", range(8), 30))
    while scheduler.has_work:
        loop.launch()
        if (sequence := scheduler.sequences.get("a")) and loop.in_flight[-1][0].output.decode_slots:
            reach = min(sequence.num_computed_tokens + 6, sequence.max_total_len - 1)
            assert reach <= sequence.capacity < reach + 2 * 8
            assert sequence.capacity <= 40
        loop.collect()
    check_idle(scheduler)


def test_accounts_are_put_right_when_results_come_in() -> None:
    """In flight a step counts for one token and may bring three more; once known, cached is what
    was written and no max_extra_tokens is left."""
    scheduler = make(num_speculative_tokens=3)
    loop = loop_of(scheduler, depth=3)
    scheduler.add(ask("a", range(10), 200))
    for _ in range(12):
        loop.launch()
        sequence = scheduler.sequences["a"]
        decoding = [
            step.output.num_speculative_tokens
            for step, _ in loop.in_flight
            if step.output.decode_slots
        ]
        assert sequence.max_extra_tokens == sum(decoding)
        assert sequence.num_computed_tokens == len(sequence.tokens) - 1 + len(loop.in_flight)
        loop.collect()
    while loop.in_flight:
        loop.collect()
    assert sequence.max_extra_tokens == sequence.pending == 0
    assert sequence.num_computed_tokens == len(sequence.tokens) - 1
    assert sum(sequence.drafted) == sum(scheduler.drafted) > 0
    assert sequence.accepted == scheduler.accepted
    assert len(sequence.outputs) == 1 + sum(sequence.accepted) + sequence.drafted[0], (
        "one a step, and what was accepted"
    )


def test_the_end_in_the_middle_of_a_run() -> None:
    """Tokens after a stop id or the last one asked for are dropped, whatever their number."""
    prompt = tuple(range(20, 28))
    free = expected(ask("x", prompt, 40), 512, 97)
    for depth in DEPTHS:
        for most in range(1, 12):
            loop = loop_of(make(num_speculative_tokens=3), depth)
            run_all(loop, [ask("x", prompt, most)])
            assert (loop.outputs["x"], loop.finishes["x"]) == (free[:most], "length")
            loop = loop_of(make(num_speculative_tokens=3), depth)
            run_all(loop, [ask("x", prompt, 40, stop_token_ids=[free[most]])])
            assert (loop.outputs["x"], loop.finishes["x"]) == (
                free[: free.index(free[most]) + 1],
                "stop",
            )


def test_drafts_count_by_their_place() -> None:
    scheduler = make(num_speculative_tokens=3)
    loop = loop_of(scheduler)
    scheduler.add(ask("a", range(5), 50))
    loop.step()
    for tokens, drafted in (([1, 2, 3, 4], 3), ([5], 3), ([6, 7], 1), ([8], 0), ([9, 10], 2)):
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(step, StepResult([tokens], [drafted]))
    assert scheduler.drafted == scheduler.sequences["a"].drafted == [4, 3, 2]
    assert scheduler.accepted == scheduler.sequences["a"].accepted == [3, 1, 1]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("length", [15, 16, 17, 18, 19, 40])
def test_a_page_s_key_covers_what_follows_it(lookahead: int, length: int) -> None:
    """A prompt finds a page again where the tokens after it are the same ones too; both pages of
    one that repeats are never found."""
    scheduler = make(num_speculative_tokens=1, lookahead=lookahead)
    loop = loop_of(scheduler)
    prompt = list(range(length))
    run_all_names = [
        ask("first", prompt, 1),
        ask("again", prompt, 1),
        ask("other", [*prompt[:16], 90, 91, 92], 1),
    ]
    cached = []
    for request in run_all_names:
        scheduler.add(request)
        sequence = scheduler.sequences[request.id]
        loop.drain(loop.plans + 20)
        cached.append(sequence.num_cached_prompt)
    full = max(0, length - max(1, lookahead)) // 8 * 8
    follows = [90, 91][:lookahead]
    same = 16 if not follows or prompt[16 : 16 + lookahead] == follows else 8
    assert cached == [0, full, min(same, (length - lookahead) // 8 * 8)]
    assert_expected(loop, run_all_names)


def test_a_step_must_hold_the_drafts_of_every_request() -> None:
    with pytest.raises(
        ConfigError,
        match=r"max_num_batched_tokens=31 .* max_num_seqs=8 times num_speculative_tokens . 1 = 4",
    ):
        make(max_num_seqs=8, max_num_batched_tokens=31, num_speculative_tokens=3)
    loop = loop_of(make(max_num_seqs=8, max_num_batched_tokens=32, num_speculative_tokens=3))
    run_all(loop, random_requests(20, seed=1, longest_prompt=30, most_tokens=30))
