"""k decode steps in one call leave everything as k rounds of plan and update do."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.engine.scheduling.scheduler_output import StepResult
from rorqual.planner.simulator.fast_forward import advance, decode_run
from rorqual.request import Request, SamplingParams


def state(scheduler: Scheduler) -> dict[str, Any]:
    """Everything a later plan depends on; a blocked head by its name."""
    blocked = scheduler._blocked
    sequences = {}
    for name, sequence in scheduler.sequences.items():
        skipped = ("request", "stop_ids", "client_account", "user_account")
        sequences[name] = {
            key: getattr(sequence, key) for key in sequence.__slots__ if key not in skipped
        } | {"served": (sequence.client_account.served, sequence.user_account.served)}
    prefix = scheduler.prefix
    return {
        "sequences": sequences,
        "order": (
            [s.request.id for s in scheduler.waiting],
            list(scheduler.prefilling),
            list(scheduler.decoding),
        ),
        "pages": (
            list(scheduler.allocator.free),
            scheduler.allocator.holders,
            prefix.pages,
            prefix.keys,
            list(prefix.idle),
        ),
        "counts": (
            prefix.queries,
            prefix.hits,
            scheduler.drafted,
            scheduler.accepted,
            scheduler.num_preemptions,
            scheduler.free_slots,
        ),
        "live": scheduler.live_tokens,
        "blocked": blocked and (blocked[0].request.id, *blocked[1:]),
    }


def round_of(scheduler: Scheduler, right: list[int], rng: random.Random) -> bool:
    """One plan and update; `right` drafts of each decoding row are accepted."""
    step = scheduler.schedule()
    if step is None:
        return False
    decoded = len(step.output.decode_slots)
    tokens = [[rng.randrange(3) for _ in range(right[row] + 1)] for row in range(decoded)]
    tokens += [[rng.randrange(3)] for _ in step.sampled[decoded:]]
    drafted = (
        [scheduler.num_speculative_tokens * (row < decoded) for row in range(len(tokens))]
        if scheduler.num_speculative_tokens
        else []
    )
    scheduler.update(step, StepResult(tokens, drafted))
    return True


def settled(seed: int, **config: Any) -> tuple[Scheduler, random.Random]:
    """Some requests after a while, with prompts that share pages and a cache that is rather
    small."""
    rng = random.Random(seed)
    scheduler = Scheduler(SchedulerConfig(**config))
    scheduler._seeds = random.Random(seed)  # type: ignore[assignment]  # the system's cannot be copied
    for index in range(rng.randint(1, 7)):
        prompt = tuple(rng.randrange(2) for _ in range(rng.randint(1, 20)))
        scheduler.add(
            Request(f"r{index}", prompt, SamplingParams(max_tokens=rng.randint(1, 24), seed=index))
        )
    for _ in range(rng.randint(1, 12)):
        rights = [rng.randint(0, scheduler.num_speculative_tokens) for _ in range(8)]
        round_of(scheduler, rights, rng)
    return scheduler, rng


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 2, 4, 8]),
    num_speculative_tokens=st.integers(0, 2),
    lookahead=st.integers(0, 2),
    spare=st.integers(0, 40),
    caching=st.booleans(),
    share=st.floats(0, 1),
)
def test_k_steps_at_once_equal_k_single_steps(
    seed: int,
    page_size: int,
    num_speculative_tokens: int,
    lookahead: int,
    spare: int,
    caching: bool,
    share: float,
) -> None:
    config = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 48,
        "page_size": page_size,
        "prefix_caching": caching,
    }
    fast, _ = settled(
        seed,
        **config,
        num_pages=48 // page_size + 1 + spare,
        num_speculative_tokens=num_speculative_tokens,
        lookahead=lookahead,
    )
    while fast.has_work:
        run = decode_run(fast)
        slow = copy.deepcopy(fast)
        if not run:
            round_of(fast, [0] * 8, random.Random(seed))
            continue
        count = max(1, round(run * share))
        draw = random.Random(seed)
        accepted = [
            [draw.randint(0, num_speculative_tokens) for _ in range(count)] for _ in fast.decoding
        ]
        new = [[draw.randrange(3) for _ in range(count + sum(right))] for right in accepted]
        todo = [list(tokens) for tokens in new]
        for index in range(count):
            step = slow.schedule()
            assert step is not None
            assert not step.output.chunks
            assert step.output.decode_slots == [s.slot for s in fast.decoding.values()]
            tokens = [
                [todo[row].pop(0) for _ in range(right[index] + 1)]
                for row, right in enumerate(accepted)
            ]
            outs = slow.update(
                step,
                StepResult(
                    tokens, [num_speculative_tokens] * len(tokens) if num_speculative_tokens else []
                ),
            )
            assert not any(out.finish for out in outs)
        advance(fast, count, new, accepted)
        assert state(fast) == state(slow)
        assert fast.live_tokens == sum(sequence.known for sequence in fast.sequences.values())


def scheduler_of(**changes: Any) -> Scheduler:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 200,
        "num_pages": 101,
        "page_size": 4,
    }
    return Scheduler(SchedulerConfig(**{**values, **changes}))


def started(scheduler: Scheduler, *outputs: int, **params: Any) -> Scheduler:
    for index, output in enumerate(outputs):
        scheduler.add(
            Request(f"r{index}", (index, 1, 2), SamplingParams(max_tokens=output, seed=0, **params))
        )
    round_of(scheduler, [], random.Random(0))
    return scheduler


def test_a_run_ends_before_the_first_request_does() -> None:
    """One token came with the prompt; of 19 that are left the last one ends the request."""
    assert decode_run(started(scheduler_of(), 20, 30)) == 18
    assert decode_run(started(scheduler_of(num_speculative_tokens=2), 20, 30)) == 6
    assert decode_run(started(scheduler_of(), 2)) == 0


def test_no_run_where_the_next_step_may_differ() -> None:
    assert decode_run(scheduler_of()) == 0
    assert decode_run(started(scheduler_of(), 20, stop_token_ids=[7])) == 0, "a token may end it"
    waiting = started(scheduler_of(), 20)
    waiting.add(Request("late", (1,), SamplingParams(max_tokens=2)))
    assert decode_run(waiting) == 0, "a request can be admitted"
    full = started(scheduler_of(max_num_seqs=1), 20)
    full.add(Request("late", (1,), SamplingParams(max_tokens=2)))
    assert decode_run(full) == 18, "no slot is free until the run ends"
    flying = started(scheduler_of(), 20)
    flying.schedule()
    assert decode_run(flying) == 0, "a step is in flight"


def test_a_run_stops_where_pages_run_out() -> None:
    scheduler = started(scheduler_of(num_pages=13, max_model_len=44, prefix_caching=False), 40, 40)
    run = decode_run(scheduler)
    assert 0 < run < 38
    advance(scheduler, run, [[1] * run] * 2)
    assert scheduler.num_preemptions == 0
    with pytest.raises(AssertionError):
        advance(scheduler, 39, [[1] * 39] * 2)


def test_no_run_where_a_request_may_bring_the_page_a_blocked_head_waits_for() -> None:
    """Two requests say what the head of the queue has in its prompt. One of them says something
    else before the page is full: from then on only the other one counts."""
    prompt = (*range(8), *[1] * 12)

    def blocked(*salts: str) -> Scheduler:
        scheduler = scheduler_of(num_pages=11, max_model_len=44)
        for index, salt in enumerate(salts):
            params = SamplingParams(max_tokens=12, seed=0)
            scheduler.add(Request(f"r{index}", prompt[:9], params, cache_salt=salt))
        say(scheduler, [[1]] * len(salts))
        scheduler.add(Request("head", (*prompt, *range(16)), SamplingParams(max_tokens=2, seed=0)))
        say(scheduler, [[1]] * len(salts))
        assert [sequence.request.id for sequence in scheduler.waiting] == ["head"]
        return scheduler

    assert decode_run(blocked("other")) > 0, "it shares nothing with the head"
    alone = blocked("")
    before = alone._blocked
    for _ in range(2):
        assert decode_run(alone) == 0
        say(alone, [[1]])
        assert alone._blocked == before
    assert len(alone.sequences["r0"].tokens) == 13, "its third page is full"
    assert alone.schedule() is not None
    assert alone._blocked != before, "the plan looked at the head again"
    both = blocked("", "other")
    assert decode_run(both) == 0
    say(both, [[2], [1]])
    assert decode_run(both) > 0, "its third page is another one now"


def say(scheduler: Scheduler, tokens: list[list[int]]) -> None:
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(step, StepResult(tokens))
