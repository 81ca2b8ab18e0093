"""Random histories of the scheduler: whatever callers do, holders are counted right, the oldest
goes on, and outputs are exact."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.request import FinishReason, Request, SamplingParams
from tests.engine.fake_runner import FakeRunner, Loop, check_idle, check_pages, expected

# Few token values, so that prompts share prefixes and stop ids are met.
VOCAB = 5
MAX_LEN = 40


class History(RuleBasedStateMachine):
    """Callers add, cancel and stop requests while the engine launches and collects steps in any
    order a depth of 3 allows."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8]),
        num_seqs=st.integers(1, 5),
        extra=st.integers(0, 12),
        chunk=st.sampled_from([None, 1, 3]),
        caching=st.booleans(),
        spare=st.integers(0, 16),
        num_speculative_tokens=st.integers(0, 3),
        lookahead=st.integers(0, 2),
        turns=st.integers(1, 3),
    )
    def start(
        self,
        page_size: int,
        num_seqs: int,
        extra: int,
        chunk: int | None,
        caching: bool,
        spare: int,
        num_speculative_tokens: int,
        lookahead: int,
        turns: int,
    ) -> None:
        pages = -(-MAX_LEN // page_size) + 1 + spare  # at least one request of full length fits
        budget = num_seqs * (num_speculative_tokens + 1) + extra
        more = {
            "num_speculative_tokens": num_speculative_tokens,
            "lookahead": lookahead,
            "pipeline_turns": turns,
        }
        config = SchedulerConfig(
            num_seqs, budget, MAX_LEN, pages, page_size, caching, chunk, **more
        )
        self.scheduler = Scheduler(config)
        self.loop = Loop(self.scheduler, FakeRunner.of(self.scheduler, VOCAB), depth=3)
        self.requests: dict[str, Request] = {}
        self.cut: set[str] = set()
        self.idle_plans = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        most=st.one_of(st.none(), st.integers(1, 16)),
        least=st.integers(0, 8),
        stops=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        salt=st.sampled_from(["", "a"]),
        scored=st.sampled_from([None, None, 0]),
        elsewhere=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        most: int | None,
        least: int,
        stops: set[int],
        salt: str,
        scored: int | None,
        elsewhere: bool,
    ) -> None:
        name = f"r{len(self.requests)}"
        transfer = {"do_remote_decode": True} if elsewhere else None
        params = SamplingParams(
            max_tokens=most,
            min_tokens=least if most is None else min(least, most),
            stop_token_ids=sorted(stops),
            prompt_logprobs=scored,
        )
        self.requests[name] = Request(
            name, tuple(prompt), params, cache_salt=salt, kv_transfer_params=transfer
        )
        self.scheduler.add(self.requests[name])

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        name = data.draw(st.sampled_from(sorted(self.scheduler.sequences)))
        self.cut.add(name)
        self.scheduler.finish(self.scheduler.sequences[name], reason)
        assert name not in self.scheduler.sequences

    @precondition(lambda self: len(self.loop.in_flight) < 3)
    @rule()
    def launch(self) -> None:
        oldest = min(
            (s for s in self.scheduler.sequences.values() if s.slot >= 0),
            key=lambda s: s.order,
            default=None,
        )
        before = oldest.preemptions if oldest else 0
        step = self.scheduler.schedule()
        assert oldest is None or oldest.preemptions == before, (
            "the oldest running request was preempted"
        )
        if step is None:
            assert self.loop.in_flight or not self.scheduler.has_work, (
                "nothing is in flight and nothing can be planned"
            )
        else:
            self.loop.in_flight.append((step, self.loop.runner.launch(step.output)))

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def collect(self) -> None:
        for out in self.loop.collect():
            assert out.sequence.request.id not in self.cut, "a token of a request that was ended"

    @rule(num_speculative_tokens=st.integers(0, 3))
    def steer(self, num_speculative_tokens: int) -> None:
        """A controller may ask for fewer drafts, plan by plan."""
        self.scheduler.num_speculative_tokens = min(
            num_speculative_tokens, self.scheduler.config.num_speculative_tokens
        )

    @rule()
    def clear_prefixes(self) -> None:
        self.scheduler.prefix.clear()

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "scheduler"):
            check_pages(self.scheduler)
            live = sum(sequence.known for sequence in self.scheduler.sequences.values())
            assert self.scheduler.live_tokens == live
            orders = [s.order for s in self.scheduler.waiting]
            assert orders == sorted(orders)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.loop.drain(self.loop.plans + 200 * (len(self.requests) + 1))
        check_idle(self.scheduler)
        assert self.scheduler.live_tokens == 0
        for name, request in self.requests.items():
            wanted = expected(request, MAX_LEN, VOCAB)
            found = self.loop.outputs.get(name, [])
            assert found == (wanted[: len(found)] if name in self.cut else wanted)


History.TestCase.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistory = History.TestCase


Asked = tuple[list[int], int, set[int]]  # prompt, max_tokens, stop ids
requests_ = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=30),
        st.integers(1, 20),
        st.sets(st.integers(0, VOCAB - 1), max_size=1),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests_,
    page_size=st.sampled_from([1, 3, 4, 16]),
    seqs=st.integers(1, 6),
    extra=st.integers(0, 40),
    spare=st.integers(0, 20),
    num_speculative_tokens=st.integers(0, 3),
)
def test_no_setting_changes_an_output(
    requests: list[Asked],
    page_size: int,
    seqs: int,
    extra: int,
    spare: int,
    num_speculative_tokens: int,
) -> None:
    """Depth, prefix caching, chunking, drafts and the number of pages change when a token is
    computed, never which."""
    asked = [
        Request(
            f"r{i}", tuple(prompt), SamplingParams(max_tokens=most, stop_token_ids=sorted(stops))
        )
        for i, (prompt, most, stops) in enumerate(requests)
    ]
    wanted = {request.id: expected(request, 60, VOCAB) for request in asked}
    pages = -(-60 // page_size) + 1 + spare
    variants: list[dict[str, Any]] = [{"prefix_caching": False}, {}, {"chunked_prefill_size": 2}]
    for depth, changes in enumerate(variants, 1):
        budget = seqs * (num_speculative_tokens + 1) + extra
        scheduler = Scheduler(
            SchedulerConfig(
                seqs,
                budget,
                60,
                pages,
                page_size,
                num_speculative_tokens=num_speculative_tokens,
                lookahead=depth - 1,
                **changes,
            )
        )
        loop = Loop(scheduler, FakeRunner.of(scheduler, VOCAB), depth)
        for request in asked:
            scheduler.add(request)
        loop.drain(4000)
        assert loop.outputs == wanted
        check_idle(scheduler)
