"""Events of pages stored in and removed from a prefix cache, for external cache-aware routers. No
torch.

Pages of prompts with a salt are left out: they would reveal what a tenant has cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PageStored:
    """The device holds a page. key: of the page; previous: of the page before it, None for a
    prompt's first. tokens: of this page only."""

    key: bytes
    previous: bytes | None
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class PageRemoved:
    key: bytes


@dataclass(frozen=True)
class HostPageStored:
    """Host memory holds a copy of a page. page_size: its tokens."""

    key: bytes
    page_size: int


@dataclass(frozen=True)
class HostPageRemoved:
    key: bytes


@dataclass(frozen=True)
class CacheCleared:
    """All pages were removed, on the device and in host memory."""


CacheEvent = PageStored | PageRemoved | HostPageStored | HostPageRemoved | CacheCleared


class CacheEvents:
    """Collects events until `drain`. root: the key before a prompt's first page, without a salt."""

    def __init__(self, root: bytes, page_size: int):
        self.root = root
        self.page_size = page_size
        self.announced: set[bytes] = set()
        self.announced_host: set[bytes] = set()
        self.found: list[CacheEvent] = []

    def stored(self, previous: bytes, key: bytes, tokens: Sequence[int]) -> None:
        """tokens: those the key covers; a prediction module's lookahead is not part of the page."""
        first = previous == self.root
        if first or previous in self.announced:
            self.announced.add(key)
            page = tuple(tokens[: self.page_size])
            self.found.append(PageStored(key, None if first else previous, page))

    def removed(self, key: bytes) -> None:
        if key in self.announced:
            self.announced.discard(key)
            self.found.append(PageRemoved(key))

    def host_stored(self, key: bytes) -> None:
        """Host memory holds a copy of a page that is also on the device."""
        if key in self.announced:
            self.announced_host.add(key)
            self.found.append(HostPageStored(key, self.page_size))

    def host_removed(self, key: bytes) -> None:
        if key in self.announced_host:
            self.announced_host.discard(key)
            self.found.append(HostPageRemoved(key))

    def cleared(self) -> None:
        self.announced.clear()
        self.announced_host.clear()
        self.found = [CacheCleared()]

    def drain(self) -> list[CacheEvent]:
        found = self.found
        self.found = []
        return found
