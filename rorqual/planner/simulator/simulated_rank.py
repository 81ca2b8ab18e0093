"""One rank of the simulation: the engine's scheduler, fed with made-up tokens, and what became of
each of its requests. No torch.

While nothing changes but the number of tokens, steps are only counted: without drafts for each
request by itself (sleeping_rows.py), with drafts for all of them together (fast_forward.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field

from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.engine.scheduling.scheduler_output import StepResult
from rorqual.engine.scheduling.sequence import InFlight, Sequence
from rorqual.errors import RequestError
from rorqual.planner.simulator.cost_runner import IDLE, StepLoad
from rorqual.planner.simulator.fast_forward import advance, decode_run
from rorqual.planner.simulator.sleeping_rows import SleepingScheduler
from rorqual.planner.simulator.workload import Arrival, filler
from rorqual.request import Request, SamplingParams

SLEEPING = True  # False: every request is planned in every step, to compare


@dataclass(slots=True)
class RequestTimeline:
    """A request's times, in seconds since the start, and token counts. computed: prompt tokens
    computed. reused: found in the prefix cache. received: from another pool. wanted: output tokens,
    as many as requested and fit. paused: time of its last token, if the next one is not in the
    following step."""

    job: Arrival
    arrival: float
    admitted: float | None = None
    first: float | None = None
    last: float | None = None
    paused: float | None = None
    refused: str | None = None
    computed: int = 0
    reused: int = 0
    received: int = 0
    wanted: int = 0
    made: int = 0
    preemptions: int = 0
    moved: int = 0
    carried: int = 0  # of computed, reused and received, on ranks before this one

    @property
    def length(self) -> int:
        """Tokens that must be in a rank's cache before the next one can be computed."""
        return self.job.prompt + self.made


@dataclass(slots=True)
class StepEvents:
    """What a step brought: requests that got their last token here, rows that decoded, and
    longer gaps between two tokens of one."""

    done: list[RequestTimeline] = field(default_factory=list)
    rows: int = 0
    gaps: list[float] = field(default_factory=list)


class SimulatedRank:
    """remote: prompts arrive with their caches, and their first step is one decode row. first_only:
    a request ends here with its first token and moves to another pool. live: tokens of unfinished
    requests here."""

    def __init__(
        self,
        config: SchedulerConfig,
        acceptance: ReadOnly[float],
        draw: random.Random,
        remote: bool = False,
        first_only: bool = False,
    ):
        assert len(acceptance) == config.num_speculative_tokens
        self.sleeping = SleepingScheduler(config) if SLEEPING and not acceptance else None
        self.scheduler = self.sleeping or Scheduler(config)
        self.scheduler.prefix.read_by_peers = remote or first_only
        self.acceptance = tuple(acceptance)
        self.random = draw
        self.remote = remote
        self.first_only = first_only
        self.records: dict[str, RequestTimeline] = {}
        self.preempted: dict[str, int] = {}
        self.inbox: list[tuple[float, RequestTimeline]] = []
        self.live = self.emitted = self.owed = self.left = self.rows = self.entries = 0
        self.accepted: list[list[int]] = []
        self.step: InFlight | None = None
        self._params: dict[int, SamplingParams] = {}

    # ---- requests

    def put(self, record: RequestTimeline, now: float) -> None:
        self.inbox.append((now, record))
        self.live += record.length

    def take_in(self, until: float) -> list[RequestTimeline]:
        """Requests that came by `until` join the scheduler's queue; returns those it refuses."""
        if not self.inbox or self.inbox[0][0] > until:
            return []
        self.settle()
        count = next(
            (index for index, (came, _) in enumerate(self.inbox) if came > until), len(self.inbox)
        )
        taken = self.inbox[:count]
        self.inbox = self.inbox[count:]
        for _, record in taken:
            self._add(record)
        return [record for _, record in taken if record.refused is not None]

    def _add(self, record: RequestTimeline) -> None:
        job = record.job
        record.wanted = max(1, min(job.output, self.scheduler.config.max_model_len - job.prompt))
        prompt = (*job.tokens(), *filler(job.prompt, record.length))
        output = 1 if self.first_only else record.wanted - record.made
        params = self._params.get(output)
        if params is None:
            params = self._params[output] = SamplingParams(
                max_tokens=output, seed=0, ignore_eos=True
            )
        name = str(job.number)
        try:
            self.scheduler.add(Request(name, prompt, params, arrival=record.arrival))
        except RequestError as error:
            record.refused = str(error)
            self.live -= record.length
            return
        record.carried = record.computed + record.reused + record.received
        self.records[name] = record

    def allow(self, prompt_tokens: int) -> None:
        """Most prompt tokens of the next step."""
        if self.sleeping is not None:
            self.sleeping.allowed = prompt_tokens
        else:
            self.scheduler.prompt_budget = prompt_tokens

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self.inbox)

    # ---- steps

    def begin(self, now: float) -> StepLoad:
        """The load of the next step; IDLE where there is none."""
        if self.sleeping is not None:
            return self._begin_sleeping(self.sleeping, now)
        if not self.left:
            self.settle()
            self._start_run()
        if self.left:
            return self._count_step()
        self._schedule(now)
        assert self.step or not self.scheduler.has_work, "work is there, and none of it is planned"
        return self._load(self.step, now) if self.step else IDLE

    def _schedule(self, now: float) -> None:
        before = self.scheduler.num_preemptions
        self.step = self.scheduler.schedule()
        if self.scheduler.num_preemptions > before:
            self._note_preempted(now)

    def _begin_sleeping(self, scheduler: SleepingScheduler, now: float) -> StepLoad:
        if scheduler.rouse():
            self._schedule(now)
        if self.step:
            return self._load(self.step, now)
        rows = len(scheduler.since)
        assert rows or not scheduler.has_work, "work is there, and none of it is planned"
        return StepLoad(rows, scheduler.asleep // rows) if rows else IDLE

    def _start_run(self) -> None:
        self.left = decode_run(self.scheduler)
        if self.left:
            decoding = self.scheduler.decoding.values()
            self.rows = len(decoding)
            self.entries = sum(len(sequence.tokens) for sequence in decoding)
            self.accepted = [[] for _ in decoding] if self.acceptance else []

    def _count_step(self) -> StepLoad:
        self.left -= 1
        self.owed += 1
        load = StepLoad(self.rows, self.entries // self.rows)
        self.entries += self.rows
        for right in self.accepted:
            right.append(self._right())
            self.entries += right[-1]
        return load

    def settle(self) -> None:
        """Apply the steps that were only counted to the scheduler."""
        if self.owed:
            more = [self.owed + sum(right) for right in self.accepted] or [self.owed] * self.rows
            lengths = [len(sequence.tokens) for sequence in self.scheduler.decoding.values()]
            tokens = [
                filler(length, length + new) for length, new in zip(lengths, more, strict=True)
            ]
            advance(self.scheduler, self.owed, tokens, self.accepted)
            self.emitted += sum(more)
        self.owed = 0
        self.left = 0
        self.accepted = []

    def _right(self) -> int:
        """Drafts accepted: those before the first that is refused."""
        for place, rate in enumerate(self.acceptance):
            if self.random.random() >= rate:
                return place
        return len(self.acceptance)

    def _note_preempted(self, now: float) -> None:
        for sequence in self.scheduler.waiting:
            name = sequence.request.id
            record = self.records[name]
            if sequence.preemptions > self.preempted.get(name, 0):
                self.preempted[name] = sequence.preemptions
                record.preemptions += 1
                if record.first is not None and record.paused is None:
                    record.paused = now

    def _note_admitted(self, sequence: Sequence, reused: int, now: float) -> None:
        record = self.records[sequence.request.id]
        record.admitted = now if record.admitted is None else record.admitted
        record.reused += reused

    def _load(self, step: InFlight, now: float) -> StepLoad:
        output = step.output
        decoded = len(output.decode_slots)
        rows = decoded
        entries = sum(len(sequence.tokens) for sequence in step.sampled[:decoded])
        if self.sleeping is not None:
            rows += len(self.sleeping.since)
            entries += self.sleeping.asleep
        prompts = tokens = pairs = 0
        at_once = [row for row in output.new_requests if row.length]
        for row, sequence in zip(
            at_once, step.sampled[decoded - len(at_once) : decoded], strict=True
        ):
            self._note_admitted(sequence, row.length, now)
            self.records[sequence.request.id].computed += 1
        fresh = len(output.chunks) - len(output.new_requests) + len(at_once)
        for index, (chunk, done) in enumerate(zip(output.chunks, step.computed, strict=True)):
            sequence = done.sequence
            record = self.records[sequence.request.id]
            new = len(chunk.tokens)
            if index >= fresh:
                self._note_admitted(sequence, chunk.start, now)
            if self.remote and not sequence.preemptions:
                record.received += new
                rows = rows + 1
                entries = entries + done.stop
                continue
            record.computed += new
            prompts = prompts + 1
            tokens = tokens + new
            pairs = pairs + new * (2 * chunk.start + new)
        context = entries // rows if rows else 0
        if not prompts:
            return StepLoad(rows, context)
        each = -(-tokens // prompts)
        return StepLoad(
            rows, context, prompts, each, max(0, round(pairs / tokens / 2 - tokens / prompts / 2))
        )

    def end(self, now: float) -> StepEvents:
        """The step that began last is over."""
        if self.step is None and self.sleeping is not None:
            return StepEvents(rows=self._slept(()))
        if self.step is None:
            self.live += self.rows + sum(right[-1] for right in self.accepted)
            return StepEvents(rows=self.rows)
        step = self.step
        self.step = None
        # those that began as ones that decode got their first token, as behind a prompt
        begun = sum(row.length > 0 for row in step.output.new_requests)
        decoded = len(step.output.decode_slots) - begun
        found = StepEvents(rows=decoded)
        rights = [self._right() if row < decoded else 0 for row in range(len(step.sampled))]
        tokens = [
            filler(len(sequence.tokens), len(sequence.tokens) + right + 1)
            for sequence, right in zip(step.sampled, rights, strict=True)
        ]
        num_speculative_tokens = step.output.num_speculative_tokens
        drafted = (
            [num_speculative_tokens * (row < decoded) for row in range(len(rights))]
            if num_speculative_tokens
            else []
        )
        prompts = step.sampled[decoded:]
        outs = self.scheduler.update(step, StepResult(tokens, drafted))
        self.emitted += len(outs)
        self.live += len(outs)
        for sequence in prompts:
            self._answered(sequence, now, found)
        for out in outs:
            if out.finish is not None:
                found.done.append(self._finished(out.sequence, now))
        if self.sleeping is not None:
            found.rows += self._slept(step.sampled)
        return found

    def _slept(self, sampled: ReadOnly[Sequence]) -> int:
        """End the step for sleeping requests; returns how many there are."""
        assert self.sleeping is not None
        rows = self.sleeping.end_step(sampled)
        self.live += rows
        self.emitted += rows
        return rows

    def _answered(self, sequence: Sequence, now: float, found: StepEvents) -> None:
        """A prompt is done: its request got its first token, or its next one after a pause."""
        record = self.records[sequence.request.id]
        if record.first is None:
            record.first = now
        elif record.paused is not None:
            found.gaps.append(now - record.paused)
        record.paused = None

    def _finished(self, sequence: Sequence, now: float) -> RequestTimeline:
        record = self._taken_out(sequence)
        record.last = now
        return record

    def _taken_out(self, sequence: Sequence) -> RequestTimeline:
        """Done here; what it got here counts as made."""
        record = self.records.pop(sequence.request.id)
        self.preempted.pop(sequence.request.id, None)
        made = len(sequence.tokens) - sequence.prompt_len
        self._check(record, sequence, made)
        record.made += made
        self.live -= record.length
        return record

    # ---- a rank that dies

    def crash(self, stepping: bool, ended: float) -> list[RequestTimeline]:
        """The rank died: returns the requests it had, with their tokens by the end of the last
        step, at `ended`; a step in flight (stepping) is lost."""
        for sequence in list(self.scheduler.decoding.values()) if self.sleeping else ():
            if self.sleeping and sequence.request.id in self.sleeping.since:
                self.sleeping.wake(sequence)
        if stepping and self.owed:  # it was only counted
            self.owed -= 1
            for right in self.accepted:
                right.pop()
        self.settle()
        found = []
        for name, record in self.records.items():
            sequence = self.scheduler.sequences[name]
            record.made += len(sequence.tokens) - sequence.prompt_len
            if record.made and record.paused is None:
                record.paused = ended
            found.append(record)
        found += [record for _, record in self.inbox]
        for record in found:
            record.moved += 1
        return found

    def _check(self, record: RequestTimeline, sequence: Sequence, made: int) -> None:
        """Conservation: every token of the prompt was computed, found or received, once unless
        the request was preempted."""
        assert made == sequence.request.params.max_tokens, (
            f"request {record.job.number} asked for another number of tokens than {made}"
        )
        had = record.computed + record.reused + record.received - record.carried
        length = record.length
        assert had == length if not sequence.preemptions else had >= length, (
            f"request {record.job.number}: {had} of {length} tokens were cached"
        )

    def check_idle(self) -> None:
        """Nothing is left behind: no request, no page, no token."""
        self.settle()
        free = self.scheduler.prefix.available
        scheduler = self.scheduler
        left = len(scheduler.sequences) + len(self.inbox) + len(self.records)
        assert left == 0, f"{left} requests are left"
        assert free == scheduler.allocator.capacity, (
            f"{scheduler.allocator.capacity - free} pages are lost"
        )
        assert self.live == 0, f"{self.live} tokens are still counted as live"
