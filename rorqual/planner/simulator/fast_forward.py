"""Many decode steps in one call, for the time between two events of a simulation. No torch.

While the same requests decode and none joins, ends or is preempted, steps differ only by their new
tokens. `advance` changes the scheduler, its pages and its prefix cache as the same number of
schedule and update calls would.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as ReadOnly
from itertools import accumulate

from rorqual.engine.scheduling.scheduler import Scheduler
from rorqual.engine.scheduling.sequence import Sequence
from rorqual.engine.scheduling.waiting_queue import charge_output


def decode_run(scheduler: Scheduler) -> int:
    """How many of the next steps are certain to be alike, none of them a request's last. Drafts are
    assumed to be all accepted. 0 if the next step may differ: prompts, an admission, too few pages,
    steps in flight, or a request whose end depends on its tokens."""
    sequences = scheduler.decoding.values()
    if not sequences or scheduler.prefilling or _may_admit(scheduler):
        return 0
    left = 1 << 60
    for sequence in sequences:
        if sequence.pending or sequence.stop_ids or sequence.request.params.structured:
            return 0
        left = min(left, sequence.max_total_len - len(sequence.tokens))
    steps = (left - 1) // (scheduler.num_speculative_tokens + 1)
    while steps and _most_pages(scheduler, steps) > scheduler.prefix.available:
        steps //= 2
    return steps


def _may_admit(scheduler: Scheduler) -> bool:
    if not scheduler.waiting:
        return False
    if scheduler.victim(scheduler.waiting.head) is not None:
        return True
    if not scheduler.free_slots:
        return False
    room = scheduler.config.max_num_batched_tokens - len(scheduler.decoding) * (
        scheduler.num_speculative_tokens + 1
    )
    head = scheduler.waiting.head
    if room <= 0 or head.pending:
        return False
    return not scheduler._still_blocked(head) or _may_unblock(scheduler, head)


def _may_unblock(scheduler: Scheduler, head: Sequence) -> bool:
    """Whether a decoding request, by its tokens so far, may end up with the very page that the
    queue's head waits to find in the prefix cache."""
    blocked = scheduler._blocked
    config = scheduler.config
    if blocked is None or blocked.wanted is None:
        return False
    length = (blocked.matched + 1) * config.page_size + config.lookahead  # what its key covers
    salt = head.request.cache_salt
    for row in scheduler.decoding.values():
        if row.num_hashed_pages > blocked.matched or row.request.cache_salt != salt:
            continue
        common = min(length, len(row.tokens))
        if row.tokens[0] == head.tokens[0] and row.tokens[:common] == head.tokens[:common]:
            return True
    return False


def _most_pages(scheduler: Scheduler, steps: int) -> int:
    """Most pages that this number of steps allocates."""
    num_speculative_tokens = scheduler.num_speculative_tokens
    size = scheduler.config.page_size
    more = (steps - 1) * (num_speculative_tokens + 1) + 2 * num_speculative_tokens
    reaches = (
        min(len(sequence.tokens) + more, sequence.max_total_len - 1) - sequence.capacity
        for sequence in scheduler.decoding.values()
    )
    return sum(-(-reach // size) for reach in reaches if reach > 0)


def advance(
    scheduler: Scheduler,
    count: int,
    tokens: ReadOnly[list[int]],
    accepted: ReadOnly[ReadOnly[int]] = (),
) -> None:
    """Take `count` steps, at most decode_run(). tokens: of each decoding request, in the
    scheduler's order, all its new ones; accepted: of each of them the drafts found right in each
    step, where num_speculative_tokens drafts were up for verification in every step."""
    events: list[tuple[int, int, int, int]] = []
    sequences = list(scheduler.decoding.values())
    for row, (sequence, new) in enumerate(zip(sequences, tokens, strict=True)):
        start = len(sequence.tokens)
        right = accepted[row] if scheduler.num_speculative_tokens else None
        lengths = (
            range(start, start + count + 1)
            if right is None
            else list(accumulate((n + 1 for n in right), initial=start))
        )
        assert (len(lengths), lengths[-1]) == (count + 1, start + len(new)), (
            "tokens, accepted drafts and steps do not agree"
        )
        assert lengths[-1] < sequence.max_total_len, "a step that decode_run did not promise"
        assert not sequence.pending, "steps are in flight"
        events += _events(scheduler, sequence, row, lengths)
        sequence.tokens.extend(new)
        scheduler.live_tokens += len(new)
        charge_output(sequence, len(new))
        sequence.num_computed_tokens = sequence.collected = lengths[-1] - 1
        if right is not None:
            _count_drafts(scheduler, sequence, right)
    # by step; within one, pages are taken in planning and offered when its results are in
    events.sort()
    for _, offered, row, page in events:
        sequence = sequences[row]
        if offered:
            covered = scheduler.prefix.covered(sequence.tokens, page)
            sequence.key = scheduler.prefix.insert(sequence.key, covered, sequence.pages[page])
            sequence.num_hashed_pages = page + 1
            sequence.next_hash = (page + 2) * scheduler.config.page_size
        else:
            scheduler._grow(sequence)


def _events(
    scheduler: Scheduler, sequence: Sequence, row: int, lengths: ReadOnly[int]
) -> list[tuple[int, int, int, int]]:
    """(step, 0, row, page) where a page is taken, (step, 1, row, page) where one is offered;
    lengths[s] tokens are known after step s."""
    size = scheduler.config.page_size
    ahead = 2 * scheduler.num_speculative_tokens
    steps = len(lengths) - 1
    found = []
    capacity = sequence.capacity
    while (
        capacity < sequence.max_total_len - 1
        and (step := bisect_right(lengths, capacity - ahead) + 1) <= steps
    ):
        found.append((step, 0, row, capacity // size))
        capacity += size
    page = sequence.num_hashed_pages
    more = max(1, scheduler.config.lookahead)
    while (step := bisect_left(lengths, (page + 1) * size + more)) <= steps:
        found.append((step, 1, row, page))
        page += 1
    return found


def _count_drafts(scheduler: Scheduler, sequence: Sequence, right: ReadOnly[int]) -> None:
    for _ in range(len(sequence.drafted), scheduler.num_speculative_tokens):
        sequence.drafted.append(0)
        sequence.accepted.append(0)
    for place in range(scheduler.num_speculative_tokens):
        taken = sum(n > place for n in right)
        sequence.drafted[place] += len(right)
        sequence.accepted[place] += taken
        scheduler.drafted[place] += len(right)
        scheduler.accepted[place] += taken
