"""Pages of a prefix cache in host memory: which keys are there, and what is copied. No torch.

The least recently used goes first. The tier only decides, while a step is planned: copies are noted
in the order in which every rank has to do them, and the step carries them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from rorqual.cache.events import CacheEvents


class PageCopy(NamedTuple):
    """Between a page of the device and a slot of host memory."""

    page: int
    slot: int
    to_host: bool


class HostTier:
    """capacity: pages that host memory holds. step_pages: most that one step copies each way; out
    go as many more as its prompts fill.

    Copies of one step are done in their order, and all of them after the steps before it. The step
    itself runs beside them, unless `first`: then one of its requests was given a page that is
    copied out. What is noted in a step may be read and overwritten from the next one on."""

    def __init__(self, capacity: int, step_pages: int):
        self.capacity = capacity
        self.step_pages = step_pages
        self.slots: OrderedDict[bytes, int] = OrderedDict()  # oldest first
        self.unused = 0  # slots from this one on have never been filled
        self.planning = False
        self.copies: list[PageCopy] = []
        self.leaving: set[int] = set()  # pages that are copied out
        self.first = False
        self.out_left = self.in_left = 0
        # tokens looked for here and found, pages copied out and in
        self.queries = self.hits = self.pages_out = self.pages_in = 0
        self.events: CacheEvents | None = None

    def begin(self) -> None:
        """A step is planned."""
        self.planning = True
        self.copies = []
        self.leaving = set()
        self.first = False
        self.out_left = self.in_left = self.step_pages

    def end(self) -> None:
        self.planning = False

    def evicted(self, key: bytes, page: int) -> None:
        """A page leaves the device. It is lost where nothing is planned, since its next content may
        be written before the next step; or where the step copies enough as it is."""
        if key in self.slots:
            self.slots.move_to_end(key)
        else:
            self.keep(key, page)

    def keep(self, key: bytes, page: int) -> bool:
        """Copy a page out, unless the step copies enough as it is."""
        if not self.planning or not self.out_left:
            return False
        self.out_left -= 1
        slot = self._slot()
        self.slots[key] = slot
        self.copies.append(PageCopy(page, slot, True))
        self.leaving.add(page)
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

    def bring(self, key: bytes, page: int) -> None:
        """Copy a page in, which stays here as well."""
        assert self.planning, "copies belong to a step"
        assert self.in_left, "a step copies only so much"
        self.in_left -= 1
        self.slots.move_to_end(key)
        self.copies.append(PageCopy(page, self.slots[key], False))
        self.pages_in += 1

    def given(self, page: int) -> None:
        """A request of the step that is planned will write to the page."""
        if page in self.leaving:
            self.first = True

    def clear(self) -> None:
        if self.events is not None:
            for key in self.slots:
                self.events.host_removed(key)
        self.slots.clear()
        self.unused = 0

    def anew(self) -> HostTier:
        """An empty one with the same counts."""
        tier = HostTier(self.capacity, self.step_pages)
        tier.queries, tier.hits = self.queries, self.hits
        tier.pages_out, tier.pages_in = self.pages_out, self.pages_in
        tier.events = self.events
        return tier
