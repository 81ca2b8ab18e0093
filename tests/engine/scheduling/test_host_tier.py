"""Pages that go to host memory and come back: whatever happens on the way, outputs are exact, and
what a tier holds under a key is what belongs to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.request import FinishReason, Request, SamplingParams
from tests.cache.counted_keys import counted_keys
from tests.engine.fake_runner import FakeRunner, Loop, check_idle, check_pages, expected

VOCAB = 5
MAX_LEN = 64
SIZE = 4


def make(**changes: Any) -> Loop:
    """A device of 16 pages, of 4 tokens each; copies of 2 pages a step."""
    settings = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 24,
        "max_model_len": MAX_LEN,
        "num_pages": 17,
        "page_size": SIZE,
        "host_pages": 64,
        "host_step_pages": 2,
    }
    scheduler = Scheduler(SchedulerConfig(**{**settings, **changes}))
    return Loop(scheduler, FakeRunner.of(scheduler, VOCAB), depth=2)


def ask(loop: Loop, name: str, prompt: list[int], most: int = 2, **more: Any) -> Request:
    request = Request(name, tuple(prompt), SamplingParams(max_tokens=most), **more)
    loop.scheduler.add(request)
    return request


def text(seed: int, length: int = 40) -> list[int]:
    return [(seed * 7 + i * i + seed * i) % VOCAB for i in range(length)]


def finish(loop: Loop, *requests: Request) -> None:
    loop.drain(loop.plans + 500)
    for request in requests:
        assert loop.outputs[request.id] == expected(request, MAX_LEN, VOCAB)
    check_idle_but_cached(loop)


def check_idle_but_cached(loop: Loop) -> None:
    check_pages(loop.scheduler)
    assert not loop.scheduler.sequences
    assert not loop.scheduler.loads


def host(loop: Loop) -> Any:
    return loop.scheduler.prefix.host


def fill(loop: Loop, prompts: int = 4) -> list[Request]:
    """One prompt after the other, more than the device holds."""
    requests = []
    for i in range(prompts):
        requests.append(ask(loop, f"first{i}", text(i), most=8))
        finish(loop, requests[-1])
    return requests


def test_evicted_pages_come_back() -> None:
    loop = make()
    fill(loop)
    assert host(loop).pages_out
    computed = loop.runner.computed_tokens
    hits = loop.scheduler.prefix.hits
    again = ask(loop, "again", text(0))
    finish(loop, again)
    # all pages but that of the last token, which is computed
    assert host(loop).hits == host(loop).pages_in * SIZE == 36
    assert loop.scheduler.prefix.hits - hits == 36
    assert loop.runner.computed_tokens - computed == 4 + 1
    assert host(loop).queries == 4 * 40 + 40
    usage = loop.scheduler.usage()
    assert (usage.host_pages, usage.host_pages_held) == (64, len(host(loop).slots))
    assert (usage.host_queries, usage.host_hits) == (200, 36)
    assert (usage.host_pages_out, usage.host_pages_in) == (host(loop).pages_out, 9)


def test_a_step_copies_only_so_much_and_others_decode_meanwhile() -> None:
    loop = make()
    loop.depth = 1
    fill(loop)
    other = ask(loop, "other", [1, 2, 3], most=30)
    loop.step()
    again = ask(loop, "again", text(0))
    shares = []
    waited = []
    while "again" not in loop.outputs:
        tokens = len(loop.outputs["other"])
        started = sum(map(bool, shares))
        step = loop.scheduler.schedule()
        assert step is not None
        shares.append(sum(not copy.to_host for copy in step.output.copies))
        assert not step.output.copies_by_layer
        running, _ = step.output.copies_running
        waited.append(running is not None and running < started)
        loop.in_flight.append((step, loop.runner.launch(step.output)))
        loop.collect()
        assert len(loop.outputs["other"]) == tokens + 1
    # nine pages, two a step; two steps later the prompt is admitted, and waits for the copies
    assert shares == [2, 2, 2, 2, 1, 0, 0, 0]
    assert waited == [False] * 7 + [True]
    finish(loop, other, again)


def test_what_is_loaded_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked up on the device, in host memory, and again once it has come."""
    loop = make(num_pages=25)
    fill(loop, 5)
    host(loop).step_pages = 9
    again = ask(loop, "again", text(0))
    computed = counted_keys(monkeypatch)
    step = loop.scheduler.schedule()
    assert step is not None
    assert sum(not copy.to_host for copy in step.output.copies) == 9
    assert len(computed) == 9
    loop.in_flight.append((step, loop.runner.launch(step.output)))
    finish(loop, again)


@pytest.mark.parametrize(
    ("step_pages", "shares"), [(2, [9]), (1, [8, 1])], ids=["at once", "in two steps"]
)
def test_alone_it_is_computed_by_the_step_that_copies_its_last_pages(
    step_pages: int, shares: list[int]
) -> None:
    """Of nine pages eight steps' share at once."""
    loop = make(num_pages=25)
    fill(loop, 5)
    host(loop).step_pages = step_pages
    again = [ask(loop, f"again{i}", text(i)) for i in range(2)]
    for share in shares:
        step = loop.scheduler.schedule()
        assert step is not None
        last = share == shares[-1]
        assert sum(not copy.to_host for copy in step.output.copies) == share
        assert step.output.copies_by_layer == last
        assert [len(chunk.tokens) for chunk in step.output.chunks] == [4] * last
        loop.in_flight.append((step, loop.runner.launch(step.output)))
    step = loop.scheduler.schedule()
    assert step is not None
    assert not step.output.copies_by_layer, "the first one is running"
    assert sum(not copy.to_host for copy in step.output.copies) == step_pages
    loop.in_flight.append((step, loop.runner.launch(step.output)))
    finish(loop, *again)
    assert host(loop).pages_in == 18


def test_requests_for_the_same_pages_wait_for_one_copy() -> None:
    loop = make()
    fill(loop)
    again = [ask(loop, f"again{i}", text(0)) for i in range(3)]
    finish(loop, *again)
    assert host(loop).pages_in == 9


@pytest.mark.parametrize("steps", [0, 1])
def test_nobody_reads_a_page_in_the_step_that_copies_it(steps: int) -> None:
    """Two requests for pages that all come at once, beside an even or an odd step."""
    loop = make(host_step_pages=16)
    fill(loop)
    loop.runner.steps = steps
    again = [ask(loop, f"again{i}", text(0)) for i in range(2)]
    finish(loop, *again)
    assert host(loop).pages_in == 9


def test_a_request_whose_pages_come_leaves_at_any_time() -> None:
    for steps in range(1, 8):
        loop = make()
        loop.depth = 1
        fill(loop)
        ask(loop, "gone", text(0))
        for _ in range(steps):
            loop.step()
            check_pages(loop.scheduler)
        loop.scheduler.abort("gone")
        check_pages(loop.scheduler)
        again = ask(loop, "again", text(0))
        finish(loop, again)
        assert host(loop).pages_in == 9, "those that had come are not copied again"


def test_salts_share_nothing_in_host_memory() -> None:
    loop = make()
    finish(loop, *[ask(loop, f"a{i}", text(i), 12, cache_salt="a") for i in range(4)])
    finish(loop, ask(loop, "b", text(0), cache_salt="b"))
    assert host(loop).pages_in == 0
    finish(loop, ask(loop, "a", text(0), cache_salt="a"))
    assert host(loop).pages_in == 9


def test_preempted_requests_get_their_pages_back() -> None:
    """Two that decode do not fit: the younger gives way, and what it had computed is overwritten
    by the older one's tokens."""
    loop = make(max_num_seqs=2, num_pages=14)
    requests = [ask(loop, f"r{i}", text(i, 20), most=26) for i in range(2)]
    finish(loop, *requests)
    assert loop.scheduler.num_preemptions
    assert host(loop).pages_in


def test_requests_that_run_get_pages_before_those_whose_pages_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One grows while the pages of two others are being brought, one a step."""
    loop = make(host_step_pages=1, num_pages=24)
    fill(loop, 5)
    one = ask(loop, "one", text(9, 10), most=50)
    loop.step()
    again = [ask(loop, f"again{i}", text(i)) for i in range(2)]
    dropped = []
    drop_all = loop.scheduler.loads.drop_all
    monkeypatch.setattr(
        loop.scheduler.loads, "drop_all", lambda: dropped.extend(drop_all()) or dropped
    )
    running = loop.scheduler.sequences["one"]
    finish(loop, one, *again)
    assert [sequence.request.id for sequence in dropped][:2] == ["again0", "again1"]
    assert running.preemptions == 0


def test_clearing_the_cache_clears_host_memory() -> None:
    loop = make()
    fill(loop)
    assert host(loop).slots
    loop.scheduler.prefix.clear()
    assert not host(loop).slots
    finish(loop, ask(loop, "again", text(0)))
    assert host(loop).pages_in == 0


def test_a_page_evicted_between_steps_is_not_copied() -> None:
    """Whoever takes it then may write to it before the next step."""
    loop = make()
    fill(loop)
    prefix = loop.scheduler.prefix
    host(loop).clear()
    host(loop).out_left = 99
    while prefix.idle:
        prefix.evict()
    assert not host(loop).slots
    finish(loop, ask(loop, "again", text(0)))


@pytest.mark.parametrize("depth", [1, 2])
def test_copies_may_take_any_time(depth: int) -> None:
    """None is done before a step waits for it: pages that are written to again, or read."""
    loop = make()
    loop.depth = depth
    loop.runner.prompt_copies = 10**9
    fill(loop, 7)
    other = ask(loop, "other", [1, 2, 3], most=50)
    for i in (3, 0, 5, 1):
        finish_one = ask(loop, f"again{i}", text(i), most=6)
        while finish_one.id in loop.scheduler.sequences:
            loop.step()
    finish(loop, other)
    assert host(loop).pages_in > 20


def test_host_memory_smaller_than_a_prompt() -> None:
    for pages in (1, 2, 3, 5, 8):
        loop = make(host_pages=pages)
        fill(loop)
        for turn in range(2):
            finish(loop, *[ask(loop, f"again{turn}{i}", text(i)) for i in range(4)])
        assert len(host(loop).slots) == pages


def test_an_error_empties_both_tiers_and_keeps_the_counts() -> None:
    loop = make()
    fill(loop)
    ask(loop, "again", text(0))
    step = loop.scheduler.schedule()
    assert step is not None
    assert step.output.copies
    hits = host(loop).hits
    loop.scheduler.restart()  # the step is never launched, so nothing was copied
    check_pages(loop.scheduler)
    assert not host(loop).slots
    assert host(loop).hits == hits > 0
    loop.drain(loop.plans + 100)
    assert host(loop).hits == hits
    assert loop.outputs["again"] == expected(
        replace(Request("again", tuple(text(0)), SamplingParams(max_tokens=2))), MAX_LEN, VOCAB
    )


class HostHistory(RuleBasedStateMachine):
    """Callers add, cancel and clear, steps are launched and collected in any order that a depth of
    3 allows, and errors strike before a launch, amid its copies, or behind it."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_seqs=st.integers(1, 4),
        chunk=st.sampled_from([None, 3]),
        spare=st.integers(0, 12),
        drafts=st.integers(0, 2),
        lookahead=st.integers(0, 2),
        turns=st.integers(1, 2),
        host_pages=st.integers(1, 60),
        host_step_pages=st.integers(1, 4),
    )
    def start(
        self,
        page_size: int,
        num_seqs: int,
        chunk: int | None,
        spare: int,
        drafts: int,
        lookahead: int,
        turns: int,
        host_pages: int,
        host_step_pages: int,
    ) -> None:
        self.loop = make(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs * (drafts + 1) + 8,
            max_model_len=40,
            num_pages=-(-40 // page_size) + 1 + spare,
            page_size=page_size,
            chunked_prefill_size=chunk,
            num_speculative_tokens=drafts,
            lookahead=lookahead,
            pipeline_turns=turns,
            host_pages=host_pages,
            host_step_pages=host_step_pages,
        )
        self.scheduler = self.loop.scheduler
        self.requests: dict[str, Request] = {}
        self.cut: set[str] = set()
        self.truth: dict[bytes, list[int]] = {}  # what belongs under a key

    @rule(
        start=st.integers(0, 3),
        length=st.integers(4, 30),
        most=st.integers(1, 10),
        salt=st.sampled_from(["", "", "a"]),
        scored=st.sampled_from([None, None, None, 0]),
        elsewhere=st.sampled_from([False, False, True]),
    )
    def add(
        self, start: int, length: int, most: int, salt: str, scored: int | None, elsewhere: bool
    ) -> None:
        """Four texts and their beginnings: what one request leaves another finds, of those that go
        on elsewhere the last page too, which is not full."""
        name = f"r{len(self.requests)}"
        params = SamplingParams(max_tokens=most, prompt_logprobs=scored)
        given = {"do_remote_decode": True} if elsewhere else None
        request = Request(
            name,
            tuple(text(start, length)),
            params,
            cache_salt=salt,
            kv_transfer_params=given,
        )
        self.requests[name] = request
        self.scheduler.add(request)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.scheduler.sequences)))
        self.cut.add(name)
        self.scheduler.finish(self.scheduler.sequences[name], FinishReason.ABORT)

    @precondition(lambda self: len(self.loop.in_flight) < 3)
    @rule()
    def launch(self) -> None:
        step = self.scheduler.schedule()
        if step is None:
            assert self.loop.in_flight or not self.scheduler.has_work, "nothing can be planned"
            return
        copies = step.output.copies
        config = self.scheduler.config
        assert sum(not copy.to_host for copy in copies) <= config.host_step_pages
        filled = sum(len(chunk.tokens) for chunk in step.output.chunks)
        most = config.host_step_pages + -(-filled // config.page_size)
        assert sum(copy.to_host for copy in copies) <= most
        self.loop.in_flight.append((step, self.loop.runner.launch(step.output)))

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def collect(self) -> None:
        self.loop.collect()

    @rule(data=st.data(), plan=st.booleans())
    def strike(self, data: st.DataObject, plan: bool) -> None:
        """An error: what is in flight is abandoned, and of the step that was planned, if one was,
        some copies may have been done."""
        step = self.scheduler.schedule() if plan and len(self.loop.in_flight) < 3 else None
        if step is not None:
            done = data.draw(st.integers(0, len(step.output.copies)))
            self.loop.runner.start_copies(step.output.copies[:done])
            self.scheduler.undo(step)
        for waiting, _ in self.loop.in_flight:
            self.scheduler.undo(waiting)
        self.loop.in_flight.clear()
        self.loop.runner.queue.clear()
        self.scheduler.restart()

    @rule()
    def clear(self) -> None:
        self.scheduler.prefix.clear()

    @invariant()
    def counted(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        check_pages(self.scheduler)
        live = sum(sequence.known for sequence in self.scheduler.sequences.values())
        assert self.scheduler.live_tokens == live

    @invariant()
    def every_key_has_its_content(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        prefix = self.scheduler.prefix
        pages, slots = self.loop.runner.after_copies()
        whole = (found for found in prefix.pages.items() if found[0] not in prefix.tails)
        held = [(key, pages[page]) for key, page in whole]
        held += [(key, slots[slot]) for key, slot in host(self.loop).slots.items()]
        for key, page in held:
            states = page.states[: prefix.page_size]
            assert len(states) == prefix.page_size
            assert self.truth.setdefault(key, states) == states

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.loop.drain(self.loop.plans + 300 * (len(self.requests) + 1))
        for name, request in self.requests.items():
            wanted = expected(request, 40, VOCAB)
            found = self.loop.outputs.get(name, [])
            assert found == (wanted[: len(found)] if name in self.cut else wanted)
        check_idle(self.scheduler)


HostHistory.TestCase.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHostHistory = pytest.mark.exhaustive(HostHistory.TestCase)
