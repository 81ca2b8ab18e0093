"""Pages of a prefix cache in host memory: which keys are there, and what is copied. No torch.

Eviction is LRU. The tier only decides, while a step is being scheduled: it records copies in the
order in which every rank must do them, and the scheduler output carries them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from rorqual.cache.events import CacheEvents


class PageCopy(NamedTuple):
    """A copy between a device page and a slot of host memory."""

    page: int
    slot: int
    to_host: bool


def _later(steps: dict[int, int], done: int) -> dict[int, int]:
    return {page: step for page, step in steps.items() if step > done}


class HostTier:
    """capacity: pages that host memory holds. step_pages: most that one step copies each way;
    outwards, plus as many as its prompts fill.

    Copies are done in order, those of a step after all earlier steps. The step itself runs
    concurrently with them, unless `first`: then one of its requests was given a page that is being
    copied out. Later steps do so too, up to one that writes to a page that is being copied, or
    reads one that is being copied in: it waits for the copies of that step and of those before.
    at_once: every later step waits."""

    def __init__(self, capacity: int, step_pages: int):
        self.capacity = capacity
        self.step_pages = step_pages
        self.slots: OrderedDict[bytes, int] = OrderedDict()  # oldest first
        self.unused = 0  # slots from this one on were never filled
        self.planning = False
        self.copies: list[PageCopy] = []
        self.copying_out: set[int] = set()  # pages being copied out
        self.first = False
        self.at_once = False
        self.batches = 0  # steps with copies
        # pages of copies that no step has waited for, with the last such step that copies each,
        # and those copied in
        self.running: dict[int, int] = {}
        self.coming: dict[int, int] = {}
        # Up to which of them the step waits, if not None. The first waits for all: copies of steps
        # that came to nothing may still run.
        self.awaited: int | None = 0
        self.out_left = self.in_left = 0
        # tokens looked for here and found, pages copied out and in
        self.queries = self.hits = self.pages_out = self.pages_in = 0
        self.events: CacheEvents | None = None

    def begin(self) -> None:
        """Scheduling of a step starts."""
        self.planning = True
        self.copies = []
        self.copying_out = set()
        self.first = False
        self.out_left = self.in_left = self.step_pages

    def end(self, launched: bool) -> None:
        """launched: there will be a step."""
        self.planning = False
        if not launched:
            return
        self.batches += bool(self.copies)
        self.running.update((copy.page, self.batches) for copy in self.copies)
        self.coming.update((copy.page, self.batches) for copy in self.copies if not copy.to_host)
        done = self.batches if self.first or self.at_once else self.awaited
        if done is not None:
            self.running = _later(self.running, done)
            self.coming = _later(self.coming, done)
        self.awaited = None

    def allowed(self) -> int | None:
        """Of the last how many steps with copies the step does not wait for; None: of none."""
        return None if self.awaited is None else self.batches - self.awaited

    def evicted(self, key: bytes, page: int) -> None:
        """A page is evicted from the device: copy it out. It is lost while no step is being
        scheduled, since its next content may be written before the next step, or where the step's
        copies are at their limit."""
        if key in self.slots:
            self.slots.move_to_end(key)
        else:
            self.copy_out(key, page)

    def copy_out(self, key: bytes, page: int) -> bool:
        """Copy a page out, unless the step's copies are at their limit; returns whether it is
        copied."""
        if not self.planning or not self.out_left:
            return False
        self.out_left -= 1
        slot = self._slot()
        self.slots[key] = slot
        self.copies.append(PageCopy(page, slot, True))
        self.copying_out.add(page)
        self.pages_out += 1
        if self.events is not None:
            self.events.host_stored(key)
        return True

    def _slot(self) -> int:
        if self.unused < self.capacity:
            self.unused += 1
            return self.unused - 1
        key, slot = self.slots.popitem(last=False)
        if self.events is not None:
            self.events.host_removed(key)
        return slot

    def copy_in(self, key: bytes, page: int) -> None:
        """Copy a page in; host memory keeps it too."""
        assert self.planning, "copies belong to a step"
        assert self.in_left, "a step copies only so much"
        self.in_left -= 1
        self.slots.move_to_end(key)
        self.copies.append(PageCopy(page, self.slots[key], False))
        self.pages_in += 1

    def given(self, page: int) -> None:
        """A request of the step being scheduled will write to the page."""
        if page in self.copying_out:
            self.first = True
        self._await(self.running.get(page))

    def read(self, pages: Iterable[int]) -> None:
        """A request of the step being scheduled will read these pages."""
        if self.coming:
            for page in pages:
                self._await(self.coming.get(page))

    def _await(self, step: int | None) -> None:
        if step is not None:
            self.awaited = max(self.awaited or 0, step)

    def clear(self) -> None:
        if self.events is not None:
            for key in self.slots:
                self.events.host_removed(key)
        self.slots.clear()
        self.unused = 0

    def emptied(self) -> HostTier:
        """An empty tier with the same counts."""
        tier = HostTier(self.capacity, self.step_pages)
        tier.queries, tier.hits = self.queries, self.hits
        tier.pages_out, tier.pages_in = self.pages_out, self.pages_in
        tier.at_once = self.at_once
        tier.events = self.events
        return tier
