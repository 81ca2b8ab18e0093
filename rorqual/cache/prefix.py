"""Prefix cache: full pages of tokens, keyed by the SHA-256 chain over everything before them, with
LRU eviction.

A key covers the page's tokens, its predecessor's key and the tenant's salt, so equal keys mean
equal prefixes and tenants with different salts share nothing. The cache is one holder of its pages;
pages that only the cache holds can be evicted. No torch.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from rorqual.cache.events import CacheEvents
from rorqual.cache.host_tier import HostTier
from rorqual.cache.pages import PageAllocator
from rorqual.request import int64_array

TOKEN_BYTES = 8


def root_key(salt: str = "") -> bytes:
    return hashlib.sha256(b"rorqual prefix\0" + salt.encode()).digest()


def next_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(previous + int64_array(tokens).tobytes()).digest()


def tail_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a partial page; never equal to a full page's key."""
    return hashlib.sha256(b"tail\0" + previous + int64_array(tokens).tobytes()).digest()


def whole_pages(num_tokens: int, page_size: int, lookahead: int) -> int:
    """Most full pages of a prompt of num_tokens tokens that may come from the cache, leaving at
    least one token to compute. lookahead: see PrefixCache."""
    return (num_tokens - max(1, lookahead)) // page_size


def extend_keys(
    keys: list[bytes],
    tokens: Sequence[int],
    salt: str,
    page_size: int,
    lookahead: int,
    count: int,
) -> None:
    """Append to the keys of a prompt's first pages, of `page_size` tokens, until there are `count`:
    each as `next_key`, but without a call and a conversion for each."""
    first = len(keys) * page_size
    data = int64_array(tokens[first : count * page_size + lookahead]).tobytes()
    key = keys[-1] if keys else root_key(salt)
    digest = hashlib.sha256
    step = page_size * TOKEN_BYTES
    covered = step + lookahead * TOKEN_BYTES
    for start in range(0, (count * page_size - first) * TOKEN_BYTES, step):
        key = digest(key + data[start : start + covered]).digest()
        keys.append(key)


def page_keys(tokens: Sequence[int], salt: str, page_size: int, lookahead: int) -> list[bytes]:
    """Keys of all pages of a prompt that are transferred between engines: the full ones and, if
    there is one, the partial last page, which holds the entries of all tokens but the last."""
    full = whole_pages(len(tokens), page_size, lookahead)
    keys: list[bytes] = []
    extend_keys(keys, tokens, salt, page_size, lookahead, full)
    tail = tail_behind(tokens, keys[-1] if keys else root_key(salt), page_size, lookahead)
    return keys if tail is None else [*keys, tail]


def tail_behind(
    tokens: Sequence[int], previous: bytes, page_size: int, lookahead: int
) -> bytes | None:
    """Key of the partial page after the full pages of `tokens`, the last of which has key
    `previous`: it holds entries up to the last token but one. None where it would be empty, or
    where prediction modules look further ahead than that token."""
    full = whole_pages(len(tokens), page_size, lookahead) * page_size
    if lookahead > 1 or full >= len(tokens) - 1:
        return None
    return tail_key(previous, tokens[full:])


class PrefixCache:
    """Maps chain keys to pages. With `enabled` False it never finds or keeps a page.

    `lookahead`: number of tokens after a page that its entries also depend on (one for a prediction
    module), so that its key covers them too.
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
        self.tails: set[bytes] = set()  # keys of partial pages
        # Pages that only the cache holds, oldest first. A chain's later pages are released first
        # and so precede its earlier ones: a chain is evicted from its end.
        self.idle: OrderedDict[int, None] = OrderedDict()
        # prompt tokens of admitted requests, and how many were cached; counted by the scheduler
        self.queries = 0
        self.hits = 0
        self.events: CacheEvents | None = None  # None: not recorded
        self.read_by_peers = False  # at any time, not in the order of steps
        self.host: HostTier | None = None  # where evicted pages go
        self.uncopied: dict[int, None] = {}  # cached pages without a host copy, oldest first

    @property
    def available(self) -> int:
        """Pages available now: free ones and those only the cache holds."""
        return len(self.allocator.free) + len(self.idle)

    def match(
        self, tokens: Sequence[int], salt: str = "", known: list[bytes] | None = None
    ) -> tuple[list[int], bytes]:
        """Pages of the longest cached prefix that leaves at least one token to compute, now held
        for the caller, and its key. known: see `keys_of`."""
        keys = self.keys_of(tokens, salt, known)
        pages: list[int] = []
        for key in keys:
            page = self.pages.get(key)
            if page is None:
                break
            pages.append(page)
            self.idle.pop(page, None)
        self.allocator.hold_many(pages)
        return pages, keys[len(pages) - 1] if pages else root_key(salt)

    def keys_of(
        self, tokens: Sequence[int], salt: str, known: list[bytes] | None = None
    ) -> Sequence[bytes]:
        """The keys under which `match` looks up a sequence's pages. known: those of its first
        pages, which this extends, so that a long prompt is hashed once however often it is looked
        up."""
        count = max(0, self.full_pages(len(tokens))) if self.enabled else 0
        keys = [] if known is None else known
        if len(keys) < count:
            self.add_keys(keys, tokens, salt, count)
        return keys[:count] if len(keys) > count else keys

    def add_keys(self, keys: list[bytes], tokens: Sequence[int], salt: str, count: int) -> None:
        """See extend_keys. The same keys as by `key_after`, one after the other."""
        extend_keys(keys, tokens, salt, self.page_size, self.lookahead, count)

    def key_after(self, previous: bytes, tokens: Sequence[int]) -> bytes:
        """Key of a page that holds `tokens`, after the page with key `previous`."""
        return next_key(previous, tokens)

    def covered(self, tokens: Sequence[int], page: int) -> Sequence[int]:
        """The tokens that the key of a sequence's page number `page` covers, beside its
        predecessor's."""
        return tokens[page * self.page_size : (page + 1) * self.page_size + self.lookahead]

    def full_pages(self, length: int) -> int:
        """Pages that `match` looks up for `length` tokens: at least one token is left to
        compute."""
        return whole_pages(length, self.page_size, self.lookahead)

    def tail(self, tokens: Sequence[int], previous: bytes) -> bytes | None:
        """See tail_behind."""
        if not self.enabled:
            return None
        return tail_behind(tokens, previous, self.page_size, self.lookahead)

    def insert_tail(self, key: bytes, page: int) -> None:
        """Keep a partial page, for a request that takes it over with `take_tail`."""
        if self.enabled and key not in self.pages and page not in self.keys:
            self.pages[key] = page
            self.keys[page] = key
            self.tails.add(key)
            self.allocator.hold(page)

    def is_free_tail(self, key: bytes | None) -> bool:
        """Whether the cache has this page and is its only holder."""
        page = self.pages.get(key) if key is not None else None
        return page is not None and self.allocator.holders[page] == 1

    def take_tail(self, key: bytes | None) -> int | None:
        """The page with this key, removed from the cache: the caller is its only holder and may
        write to it. None where it is missing or in use."""
        if key is None or not self.is_free_tail(key):
            return None
        page = self.pages[key]
        self.hold(page)
        self._remove(page)
        return page

    def hold(self, page: int) -> None:
        self.idle.pop(page, None)
        self.allocator.hold(page)

    def take(self) -> int:
        """A page for new content, evicting the least recently used cached one if none is free."""
        return self.take_many(1)[0]

    def take_many(self, count: int) -> list[int]:
        """So many pages, as `take`; a prompt of thousands of tokens has hundreds."""
        while len(self.allocator.free) < count:
            self.evict()
        return self.allocator.take_many(count)

    def evict(self) -> None:
        page, _ = self.idle.popitem(last=False)
        key = self.keys[page]
        if self.host is not None and key not in self.tails:
            self.host.evicted(key, page)
        self._remove(page)

    def copy_ahead(self, filled: int) -> None:
        """Copy cached pages to host memory before their eviction, oldest first, so that evictions
        need not wait for copies. Half of host memory is reserved for pages no longer on the device.
        filled: pages that the step fills."""
        host = self.host
        if host is None:
            return
        host.out_left += filled
        while self.uncopied and len(self.keys) - len(self.uncopied) < (host.capacity + 1) // 2:
            page = next(iter(self.uncopied))
            key = self.keys[page]
            if key not in host.slots and not host.copy_out(key, page):
                return
            del self.uncopied[page]

    def in_host(
        self, tokens: Sequence[int], page: int, salt: str, known: list[bytes] | None = None
    ) -> list[bytes]:
        """Keys of a sequence's consecutive pages in host memory, from page number `page` on. known:
        see `keys_of`."""
        if self.host is None or not self.host.slots:
            return []
        keys = self.keys_of(tokens, salt, known)[page:]
        return list(takewhile(self.host.slots.__contains__, keys))

    def _remove(self, page: int) -> None:
        key = self.keys.pop(page)
        self.uncopied.pop(page, None)
        del self.pages[key]
        if key in self.tails:
            self.tails.remove(key)
        elif self.events is not None:
            self.events.removed(key)
        self.allocator.release(page)

    def insert(
        self, previous: bytes, tokens: Sequence[int], page: int, key: bytes | None = None
    ) -> bytes:
        """Keep a full page, whose key covers `tokens`; returns the key. Ignores a page whose
        content is already kept. key: where it is known."""
        if not self.enabled:
            return previous
        key = self.key_after(previous, tokens) if key is None else key
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
        """Start to record events."""
        if self.events is None:
            self.events = CacheEvents(root_key(), self.page_size)
            if self.host is not None:
                self.host.events = self.events
        return self.events

    def release(self, pages: Sequence[int]) -> None:
        """Release a request's pages, last first."""
        order = pages[::-1]
        self.allocator.release_many(order)
        holders = self.allocator.holders
        for page in order if self.keys else ():
            if holders[page] == 1 and page in self.keys:
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
