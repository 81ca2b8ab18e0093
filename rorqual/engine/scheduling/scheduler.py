"""Continuous batching: which tokens of which requests the next step computes. No torch.

A request is two lengths: tokens known and tokens cached. Their difference is what the next steps
compute: prefill, chunked prefill and decode alike. While steps are in flight the host knows only
the number of the newest tokens.

Policy. Every running request that decodes gets its token in every step (with pipeline_turns m, in
one of m steps); the rest of the token budget goes to prompts, oldest first. Waiting requests are
ordered by priority, then least served client (waiting_queue.py). A request is admitted when there
are pages for all its known tokens. When a decoding request finds no free page, the youngest running
request is preempted: it gives up its pages and later recomputes them. Where the next client finds
no row or too few pages, a request of a client with more than twice its rows is preempted as well,
since rows may not come free in time. The oldest request is never preempted, so it always finishes.

A request with all but its last token cached, as after a remote prefill, starts as a decoding
request: its first step may have no prompt chunk.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from rorqual.cache.host_tier import HostTier
from rorqual.cache.pages import PageAllocator
from rorqual.cache.prefix import PrefixCache
from rorqual.engine.scheduling.host_loads import HostLoads
from rorqual.engine.scheduling.scheduler_output import (
    NewRequest,
    PrefillChunk,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from rorqual.engine.scheduling.sequence import (
    ComputedChunk,
    InFlight,
    PendingLoad,
    Sequence,
    TokenOut,
    Usage,
)
from rorqual.engine.scheduling.waiting_queue import WaitingQueue, charge, charge_output, reserve
from rorqual.errors import ConfigError, RequestError
from rorqual.request import FinishReason, Request

COUNTED_STEPS = 8
INITIAL_OUTPUT_LEN = 256.0  # output tokens assumed before any request has finished
OUTPUT_LEN_WEIGHT = 0.05  # weight of the newest request in the running mean


@dataclass(frozen=True)
class SchedulerConfig:
    """max_num_seqs requests run at once; a step computes at most max_num_batched_tokens, of one
    prompt at most chunked_prefill_size; pages hold page_size tokens. At most num_speculative_tokens
    drafts are verified for each request in a step. lookahead: see PrefixCache. send_tokens: new
    rows carry all their tokens (the ngram drafter reads them). pipeline_turns: decoding requests
    take turns over this many steps, so that pipeline stages work on different ones. host_pages: the
    prefix cache's capacity in host memory; a step copies at most host_step_pages each way."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size: int
    prefix_caching: bool = True
    chunked_prefill_size: int | None = None
    max_waiting: int = 100_000
    num_speculative_tokens: int = 0
    lookahead: int = 0
    send_tokens: bool = False
    pipeline_turns: int = 1
    host_pages: int = 0
    host_step_pages: int = 1

    def __post_init__(self) -> None:
        if self.chunked_prefill_size is not None and self.chunked_prefill_size < 1:
            raise ConfigError(
                f"chunked_prefill_size={self.chunked_prefill_size} must be at least 1"
            )
        least = self.max_num_seqs * (self.num_speculative_tokens + 1)
        if not 1 <= least <= self.max_num_batched_tokens:
            drafts = (
                f" times num_speculative_tokens + 1 = {self.num_speculative_tokens + 1}"
                if self.num_speculative_tokens
                else ""
            )
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}{drafts}: "
                "every running request gets its tokens in every step"
            )


class Blocked(NamedTuple):
    """The queue's head that found too few pages, and the state then: pages available, requests
    running, how many of its pages were cached, and the key of its next page (None: there is none).

    It cannot succeed until more pages are available, fewer requests run, or the next page is
    cached; trying earlier would only hash its prompt again."""

    head: Sequence
    available: int
    running: int
    matched: int
    wanted: bytes | None


def _age(sequence: Sequence) -> tuple[int, int]:
    """The larger, the sooner it is preempted."""
    return sequence.request.priority, sequence.order


class CachedPrefix(NamedTuple):
    """A request's cached pages, how many entries they hold, and the key of the last full one.
    decodes: it starts as a decoding request."""

    pages: list[int]
    key: bytes
    entries: int
    decodes: bool


class Scheduler:
    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.allocator = PageAllocator(config.num_pages)
        self.prefix = PrefixCache(
            self.allocator, config.page_size, config.prefix_caching, config.lookahead
        )
        if config.host_pages:
            self.prefix.host = HostTier(config.host_pages, config.host_step_pages)
        self.loads = HostLoads(self.prefix)
        # of the next step; a controller may lower it
        self.num_speculative_tokens = config.num_speculative_tokens
        self.prompt_budget = config.max_num_batched_tokens  # for prompts; likewise
        self.drafted = [0] * config.num_speculative_tokens
        self.accepted = [0] * config.num_speculative_tokens
        self.waiting = WaitingQueue()
        self.rows: dict[str, int] = {}  # running requests of each client
        self.mean_output_len = INITIAL_OUTPUT_LEN  # mean output tokens of a request
        self.prefilling: dict[str, Sequence] = {}
        self.decoding: dict[str, Sequence] = {}
        self.sequences: dict[str, Sequence] = {}
        # Known tokens of all requests, running or waiting: the load by which new requests are
        # assigned to ranks. Kept as a running count.
        self.live_tokens = 0
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0
        self.in_flight: deque[InFlight] = deque()  # kept where requests take turns
        self._filled: set[int] = set()  # pages that this step fills and others may already share
        self._blocked: Blocked | None = None
        self._order = 0
        self._seeds = random.SystemRandom()

    # ---- requests in and out

    def add(self, request: Request) -> FinishReason | None:
        """Queue a request; raises RequestError when it can never be served. Returns a finish
        reason, without queueing, where its given output already reaches its limit."""
        max_total_len = self._target(request)
        if request.id in self.sequences:
            raise RequestError(f"request id {request.id!r} is already in use")
        if len(request.tokens) == max_total_len:
            return FinishReason.LENGTH
        if len(self.waiting) >= self.config.max_waiting:
            raise RequestError(f"the queue is full ({self.config.max_waiting} requests wait)")
        seed = (
            request.params.seed if request.params.seed is not None else self._seeds.getrandbits(63)
        )
        self._order += 1
        sequence = Sequence(request, max_total_len, seed, self._order)
        self.sequences[request.id] = sequence
        self.live_tokens += sequence.known
        self.waiting.append(sequence)
        return None

    def _target(self, request: Request) -> int:
        length = len(request.prompt)
        most = self.config.max_model_len
        if not length:
            raise RequestError("the prompt is empty")
        if length >= most:
            raise RequestError(
                f"the prompt has {length} tokens; with max_model_len={most} at most {most - 1} fit"
            )
        wanted = request.params.max_tokens
        if wanted is None:  # as many as fit; the last token needs no cache entry
            max_total_len = max(
                length + 1, min(most, self.allocator.capacity * self.config.page_size + 1)
            )
        else:
            max_total_len = min(most, length + wanted)
        if length + len(request.outputs) > max_total_len:
            raise RequestError(
                f"{len(request.outputs)} tokens of the answer were given; with this prompt it has "
                f"at most {max_total_len - length}"
            )
        pages = self._pages_for(max_total_len - 1)
        if pages > self.allocator.capacity:
            have = self.allocator.capacity
            raise RequestError(
                f"{max_total_len} tokens need {pages} cache pages, there are {have}; lower "
                "max_tokens or shorten the prompt"
            )
        return max_total_len

    def abort(self, request_id: str) -> Sequence | None:
        """Drop a request at any point; its pages and slot are free before the next step."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self.finish(sequence, FinishReason.ABORT)
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.finish is not None:
            return
        sequence.finish = reason
        del self.sequences[sequence.request.id]
        self.live_tokens -= sequence.known
        num_outputs = len(sequence.tokens) - sequence.prompt_len
        if num_outputs:
            self.mean_output_len += (num_outputs - self.mean_output_len) * OUTPUT_LEN_WEIGHT
        if sequence in self.loads:
            self.loads.drop(sequence)
        elif sequence.slot < 0:
            self.waiting.remove(sequence)
        elif reason is not FinishReason.ABORT and sequence.request.goes_on_elsewhere:
            self._cache_tail(sequence)
        self._release(sequence)

    def _cache_tail(self, sequence: Sequence) -> None:
        """Cache the partial last page of what is transferred, for the engine that decodes."""
        known = sequence.prompt_len + sequence.request.hands_over
        tokens = sequence.tokens[:known]
        prefix = self.prefix
        full = prefix.full_pages(len(tokens))
        if sequence.num_hashed_pages == full and sequence.collected >= len(tokens) - 1:
            key = prefix.tail(tokens, sequence.key)
            if key is not None:
                prefix.insert_tail(key, sequence.pages[full])

    def _release(self, sequence: Sequence) -> None:
        """Release slot and pages. Steps in flight may still write there; they run before any step
        that reuses the pages."""
        self.prefilling.pop(sequence.request.id, None)
        self.decoding.pop(sequence.request.id, None)
        if sequence.slot >= 0:
            self.free_slots.append(sequence.slot)
            sequence.slot = -1
            self._count_row(sequence, -1)
            self.waiting.refund(sequence)
        self.prefix.release(sequence.pages)
        sequence.pages = []
        sequence.capacity = 0
        sequence.num_computed_tokens = 0
        sequence.collected = 0
        sequence.num_hashed_pages = 0
        sequence.next_hash = 0
        sequence.host_asked = False

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def usage(self) -> Usage:
        pages = self.allocator.capacity
        prefix = self.prefix
        used = pages - prefix.available
        counts = [prefix.queries, prefix.hits, self.num_preemptions]
        if (host := prefix.host) is not None:
            counts += [host.capacity, len(host.slots), host.queries, host.hits]
            counts += [host.pages_out, host.pages_in]
        waiting = len(self.waiting) + len(self.loads)
        return Usage(self.num_running, waiting, pages, used, len(prefix.idle), *counts)

    # ---- scheduling

    def next_load(self) -> PendingLoad:
        """Work that could be computed now; prompts are counted up to a few steps' worth."""
        most = COUNTED_STEPS * self.config.max_num_batched_tokens
        tokens = sum(len(s.tokens) - s.num_computed_tokens for s in self.prefilling.values())
        prompts = len(self.prefilling)
        for sequence in islice(self.waiting, len(self.free_slots)) if self.waiting else ():
            if tokens >= most:
                break
            tokens += len(sequence.tokens)
            prompts += 1
        return PendingLoad(len(self.decoding), prompts, min(tokens, most))

    def schedule(self) -> InFlight | None:
        """The next step, or None when nothing can be launched until a step in flight is
        collected."""
        self.loads.begin()
        self._filled.clear()
        if self.waiting:
            self._make_room(self.waiting.head)
        output = SchedulerOutput(num_speculative_tokens=self.num_speculative_tokens)
        sampled = self._schedule_decode(output)
        computed: list[ComputedChunk] = []
        self._queue_again(self.loads.advance(self.num_running > 0))
        most = self.config.max_num_batched_tokens - output.num_tokens
        budget = min(most, self.prompt_budget)
        for sequence in list(self.prefilling.values()):
            if budget > 0:
                budget -= self._schedule_chunk(output, sequence, budget, sampled, computed)
        while budget > 0 and self.waiting and len(self.free_slots) > len(self.loads):
            head = self.waiting.head
            admitted = self._admit(output, budget)
            if admitted is None:
                if head not in self.loads:
                    break
            elif admitted.request.id in self.decoding:
                budget -= self._schedule_first_token(output, admitted, sampled)
            else:
                budget -= self._schedule_chunk(output, admitted, budget, sampled, computed)
        if not self._schedule_copies(output):
            return None
        step = InFlight(output, sampled, computed)
        chunks = zip(computed, output.chunks, strict=True)
        step.scored = [done.sequence for done, chunk in chunks if chunk.num_scored]
        if self.config.pipeline_turns > 1:
            self.in_flight.append(step)
        return step

    def _share_filled(self, sequence: Sequence) -> None:
        """Let other requests find the pages that this step fills, in the same step even: in every
        layer all of a step's entries are written before any of its requests attends, and steps run
        in the order they were scheduled. Copies to host memory and to peers do not wait for steps,
        so with them pages are kept once they are collected."""
        if self.prefix.host is not None or self.prefix.read_by_peers:
            return
        before = sequence.num_hashed_pages
        self._cache_full_pages(sequence, sequence.num_computed_tokens)
        self._filled.update(sequence.pages[before : sequence.num_hashed_pages])

    def _queue_again(self, found: list[Sequence]) -> None:
        """Put requests whose host pages have been loaded back at the head of the queue."""
        for sequence in reversed(found):
            self.waiting.append_left(sequence)

    def _schedule_copies(self, output: SchedulerOutput) -> bool:
        """Whether there is a step."""
        host = self.prefix.host
        computes = bool(output.decode_slots or output.chunks)
        if host is not None:
            # copies ahead of their need do not delay a request whose pages come
            if computes and not host.by_layer:
                self.prefix.copy_ahead(self._pages_for(sum(len(c.tokens) for c in output.chunks)))
            output.copies = host.copies
            output.copies_first = host.first
            output.copies_by_layer = host.by_layer
            output.copies_running = (host.coming.allowed, host.going.allowed)
            output.copies_settled = host.at_once = self.prefix.read_by_peers
        launched = computes or bool(output.copies)
        self.loads.end(launched)
        return launched

    def _schedule_decode(self, output: SchedulerOutput) -> list[Sequence]:
        """One token, and drafts, for every decoding request below its target length. This loop
        dominates the host's time a step."""
        needy: list[Sequence] = []
        sampled: list[Sequence] = []
        num_speculative_tokens = output.num_speculative_tokens
        for sequence in self._decode_turn():
            length = sequence.num_computed_tokens + 1
            if length >= sequence.max_total_len:
                continue  # its last token is in flight
            if sequence.pending and sequence.request.params.structured:
                continue  # its grammar needs the last token first
            if self._writable_len(sequence, num_speculative_tokens) > sequence.capacity:
                needy.append(sequence)
            sampled.append(sequence)
        if needy:
            self._extend(output, needy, num_speculative_tokens)
            sampled = [sequence for sequence in sampled if sequence.slot >= 0]
        for sequence in sampled:
            self._decode(output, sequence)
        self.live_tokens += len(sampled)
        return sampled

    def _decode(self, output: SchedulerOutput, sequence: Sequence) -> None:
        drafts = output.num_speculative_tokens
        sequence.num_computed_tokens = length = sequence.num_computed_tokens + 1
        sequence.pending += 1
        output.decode_slots.append(sequence.slot)
        output.decode_bounds.append(length + sequence.max_extra_tokens + drafts)
        sequence.max_extra_tokens += drafts

    def _schedule_first_token(
        self, output: SchedulerOutput, sequence: Sequence, sampled: list[Sequence]
    ) -> int:
        """For a request that starts as a decoding one. It has no drafts yet: its row says so, and
        the tokens in the drafts' places are ignored."""
        sampled.insert(len(output.decode_slots), sequence)
        self._decode(output, sequence)
        self.live_tokens += 1
        charge(sequence, 1)
        return output.num_speculative_tokens + 1

    def _decode_turn(self) -> Iterable[Sequence]:
        """The decoding requests of this step. With pipeline_turns: an equal share, those that have
        waited longest, and none whose last token is sampled by a step still in flight, for which
        the first pipeline stage would have to wait."""
        turns = self.config.pipeline_turns
        if turns == 1:
            return self.decoding.values()
        busy = {
            id(sequence) for step in list(self.in_flight)[1 - turns :] for sequence in step.sampled
        }
        free = (sequence for sequence in self.decoding.values() if id(sequence) not in busy)
        chosen = list(islice(free, -(-len(self.decoding) // turns)))
        for sequence in chosen:
            self.decoding[sequence.request.id] = self.decoding.pop(sequence.request.id)
        return chosen

    def _writable_len(self, sequence: Sequence, num_speculative_tokens: int) -> int:
        """Cache entries that the next step may write and a later one may read: its tokens, its
        drafts, and the new drafts. Entries at or past the target length are never read, and go to
        the null page."""
        return min(
            sequence.num_computed_tokens
            + 1
            + sequence.max_extra_tokens
            + 2 * num_speculative_tokens,
            sequence.max_total_len - 1,
        )

    def _extend(
        self, output: SchedulerOutput, needy: Iterable[Sequence], num_speculative_tokens: int
    ) -> None:
        before = self.num_preemptions
        for sequence in needy:
            while (
                sequence.slot >= 0
                and self._writable_len(sequence, num_speculative_tokens) > sequence.capacity
            ):
                if self.prefix.available:
                    place = len(sequence.pages)
                    (page,) = self._grow(sequence)
                    output.pages.append((sequence.slot, place, page))
                elif self.loads:
                    self._queue_again(self.loads.drop_all())
                else:
                    self._preempt(self._youngest())
        if self.num_preemptions > before:
            vacant = frozenset(self.free_slots)
            output.pages[:] = [entry for entry in output.pages if entry[0] not in vacant]

    def _grow(self, sequence: Sequence, count: int = 1) -> list[int]:
        pages = self.prefix.take_many(count)
        if self.prefix.host is not None:
            for page in pages:
                self.prefix.host.given(page)
        sequence.pages += pages
        sequence.capacity += count * self.config.page_size
        return pages

    def _running(self) -> list[Sequence]:
        return [*self.decoding.values(), *self.prefilling.values()]

    def _youngest(self) -> Sequence:
        """The youngest running request of the lowest priority."""
        return max(self._running(), key=_age)

    def _preempt(self, victim: Sequence) -> None:
        """A running request gives up its pages; its output so far is later recomputed with its
        prompt."""
        self._release(victim)
        victim.preemptions += 1
        self.num_preemptions += 1
        self.waiting.append_left(victim)

    def _make_room(self, head: Sequence) -> None:
        """Preempt a request for the head of the queue where that cannot start: one a step, until it
        can. Runs before decoding is scheduled, which would include the victim."""
        if head.pending or (self.free_slots and not self._still_blocked(head)):
            return
        victim = self.victim(head)
        if victim is not None:
            self._preempt(victim)

    def victim(self, head: Sequence) -> Sequence | None:
        """The request to preempt for `head`: the youngest of a lower priority; else, if the client
        with the most rows has more than twice as many as head's client would have, its request with
        the fewest tokens to recompute. Twice, so that rows do not move back and forth; and only one
        that would wait behind `head`, since its client gets back what was charged in advance."""
        if len(self.waiting.levels) == 1 and self.rows.keys() == {head.request.client}:
            return None  # the usual case: a single client
        running = self._running()
        if len(running) < 2:
            return None
        oldest = min(running, key=lambda sequence: sequence.order)
        priority = head.request.priority
        later = [found for found in running if found.request.priority > priority]
        if later:
            others = (found for found in later if found is not oldest)
            return max(others, key=_age, default=None)
        client = max(self.rows, key=lambda name: self.rows[name])
        if self.rows[client] <= 2 * (self.rows.get(head.request.client, 0) + 1):
            return None
        others = (
            found
            for found in running
            if found.request.client == client
            and found.request.priority == priority
            and found is not oldest
            and self.waiting.served_without_row(found) >= head.client_account.served
        )
        return min(others, key=lambda found: len(found.tokens), default=None)

    def _count_row(self, sequence: Sequence, change: int) -> None:
        client = sequence.request.client
        self.rows[client] = self.rows.get(client, 0) + change
        if not self.rows[client]:
            del self.rows[client]

    def _admit(self, output: SchedulerOutput, budget: int) -> Sequence | None:
        """Start the next waiting request if all its tokens are known and there are pages for them,
        plus a spare page for each running request so that it is not preempted at the next page
        boundary. It decodes at once where all but its last token is cached and the budget holds
        that token and as many drafts as the other requests have."""
        sequence = self.waiting.head
        if sequence.pending or self._still_blocked(sequence):
            return None
        reusable = sequence.reusable
        known_keys = sequence.page_keys
        pages, key = self.prefix.match(reusable, sequence.request.cache_salt, known_keys)
        tail = self._tail(sequence, len(pages), key)
        known = len(sequence.tokens)
        drafts = self.config.num_speculative_tokens
        # a step's micro-batches begin with its decoding requests, which would read too early
        filled = not self._filled.isdisjoint(pages)
        slow = self.prefix.host is not None and self.prefix.host.many
        decodes = drafts < budget and not (filled or slow)
        decodes = decodes and self._decodes_at_once(sequence, len(pages), tail)
        # The step that ends the prompt makes the first drafts, which write entries after it.
        written = known + (2 * drafts if decodes else drafts)
        need = self._pages_for(max(known, min(written, sequence.max_total_len - 1))) - len(pages)
        spare = min(self.num_running, self.allocator.capacity - need - len(pages))
        if need + spare > self.prefix.available:  # where nothing runs, other engines hold pages
            self.prefix.release(pages)
            keys = self.prefix.keys_of(reusable, sequence.request.cache_salt, known_keys)
            wanted = keys[len(pages)] if len(pages) < len(keys) else None
            now = (self.prefix.available, self.num_running)
            self._blocked = Blocked(sequence, *now, len(pages), wanted)
            return None
        others = self.num_running > 0 or len(self.loads) > 0
        if self.loads.start(sequence, pages, key, others):
            if sequence not in self.loads:
                return self._admit(output, budget)
            self.waiting.pop_head()
            return None
        self.waiting.pop_head()
        cached = len(pages) * self.config.page_size
        if decodes:
            cached = known - 1
            taken = self.prefix.take_tail(tail)
            if taken is not None:
                pages.append(taken)
                need -= 1
        self._start(output, sequence, CachedPrefix(pages, key, cached, decodes), need)
        return sequence

    def _tail(self, sequence: Sequence, pages: int, key: bytes) -> bytes | None:
        """The key of the partial page after the full ones, if it is cached."""
        tokens = sequence.tokens
        if pages < self.prefix.full_pages(len(tokens)):
            return None
        found = self.prefix.tail(tokens, key)
        return found if self.prefix.is_free_tail(found) else None

    def _decodes_at_once(self, sequence: Sequence, pages: int, tail: bytes | None) -> bool:
        """Not where prediction modules look further ahead than one token, or the prompt is scored:
        both need more than the last token's row."""
        if self.config.lookahead > 1 or sequence.num_scored < sequence.score_end:
            return False
        whole = pages * self.config.page_size == len(sequence.tokens) - 1
        return tail is not None or (whole and pages > 0)

    def _still_blocked(self, sequence: Sequence) -> bool:
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.head is sequence
            and self.prefix.available <= blocked.available
            and self.num_running >= blocked.running
            and (blocked.wanted is None or blocked.wanted not in self.prefix.pages)
        )

    def _start(
        self, output: SchedulerOutput, sequence: Sequence, found: CachedPrefix, need: int
    ) -> None:
        """need: pages beyond the cached ones."""
        size = self.config.page_size
        if self.prefix.host is not None:
            self.prefix.host.read(found.pages)
        self._blocked = None
        self.prefix.queries += len(sequence.reusable)
        self.prefix.hits += found.entries
        sequence.pages = found.pages
        sequence.key = found.key
        sequence.num_hashed_pages = full = found.entries // size
        sequence.next_hash = (full + 1) * size
        sequence.capacity = len(found.pages) * size
        sequence.num_computed_tokens = sequence.collected = found.entries
        if sequence.num_cached_prompt is None:
            sequence.num_cached_prompt = min(sequence.num_computed_tokens, sequence.prompt_len)
        self._grow(sequence, need)
        sequence.slot = self.free_slots.pop()
        self._count_row(sequence, 1)
        reserve(
            sequence, min(int(self.mean_output_len), sequence.max_total_len - len(sequence.tokens))
        )
        running = self.decoding if found.decodes else self.prefilling
        running[sequence.request.id] = sequence
        params = sequence.request.params
        wanted = params.edits_logits or params.structured or self.config.send_tokens
        tokens = sequence.tokens[:] if wanted else array("q")
        output.new_requests.append(
            NewRequest(
                sequence.slot,
                params,
                sequence.seed,
                tuple(sequence.pages),
                sequence.prompt_len,
                tokens,
                sequence.stop_ids,
                sequence.tokens[-1] if found.decodes else 0,
                found.entries if found.decodes else 0,
            )
        )

    def _schedule_chunk(
        self,
        output: SchedulerOutput,
        sequence: Sequence,
        budget: int,
        sampled: list[Sequence],
        computed: list[ComputedChunk],
    ) -> int:
        start = sequence.num_computed_tokens
        known = len(sequence.tokens)
        ahead = self.config.lookahead
        stop = min(known, start + min(budget, self.config.chunked_prefill_size or budget))
        if 0 < known - stop < ahead:
            # The last module would need a token not yet sampled: leave more for the next chunk.
            stop = max(start + 1, known - ahead)
        last = stop == known
        following = () if last else tuple(sequence.tokens[stop : stop + max(1, ahead)])
        scores = (0, 0)
        if sequence.num_scored < (score_stop := min(stop, sequence.score_end)):
            scores = (sequence.num_scored, score_stop)
            sequence.num_scored = score_stop
        tokens = sequence.tokens[start:stop]
        output.chunks.append(PrefillChunk(sequence.slot, start, tokens, last, following, *scores))
        sequence.num_computed_tokens = stop
        self._share_filled(sequence)
        charge(sequence, stop - start)
        computed.append(ComputedChunk(sequence, stop, sequence.preemptions))
        if last:
            del self.prefilling[sequence.request.id]
            self.decoding[sequence.request.id] = sequence
            sequence.pending += 1
            self.live_tokens += 1
            sampled.append(sequence)
        return stop - start

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    # ---- results

    def update(self, step: InFlight, result: StepResult) -> list[TokenOut]:
        """Process a step's result; returns the new tokens of requests still running. Called in the
        order the steps were scheduled."""
        if self.in_flight:
            self.in_flight.popleft()
        step.before = [-1 if s.finish is not None else len(s.tokens) for s in step.sampled]
        for done in step.computed:
            if done.current:
                sequence = done.sequence
                sequence.collected = max(
                    sequence.collected, min(done.stop, sequence.num_computed_tokens)
                )
                if sequence.collected >= sequence.next_hash:
                    self._cache_full_pages(sequence, sequence.collected)
        step.scored_before = [len(sequence.prompt_logprobs) for sequence in step.scored]
        for sequence, found in zip(step.scored, result.prompt_logprobs, strict=True):
            sequence.prompt_logprobs += found
        outs = []
        for row, (sequence, tokens) in enumerate(zip(step.sampled, result.tokens, strict=True)):
            sequence.pending -= 1
            charge_output(sequence, len(tokens))
            if sequence.finish is None:
                self.live_tokens -= 1
            if result.drafted:
                self._count_drafts(step, sequence, row, result.drafted[row], len(tokens) - 1)
            logprobs = result.logprobs.get(row)
            for index, token in enumerate(tokens):
                if sequence.finish is None:
                    outs.append(
                        self._append(sequence, token, logprobs[index] if logprobs else None)
                    )
        return outs

    def undo(self, step: InFlight) -> None:
        """Before `restart`: take back the step's new tokens, which never reached the caller, and
        the finishes they caused. A step that was not processed has none."""
        for sequence, length in zip(step.sampled, step.before, strict=False):
            if length >= 0:
                del sequence.tokens[length:]
                sequence.finish = sequence.stop_token = None
                self.sequences[sequence.request.id] = sequence
        for sequence, length in zip(step.scored, step.scored_before, strict=False):
            del sequence.prompt_logprobs[length:]

    def restart(self) -> None:
        """After an error at any point: keep only the tokens returned so far. No page is held or
        cached, no slot is taken, no step is in flight; requests wait in order of arrival. A step
        launched before may still write to its pages, but it runs before later steps, which set up
        every row and compute every entry again."""
        config = self.config
        counts = self.prefix
        policy = (config.page_size, config.prefix_caching, config.lookahead)
        live = [sequence for sequence in self.sequences.values() if sequence.finish is None]
        live.sort(key=lambda sequence: sequence.order)
        for sequence in live:
            sequence.restart()
        self.allocator = PageAllocator(config.num_pages)
        self.prefix = PrefixCache(self.allocator, *policy)
        self.prefix.queries = counts.queries
        self.prefix.hits = counts.hits
        self.prefix.events = counts.events
        self.prefix.read_by_peers = counts.read_by_peers
        if counts.host is not None:
            self.prefix.host = counts.host.emptied()
        self.loads = HostLoads(self.prefix)
        if counts.events is not None:
            counts.events.cleared()
        self.sequences = {sequence.request.id: sequence for sequence in live}
        self.waiting = WaitingQueue()
        for sequence in live:
            self.waiting.append(sequence)
        self.rows = {}
        self.live_tokens = sum(sequence.known for sequence in live)
        self.prefilling = {}
        self.decoding = {}
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.in_flight.clear()
        self._blocked = None

    def _count_drafts(
        self, step: InFlight, sequence: Sequence, row: int, drafted: int, accepted: int
    ) -> None:
        """Update a request's lengths and draft counts from a step's result."""
        if row < len(step.output.decode_slots):
            sequence.max_extra_tokens -= step.output.num_speculative_tokens
        if sequence.slot >= 0:
            sequence.num_computed_tokens += accepted
        if drafted > len(sequence.drafted):
            more = [0] * (drafted - len(sequence.drafted))
            sequence.drafted = sequence.drafted + more
            sequence.accepted = sequence.accepted + more
        for place in range(drafted):
            right = place < accepted
            sequence.drafted[place] += 1
            sequence.accepted[place] += right
            self.drafted[place] += 1
            self.accepted[place] += right

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> TokenOut:
        sequence.tokens.append(token)
        self.live_tokens += 1
        length = len(sequence.tokens)
        if sequence.slot >= 0:
            # All tokens but the newest have cache entries.
            sequence.collected = length - 1
            if length > sequence.next_hash:
                self._cache_full_pages(sequence, sequence.collected)
        reason = None
        if token in sequence.stop_ids and length > sequence.min_len:
            reason = FinishReason.STOP
            sequence.stop_token = token
        elif length >= sequence.max_total_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish(sequence, reason)
        return TokenOut(sequence, token, logprobs, reason)

    def _cache_full_pages(self, sequence: Sequence, written: int) -> None:
        """Add full pages among the first `written` entries, whose tokens are known, to the prefix
        cache."""
        size = self.config.page_size
        full = min(written, len(sequence.tokens) - self.config.lookahead) // size
        if full <= sequence.num_hashed_pages:
            return
        new = range(sequence.num_hashed_pages, full) if self.prefix.enabled else ()
        keys = sequence.page_keys
        for i in new:
            key = keys[i] if i < len(keys) else None
            sequence.key = self.prefix.insert(
                sequence.key, self.prefix.covered(sequence.tokens, i), sequence.pages[i], key
            )
        sequence.num_hashed_pages = full
        sequence.next_hash = (full + 1) * size
