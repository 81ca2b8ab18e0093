"""Requests whose pages are being loaded from host memory to the device. No torch.

A request at the head of the queue whose next pages are in host memory waits here, not in the queue.
All the device pages for them are allocated up front, so that it can always finish. Each step copies
some. SETTLE_STEPS after the one that copies the last one it returns to the head of the queue and
finds its pages in the prefix cache like any prefix. Where nothing else runs, many more are copied
at once, and the step that copies the last ones computes the request: each layer waits for its own
part of them. If a request is dropped midway, loaded pages are ordinary cached pages, and the others
are free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import islice, takewhile

from rorqual.cache.prefix import PrefixCache
from rorqual.engine.scheduling.sequence import Sequence

# The step that first uses loaded pages waits for their copies, and so do the requests that decode
# in it. The copies are given some more steps to finish before.
SETTLE_STEPS = 2
ALONE_STEPS = 8  # so many steps' copies at once where nothing else runs


@dataclass
class Load:
    """pages: held for the request, cached ones first; the others are for `keys`, in order, the
    first of which is the prompt's page number `next`. previous: the key before it. awaits: it
    copies nothing itself and waits for another request's load that starts with this key. rest:
    steps for which it still waits after the last copy."""

    sequence: Sequence
    pages: list[int] = field(default_factory=list)
    keys: deque[bytes] = field(default_factory=deque)
    next: int = 0
    previous: bytes = b""
    awaits: bytes | None = None
    rest: int = SETTLE_STEPS


class HostLoads:
    """coming: keys being loaded. notes: of the step being scheduled, (previous key, tokens that the
    page's key covers, page, key), to be cached once it is scheduled."""

    def __init__(self, prefix: PrefixCache):
        self.prefix = prefix
        self.loads: dict[str, Load] = {}
        self.coming: set[bytes] = set()
        self.notes: list[tuple[bytes, SequenceOf[int], int, bytes]] = []

    def __len__(self) -> int:
        return len(self.loads)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.request.id in self.loads

    def __iter__(self) -> Iterator[Sequence]:
        return (load.sequence for load in self.loads.values())

    def begin(self) -> None:
        if self.prefix.host is not None:
            self.prefix.host.begin()
        self.notes = []

    def start(self, sequence: Sequence, pages: list[int], key: bytes, others: bool) -> bool:
        """If the pages after the cached `pages` are in host memory, start to load them and return
        True: the request then waits here, or, without `others`, finds them in the cache at once,
        for this step. The caller holds `pages`, the last of which has `key`, and has checked that
        there are device pages for the whole request."""
        host = self.prefix.host
        if host is None:
            return False
        tokens = sequence.reusable
        if not sequence.host_asked:
            sequence.host_asked = True
            host.queries += len(tokens) - len(pages) * self.prefix.page_size
        salt = sequence.request.cache_salt
        keys = self.prefix.in_host(tokens, len(pages), salt, sequence.page_keys)
        if not keys:
            return False
        if keys[0] in self.coming:
            self.prefix.release(pages)
            self.loads[sequence.request.id] = Load(sequence, awaits=keys[0])
            return True
        taken = self._take(keys)
        if not taken:
            return False
        load = Load(sequence, pages + taken, deque(keys[: len(taken)]), len(pages), key)
        self.loads[sequence.request.id] = load
        self.coming.update(load.keys)
        if not others and self._copy_alone(load):
            self.drop(sequence)
        else:
            self._copy(load)
        return True

    def _take(self, keys: list[bytes]) -> list[int]:
        """Device pages for the first of `keys`: pages evicted for them are copied to host memory
        and, where that is small, may evict the last keys there."""
        host = self.prefix.host
        assert host is not None
        for key in reversed(keys):
            host.slots.move_to_end(key)
        pages = self.prefix.take_many(len(keys))
        count = sum(1 for _ in takewhile(host.slots.__contains__, keys))
        self.prefix.release(pages[count:])
        return pages[:count]

    def advance(self, others: bool) -> list[Sequence]:
        """Schedule a step's copies; returns the requests that are done waiting, in order. others:
        the step has other requests, which should not wait for copies."""
        done = [load for load in self.loads.values() if self._done(load, others)]
        alone = not others and not done
        for load in self.loads.values():
            if load.keys:
                whole = alone and self._copy_alone(load)
                alone = False
                if whole or (not self._copy(load) and not load.keys):
                    done.append(load)
        for load in done:
            self.drop(load.sequence)
        return [load.sequence for load in done]

    def _done(self, load: Load, others: bool) -> bool:
        if load.keys or load.awaits in self.coming:
            return False
        load.rest -= 1
        return not others or load.rest < 0

    def _copy_alone(self, load: Load) -> bool:
        """Copy more than a step's share. Returns whether the step may compute the request, as all
        its pages will have come by then; nothing else is copied in this step."""
        host = self.prefix.host
        assert host is not None
        host.in_left += (ALONE_STEPS - 1) * host.step_pages
        count = self._copy(load)
        if load.keys:
            return False
        host.in_left = 0
        host.by_layer = True
        host.many = count > host.step_pages
        self._note()
        return True

    def _copy(self, load: Load) -> int:
        """Returns the number of pages scheduled."""
        prefix = self.prefix
        host = prefix.host
        assert host is not None
        wanted = list(islice(load.keys, host.in_left))
        keys = list(takewhile(host.slots.__contains__, wanted))
        pages = load.pages[load.next : load.next + len(keys)]
        host.copy_in(keys, pages)
        host.hits += len(keys) * prefix.page_size
        for key, page in zip(keys, pages, strict=True):
            tokens = prefix.covered(load.sequence.tokens, load.next)
            self.notes.append((load.previous, tokens, page, key))
            load.previous = key
            load.next += 1
            load.keys.popleft()
        if len(keys) < len(wanted):  # evicted as the oldest; the rest is computed
            self._cancel(load)
        return len(keys)

    def _cancel(self, load: Load) -> None:
        self.coming.difference_update(load.keys)
        load.keys.clear()

    def drop(self, sequence: Sequence) -> None:
        """Stop loading for it. Not after copies of the step being scheduled were noted."""
        load = self.loads.pop(sequence.request.id)
        self._cancel(load)
        self.prefix.release(load.pages)

    def drop_all(self) -> list[Sequence]:
        """Stop all loading, as running requests need the pages; returns the requests, in order."""
        found = list(self)
        for sequence in found:
            self.drop(sequence)
        return found

    def end(self, launched: bool) -> None:
        """The step is scheduled, if there is one: later steps may read its loaded pages."""
        self._note()
        if self.prefix.host is not None:
            self.prefix.host.end(launched)

    def _note(self) -> None:
        for note in self.notes:
            self.coming.discard(self.prefix.insert(*note))
        self.notes = []
