"""Pages that a step in flight writes: of a request that gave them up meanwhile, of another one's
prefix, and too few of them because other engines hold the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.engine.scheduling.scheduler_output import StepResult
from rorqual.engine.scheduling.sequence import InFlight
from rorqual.request import Request, SamplingParams
from tests.engine.fake_runner import FakeRunner, Loop, check_pages, expected

VOCAB = 97
SIZE = 4
PROMPT = tuple((11 * i * i + 5 * i) % VOCAB for i in range(64))
OTHER = tuple((13 * i * i + 7 * i + 1) % VOCAB for i in range(64))


def make(**changes: Any) -> tuple[Scheduler, FakeRunner]:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "num_pages": 65,
        "page_size": SIZE,
    }
    scheduler = Scheduler(SchedulerConfig(**{**values, **changes}))
    return scheduler, FakeRunner.of(scheduler, VOCAB)


def ask(name: str, prompt: tuple[int, ...], max_tokens: int = 4) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens))


def launched(scheduler: Scheduler, runner: FakeRunner) -> tuple[InFlight, StepResult]:
    step = scheduler.schedule()
    assert step is not None
    return step, runner.launch(step.output)


def test_a_chunk_of_pages_given_up_does_not_count_for_the_new_ones() -> None:
    """Peers may read what is cached without waiting for steps in flight."""
    scheduler, runner = make(max_num_batched_tokens=8)
    scheduler.prefix.read_by_peers = True
    scheduler.add(ask("long", PROMPT[:32]))
    first, pending = launched(scheduler, runner)
    sequence = scheduler.sequences["long"]
    given_up = list(sequence.pages)
    scheduler._preempt(sequence)
    taken = [scheduler.prefix.take() for _ in given_up]  # so that it gets other ones
    second, next_pending = launched(scheduler, runner)
    assert not set(sequence.pages) & set(given_up)
    scheduler.update(first, runner.collect(pending))
    assert not scheduler.prefix.keys, "nothing that the second step writes is there yet"
    assert sequence.collected == 0
    scheduler.update(second, runner.collect(next_pending))
    assert sequence.collected == 8
    assert set(scheduler.prefix.keys) == set(sequence.pages[:2])
    scheduler.prefix.release(taken)
    loop = Loop(scheduler, runner)
    loop.drain(100)
    assert loop.outputs["long"] == expected(ask("long", PROMPT[:32]), 128, VOCAB)
    check_pages(scheduler)


def test_no_request_decodes_at_once_behind_any_page_that_its_step_fills() -> None:
    """Two requests compute the same first page side by side: one copy is cached, and pages behind
    it may be the other one's. Once it is evicted, a step fills it again, while those behind are
    old."""
    scheduler, runner = make(chunked_prefill_size=2)
    loop = Loop(scheduler, runner)
    prompt = PROMPT[: 2 * SIZE + 1]
    scheduler.prompt_budget = 4  # side by side, two tokens each
    scheduler.add(ask("one", PROMPT[:SIZE], 1))
    scheduler.add(ask("two", prompt, 1))
    loop.drain(100)
    kept, _ = scheduler.prefix.match(prompt)
    assert len(kept) == 2
    for page in kept:  # the first one is to be evicted first
        scheduler.prefix.release([page])
    held = []
    while kept[0] in scheduler.prefix.keys:
        held.append(scheduler.prefix.take())
    assert kept[1] in scheduler.prefix.keys
    del runner.pages[kept[0]]  # as if others had used it since
    scheduler.prefix.release(held)
    scheduler.config = replace(scheduler.config, chunked_prefill_size=None)
    scheduler.prompt_budget = 64
    fills = ask("fills", (*PROMPT[:SIZE], *OTHER[:5]))
    behind = ask("behind", prompt)
    scheduler.add(fills)
    scheduler.add(behind)
    loop.drain(100)
    assert loop.outputs["fills"] == expected(fills, 128, VOCAB)
    assert loop.outputs["behind"] == expected(behind, 128, VOCAB)


def test_a_request_waits_for_pages_that_only_other_engines_hold() -> None:
    scheduler, runner = make(num_pages=17)
    leased = [scheduler.prefix.take() for _ in range(8)]
    request = ask("long", PROMPT[:48], 8)  # needs 14 of 16 pages
    scheduler.add(request)
    for _ in range(3):
        assert scheduler.schedule() is None
        assert scheduler.has_work
        assert scheduler.prefix.available == 8
    scheduler.prefix.release(leased)
    loop = Loop(scheduler, runner)
    loop.drain(100)
    assert loop.outputs["long"] == expected(request, 128, VOCAB)
    check_pages(scheduler)


def test_a_request_that_cannot_grow_waits_as_well() -> None:
    scheduler, runner = make(num_pages=17)
    loop = Loop(scheduler, runner)
    request = ask("grows", PROMPT[:8], 40)
    scheduler.add(request)
    loop.step()
    leased = [scheduler.prefix.take() for _ in range(scheduler.prefix.available)]
    for _ in range(12):
        loop.step()
    assert scheduler.num_preemptions == 1
    assert len(scheduler.waiting) == 1
    scheduler.prefix.release(leased)
    loop.drain(200)
    assert loop.outputs["grows"] == expected(request, 128, VOCAB)
