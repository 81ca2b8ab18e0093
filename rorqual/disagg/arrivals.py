"""Prompts prefilled elsewhere and decoded here: rank 0 makes every rank of one data-parallel rank
fetch its part of their pages, and puts the pages that all of them have received into the cache."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rorqual.cache.page_parts import PagePart
from rorqual.cache.prefix import PrefixCache, page_keys
from rorqual.config.parallel import ParallelConfig
from rorqual.disagg.page_sources import (
    Address,
    CacheShape,
    SenderLayout,
    WantedPages,
    page_sizes_differ,
    wanted_pages,
)
from rorqual.disagg.rank_messages import (
    FetchOver,
    FetchPages,
    PagesFetched,
    PagesPlaced,
    ToRank,
)
from rorqual.engine.cached_pages import CachedPages
from rorqual.request import Request

log = logging.getLogger("rorqual.engine")

PLACED_BYTES = 16 * 2**20  # per rank, written to the cache between two steps
RESERVED_SHARE = 0.25  # most of a cache for prompts being fetched
MAX_FINISHED = 4096  # leases remembered
PLACED_ON_DEVICE = 2**30  # likewise where they are on the device: takes less than a millisecond


@dataclass(frozen=True)
class RemotePrompt:
    """Where a prompt's pages are. address: of rank 0 there. secret: of its connections. barred:
    addresses among those of its ranks that this engine may not connect to."""

    address: Address
    secret: bytes
    lease: bytes
    layout: SenderLayout
    barred: tuple[Address, ...] = ()

    @property
    def problem(self) -> str:
        """Why its pages cannot be fetched; empty if they can. Without the addresses: clients of a
        router get this message."""
        return "they are at an address that is not among kv_peers" if self.barred else ""


class Arrived(NamedTuple):
    """A request that may be queued now, on the data-parallel rank that has its pages; error: why
    some were not received."""

    request: Request
    error: str
    dp_rank: int


@dataclass
class ArrivingPrompt:
    """A prompt being fetched to a data-parallel rank. prompt: with the first token of the answer
    where the other engine sampled it. requests: those that wait for it, by id; the
    choices of one call share it. found: by rank, how many of the other engine's pages it has
    received. placed: pages of this engine that are in its cache. reserved: pages of `prefix` into
    which received ones are written at once; void: received pages must not be used."""

    number: int
    prompt: tuple[int, ...]
    salt: str
    remote: RemotePrompt
    dp_rank: int
    pages: WantedPages
    requests: dict[str, Request] = field(default_factory=dict)
    found: dict[int, int] = field(default_factory=dict)
    error: str = ""
    placed: int = 0
    void: bool = False
    reserved: list[int] = field(default_factory=list)
    prefix: PrefixCache | None = None
    seconds: float = 0.0  # of the slowest rank's fetch

    @property
    def wanted(self) -> int:
        return self.pages.last_page - self.pages.first_page

    @property
    def num_received(self) -> int:
        """Pages of this engine that every rank has received its part of."""
        return self.pages.filled(min(self.found.values()))


class PromptArrivals:
    """broadcast: sends a message to all ranks, in the order of the steps. finish: notifies the
    other engine that its pages have been read. page_bytes: of a page, on this rank; placed_bytes:
    most that is written to the cache between two steps. reserves: whether ranks can write received
    pages to the cache at once."""

    def __init__(
        self,
        cache: CachedPages,
        broadcast: Callable[[ToRank], None],
        finish: Callable[[RemotePrompt], None],
        sizes: ParallelConfig,
        shape: CacheShape,
        page_bytes: int,
        placed_bytes: int = PLACED_BYTES,
        reserves: bool = False,
    ):
        self.cache = cache
        self.broadcast = broadcast
        self.finish = finish
        self.sizes = sizes
        self.shape = shape
        self.page_bytes = page_bytes
        self.placed_bytes = placed_bytes
        self.reserves = reserves
        self.numbers = itertools.count(1)
        self.by_number: dict[int, ArrivingPrompt] = {}
        self.waiting: dict[str, ArrivingPrompt] = {}
        self.placing: list[ArrivingPrompt] = []
        self.finished: OrderedDict[bytes, None] = OrderedDict()  # leases read in full
        self.fetched = 0  # requests
        self.failed = 0  # of these: not all pages were received
        self.pages_in = 0

    # ---- fetching

    def start(self, request: Request, remote: RemotePrompt) -> bool:
        """Start to fetch the request's pages; returns whether any are being fetched. A choice that
        comes after the pages of its call were received finds them in the cache."""
        prompt, salt = request.transferred(request.outputs), request.cache_salt
        same = (a for a in self.waiting.values() if a.remote.lease == remote.lease)
        arrival = next((a for a in same if (a.prompt, a.salt) == (prompt, salt)), None)
        if arrival is None and remote.lease in self.finished:
            return False
        if arrival is None:
            arrival = self._begin(request, remote)
            if arrival is None:
                self.let_go(remote)
                return False
        arrival.requests[request.id] = request
        self.waiting[request.id] = arrival
        return True

    def let_go(self, remote: RemotePrompt) -> None:
        """Nothing of a lease is fetched, or no longer: the other engine need not hold the pages."""
        fetched = any(a.remote.lease == remote.lease for a in self.by_number.values())
        if not (fetched or remote.barred or remote.lease in self.finished):
            self._finish(remote)

    def _begin(self, request: Request, remote: RemotePrompt) -> ArrivingPrompt | None:
        """None where all pages are cached."""
        prompt, salt = request.transferred(request.outputs), request.cache_salt
        dp_rank = self.cache.engine.scheduler.cheapest(request, self._tokens_coming())
        prefix = self.cache.prefix(dp_rank)
        own, theirs = prefix.page_size, remote.layout.page_size
        number = next(self.numbers)
        cached = self.cache.count(dp_rank, prompt, salt)
        pages = wanted_pages(own, theirs, len(prompt), prefix.lookahead, cached)
        if pages is None:
            return None
        arrival = ArrivingPrompt(number, prompt, salt, remote, dp_rank, pages)
        self.by_number[number] = arrival
        arrival.error = remote.problem or page_sizes_differ(own, theirs)
        if arrival.error:
            arrival.found[0] = 0
            self.placing.append(arrival)
        else:
            keys = page_keys(prompt, salt, theirs, prefix.lookahead)
            if self.reserves and own == theirs:
                self._reserve(arrival)
            self._fetch(arrival, keys[pages.their_first : pages.their_last])
        return arrival

    def _reserve(self, arrival: ArrivingPrompt) -> None:
        """Reserve pages, where that leaves most of the cache to running requests."""
        prefix = self.cache.prefix(arrival.dp_rank)
        others = sum(len(a.reserved) for a in self.by_number.values() if a.prefix is prefix)
        if others + arrival.wanted <= RESERVED_SHARE * prefix.allocator.num_pages:
            arrival.reserved = self.cache.reserve(arrival.dp_rank, arrival.wanted)
            arrival.prefix = prefix

    def restarted(self) -> None:
        """The cache was replaced, before any further step: write nothing into the old one's
        pages."""
        in_force = {id(prefix) for prefix in self.cache.prefixes}
        for arrival in list(self.by_number.values()):
            if arrival.reserved and id(arrival.prefix) not in in_force:
                self.broadcast(FetchOver(arrival.number))
                arrival.reserved = []
                arrival.void = True
                arrival.error = "the cache began anew"
                arrival.found = {0: 0}
                if arrival not in self.placing:
                    self.placing.append(arrival)

    def _tokens_coming(self) -> tuple[int, ...]:
        """Tokens being fetched, by data-parallel rank."""
        found = [0] * self.sizes.dp
        for arrival in self.waiting.values():
            found[arrival.dp_rank] += len(arrival.prompt)
        return tuple(found)

    def _fetch(self, arrival: ArrivingPrompt, keys: list[bytes]) -> None:
        layout = arrival.remote.layout
        sources = [
            layout.sources(part, self.shape, place % self.sizes.tp)
            for place, part in enumerate(self._own_parts())
        ]
        self.broadcast(
            FetchPages(
                arrival.number,
                arrival.dp_rank,
                arrival.remote.lease,
                arrival.remote.secret,
                keys,
                layout.page_size,
                sources,
                arrival.reserved,
            )
        )

    def _own_parts(self) -> list[PagePart]:
        """The part that each rank of a data-parallel rank holds, stage after stage."""
        here = SenderLayout(self.sizes.tp, self.sizes.pp, 1, ())
        return here.parts(self.shape)

    def on_pages_fetched(self, rank: int, message: PagesFetched) -> None:
        arrival = self.by_number.get(message.number)
        if arrival is None or arrival.void:
            return
        arrival.found[rank] = message.found
        arrival.seconds = max(arrival.seconds, message.seconds)
        several = self.sizes.world > 1
        if message.error and not arrival.error:
            arrival.error = f"rank {rank}: {message.error}" if several else message.error
        if len(arrival.found) == self.sizes.tp * self.sizes.pp:
            self.placing.append(arrival)
            if not arrival.error:
                self._finish(arrival.remote)

    def _finish(self, remote: RemotePrompt) -> None:
        self.finish(remote)
        self.finished[remote.lease] = None
        if len(self.finished) > MAX_FINISHED:
            self.finished.popitem(last=False)

    def cancel(self, name: str) -> None:
        arrival = self.waiting.pop(name, None)
        if arrival is not None:
            del arrival.requests[name]
            if not arrival.requests:
                self._over(arrival)
                self.let_go(arrival.remote)

    def _over(self, arrival: ArrivingPrompt) -> None:
        del self.by_number[arrival.number]
        if arrival in self.placing:
            self.placing.remove(arrival)
        self.broadcast(FetchOver(arrival.number))
        if arrival.reserved and arrival.prefix is not None:
            self.cache.unreserve(arrival.prefix, arrival.reserved)

    # ---- placing

    def place(self) -> list[Arrived]:
        """Write some pages to the cache; returns the requests whose pages are complete."""
        arrived: list[Arrived] = []
        budget = max(1, self.placed_bytes // self.page_bytes)
        while self.placing and budget > 0:
            arrival = self.placing[0]
            left = arrival.num_received - arrival.placed
            count = left if arrival.reserved else min(left, budget)
            placed = self._place(arrival, count) if count else 0
            budget -= max(1, placed)
            arrival.placed += placed
            if placed == count == left or placed < count:
                arrived += self._end(arrival)
        return arrived

    def _place(self, arrival: ArrivingPrompt, count: int) -> int:
        first = arrival.pages.first_page + arrival.placed

        def write(pages: list[int], after: int) -> None:
            skipped = arrival.pages.skipped_tokens(first + after)
            self.broadcast(PagesPlaced(arrival.number, pages, skipped))

        prompt = arrival.dp_rank, arrival.prompt, arrival.salt
        return self.cache.keep(*prompt, first, count, write, arrival.reserved)

    def _end(self, arrival: ArrivingPrompt) -> list[Arrived]:
        self._over(arrival)
        requests = list(arrival.requests.values())
        self.fetched += len(requests)
        self.pages_in += arrival.placed
        error = ""
        if arrival.placed < arrival.wanted:
            self.failed += len(requests)
            why = arrival.error or "no room in the cache, or the pages before them have gone"
            error = f"{arrival.placed} of {arrival.wanted} pages of the prompt came: {why}"
        for request in requests:
            del self.waiting[request.id]
            if error and not arrival.remote.barred:  # barred addresses are logged once
                log.warning("request %s: %s", request.id, error)
        return [Arrived(request, error, arrival.dp_rank) for request in requests]
