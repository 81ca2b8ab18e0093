"""Prefix cache: full pages of tokens, found again by the SHA-256 chain of everything before them.
Least recently used goes first.

A key covers the page's tokens, its predecessor's key and the tenant's salt, so equal keys mean
equal prefixes and tenants with different salts share nothing. The cache is one holder of its pages;
pages that only the cache holds can be given back. No torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from rorqual.cache.events import CacheEvents
from rorqual.cache.host_tier import HostTier
from rorqual.cache.pages import PageAllocator


def root_key(salt: str = "") -> bytes:
    return hashlib.sha256(b"rorqual prefix\0" + salt.encode()).digest()


def next_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(previous + array("q", tokens).tobytes()).digest()


def tail_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Of a page that is not full; no full page has such a key."""
    return hashlib.sha256(b"tail\0" + previous + array("q", tokens).tobytes()).digest()


def whole_pages(num_tokens: int, page_size: int, lookahead: int) -> int:
    """Of a prompt of so many tokens: full pages that may be taken from a cache, which leaves at
    least one token to compute. lookahead: see PrefixCache."""
    return (num_tokens - max(1, lookahead)) // page_size


def chain_keys(
    tokens: Sequence[int], salt: str, page_size: int, lookahead: int, count: int
) -> list[bytes]:
    """Of a prompt's first `count` pages, in a cache with pages of `page_size` tokens."""
    keys: list[bytes] = []
    key = root_key(salt)
    for start in range(0, count * page_size, page_size):
        key = next_key(key, tokens[start : start + page_size + lookahead])
        keys.append(key)
    return keys


def page_keys(tokens: Sequence[int], salt: str, page_size: int, lookahead: int) -> list[bytes]:
    """Of all pages of a prompt that one engine gives another: the full ones, and where there is
    one the last, which is not full and holds the entries of all tokens but the last."""
    full = whole_pages(len(tokens), page_size, lookahead)
    keys = chain_keys(tokens, salt, page_size, lookahead, full)
    tail = tail_behind(tokens, keys[-1] if keys else root_key(salt), page_size, lookahead)
    return keys if tail is None else [*keys, tail]


def tail_behind(
    tokens: Sequence[int], previous: bytes, page_size: int, lookahead: int
) -> bytes | None:
    """The key of what lies behind the full pages of `tokens`, of which `previous` is the last
    one's: entries of all tokens but the last. None where there are none, or where prediction
    modules look further ahead than that token."""
    full = whole_pages(len(tokens), page_size, lookahead) * page_size
    if lookahead > 1 or full >= len(tokens) - 1:
        return None
    return tail_key(previous, tokens[full:])


class PrefixCache:
    """Maps chain keys to pages. `enabled` False makes a cache that never finds and never keeps.

    `lookahead`: a page's entries depend on so many tokens after it as well (those of a prediction
    module on one), so its key covers them.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, enabled: bool = True, lookahead: int = 0
    ):
        self.allocator = allocator
        self.page_size = page_size
        self.enabled = enabled
        self.lookahead = lookahead
        self.pages: dict[bytes, int] = {}
        self.keys: dict[int, bytes] = {}
        self.tails: set[bytes] = set()  # keys of pages that are not full
        # Pages held by the cache alone, oldest first. A chain's later pages are released first and
        # so stand before its earlier ones: eviction eats a chain from its end.
        self.idle: OrderedDict[int, None] = OrderedDict()
        # prompt tokens of admitted requests, and how many of them were found: the scheduler counts
        self.queries = 0
        self.hits = 0
        self.events: CacheEvents | None = None  # None: nobody wants to know
        self.host: HostTier | None = None  # where evicted pages go
        self.uncopied: dict[int, None] = {}  # cached pages that are not there, oldest first

    @property
    def available(self) -> int:
        """Pages that can be had at once: free ones and those only the cache holds."""
        return len(self.allocator.free) + len(self.idle)

    def match(self, tokens: Sequence[int], salt: str = "") -> tuple[list[int], bytes]:
        """Pages of the longest cached prefix that leaves at least one token to compute, now held
        for the caller, and its key."""
        key = root_key(salt)
        pages: list[int] = []
        while (candidate := self.following(tokens, len(pages), key)) is not None:
            page = self.pages.get(candidate)
            if page is None:
                break
            self.hold(page)
            pages.append(page)
            key = candidate
        return pages, key

    def following(self, tokens: Sequence[int], page: int, previous: bytes) -> bytes | None:
        """The key under which `match` looks for a sequence's page number `page`; None where it
        would not look."""
        if not self.enabled or page >= self.full_pages(len(tokens)):
            return None
        return self.key_after(previous, self.covered(tokens, page))

    def key_after(self, previous: bytes, tokens: Sequence[int]) -> bytes:
        """Of a page that holds `tokens`, behind those of `previous`."""
        return next_key(previous, tokens)

    def covered(self, tokens: Sequence[int], page: int) -> Sequence[int]:
        """What the key of a sequence's page number `page` covers beside its predecessor's."""
        return tokens[page * self.page_size : (page + 1) * self.page_size + self.lookahead]

    def full_pages(self, length: int) -> int:
        """How many pages of so many tokens `match` looks for: at least one token is left to
        compute."""
        return whole_pages(length, self.page_size, self.lookahead)

    def tail(self, tokens: Sequence[int], previous: bytes) -> bytes | None:
        """See tail_behind."""
        if not self.enabled:
            return None
        return tail_behind(tokens, previous, self.page_size, self.lookahead)

    def insert_tail(self, key: bytes, page: int) -> None:
        """Keep a page that is not full, for one who takes it whole."""
        if self.enabled and key not in self.pages and page not in self.keys:
            self.pages[key] = page
            self.keys[page] = key
            self.tails.add(key)
            self.allocator.hold(page)

    def is_free_tail(self, key: bytes | None) -> bool:
        """Whether the cache has this page, and nobody reads it."""
        page = self.pages.get(key) if key is not None else None
        return page is not None and self.allocator.holders[page] == 1

    def take_tail(self, key: bytes | None) -> int | None:
        """The page of this key, now the caller's alone, who may write to it; None where there is
        none to be had."""
        if key is None or not self.is_free_tail(key):
            return None
        page = self.pages[key]
        self.hold(page)
        self.forget(page)
        return page

    def hold(self, page: int) -> None:
        self.idle.pop(page, None)
        self.allocator.hold(page)

    def take(self) -> int:
        """A page for new content, evicting the least recently used cached one if none is free."""
        if not self.allocator.free:
            self.evict()
        return self.allocator.take()

    def evict(self) -> None:
        page, _ = self.idle.popitem(last=False)
        key = self.keys[page]
        if self.host is not None and key not in self.tails:
            self.host.evicted(key, page)
        self.forget(page)

    def copy_ahead(self, filled: int) -> None:
        """Cached pages go to host memory, oldest first, while they are still on the device: when
        they are evicted nobody has to wait for their copies. Half of that memory is for pages that
        the device has no more. filled: pages that the step fills."""
        host = self.host
        if host is None:
            return
        host.out_left += filled
        while self.uncopied and len(self.keys) - len(self.uncopied) < (host.capacity + 1) // 2:
            page = next(iter(self.uncopied))
            key = self.keys[page]
            if key not in host.slots and not host.keep(key, page):
                return
            del self.uncopied[page]

    def in_host(self, tokens: Sequence[int], page: int, previous: bytes) -> list[bytes]:
        """Keys of a sequence's pages from its number `page` on that host memory holds, without a
        gap."""
        keys: list[bytes] = []
        if self.host is None or not self.host.slots:
            return keys
        key = previous
        while (found := self.following(tokens, page + len(keys), key)) is not None:
            if found not in self.host.slots:
                break
            keys.append(found)
            key = found
        return keys

    def forget(self, page: int) -> None:
        key = self.keys.pop(page)
        self.uncopied.pop(page, None)
        del self.pages[key]
        if key in self.tails:
            self.tails.remove(key)
        elif self.events is not None:
            self.events.removed(key)
        self.allocator.release(page)

    def insert(self, previous: bytes, tokens: Sequence[int], page: int) -> bytes:
        """Keep a full page, whose key covers `tokens`; returns the key. Where a page with the
        same content is kept already, this one is not."""
        if not self.enabled:
            return previous
        key = self.key_after(previous, tokens)
        if key not in self.pages and page not in self.keys:
            self.pages[key] = page
            self.keys[page] = key
            self.allocator.hold(page)
            self._want_copy(page)
            if self.events is not None:
                self.events.stored(previous, key, tokens)
        return key

    def _want_copy(self, page: int) -> None:
        key = self.keys[page]
        if self.host is not None and key not in self.host.slots and key not in self.tails:
            self.uncopied[page] = None

    def record(self) -> CacheEvents:
        """From now on events are kept."""
        if self.events is None:
            self.events = CacheEvents(root_key(), self.page_size)
            if self.host is not None:
                self.host.events = self.events
        return self.events

    def release(self, pages: Sequence[int]) -> None:
        """A request lets go of its pages, last first."""
        for page in reversed(pages):
            self.allocator.release(page)
            if page in self.keys and self.allocator.holders[page] == 1:
                self.idle[page] = None
                self._want_copy(page)

    def clear(self) -> int:
        """Drop every page that is not in use, and all in host memory; returns how many of the
        device."""
        count = len(self.idle)
        while self.idle:
            self.evict()
        if self.host is not None:
            self.host.clear()
        return count
