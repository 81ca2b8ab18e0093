"""From which ranks of another engine a rank fetches its part of a prompt's pages. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rorqual.cache.page_parts import PagePart, held_part
from rorqual.cache.prefix import whole_pages
from rorqual.config.parallel import ParallelConfig

MAX_RANKS = 1024  # that kv_transfer_params may name
Address = tuple[str, int]


@dataclass(frozen=True)
class CacheShape:
    """Of the whole model: layers, prediction modules after them, and heads into which the cache can
    be split (page_parts.py)."""

    layers: int
    modules: int
    heads: int


@dataclass(frozen=True)
class SenderLayout:
    """How an engine's ranks split pages: `tp` ranks split the heads and `pp` stages the layers.
    addresses: of its ranks' page servers, stage after stage. page_size: in tokens."""

    tp: int
    pp: int
    page_size: int
    addresses: tuple[Address, ...]

    def problem(self, cache: CacheShape) -> str:
        """Why this layout is invalid; empty if it is valid."""
        tp, pp = self.tp, self.pp
        if min(tp, pp, self.page_size) < 1 or pp > cache.layers or tp * pp > MAX_RANKS:
            return (
                f"tp_size={tp}, pp_size={pp} and remote_page_size={self.page_size} are out of "
                f"range; accepted: at least 1, at most {cache.layers} stages and "
                f"{MAX_RANKS} ranks"
            )
        if cache.heads % tp and tp % cache.heads:
            return f"tp_size={tp} does not go with {cache.heads} key-value heads"
        if len(self.addresses) != tp * pp:
            return (
                f"remote_ranks names {len(self.addresses)} addresses; accepted: tp_size x pp_size, "
                f"{tp * pp}"
            )
        return ""

    def parts(self, cache: CacheShape) -> list[PagePart]:
        """The part of each rank, in the order of their addresses."""
        sizes = ParallelConfig(pp=self.pp)
        found = []
        for stage in range(self.pp):
            layers = sizes.stage_layers(cache.layers, stage)
            if stage == self.pp - 1:
                layers = range(layers.start, layers.stop + cache.modules)
            found += [held_part(layers, cache.heads, self.tp, rank) for rank in range(self.tp)]
        return found

    def sources(
        self, wanted: PagePart, cache: CacheShape, first: int
    ) -> list[tuple[Address, PagePart]]:
        """Disjoint parts that together are `wanted`, and the address of each. Among ranks that hold
        the same part `first` chooses, so that readers use different ones."""
        holders: dict[PagePart, list[Address]] = {}
        for address, part in zip(self.addresses, self.parts(cache), strict=True):
            common = part.common(wanted)
            if not common.empty:
                holders.setdefault(common, []).append(address)
        return [(same[first % len(same)], part) for part, same in holders.items()]


def page_sizes_differ(own: int, theirs: int) -> str:
    """Why pages cannot be converted between these sizes; empty if they can."""
    if own % theirs and theirs % own:
        return f"page_size is {theirs} at the other engine, {own} here: neither is a multiple"
    return ""


@dataclass(frozen=True)
class WantedPages:
    """Of a prompt: this engine's pages first_page to last_page (excluded), and the other engine's
    pages that hold their tokens. entries: tokens of the prompt that the other engine's pages hold;
    the last page on either side may be partial."""

    own_size: int
    their_size: int
    entries: int
    first_page: int
    last_page: int

    @property
    def their_first(self) -> int:
        return self.first_page * self.own_size // self.their_size

    @property
    def their_last(self) -> int:
        return -(-min(self.last_page * self.own_size, self.entries) // self.their_size)

    def filled(self, found: int) -> int:
        """How many of this engine's pages the first `found` of theirs fill."""
        tokens = (self.their_first + found) * self.their_size
        whole = tokens // self.own_size if tokens < self.entries else self.last_page
        return max(0, min(whole, self.last_page) - self.first_page)

    def skipped_tokens(self, page: int) -> int:
        """Tokens in the other engine's pages before this engine's page number `page`."""
        return page * self.own_size - self.their_first * self.their_size


def wanted_pages(
    own: int, theirs: int, length: int, lookahead: int, cached: int
) -> WantedPages | None:
    """own, theirs: tokens of a page on either side. length: of the prompt. cached: its pages cached
    here. None where the other side has no missing page."""
    if lookahead <= 1:  # both sides hold all but the last token
        entries = max(0, length - 1)
        last = -(-entries // own)
    else:
        entries = max(0, whole_pages(length, theirs, lookahead)) * theirs
        last = min(max(0, whole_pages(length, own, lookahead)), entries // own)
    return WantedPages(own, theirs, entries, cached, last) if cached < last else None


def read_layout(given: dict[str, Any], address: Address, page_size: int) -> SenderLayout | str:
    """The layout in kv_transfer_params, of the engine that computed a prompt, or an error message.
    An engine of one rank may omit it."""
    tp, pp = (given.get(name, 1) for name in ("tp_size", "pp_size"))
    size = given.get("remote_page_size", page_size)
    if not all(type(number) is int for number in (tp, pp, size)):
        return "tp_size, pp_size and remote_page_size are whole numbers"
    ranks = given.get("remote_ranks")
    if ranks is None:
        return SenderLayout(tp, pp, size, (address,))
    if not isinstance(ranks, list) or len(ranks) > MAX_RANKS:
        return f"remote_ranks is a list of at most {MAX_RANKS} [host, port]"
    found = []
    for rank in ranks:
        if not is_address(rank):
            return "remote_ranks holds what is no [host, port]"
        found.append((rank[0], rank[1]))
    return SenderLayout(tp, pp, size, tuple(found))


def is_address(given: object) -> bool:
    """Whether it is [host, port]."""
    if not isinstance(given, list | tuple) or len(given) != 2:
        return False
    host, port = given
    return isinstance(host, str) and type(port) is int and 0 < port < 65536
