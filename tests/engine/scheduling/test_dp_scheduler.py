"""Several data-parallel ranks under one scheduler, and plans as bytes."""

from __future__ import annotations

import random
import sys
from array import array
from collections import deque
from dataclasses import replace

import pytest

from rorqual.engine.distributed.codec import (
    decode_output,
    decode_result,
    encode_output,
    encode_result,
)
from rorqual.engine.scheduling.dp_scheduler import DataParallelOutput, DataParallelScheduler
from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.engine.scheduling.scheduler_output import (
    NewRequest,
    PrefillChunk,
    SamplingVariant,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from rorqual.errors import RequestError
from rorqual.request import FinishReason, Request, SamplingParams, StructuredOutput
from tests.cache.counted_keys import counted_keys
from tests.engine.fake_runner import FakeRunner, check_idle, expected

LONGEST = 96
VOCAB = 97


def config(**changes) -> SchedulerConfig:
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "max_model_len": LONGEST,
        "num_pages": 40,
        "page_size": 4,
    }
    return SchedulerConfig(**{**settings, **changes})


def request(name: str, length: int, most: int, seed: int, **params) -> Request:
    rng = random.Random(seed)
    return Request(
        name,
        tuple(rng.randrange(VOCAB) for _ in range(length)),
        SamplingParams(max_tokens=most, **params),
    )


class GroupLoop:
    """The engine's loop over fake runners, one a rank; every plan crosses as bytes."""

    def __init__(self, scheduler: DataParallelScheduler, depth: int):
        self.scheduler = scheduler
        self.depth = depth
        self.runners = [FakeRunner.of(rank, VOCAB) for rank in scheduler.schedulers]
        self.in_flight: deque = deque()
        self.outputs: dict[str, list[int]] = {}
        self.steps = 0

    def step(self) -> None:
        while len(self.in_flight) < self.depth:
            step = self.scheduler.schedule()
            if step is None:
                break
            parts = decode_output(encode_output(step.output)).parts
            assert parts == step.output.parts
            self.in_flight.append(
                (
                    step,
                    [
                        r.launch(p) if p.num_tokens else None
                        for r, p in zip(self.runners, parts, strict=True)
                    ],
                )
            )
        step, launched = self.in_flight.popleft()
        results = [
            r.collect(p) if p else StepResult([])
            for r, p in zip(self.runners, launched, strict=True)
        ]
        results = [decode_result(encode_result(result)) for result in results]
        for out in self.scheduler.update(step, results):
            self.outputs.setdefault(out.sequence.request.id, []).append(out.token)
        self.steps += 1

    def drain(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            assert self.steps < 5000
            self.step()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_speculative_tokens", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_outputs_do_not_depend_on_the_rank(
    ranks: int, num_speculative_tokens: int, depth: int
) -> None:
    scheduler = DataParallelScheduler(config(num_speculative_tokens=num_speculative_tokens), ranks)
    loop = GroupLoop(scheduler, depth)
    rng = random.Random(ranks)
    asked = [request(f"r{i}", rng.randint(1, 50), rng.randint(1, 40), i) for i in range(60)]
    for item in asked:
        scheduler.add(item)
    loop.drain()
    assert loop.outputs == {item.id: expected(item, LONGEST, VOCAB) for item in asked}
    assert not scheduler.assigned_rank
    assert all(runner.steps for runner in loop.runners)
    for rank in scheduler.schedulers:
        check_idle(rank)
    if num_speculative_tokens:
        assert sum(scheduler.drafted) == sum(sum(rank.drafted) for rank in scheduler.schedulers) > 0


def test_requests_go_where_fewest_tokens_live() -> None:
    scheduler = DataParallelScheduler(config(), 2)
    for name, length in (("long", 60), ("a", 20), ("b", 20), ("c", 15), ("d", 30)):
        scheduler.add(request(name, length, 4, length))
    homes = {
        name: scheduler.schedulers.index(home) for name, home in scheduler.assigned_rank.items()
    }
    assert homes == {"long": 0, "a": 1, "b": 1, "c": 1, "d": 1}
    assert abs(scheduler.schedulers[0].live_tokens - scheduler.schedulers[1].live_tokens) <= 30


def test_a_request_whose_rank_is_known_goes_there() -> None:
    scheduler = DataParallelScheduler(config(), 2)
    scheduler.add(request("long", 12, 4, 0), 1)
    assert scheduler.assigned_rank["long"] is scheduler.schedulers[1]
    asked = request("next", 8, 4, 1)
    assert scheduler.cheapest(asked) == 0
    assert scheduler.cheapest(asked, (30, 0)) == 1, "what was promised to a rank counts"
    scheduler.add(asked, 1)
    assert scheduler.assigned_rank["next"] is scheduler.schedulers[1]


def test_all_ranks_are_asked_with_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = DataParallelScheduler(config(), 3)
    loop = GroupLoop(scheduler, 1)
    asked = request("first", 41, 4, 0)
    for rank in range(3):
        scheduler.add(replace(asked, id=f"on {rank}"), rank)
    while scheduler.sequences:
        loop.step()
    computed = counted_keys(monkeypatch)
    assert scheduler.cheapest(replace(asked, id="next"), (9, 0, 9)) == 1
    assert len(computed) == 10, "pages of the prompt, whatever the number of ranks"


def test_a_request_goes_where_its_prefix_is() -> None:
    scheduler = DataParallelScheduler(config(), 2)
    loop = GroupLoop(scheduler, 1)
    first = request("first", 40, 2, 1)
    scheduler.add(first)
    loop.drain()
    holder = next(i for i, rank in enumerate(scheduler.schedulers) if rank.prefix.pages)
    other = scheduler.schedulers[1 - holder]
    scheduler.schedulers[holder].add(
        request("busy", 30, 2, 2)
    )  # busier, yet the prefix outweighs it
    again = Request("again", (*first.prompt, 1, 2), SamplingParams(max_tokens=2))
    scheduler.add(again)
    assert scheduler.assigned_rank["again"] is scheduler.schedulers[holder]
    scheduler.add(request("fresh", 40, 2, 3))
    assert scheduler.assigned_rank["fresh"] is other


def test_a_request_goes_where_its_prefix_is_in_host_memory() -> None:
    scheduler = DataParallelScheduler(config(host_pages=50, host_step_pages=20), 2)
    loop = GroupLoop(scheduler, 1)
    scheduler.add(request("other", 4, 20, 2))
    first = request("first", 40, 8, 1)
    scheduler.add(first)
    holder = scheduler.assigned_rank["first"]
    loop.drain()
    while holder.prefix.idle:
        holder.prefix.evict()
    assert not holder.prefix.pages
    holder.add(request("busy", 30, 2, 2))
    again = Request("again", (*first.prompt, 1, 2), SamplingParams(max_tokens=2))
    scheduler.add(again)
    assert scheduler.assigned_rank["again"] is holder
    loop.drain()
    assert holder.prefix.host is not None
    assert holder.prefix.host.pages_in == 10
    usage = scheduler.usage()
    assert (usage.host_pages, usage.host_pages_in) == (100, 10)


@pytest.mark.parametrize("seed", range(4))
def test_live_tokens_are_counted_exactly_whatever_happens(seed: int) -> None:
    """Requests come, end by themselves or by the caller's word, and are preempted, with steps in
    flight; after everything that happens each rank's count is what its requests add up to."""
    rng = random.Random(seed)
    loop = GroupLoop(
        DataParallelScheduler(config(num_pages=26, num_speculative_tokens=seed % 3), 3), depth=3
    )
    scheduler = loop.scheduler

    def check() -> None:
        for rank in scheduler.schedulers:
            assert rank.live_tokens == sum(sequence.known for sequence in rank.sequences.values())
        assert scheduler.live_tokens == sum(s.known for s in scheduler.sequences.values())
        assert set(scheduler.assigned_rank) == set(scheduler.sequences)

    for count in range(400):
        if rng.random() < 0.4:
            stops = rng.sample(range(VOCAB), 3)
            sizes = (rng.randint(1, 50), rng.randint(1, 40))
            scheduler.add(request(f"r{count}", *sizes, count, stop_token_ids=stops))
            check()
        if scheduler.sequences and rng.random() < 0.1:
            victim = rng.choice(sorted(scheduler.sequences))
            if rng.random() < 0.5:
                scheduler.abort(victim)
            else:
                scheduler.finish(scheduler.sequences[victim], FinishReason.STOP)
            check()
        if scheduler.has_work or loop.in_flight:
            loop.step()
            check()
    assert scheduler.usage().preemptions > 0
    loop.drain()
    assert scheduler.live_tokens == 0


def test_the_work_of_adding_a_request_does_not_grow_with_those_there() -> None:
    """Counted are the calls of functions, Python's and built-in ones."""
    scheduler = DataParallelScheduler(config(), 4)
    asked = [request(f"r{i}", 4, 4, i) for i in range(20_000)]
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")
        assert calls <= 60 * len(asked), "more than 60 calls a request"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for item in asked:
            scheduler.add(item)
    finally:
        sys.setprofile(before)
    assert [len(rank.sequences) for rank in scheduler.schedulers] == [5_000] * 4
    assert scheduler.live_tokens == 80_000


def test_an_aborted_request_leaves_its_rank() -> None:
    scheduler = DataParallelScheduler(config(), 2)
    loop = GroupLoop(scheduler, 2)
    for i in range(8):
        scheduler.add(request(f"r{i}", 20, 30, i))
    loop.step()
    for i in range(0, 8, 2):
        assert scheduler.abort(f"r{i}").request.id == f"r{i}"
    assert scheduler.abort("r0") is None
    loop.drain()
    assert {name for name, tokens in loop.outputs.items() if len(tokens) == 30} == {
        "r1",
        "r3",
        "r5",
        "r7",
    }
    for rank in scheduler.schedulers:
        check_idle(rank)


def test_an_id_in_use_is_refused_whatever_its_rank() -> None:
    scheduler = DataParallelScheduler(config(), 3)
    scheduler.add(request("x", 5, 5, 0))
    with pytest.raises(RequestError, match="already in use"):
        scheduler.add(request("x", 50, 5, 1))


def test_one_idle_rank_has_an_empty_part() -> None:
    scheduler = DataParallelScheduler(config(), 2)
    scheduler.add(request("x", 5, 5, 0))
    step = scheduler.schedule()
    common = step.output.metadata()
    assert (common.tokens, common.logit_rows, common.sampled) == ((5, 0), (1, 0), (1, 0))
    assert not common.decodes
    assert step.parts[1] is None


def test_the_ranks_of_a_step_know_alike_how_all_rows_draw() -> None:
    """Of the rows of this step, whichever rank they are on, and of no others."""
    scheduler = DataParallelScheduler(config(chunked_prefill_size=10), 2)
    loop = GroupLoop(scheduler, 1)
    found = []
    scheduler.schedulers[0].add(request("greedy", 5, 8, 0, temperature=0))
    scheduler.schedulers[1].add(request("filtered", 15, 2, 1, top_p=0.9))
    scheduler.schedulers[1].add(request("logprobs", 25, 2, 2, temperature=0, logprobs=1))
    schedule = scheduler.schedule
    scheduler.schedule = lambda: found.append(schedule()) or found[-1]  # type: ignore[method-assign]
    loop.drain()
    seen = [
        (step.output.sampling, step.output.host, step.output.metadata().variant) for step in found
    ]
    greedy = SamplingVariant.GREEDY
    filtered = SamplingVariant.FILTERED
    full = SamplingVariant.FULL
    assert seen[:2] == [(greedy, False, greedy), (filtered, False, filtered)]
    assert (filtered, True, full) in seen or (greedy, True, full) in seen
    assert seen[-1] == (greedy, False, greedy)


def test_plans_and_results_survive_as_bytes() -> None:
    params = [
        SamplingParams(),
        SamplingParams(
            temperature=0.3,
            seed=-5,
            logit_bias={7: 1.5},
            stop_token_ids=[3, 9],
            logprobs=2,
            speculate=False,
            allowed_token_ids=[5, 2],
            bad_word_ids=[[1, 2], [3]],
        ),
        SamplingParams(
            structured=StructuredOutput("regex", "[a-é]+"), stop=["fin"], max_tokens=None
        ),
    ]
    rows = [
        NewRequest(i, p, 2**62 + i, (1, 2), 3, array("q", (4, 5, 6)), frozenset({8, 1}), 6, i)
        for i, p in enumerate(params)
    ]
    chunks = [PrefillChunk(1, 0, [4, 5, 6], True), PrefillChunk(3, 8, (1,), False, (77, 78), 8, 9)]
    output = SchedulerOutput([0, 2], [5, 9], chunks, rows, [(0, 1, 17)], 2)
    whole = DataParallelOutput(
        [output, SchedulerOutput(num_speculative_tokens=2)], SamplingVariant.FILTERED, host=True
    )
    back = decode_output(encode_output(whole))
    assert back.metadata() == whole.metadata()
    assert (back.sampling, back.host) == (SamplingVariant.FILTERED, True)
    back = back.parts
    assert back[1] == SchedulerOutput(num_speculative_tokens=2)
    assert [list(chunk.tokens) for chunk in back[0].chunks] == [[4, 5, 6], [1]]
    assert (back[0].new_requests, back[0].pages, back[0].num_speculative_tokens) == (
        rows,
        [(0, 1, 17)],
        2,
    )
    assert [chunk.following for chunk in back[0].chunks] == [(), (77, 78)]
    assert back[0].num_scored == 1
    entry = TokenLogprobs(-0.25, 3, (9, 8), (-0.1, -0.2))
    result = StepResult([[1, 2], [3]], [2, 0], {1: [entry]}, [[entry, entry]])
    assert decode_result(encode_result(result)) == result


def test_prompts_cut_short_on_their_way_are_noticed() -> None:
    ids = [*range(300), 2**31 - 1]
    chunks = [PrefillChunk(2, 5, array("q", ids), True), PrefillChunk(3, 0, [7], False, (8,))]
    whole = DataParallelOutput([SchedulerOutput(chunks=chunks)], SamplingVariant.GREEDY, host=False)
    data = encode_output(whole)
    found = decode_output(data).parts[0].chunks
    assert [list(chunk.tokens) for chunk in found] == [ids, [7]]
    for cut in (1, 4, 8):
        with pytest.raises(ValueError, match=r"token ids|buffer size"):
            decode_output(data[:-cut])


@pytest.mark.parametrize("ranks", [1, 3])
def test_after_a_restart_requests_are_shown_as_they_are(ranks: int) -> None:
    """Each rank starts over with mappings of its own; nobody may go on looking at the old ones."""
    scheduler = DataParallelScheduler(config(), ranks)
    for index in range(2 * ranks):
        scheduler.add(request(str(index), 9, 5, index))
    step = scheduler.schedule()
    assert step is not None
    assert scheduler.num_decoding == len(scheduler.decoding) == 2 * ranks
    scheduler.undo(step)
    scheduler.restart()
    assert not scheduler.decoding
    assert not scheduler.prefilling
    scheduler.abort("0")
    assert set(scheduler.sequences) == {str(index) for index in range(1, 2 * ranks)}
