"""The engine's scheduler for simulations without drafts, with work only for requests that change
state: a decoding request sleeps through steps that only give it one more token. No torch.

A request is woken for a step in which it needs a page, fills one, or ends; the engine's own code
then schedules and updates it, in the order in which it would have been scheduled among all others.
A sleeping request allocates, publishes and frees nothing, so pages, prefix cache, queue and budget
are the same after each step as if every request had been scheduled in every step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as ReadOnly

from rorqual.cache.prefix import PrefixCache, root_key
from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.engine.scheduling.scheduler_output import SchedulerOutput
from rorqual.engine.scheduling.sequence import Sequence
from rorqual.engine.scheduling.waiting_queue import charge_output
from rorqual.planner.simulator.workload import filler


class QuickPrefixCache(PrefixCache):
    """8-byte prefix keys from Python's hash of integers, which is fast; a simulation has no
    attackers. The chance of any collision among a million pages is one in 40 million."""

    def key_after(self, previous: bytes, tokens: ReadOnly[int]) -> bytes:
        before = int.from_bytes(previous[:8], "little")
        return hash((before, *tokens)).to_bytes(8, "little", signed=True)

    def add_keys(self, keys: list[bytes], tokens: ReadOnly[int], salt: str, count: int) -> None:
        key = keys[-1] if keys else root_key(salt)
        for page in range(len(keys), count):
            key = self.key_after(key, self.covered(tokens, page))
            keys.append(key)


class SleepingScheduler(Scheduler):
    """done: completed steps. since: for each sleeping request, the step after which it fell asleep.
    asleep: tokens that all sleeping requests have now. due: requests that decode in the next step.
    awake: (position, request) of those that are not asleep in it. allowed: most prompt tokens of
    the next step, beside which the budget of all requests counts."""

    def __init__(self, config: SchedulerConfig):
        assert not config.num_speculative_tokens, "drafts decide how far a request comes"
        assert config.pipeline_turns == 1, "all requests are in every step"
        super().__init__(config)
        self.prefix = QuickPrefixCache(self.allocator, config.page_size, config.prefix_caching)
        self.allowed = config.max_num_batched_tokens
        self.done = self.asleep = self.joined = 0
        self.since: dict[str, int] = {}
        self.due: list[Sequence] = []
        self.places: dict[str, int] = {}  # the order in which requests began to decode
        self.alarms: list[tuple[int, int, Sequence]] = []
        self.awake: list[tuple[int, Sequence]] = []

    def rouse(self) -> bool:
        """Before a step: wake the requests that are due. Returns whether the step may contain more
        than sleeping requests."""
        found = self.awake
        self.awake = []
        alarms = self.alarms
        while alarms and alarms[0][0] <= self.done + 1:
            _, place, sequence = heapq.heappop(alarms)
            name = sequence.request.id
            if name in self.since and self.places[name] == place:
                self.wake(sequence)
                found.append((place, sequence))
        if len(found) > 1:
            found.sort()
        self.due = [sequence for _, sequence in found]
        return bool(found or self.prefilling or self.waiting)

    def wake(self, sequence: Sequence) -> None:
        """It has the tokens of the steps it slept through."""
        name = sequence.request.id
        more = self.done - self.since.pop(name)
        length = len(sequence.tokens)
        sequence.tokens.extend(filler(length, length + more))
        sequence.num_computed_tokens = sequence.collected = length + more - 1
        self.live_tokens += more
        charge_output(sequence, more)
        self.asleep -= length + more

    def end_step(self, sampled: Iterable[Sequence]) -> int:
        """After a step: sleeping requests get one more token, and requests that took part may fall
        asleep. Returns how many slept through it."""
        slept = len(self.since)
        self.asleep += slept
        self.done += 1
        for sequence in sampled:
            if sequence.finish is None and sequence.slot >= 0:
                self._sleep(sequence)
        return slept

    def _sleep(self, sequence: Sequence) -> None:
        assert not sequence.stop_ids, "an end that only the tokens tell"
        assert not sequence.pending, "a step of it is in flight"
        name = sequence.request.id
        length = len(sequence.tokens)
        # steps until it ends, fills a page (Scheduler._append), needs one (Scheduler._writable_len)
        steps = min(sequence.max_total_len - length, sequence.next_hash - length + 1)
        if sequence.max_total_len - 1 > sequence.capacity:
            steps = min(steps, sequence.capacity - length + 2)
        if name not in self.places:
            self.joined += 1
            self.places[name] = self.joined
        place = self.places[name]
        if steps <= 1:
            self.awake.append((place, sequence))
            return
        self.since[name] = self.done
        self.asleep += length
        heapq.heappush(self.alarms, (self.done + steps, place, sequence))

    # ---- what the scheduler must not see of it

    def _decode_turn(self) -> Iterable[Sequence]:
        return self.due

    def _schedule_decode(self, output: SchedulerOutput) -> list[Sequence]:
        """Prompts get what all that decode leave of the budget, whether they sleep or not."""
        sampled = super()._schedule_decode(output)
        rows = len(sampled) + len(self.since)
        most = self.config.max_num_batched_tokens - rows
        self.prompt_budget = min(self.allowed, most)
        return sampled

    def _release(self, sequence: Sequence) -> None:
        name = sequence.request.id
        if name in self.since:
            self.wake(sequence)
        self.places.pop(name, None)
        super()._release(sequence)
