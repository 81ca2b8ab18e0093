"""Pages of a prefix cache in host memory: which keys are there, and what is copied. No torch.

Eviction is LRU. The tier only decides, while a step is being scheduled: it records copies in the
order in which every rank must do them, and the scheduler output carries them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rorqual.cache.events import CacheEvents


class PageCopy(NamedTuple):
    """A copy between a device page and a slot of host memory."""

    page: int
    slot: int
    to_host: bool


class UnawaitedCopies:
    """Copies of one direction that no step has waited for: pages with the last step that copies
    each, counting steps with such copies. awaited: up to which of them the step being scheduled
    waits, if not None. The first step waits for all: copies of steps that came to nothing may still
    run."""

    def __init__(self) -> None:
        self.steps = 0
        self.pages: dict[int, int] = {}
        self.awaited: int | None = 0

    def use(self, page: int) -> None:
        step = self.pages.get(page)
        if step is not None:
            self.awaited = max(self.awaited or 0, step)

    def end(self, pages: list[int], waits_for_all: bool) -> None:
        """The step is scheduled, and copies `pages`."""
        self.steps += bool(pages)
        self.pages.update((page, self.steps) for page in pages)
        done = self.steps if waits_for_all else self.awaited
        if done is not None:
            self.pages = {page: step for page, step in self.pages.items() if step > done}
        self.awaited = None

    @property
    def allowed(self) -> int | None:
        """Of the last how many steps with such copies the step does not wait for; None: of none."""
        return None if self.awaited is None else self.steps - self.awaited


class HostTier:
    """capacity: pages that host memory holds. step_pages: most that one step copies each way;
    outwards, plus as many as its prompts fill.

    Copies are done in order, those of a step after all earlier steps. The step itself runs
    concurrently with them, unless `first`: then one of its requests was given a page that is being
    copied out. Later steps do so too, up to one that writes to a page that is being copied, or
    reads one that is being copied in: it waits for that direction's copies of that step and of
    those before. at_once: every later step waits. by_layer: the step reads pages that it copies in,
    each layer after its own copies. many: these take longer than it takes to launch layers one by
    one, so that a captured step, which would wait for all of them, would end later."""

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
        self.by_layer = self.many = False
        self.coming = UnawaitedCopies()
        self.going = UnawaitedCopies()
        self.out_left = self.in_left = 0
        # tokens looked for here and found, pages copied out and in
        self.queries = self.hits = self.pages_out = self.pages_in = 0
        self.events: CacheEvents | None = None

    def begin(self) -> None:
        """Scheduling of a step starts."""
        self.planning = True
        self.copies = []
        self.copying_out = set()
        self.first = self.by_layer = self.many = False
        self.out_left = self.in_left = self.step_pages

    def end(self, launched: bool) -> None:
        """launched: there will be a step."""
        self.planning = False
        if not launched:
            return
        for running, to_host in ((self.coming, False), (self.going, True)):
            pages = [copy.page for copy in self.copies if copy.to_host == to_host]
            running.end(pages, self.first or self.at_once)

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

    def copy_in(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Copy pages with these keys in; host memory keeps them too."""
        assert self.planning, "copies belong to a step"
        assert len(keys) <= self.in_left, "a step copies only so much"
        self.in_left -= len(keys)
        self.pages_in += len(keys)
        for key, page in zip(keys, pages, strict=True):
            self.slots.move_to_end(key)
            self.copies.append(PageCopy(page, self.slots[key], False))

    def given(self, page: int) -> None:
        """A request of the step being scheduled will write to the page."""
        if page in self.copying_out:
            self.first = True
        self.coming.use(page)
        self.going.use(page)

    def read(self, pages: Iterable[int]) -> None:
        """A request of the step being scheduled will read these pages."""
        if self.coming.pages:
            for page in pages:
                self.coming.use(page)

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
