"""What a prefix cache began to hold and holds no more, for whoever routes requests to it from
outside. No torch.

Pages of prompts with a salt are left out: that a tenant's text is cached is nobody else's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PageStored:
    """On the device. key: of the page; previous: of the page before it, None where it is a prompt's
    first. tokens: those of the page alone."""

    key: bytes
    previous: bytes | None
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class PageRemoved:
    key: bytes


@dataclass(frozen=True)
class HostPageStored:
    """Host memory holds a page that the device held when it was copied. page_size: its tokens."""

    key: bytes
    page_size: int


@dataclass(frozen=True)
class HostPageRemoved:
    key: bytes


@dataclass(frozen=True)
class CacheCleared:
    """Nothing is held any more, neither on the device nor in host memory."""


CacheEvent = PageStored | PageRemoved | HostPageStored | HostPageRemoved | CacheCleared


class CacheEvents:
    """Collected until `drain`. root: the key before a prompt's first page, without a salt."""

    def __init__(self, root: bytes, page_size: int):
        self.root = root
        self.page_size = page_size
        self.told: set[bytes] = set()
        self.told_host: set[bytes] = set()
        self.found: list[CacheEvent] = []

    def stored(self, previous: bytes, key: bytes, tokens: Sequence[int]) -> None:
        """tokens: what the key covers; a prediction module's look ahead is no part of the page."""
        first = previous == self.root
        if first or previous in self.told:
            self.told.add(key)
            page = tuple(tokens[: self.page_size])
            self.found.append(PageStored(key, None if first else previous, page))

    def removed(self, key: bytes) -> None:
        if key in self.told:
            self.told.discard(key)
            self.found.append(PageRemoved(key))

    def host_stored(self, key: bytes) -> None:
        """Of a page that the device holds as well."""
        if key in self.told:
            self.told_host.add(key)
            self.found.append(HostPageStored(key, self.page_size))

    def host_removed(self, key: bytes) -> None:
        if key in self.told_host:
            self.told_host.discard(key)
            self.found.append(HostPageRemoved(key))

    def cleared(self) -> None:
        self.told.clear()
        self.told_host.clear()
        self.found = [CacheCleared()]

    def drain(self) -> list[CacheEvent]:
        found = self.found
        self.found = []
        return found
