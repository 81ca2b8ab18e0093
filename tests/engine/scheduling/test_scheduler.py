"""The scheduler under a runner that checks every plan: completion, budgets, preemption,
cancelling, prefix sharing, planning time."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.errors import CapacityError, ConfigError, RequestError
from rorqual.request import Request, SamplingParams
from tests.engine.fake_runner import FakeRunner, Loop, check_idle, check_pages, expected

pytestmark = pytest.mark.exhaustive(but_first=True)

VOCAB = 97


def make(**changes: Any) -> Scheduler:
    """Room for everything unless `changes` say otherwise."""
    values = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "num_pages": 513,
        "page_size": 8,
    }
    return Scheduler(SchedulerConfig(**{**values, **changes}))


def loop_of(scheduler: Scheduler, depth: int = 1, vocab: int = VOCAB) -> Loop:
    return Loop(scheduler, FakeRunner.of(scheduler, vocab), depth)


def ask(
    name: str,
    prompt: tuple[int, ...] | list[int],
    max_tokens: int | None = 16,
    salt: str = "",
    eos: tuple[int, ...] = (),
    **params: Any,
) -> Request:
    return Request(
        name, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params), eos, cache_salt=salt
    )


def random_requests(
    count: int, seed: int, longest_prompt: int, most_tokens: int, **params: Any
) -> list[Request]:
    rng = random.Random(seed)
    return [
        ask(
            f"r{i}",
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest_prompt))],
            rng.randint(1, most_tokens),
            **params,
        )
        for i in range(count)
    ]


def run_all(loop: Loop, requests: list[Request]) -> dict[str, list[int]]:
    for request in requests:
        loop.scheduler.add(request)
    loop.drain(
        most_plans=sum(
            (request.params.max_tokens or 0) + len(request.prompt) for request in requests
        )
        + 10
    )
    check_idle(loop.scheduler)
    return loop.outputs


def assert_expected(loop: Loop, requests: list[Request]) -> None:
    longest = loop.scheduler.config.max_model_len
    wrong = [
        r.id for r in requests if loop.outputs[r.id] != expected(r, longest, loop.runner.vocab)
    ]
    assert not wrong, f"{len(wrong)} of {len(requests)} outputs are wrong, the first {wrong[0]}"


# ---- many requests


@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [1, 2])
def test_ten_thousand_requests_complete(depth: int) -> None:
    scheduler = make(
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=256,
        num_pages=2049,
        page_size=16,
    )
    loop = loop_of(scheduler, depth)
    requests = random_requests(10_000, seed=depth, longest_prompt=120, most_tokens=40)
    run_all(loop, requests)
    assert_expected(loop, requests)
    assert set(loop.finishes.values()) == {"length"}
    assert loop.runner.most_in_flight == depth
    assert (
        loop.runner.computed_tokens
        >= sum(len(r.prompt) + (r.params.max_tokens or 0) - 1 for r in requests)
        - scheduler.prefix.hits
    )


@pytest.mark.parametrize("chunked_prefill_size", [None, 1, 7, 64])
@pytest.mark.parametrize("budget", [8, 13, 4096])
def test_outputs_do_not_depend_on_chunking(budget: int, chunked_prefill_size: int | None) -> None:
    loop = loop_of(make(max_num_batched_tokens=budget, chunked_prefill_size=chunked_prefill_size))
    requests = random_requests(24, seed=3, longest_prompt=100, most_tokens=12)
    run_all(loop, requests)
    assert_expected(loop, requests)


def test_prefill_chunk_bounds_each_prompt_in_a_step() -> None:
    scheduler = make(chunked_prefill_size=5)
    loop = loop_of(scheduler)
    scheduler.add(ask("a", range(23), 2))
    scheduler.add(ask("b", range(50, 71), 2))
    sizes: list[list[int]] = []
    while scheduler.prefilling or scheduler.waiting:
        loop.launch()
        sizes.append([len(chunk.tokens) for chunk in loop.in_flight[-1][0].output.chunks])
        loop.collect()
    assert sizes == [[5, 5], [5, 5], [5, 5], [5, 5], [3, 1]]


def test_a_step_fills_its_token_budget() -> None:
    """While prompts wait and nothing else is short, no token of the budget is left unused; nor
    is it ever exceeded."""
    scheduler = make(max_num_batched_tokens=32, max_num_seqs=8)
    loop = loop_of(scheduler)
    for request in random_requests(6, seed=0, longest_prompt=60, most_tokens=4):
        scheduler.add(request)
    while True:
        loop.launch()
        if not (scheduler.waiting or scheduler.prefilling):
            break
        assert loop.in_flight[-1][0].output.num_tokens == 32
        loop.collect()


def test_decoding_goes_on_while_a_long_prompt_prefills() -> None:
    scheduler = make(
        max_num_seqs=33,
        max_num_batched_tokens=256,
        max_model_len=9000,
        num_pages=1200,
        page_size=16,
    )
    loop = loop_of(scheduler)
    short = [ask(f"s{i}", [i, i + 1], 200) for i in range(32)]
    for request in short:
        scheduler.add(request)
    loop.step()
    assert len(scheduler.decoding) == 32
    long = ask("long", [i % VOCAB for i in range(8192)], 1)
    scheduler.add(long)
    steps = 0
    while "long" not in loop.finishes:
        outs = loop.step()
        steps += 1
        assert {out.sequence.request.id for out in outs} >= {request.id for request in short}
    assert steps == -(-8192 // (256 - 32))
    loop.drain(1000)
    assert_expected(loop, [*short, long])


def test_requests_are_admitted_in_the_order_of_arrival() -> None:
    scheduler = make(max_num_seqs=2, prefix_caching=False)
    loop = loop_of(scheduler)
    requests = random_requests(12, seed=5, longest_prompt=200, most_tokens=5)
    for request in requests:
        scheduler.add(request)
    seen: list[str] = []
    while scheduler.has_work:
        seen += [
            out.sequence.request.id for out in loop.step() if out.sequence.request.id not in seen
        ]
    assert seen == [request.id for request in requests]


# ---- steps in flight


@pytest.mark.parametrize("num_pages", [513, 40])
@pytest.mark.parametrize("depth", [2, 3])
def test_steps_in_flight_do_not_change_tokens(depth: int, num_pages: int) -> None:
    """Stop ids are met at random, so some steps in flight compute tokens nobody wants."""
    requests = random_requests(
        60, seed=11, longest_prompt=90, most_tokens=60, stop_token_ids=(1, 2, 3)
    )
    one = loop_of(make(num_pages=num_pages))
    many = loop_of(make(num_pages=num_pages), depth)
    assert run_all(one, requests) == run_all(many, requests)
    assert_expected(many, requests)
    assert one.finishes == many.finishes
    assert set(many.finishes.values()) == {"stop", "length"}
    assert many.runner.most_in_flight == depth


def test_nothing_is_planned_beyond_the_last_token() -> None:
    loop = loop_of(make(), depth=3)
    loop.scheduler.add(ask("a", range(5), 4))
    loop.drain(20)
    assert loop.runner.computed_tokens == 5 + 3
    assert loop.runner.steps == 4


# ---- preemption


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_no_output(depth: int, prefix_caching: bool) -> None:
    requests = random_requests(80, seed=7, longest_prompt=60, most_tokens=100, stop_token_ids=(1,))
    roomy = loop_of(make(prefix_caching=prefix_caching), depth)
    tight = loop_of(make(num_pages=25, prefix_caching=prefix_caching), depth)
    assert run_all(roomy, requests) == run_all(tight, requests)
    assert roomy.scheduler.num_preemptions == 0
    assert tight.scheduler.num_preemptions > 20
    assert roomy.finishes == tight.finishes


def test_the_oldest_running_request_is_never_preempted() -> None:
    scheduler = make(num_pages=25)
    loop = loop_of(scheduler)
    for request in random_requests(60, seed=9, longest_prompt=60, most_tokens=100):
        scheduler.add(request)
    preempted = 0
    while scheduler.has_work:
        running = [s for s in scheduler.sequences.values() if s.slot >= 0]
        oldest = min(running, key=lambda s: s.order) if running else None
        count = oldest.preemptions if oldest else 0
        before = scheduler.num_preemptions
        loop.step()
        preempted += scheduler.num_preemptions - before
        assert oldest is None or oldest.preemptions == count
        orders = [s.order for s in scheduler.waiting]
        assert orders == sorted(orders), "a preempted request waits in front of younger ones"
    assert preempted > 20
    check_idle(scheduler)


def test_preemption_does_not_thrash() -> None:
    """Work thrown away stays in proportion: computed tokens at most twice those needed, though
    pages are a third of the demand."""
    requests = random_requests(200, seed=13, longest_prompt=60, most_tokens=100)
    loop = loop_of(
        make(num_pages=49, max_num_seqs=16, max_num_batched_tokens=128, prefix_caching=False)
    )
    run_all(loop, requests)
    needed = sum(len(r.prompt) + (r.params.max_tokens or 0) - 1 for r in requests)
    assert loop.scheduler.num_preemptions > 0
    assert loop.runner.computed_tokens < 2 * needed


def test_a_request_that_needs_every_page_ends_among_others() -> None:
    scheduler = make(num_pages=17, page_size=8, max_model_len=200)  # 128 entries
    loop = loop_of(scheduler)
    requests = [
        ask("small", range(9), 40),
        ask("all", range(30), 99),
        ask("other", range(40, 60), 60),
    ]
    run_all(loop, requests)
    assert_expected(loop, requests)


# ---- cancelling


def _waiting(scheduler: Scheduler, name: str) -> bool:
    return any(s.request.id == name and not s.preemptions for s in scheduler.waiting)


def _preempted(scheduler: Scheduler, name: str) -> bool:
    return any(s.request.id == name and s.preemptions for s in scheduler.waiting)


STAGES: dict[str, Callable[[Scheduler, str], bool]] = {
    "waiting": _waiting,
    "prefilling": lambda scheduler, name: name in scheduler.prefilling,
    "decoding": lambda scheduler, name: name in scheduler.decoding,
    "preempted": _preempted,
}


@pytest.mark.parametrize("in_flight", [0, 1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_abort_frees_everything_at_any_point(stage: str, in_flight: int) -> None:
    scheduler = make(num_pages=20, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=150)
    loop = loop_of(scheduler, depth=max(1, in_flight))
    names = ["a", "b", "c", "d"]
    requests = [ask(name, [i] * 40 + [i + 7], 100) for i, name in enumerate(names)]
    for request in requests:
        scheduler.add(request)
    name = None
    for _ in range(600):
        if in_flight:
            loop.launch()
        name = next((n for n in reversed(names) if STAGES[stage](scheduler, n)), None)
        if name is not None and len(loop.in_flight) == in_flight:
            break
        loop.step()
    assert name is not None, f"no request was ever {stage}"
    assert len(loop.in_flight) == in_flight
    sequence = scheduler.abort(name)
    assert sequence is not None
    assert sequence.finish is not None
    assert sequence.finish.value == "abort"
    assert name not in scheduler.sequences
    check_pages(scheduler)
    assert scheduler.abort(name) is None, "a second abort finds nothing"
    num_outputs = len(loop.outputs.get(name, []))
    loop.drain(3000)
    assert len(loop.outputs.get(name, [])) == num_outputs, "tokens came after the abort"
    assert_expected(loop, [request for request in requests if request.id != name])
    check_idle(scheduler)


def test_an_aborted_id_can_be_used_again_at_once() -> None:
    scheduler = make()
    loop = loop_of(scheduler, depth=2)
    scheduler.add(ask("a", range(20), 50))
    loop.step()
    loop.launch()
    scheduler.abort("a")
    again = ask("a", range(30, 40), 6)
    scheduler.add(again)
    loop.outputs.clear()
    loop.drain(50)
    assert_expected(loop, [again])
    check_idle(scheduler)


def run_with_cancels(
    loop: Loop,
    requests: list[Request],
    rng: random.Random,
    before: Callable[[], None] = lambda: None,
) -> list[Request]:
    """Requests come, are cancelled and wait for a free step as `rng` has it; `before` each plan.
    Those that were not cancelled."""
    scheduler = loop.scheduler
    coming = list(reversed(requests))
    alive = {request.id: request for request in requests}
    while coming or scheduler.has_work or loop.in_flight:
        assert loop.plans < 30 * len(requests)
        before()
        for _ in range(min(len(coming), rng.randint(0, 3))):
            scheduler.add(coming.pop())
        if rng.random() < 0.1 and scheduler.sequences:
            victim = rng.choice(list(scheduler.sequences))
            scheduler.abort(victim)
            del alive[victim]
        loop.launch() if rng.random() < 0.5 else loop.step()
        if loop.plans % 20 == 0:
            check_pages(scheduler)
    return list(alive.values())


@pytest.mark.parametrize("depth", [1, 2])
def test_random_cancels_leave_every_page_free(depth: int) -> None:
    rng = random.Random(depth)
    scheduler = make(num_pages=41, max_num_seqs=16, max_num_batched_tokens=96, max_model_len=128)
    loop = loop_of(scheduler, depth)
    coming = random_requests(
        2000, seed=20 + depth, longest_prompt=40, most_tokens=80, stop_token_ids=(5,)
    )
    alive = run_with_cancels(loop, coming, rng)
    assert scheduler.num_preemptions > 10
    assert 200 < 2000 - len(alive) < 1800
    assert_expected(loop, alive)
    check_idle(scheduler)


# ---- refusals


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (ask("x", (), 4), "empty"),
        (ask("x", range(64), 4), "64 tokens"),
        (ask("x", range(70), 4), "70 tokens"),
        (ask("x", range(30), 30), "cache pages"),
        (ask("x", range(41), None), "cache pages"),
    ],
)
def test_what_can_never_be_served_is_refused(request_: Request, named: str) -> None:
    scheduler = make(max_model_len=64, num_pages=6, page_size=8)  # 40 entries
    with pytest.raises(RequestError, match=named):
        scheduler.add(request_)
    assert not scheduler.has_work


def test_the_longest_servable_request_is_not_refused() -> None:
    """All but the last token need an entry: 40 entries serve 41 tokens, and no more."""
    scheduler = make(max_model_len=64, num_pages=6, page_size=8)
    with pytest.raises(RequestError):
        scheduler.add(ask("x", range(30), 12))
    requests = [ask("fits", range(30), 11), ask("too", range(40), 1)]
    loop = loop_of(scheduler)
    run_all(loop, requests)
    assert_expected(loop, requests)


def test_a_request_without_a_limit_ends_where_the_cache_does() -> None:
    for pages, longest in ((6, 41), (99, 64)):
        scheduler = make(max_model_len=64, num_pages=pages, page_size=8)
        loop = loop_of(scheduler)
        loop.scheduler.add(ask("open", range(3), None))
        loop.drain(most_plans=70)
        check_idle(scheduler)
        assert len(loop.outputs["open"]) == longest - 3
        assert loop.finishes == {"open": "length"}


def test_an_id_in_use_and_a_full_queue_are_refused() -> None:
    scheduler = make(max_waiting=2)
    scheduler.add(ask("a", [1]))
    with pytest.raises(RequestError, match="'a'"):
        scheduler.add(ask("a", [2]))
    scheduler.add(ask("b", [1]))
    with pytest.raises(RequestError, match="2 requests wait"):
        scheduler.add(ask("c", [1]))
    assert list(scheduler.sequences) == ["a", "b"]
    loop = loop_of(scheduler)
    loop.step()
    scheduler.add(ask("c", [1]))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=4"):
        make(max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(ConfigError, match="chunked_prefill_size=0"):
        make(chunked_prefill_size=0)
    with pytest.raises(CapacityError):
        make(num_pages=1)


# ---- the end of a request


def outputs_of(request: Request, depth: int = 1, **changes: Any) -> tuple[list[int], str]:
    loop = loop_of(make(**changes), depth)
    loop.scheduler.add(request)
    loop.drain(2000)
    check_idle(loop.scheduler)
    return loop.outputs[request.id], loop.finishes[request.id]


PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
FREE = expected(ask("x", PROMPT, 40), 512, VOCAB)
FIRST_REPEAT = next(i for i, token in enumerate(FREE) if token in FREE[:i])


@pytest.mark.parametrize("depth", [1, 2])
class TestEnd:
    def test_max_tokens(self, depth: int) -> None:
        for most in (1, 2, 9):
            assert outputs_of(ask("x", PROMPT, most), depth) == (FREE[:most], "length")

    def test_max_tokens_none_runs_to_the_end_of_the_context(self, depth: int) -> None:
        outputs, finish = outputs_of(ask("x", PROMPT, None), depth, max_model_len=30)
        assert (len(outputs), finish) == (22, "length")

    def test_context_bounds_max_tokens(self, depth: int) -> None:
        assert outputs_of(ask("x", PROMPT, 40), depth, max_model_len=20) == (FREE[:12], "length")

    def test_stop_id_ends_after_showing_it(self, depth: int) -> None:
        stop = FREE[4]
        first = FREE.index(stop)
        assert outputs_of(ask("x", PROMPT, 40, stop_token_ids=[stop]), depth) == (
            FREE[: first + 1],
            "stop",
        )

    def test_stop_id_as_the_last_token_counts_as_stop(self, depth: int) -> None:
        first = FREE.index(FREE[4])
        assert outputs_of(ask("x", PROMPT, first + 1, stop_token_ids=[FREE[4]]), depth) == (
            FREE[: first + 1],
            "stop",
        )

    def test_eos_ends_unless_ignored(self, depth: int) -> None:
        eos = (FREE[3],)
        first = FREE.index(FREE[3])
        assert outputs_of(ask("x", PROMPT, 40, eos=eos), depth) == (FREE[: first + 1], "stop")
        assert outputs_of(ask("x", PROMPT, 40, eos=eos, ignore_eos=True), depth) == (FREE, "length")
        both = ask("x", PROMPT, 40, eos=eos, ignore_eos=True, stop_token_ids=[FREE[6]])
        assert outputs_of(both, depth) == (FREE[: FREE.index(FREE[6]) + 1], "stop")

    def test_min_tokens_lets_early_stop_ids_pass(self, depth: int) -> None:
        """The scheduler ignores a stop id among the first min_tokens tokens; the next one ends
        the request."""
        stop = FREE[FIRST_REPEAT]
        first = FREE.index(stop)
        assert outputs_of(ask("x", PROMPT, 40, stop_token_ids=[stop], min_tokens=first), depth) == (
            FREE[: first + 1],
            "stop",
        )
        assert outputs_of(
            ask("x", PROMPT, 40, stop_token_ids=[stop], min_tokens=first + 1), depth
        ) == (FREE[: FIRST_REPEAT + 1], "stop")
        assert outputs_of(ask("x", PROMPT, 40, stop_token_ids=FREE, min_tokens=40), depth) == (
            FREE,
            "length",
        )

    def test_a_stop_id_in_the_prompt_is_only_text(self, depth: int) -> None:
        unheard = next(token for token in range(VOCAB) if token not in FREE)
        prompt = (unheard, *PROMPT)
        request = ask("x", prompt, 5, stop_token_ids=[unheard])
        assert outputs_of(request, depth) == (expected(request, 512, VOCAB), "length")


# ---- prefix sharing


def computed_by(loop: Loop, request: Request) -> int:
    before = loop.runner.computed_tokens
    loop.scheduler.add(request)
    loop.drain(loop.plans + 1000)
    return loop.runner.computed_tokens - before


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 65, 71, 200])
def test_a_repeated_prompt_recomputes_at_most_one_page(length: int) -> None:
    scheduler = make(max_num_batched_tokens=48)
    loop = loop_of(scheduler)
    prompt = [i * i % VOCAB for i in range(length)]
    assert computed_by(loop, ask("first", prompt, 1)) == length
    again = ask("again", prompt, 1)
    assert 1 <= computed_by(loop, again) <= scheduler.config.page_size
    assert loop.outputs["first"] == loop.outputs["again"]


def test_outputs_are_cached_too() -> None:
    """The next turn of a conversation finds the pages of prompt and answer."""
    scheduler = make()
    loop = loop_of(scheduler, depth=2)
    computed_by(loop, ask("turn", range(20), 30))
    follow_up = [*range(20), *loop.outputs["turn"], 1, 2, 3]
    assert computed_by(loop, ask("next", follow_up, 1)) == len(follow_up) - 48


def test_a_request_may_share_while_the_first_still_runs() -> None:
    scheduler = make()
    loop = loop_of(scheduler)
    shared = [i % VOCAB for i in range(40)]
    requests = [ask("a", [*shared, 1], 60), ask("b", [*shared, 2], 60)]
    scheduler.add(requests[0])
    loop.step()
    scheduler.add(requests[1])
    loop.step()
    a, b = (scheduler.sequences[name] for name in "ab")
    assert a.pages[:5] == b.pages[:5]
    assert not set(a.pages[5:]) & set(b.pages[5:])
    assert b.num_cached_prompt == 40
    scheduler.abort("a")
    check_pages(scheduler)
    loop.drain(200)
    assert_expected(loop, requests[1:])
    check_idle(scheduler)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("others", "cached"), [("steps", 40), ("host memory", 0), ("peers", 0)], ids=str
)
def test_a_prompt_is_found_while_it_is_being_computed(
    others: str, cached: int, together: bool
) -> None:
    """In the same step or the next, unless something that does not wait for steps reads pages,
    too."""
    host = {"host_pages": 8, "host_step_pages": 8} if "host" in others else {}
    scheduler = make(max_num_batched_tokens=128, **host)
    scheduler.prefix.read_by_peers = others == "peers"
    shared = [i % VOCAB for i in range(40)]
    scheduler.add(ask("a", [*shared, 1]))
    if not together:
        assert scheduler.schedule() is not None
    scheduler.add(ask("b", [*shared, 2]))
    assert scheduler.schedule() is not None
    a, b = (scheduler.sequences[name] for name in "ab")
    assert b.num_cached_prompt == cached
    assert (a.pages[:5] == b.pages[:5]) == (cached > 0)


def test_a_prompt_in_flight_is_found_after_its_request_was_aborted() -> None:
    """Its step runs all the same."""
    scheduler = make()
    shared = [i % VOCAB for i in range(40)]
    scheduler.add(ask("a", [*shared, 1]))
    assert scheduler.schedule() is not None
    scheduler.abort("a")
    scheduler.add(ask("b", [*shared, 2]))
    assert scheduler.schedule() is not None
    assert scheduler.sequences["b"].num_cached_prompt == 40


@pytest.mark.parametrize("together", [True, False])
def test_a_prompt_does_not_decode_in_the_step_that_fills_its_pages(together: bool) -> None:
    """Micro-batches of a step begin with the requests that decode."""
    scheduler = make(max_num_batched_tokens=128)
    shared = [i % VOCAB for i in range(41)]  # five pages and a token
    scheduler.add(ask("a", shared))
    if not together:
        assert scheduler.schedule() is not None
    scheduler.add(ask("b", shared))
    step = scheduler.schedule()
    assert step is not None
    slot = scheduler.sequences["b"].slot
    assert [slot in step.output.decode_slots] == [not together]
    assert [chunk.start for chunk in step.output.chunks if chunk.slot == slot] == [40] * together


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_burst_computes_its_prefix_once(depth: int) -> None:
    shared = [i % VOCAB for i in range(40)]
    requests = [ask(f"r{i}", [*shared, i, i + 1], 5) for i in range(20)]
    hits = []
    for waits in (False, True):
        scheduler = make(max_num_seqs=32, max_num_batched_tokens=128)
        scheduler.prefix.read_by_peers = waits
        loop = loop_of(scheduler, depth)
        run_all(loop, requests)
        assert_expected(loop, requests)
        hits.append(scheduler.prefix.hits)
    assert hits[0] == 19 * 40
    # 128 tokens a step: three whole prompts and the beginning of a fourth
    assert hits[1] <= hits[0] - depth * 2 * 40


@pytest.mark.parametrize("budget", [16, 12])
def test_a_full_page_is_offered_as_soon_as_it_is_known_to_be_written(budget: int) -> None:
    """After each step, all full pages of what was collected are in the prefix cache: prompts'
    pages and outputs' alike."""
    scheduler = make(max_num_batched_tokens=budget)
    loop = loop_of(scheduler)
    scheduler.add(ask("a", [i * i % VOCAB for i in range(64)], 40))
    for _ in range(30):
        loop.step()
        assert len(scheduler.prefix.pages) == scheduler.sequences["a"].num_computed_tokens // 8


def test_different_salts_share_nothing() -> None:
    scheduler = make()
    loop = loop_of(scheduler)
    prompt = list(range(64))
    tables: dict[str, set[int]] = {}
    for name, salt in (("a", "tenant one"), ("b", "tenant two"), ("c", ""), ("d", "tenant one")):
        scheduler.add(ask(name, prompt, 40, salt=salt))
        loop.step()
        tables[name] = set(scheduler.sequences[name].pages)
    assert not tables["a"] & tables["b"]
    assert not (tables["a"] | tables["b"]) & tables["c"]
    assert len(tables["a"] & tables["d"]) == 7
    cached = {name: scheduler.sequences[name].num_cached_prompt for name in tables}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 56}
    loop.drain(500)
    check_idle(scheduler)


def test_without_prefix_caching_nothing_is_kept() -> None:
    scheduler = make(prefix_caching=False)
    loop = loop_of(scheduler)
    for name in "ab":
        assert computed_by(loop, ask(name, range(50), 1)) == 50
    assert len(scheduler.allocator.free) == scheduler.allocator.capacity


def test_the_cached_count_is_that_of_the_first_admission() -> None:
    """A preempted request finds its own pages again; that is not a hit of its prompt."""
    scheduler = make(num_pages=25)
    loop = loop_of(scheduler)
    rng = random.Random(1)
    requests = [ask(f"r{i}", [rng.randrange(VOCAB) for _ in range(40)], 100) for i in range(6)]
    counts: dict[str, int | None] = {}
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        for out in loop.step():
            counts[out.sequence.request.id] = out.sequence.num_cached_prompt
    assert scheduler.num_preemptions
    assert counts == dict.fromkeys(counts, 0)


def test_hit_statistics_count_each_admission_once() -> None:
    """A request that waits for pages asks the prefix cache in every plan; its prompt is looked
    up once all the same."""
    scheduler = make(num_pages=14, page_size=8, max_model_len=104)
    loop = loop_of(scheduler)
    prompt = list(range(40))
    scheduler.add(ask("a", prompt, 60))
    for _ in range(40):
        loop.step()
    scheduler.add(ask("b", [*prompt, *range(50, 80)], 10))
    loop.step()
    assert len(scheduler.waiting) == 1, "b shares five pages and lacks four"
    loop.drain(200)
    assert scheduler.num_preemptions == 0
    assert (scheduler.prefix.queries, scheduler.prefix.hits) == (40 + 70, 40)


# ---- the host's time


def best_median(measure: Callable[[], None], rounds: int, repeats: int) -> float:
    """Milliseconds of this thread's own CPU time: the best of `rounds` medians, so that other
    processes matter little."""
    medians = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            times = []
            for _ in range(repeats):
                start = time.thread_time_ns()
                measure()
                times.append(time.thread_time_ns() - start)
            medians.append(statistics.median(times) / 1e6)
    finally:
        gc.enable()
    return min(medians)


@pytest.mark.parametrize(("running", "limit_ms"), [(256, 1.0), (2048, 5.0)])
def test_planning_time(running: int, limit_ms: float) -> None:
    """One plan of a decoding batch, page growth included (every request crosses a page boundary
    every 16 steps)."""
    scheduler = make(
        max_num_seqs=running,
        max_num_batched_tokens=8 * running,
        max_model_len=1024,
        num_pages=running * 64 + 1,
        page_size=16,
    )
    loop = loop_of(scheduler)
    rng = random.Random(0)
    for i in range(running):
        scheduler.add(ask(f"r{i}", [rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))], 900))
    loop.step()
    loop.step()
    assert len(scheduler.decoding) == running

    def schedule() -> None:
        assert scheduler.schedule() is not None

    found = best_median(schedule, rounds=5, repeats=40)
    print(f"schedule() with {running} decoding: {found:.3f} ms")
    assert found <= limit_ms


def test_planning_time_while_a_long_cached_prompt_waits_for_pages() -> None:
    """The head of the queue is looked at in every plan; however long its prompt, that must not
    cost more than the plan may."""
    size = 16
    length = 32768
    scheduler = make(
        max_num_seqs=256,
        max_num_batched_tokens=length,
        max_model_len=length + 6000,
        num_pages=length // size + 600,
        page_size=size,
    )
    loop = loop_of(scheduler)
    prompt = [i * 7 % VOCAB for i in range(length)]
    scheduler.add(ask("warm", prompt, 2))
    loop.drain(10)
    for i in range(200):
        scheduler.add(ask(f"r{i}", [i % VOCAB, i // VOCAB, 1], 800))
    loop.step()
    scheduler.add(ask("head", [*prompt, *range(6000, 6000 + 5000)], 2))
    loop.step()
    assert [s.request.id for s in scheduler.waiting] == ["head"]

    def schedule() -> None:
        assert scheduler.schedule() is not None

    found = best_median(schedule, rounds=3, repeats=11)
    assert scheduler.waiting.head.request.id == "head"
    print(f"schedule() with a blocked head of {length} cached tokens: {found:.3f} ms")
    assert found <= 1.0


def test_a_blocked_prompt_starts_once_its_prefix_is_known() -> None:
    """Two equal prompts of 20 pages, of which 39 are there. The second shares 19 of them in the
    step in which the first computes them, and both are served together."""
    scheduler = make(max_num_batched_tokens=128, num_pages=40, page_size=5)
    loop = loop_of(scheduler)
    requests = [ask(name, range(100), 40) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    ends = {}
    while scheduler.has_work:
        ends.update({out.sequence.request.id: loop.plans for out in loop.step() if out.finish})
    assert ends == {"a": 40, "b": 40}
    assert scheduler.num_preemptions == 0
    assert (scheduler.prefix.hits, scheduler.prefix.queries) == (95, 200)
    assert_expected(loop, requests)
    check_idle(scheduler)


def test_a_blocked_prompt_is_matched_again_only_when_its_own_prefix_grew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others fill page after page with text of their own meanwhile, which cannot help it."""
    scheduler = make(max_num_batched_tokens=24, chunked_prefill_size=8, num_pages=65, page_size=4)
    loop = loop_of(scheduler)
    prompt = list(range(90))
    for index in range(3):
        scheduler.add(ask(f"other{index}", [90 + index], 41))
    loop.step()
    scheduler.add(ask("first", [*prompt, 1], 100))
    scheduler.add(ask("second", [*prompt, 2, *range(160)], 4))
    matches: list[int] = []
    match = scheduler.prefix.match

    def counted(*given: Any) -> Any:
        found = match(*given)
        matches.append(len(found[0]))
        return found

    monkeypatch.setattr(scheduler.prefix, "match", counted)
    learned = []
    for _ in range(30):
        loop.step()
        learned.append(len(scheduler.prefix.pages))
    assert [sequence.request.id for sequence in scheduler.waiting] == ["second"]
    assert matches == [0, *range(2, 23, 2)], "the first prompt once, the second as the first grew"
    assert learned[-1] > learned[15] >= 22, "the others went on"


# ---- turns


@pytest.mark.parametrize(("turns", "depth"), [(2, 2), (2, 3), (3, 3), (3, 1), (4, 4)])
def test_requests_that_take_turns_end_with_the_same_tokens(turns: int, depth: int) -> None:
    requests = random_requests(60, 3, 40, 30)
    loop = loop_of(make(pipeline_turns=turns), depth)
    run_all(loop, requests)
    assert_expected(loop, requests)


def test_each_step_takes_a_share_and_none_whose_token_is_still_being_drawn() -> None:
    scheduler = make(pipeline_turns=3, max_num_seqs=8)
    loop = loop_of(scheduler, 3)
    for i in range(8):
        scheduler.add(ask(f"r{i}", [1, 2, 3], 40))
    loop.depth = 1
    loop.step()  # the prompts
    loop.depth = 3
    counts: dict[str, int] = {}
    for _ in range(30):
        loop.launch()
        steps = [{sequence.request.id for sequence in step.sampled} for step, _ in loop.in_flight]
        assert [len(step) for step in steps].count(3) >= 2
        assert sum(map(len, steps)) == len(set().union(*steps)) == 8
        for name in steps[0]:
            counts[name] = counts.get(name, 0) + 1
        loop.collect()
    assert len(counts) == 8
    assert max(counts.values()) - min(counts.values()) <= 1


def test_one_request_alone_never_waits_for_a_turn() -> None:
    loop = loop_of(make(pipeline_turns=4), 4)
    loop.scheduler.add(ask("one", [1, 2, 3], 20))
    for _ in range(20):
        assert len(loop.step()) == 1
    assert not loop.scheduler.has_work
