"""A Runner without torch. It executes plans against a model of the cache and checks everything a
plan promises.

The model's "hidden state" after a token is a hash of all tokens up to it, and that hash is also
what an entry of the cache holds. A step continues from the entry before its first token, and the
next token is a function of the state alone: so a wrong page, a stale entry or a lost token changes
the output, while chunking, preemption and prefix caching must not. `expected` computes the same
outputs from a request alone. Drafts are right or wrong by the toss of a hash; wrong ones, and those
drafted for the next step, spoil the pages they are written to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rorqual.cache.host_tier import PageCopy
from rorqual.engine.scheduling.scheduler import Scheduler
from rorqual.engine.scheduling.scheduler_output import (
    NewRequest,
    PrefillChunk,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from rorqual.engine.scheduling.sequence import InFlight, TokenOut
from rorqual.request import Request

ROOT = 0x5EED


def advance(state: int, token: int) -> int:
    """The state after one more token; hashes of tuples of ints do not change from run to run."""
    return hash((state, token))


def next_token(state: int, vocab: int) -> int:
    return (state >> 7) % vocab


def expected(request: Request, max_model_len: int, vocab: int) -> list[int]:
    """The outputs of a request that runs alone and in one piece."""
    state = ROOT
    params = request.params
    for token in request.prompt:
        state = advance(state, token)
    room = max_model_len - len(request.prompt)
    outputs: list[int] = []
    while len(outputs) < min(room, params.max_tokens or room):
        outputs.append(next_token(state, vocab))
        state = advance(state, outputs[-1])
        if outputs[-1] in request.stop_ids and len(outputs) > params.min_tokens:
            break
    return outputs


def scores(prompt: tuple[int, ...]) -> list[TokenLogprobs]:
    """What the model thought of each token of a prompt behind the first: a hash of all before."""
    state = ROOT
    found = []
    for token in prompt[:-1]:
        state = advance(state, token)
        found.append(score(state))
    return found


def score(state: int) -> TokenLogprobs:
    return TokenLogprobs(-float(next_token(state, 2**31)), 1, (), ())


@dataclass
class Page:
    """What a cache page holds: the row that wrote it, the position it begins at, the state
    before it, and the state at each token."""

    writer: int
    start: int
    before: int
    states: list[int] = field(default_factory=list)


@dataclass
class Row:
    """A device row. `life` differs for every request set up in a slot; entries from position
    `target` - 1 on are never read."""

    life: int
    table: list[int]
    max_total_len: int
    length: int = 0
    last_token: int = -1
    drafted: bool = True  # False until its first step, where it begins without a prompt chunk


class FakeRunner:
    """launch executes at once (a device runs its steps in order); results come out in collect,
    oldest first."""

    def __init__(
        self,
        max_num_seqs: int,
        page_size: int,
        num_pages: int,
        max_num_batched_tokens: int,
        vocab: int = 97,
        max_len: int = 2**30,
    ):
        self.page_size = page_size
        self.num_pages = num_pages
        self.vocab = vocab
        self.max_len = max_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.rows: list[Row | None] = [None] * max_num_seqs
        self.pages: dict[int, Page] = {}
        self.host: dict[int, Page] = {}
        # copies that no step has waited for, with the number of their step among those that have
        # copies in this direction
        self.late: list[tuple[int, PageCopy]] = []
        self.copy_steps = {False: 0, True: 0}
        self.prompt_copies = 3  # in one step of so many, copies are done before it
        self.queue: deque[StepResult] = deque()
        self.lives = self.steps = self.computed_tokens = self.most_in_flight = 0

    @classmethod
    def of(cls, scheduler: Scheduler, vocab: int = 97) -> FakeRunner:
        config = scheduler.config
        return cls(
            config.max_num_seqs,
            config.page_size,
            config.num_pages,
            config.max_num_batched_tokens,
            vocab,
            config.max_model_len,
        )

    # ---- the Runner protocol

    def launch(self, output: SchedulerOutput) -> StepResult:
        """Copies that a step does not wait for are done before it, or as late as may be, in turns:
        nobody may rely on either."""
        self._check_shape(output)
        for to_host, running in zip((False, True), output.copies_running, strict=True):
            if running is not None:
                self._finish_direction(to_host, running)
        self.start_copies(output.copies)
        if output.copies_first or self.steps % self.prompt_copies == 0:
            self.finish_copies()
        if output.copies_by_layer:
            self._finish_direction(False, 0)
        result = self._compute(output)
        if output.copies_settled:
            self.finish_copies()
        return result

    def start_copies(self, copies: list[PageCopy]) -> None:
        for to_host in {copy.to_host for copy in copies}:
            self.copy_steps[to_host] += 1
        self.late += [(self.copy_steps[copy.to_host], copy) for copy in copies]

    def _finish_direction(self, to_host: bool, but: int) -> None:
        """Copies of one direction, except of the last `but` steps that had any, and those before
        them that use the same page or slot; no others."""
        most = self.copy_steps[to_host] - but
        done: list[PageCopy] = []
        left = []
        for step, copy in reversed(self.late):
            asked = copy.to_host == to_host and step <= most
            if asked or any(copy.page == one.page or copy.slot == one.slot for one in done):
                done.append(copy)
            else:
                left.append((step, copy))
        self.pages, self.host = self._after(reversed(done))
        self.late = left[::-1]

    def finish_copies(self) -> None:
        self.pages, self.host = self.after_copies()
        self.late.clear()

    def after_copies(self) -> tuple[dict[int, Page], dict[int, Page]]:
        """Pages and host memory as they will be."""
        return self._after(copy for _, copy in self.late)

    def _after(self, copies: Iterable[PageCopy]) -> tuple[dict[int, Page], dict[int, Page]]:
        pages = dict(self.pages)
        host = dict(self.host)
        for page, slot, to_host in copies:
            if to_host:
                host[slot] = replace(pages[page], states=list(pages[page].states))
            else:
                found = host[slot]
                pages[page] = replace(found, writer=0, states=list(found.states))
        return pages, host

    def _compute(self, output: SchedulerOutput) -> StepResult:
        for row in output.new_requests:
            self._set_up(row)
        for slot, index, page in output.pages:
            table = self._row(slot).table
            assert index == len(table), (
                f"slot {slot}: page {page} put at {index} of a table of {len(table)}"
            )
            table.append(page)
        self._check_tables(output)
        bounds = zip(output.decode_slots, output.decode_bounds, strict=True)
        tokens = [
            self._decode(slot, bound, output.num_speculative_tokens) for slot, bound in bounds
        ]
        for chunk in output.chunks:
            token = self._prefill(chunk)
            if chunk.sample:
                tokens.append([token])
        decoded = len(output.decode_slots)
        begun = {row.slot for row in output.new_requests if row.length}
        drafted = [0 if slot in begun else 1 for slot in output.decode_slots]
        drafted += [0] * (len(tokens) - decoded)
        result = StepResult(
            tokens,
            [output.num_speculative_tokens * some for some in drafted]
            if output.num_speculative_tokens
            else [],
            prompt_logprobs=[self._scores(chunk) for chunk in output.chunks if chunk.num_scored],
        )
        self.queue.append(result)
        self.steps += 1
        self.computed_tokens += output.num_tokens
        self.most_in_flight = max(self.most_in_flight, len(self.queue))
        return result

    def collect(self, pending: StepResult) -> StepResult:
        assert self.queue, "nothing is in flight"
        assert self.queue[0] is pending, "steps must be collected oldest first"
        return self.queue.popleft()

    # ---- execution

    def _set_up(self, row: NewRequest) -> None:
        assert all(0 < page < self.num_pages for page in row.pages), (
            f"slot {row.slot}: page out of range"
        )
        assert len(set(row.pages)) == len(row.pages), (
            f"slot {row.slot}: a page stands twice in its table"
        )
        self.lives += 1
        target = min(self.max_len, row.prompt_len + (row.params.max_tokens or self.max_len))
        made = self.rows[row.slot] = Row(self.lives, list(row.pages), target)
        if row.length:
            made.length = row.length
            made.last_token = row.last_token
            made.drafted = False
            self._take_over(made)

    def _take_over(self, row: Row) -> None:
        """The page that its first token goes to, where that was begun by another request: entries
        from there on are nobody's."""
        index, count = divmod(row.length, self.page_size)
        if count:
            page = self.pages[row.table[index]]
            assert page.start == row.length - count
            assert len(page.states) >= count, "a page is taken over before all of it is written"
            taken = Page(row.life, page.start, page.before, page.states[:count])
            self.pages[row.table[index]] = taken

    def _decode(self, slot: int, bound: int, num_speculative_tokens: int) -> list[int]:
        row = self._row(slot)
        found = []
        assert row.last_token >= 0, f"slot {slot} decodes before its prompt is done"
        last = row.length + 2 * num_speculative_tokens
        assert row.length + num_speculative_tokens + 1 <= bound, (
            f"slot {slot}: {row.length + num_speculative_tokens + 1} entries, the plan "
            f"says at most {bound}"
        )
        drafts = num_speculative_tokens if row.drafted else 0
        row.drafted = True
        for _ in range(self._right(row, drafts) + 1):
            if row.length // self.page_size >= len(row.table):
                assert row.length >= row.max_total_len - 1, (
                    f"slot {slot}: position {row.length} has no page and will be read"
                )
                break
            state = self._write(row, row.length, [row.last_token])
            row.length += 1
            row.last_token = next_token(state, self.vocab)
            found.append(row.last_token)
        for position in range(row.length, last + 1 if num_speculative_tokens else 0):
            self._spoil(row, position)
        return found or [0]

    def _right(self, row: Row, num_speculative_tokens: int) -> int:
        """How many drafts are right."""
        return hash((row.life, row.length, row.last_token)) % (num_speculative_tokens + 1)

    def _spoil(self, row: Row, position: int) -> None:
        """A draft's entry: whatever its page held of others is gone."""
        index = position // self.page_size
        if index >= len(row.table):
            assert position >= row.max_total_len - 1, (
                f"position {position} has no page and may be read"
            )
            return
        number = row.table[index]
        if number not in self.pages or self.pages[number].writer != row.life:
            self.pages[number] = Page(row.life, index * self.page_size, -1)

    def _prefill(self, chunk: PrefillChunk) -> int:
        row = self._row(chunk.slot)
        assert chunk.tokens, "an empty chunk"
        if row.length:
            assert chunk.start == row.length, (
                f"slot {chunk.slot}: chunk at {chunk.start}, {row.length} entries are written"
            )
        assert row.last_token < 0, "a prompt chunk after the prompt was done"
        state = self._write(row, chunk.start, chunk.tokens)
        row.length = chunk.stop
        if chunk.sample:
            row.last_token = next_token(state, self.vocab)
        return row.last_token

    def _scores(self, chunk: PrefillChunk) -> list[TokenLogprobs]:
        assert chunk.start <= chunk.score_start < chunk.score_stop <= chunk.stop, (
            "scored rows are computed in the same step"
        )
        after = (*chunk.tokens[1:], *chunk.following)
        assert chunk.score_stop - chunk.start <= len(after), "the token after a scored row is known"
        table = self._row(chunk.slot).table
        size = self.page_size
        states = [
            self.pages[table[i // size]].states[i % size]
            for i in range(chunk.score_start, chunk.score_stop)
        ]
        return [score(state) for state in states]

    def _write(self, row: Row, start: int, tokens: list[int] | tuple[int, ...]) -> int:
        """Read everything before `start` through the table, then write the entries of `tokens`;
        returns the last state."""
        state = self._read(row, start)
        for position, token in enumerate(tokens, start):
            index, offset = divmod(position, self.page_size)
            assert index < len(row.table), (
                f"position {position} lies beyond a table of {len(row.table)} pages"
            )
            number = row.table[index]
            if offset == 0:
                self.pages[number] = Page(row.life, position, state)
            page = self.pages[number]
            assert page.writer == row.life, f"page {number} is written by two requests"
            assert page.start + len(page.states) == position, (
                f"page {number}: position {position} is not next"
            )
            state = advance(state, token)
            page.states.append(state)
        return state

    def _read(self, row: Row, stop: int) -> int:
        """Every entry before `stop` must have been written for its position, and follow the one
        before."""
        state = ROOT
        for index in range(-(-stop // self.page_size)):
            page = self.pages.get(row.table[index])
            start = index * self.page_size
            count = min(self.page_size, stop - start)
            assert page is not None, f"page {row.table[index]} is read before it was written"
            assert page.start == start, (
                f"page {row.table[index]} holds positions from {page.start}, read at {start}"
            )
            assert page.before == state, f"page {row.table[index]} continues another text"
            assert len(page.states) >= count, (
                f"page {row.table[index]} has {len(page.states)} entries, {count} are read"
            )
            state = page.states[count - 1]
        return state

    def _row(self, slot: int) -> Row:
        row = self.rows[slot]
        assert row is not None, f"slot {slot} was never set up"
        return row

    # ---- what holds for every plan

    def _check_shape(self, output: SchedulerOutput) -> None:
        assert output.num_tokens or output.copies, "an empty step"
        assert output.num_tokens <= self.max_num_batched_tokens, (
            f"{output.num_tokens} tokens in a step"
        )
        slots = output.decode_slots + [chunk.slot for chunk in output.chunks]
        assert len(set(slots)) == len(slots), "a slot stands twice in a step"
        assert all(0 <= slot < self.max_num_seqs for slot in slots)
        fresh = [row.slot for row in output.new_requests]
        assert len(set(fresh)) == len(fresh), "a slot is set up twice"
        at_once = {row.slot for row in output.new_requests if row.length}
        assert at_once <= set(output.decode_slots), "a row that is to decode does not"
        assert set(fresh) - at_once <= {chunk.slot for chunk in output.chunks}, (
            "a row is set up without a chunk"
        )
        assert {slot for slot, _, _ in output.pages} <= set(output.decode_slots), (
            "a page for a row that does not decode"
        )

    def _check_tables(self, output: SchedulerOutput) -> None:
        """No page is written by two rows of a step, drafts and those drafted in turn included; a
        shared prefix lies before what either writes. Past its pages a row writes to the null
        page: whether it may is checked where it does."""
        written: dict[int, int] = {}
        starts = [(slot, self._row(slot).length) for slot in output.decode_slots]
        starts += [(chunk.slot, chunk.start) for chunk in output.chunks]
        stops = [
            length + 1 + 2 * output.num_speculative_tokens
            for _, length in starts[: len(output.decode_slots)]
        ] + [chunk.stop for chunk in output.chunks]
        for (slot, start), stop in zip(starts, stops, strict=True):
            table = self._row(slot).table
            for index in range(
                start // self.page_size, min(len(table), -(-stop // self.page_size))
            ):
                assert written.setdefault(table[index], slot) == slot, (
                    f"page {table[index]} is written by two rows of a step"
                )


@dataclass
class Loop:
    """The engine's loop over a scheduler and a fake runner, with `depth` steps in flight."""

    scheduler: Scheduler
    runner: FakeRunner
    depth: int = 1
    in_flight: deque[tuple[InFlight, StepResult]] = field(default_factory=deque)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finishes: dict[str, str] = field(default_factory=dict)
    plans: int = 0

    def step(self) -> list[TokenOut]:
        self.launch()
        return self.collect()

    def launch(self) -> None:
        while len(self.in_flight) < self.depth:
            step = self.scheduler.schedule()
            self.plans += 1
            if step is None:
                return
            self.in_flight.append((step, self.runner.launch(step.output)))

    def collect(self) -> list[TokenOut]:
        if not self.in_flight:
            return []
        step, pending = self.in_flight.popleft()
        outs = self.scheduler.update(step, self.runner.collect(pending))
        for out in outs:
            sequence = out.sequence
            wanted = sequence.request.params.prompt_logprobs is not None
            assert sequence.prompt_logprobs == (scores(sequence.request.prompt) if wanted else [])
            self.outputs.setdefault(out.sequence.request.id, []).append(out.token)
            if out.finish is not None:
                self.finishes[out.sequence.request.id] = out.finish.value
        return outs

    def drain(self, most_plans: int) -> None:
        """Run until nothing is left; planning more often than `most_plans` counts as spinning."""
        while self.scheduler.has_work or self.in_flight:
            assert self.plans < most_plans, (
                f"{self.plans} plans and {len(self.scheduler.sequences)} requests are still there"
            )
            self.step()


def check_pages(scheduler: Scheduler) -> None:
    """Each page's holders are the requests that have it in their tables, and the prefix cache
    where it keeps it."""
    allocator = scheduler.allocator
    prefix = scheduler.prefix
    held = [0] * allocator.num_pages
    for sequence in scheduler.sequences.values():
        assert (sequence.slot >= 0) == bool(sequence.pages), (
            "pages belong to running requests alone"
        )
        assert sequence.capacity == len(sequence.pages) * scheduler.config.page_size
        # drafts accepted in a step may count past the target, where nothing is read
        written = min(sequence.num_computed_tokens, sequence.max_total_len - 1)
        assert written <= sequence.capacity
        for page in sequence.pages:
            held[page] += 1
    for load in scheduler.loads.loads.values():
        for page in load.pages:
            held[page] += 1
    users = list(held)
    for page in prefix.keys:
        held[page] += 1
    assert held == allocator.holders
    assert sorted(allocator.free) == [
        page for page in range(1, allocator.num_pages) if not held[page]
    ]
    assert {key: page for page, key in prefix.keys.items()} == prefix.pages
    assert set(prefix.idle) == {page for page in prefix.keys if not users[page]}
    slots = [sequence.slot for sequence in scheduler.sequences.values() if sequence.slot >= 0]
    assert sorted(slots + scheduler.free_slots) == list(range(scheduler.config.max_num_seqs))
    check_host(scheduler)


def check_host(scheduler: Scheduler) -> None:
    """Requests wait in the queue or for their pages; each key in host memory has a slot of its
    own."""
    loads = scheduler.loads
    waiting = {sequence.request.id for sequence in scheduler.waiting}
    assert not waiting & set(loads.loads)
    coming = [key for load in loads.loads.values() for key in load.keys]
    assert len(coming) == len(set(coming))
    assert loads.coming == set(coming)
    assert not loads.notes
    tier = scheduler.prefix.host
    assert set(scheduler.prefix.uncopied) <= set(scheduler.prefix.keys)
    if tier is not None:
        slots = list(tier.slots.values())
        assert len(slots) == len(set(slots))
        assert all(0 <= slot < tier.unused for slot in slots)
        assert tier.unused <= tier.capacity


def check_idle(scheduler: Scheduler) -> None:
    """Nothing runs: every page is free or kept by the prefix cache alone, and clearing that
    frees the rest."""
    allocator = scheduler.allocator
    prefix = scheduler.prefix
    assert not scheduler.sequences
    assert not scheduler.waiting
    assert not scheduler.loads
    assert not scheduler.num_running
    assert scheduler.live_tokens == 0
    check_pages(scheduler)
    assert len(allocator.free) + len(prefix.idle) == allocator.capacity
    prefix.clear()
    assert len(allocator.free) == allocator.capacity
    assert not any(allocator.holders)
    assert not prefix.pages
    assert sorted(scheduler.free_slots) == list(range(scheduler.config.max_num_seqs))
