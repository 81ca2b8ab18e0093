"""Messages about page transfers between rank 0 and every rank: JSON of plain lists. No torch.

Rank 0 alone decides, from what all ranks have reported; a rank carries messages out in the order of
the steps, and no step waits for their results.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from rorqual.cache.page_parts import PagePart
from rorqual.disagg.page_sources import Address


@dataclass(frozen=True)
class LeaseOpened:
    """The ranks of one data-parallel rank serve these pages under this lease; others only record
    its name. complete: no pages will be added. by_layer: added ones are served as layers are
    written."""

    kind: ClassVar[str] = "open"
    lease: bytes
    dp_rank: int
    keys: list[bytes]
    pages: list[int]
    complete: bool
    by_layer: bool = False


@dataclass(frozen=True)
class LeaseWritten:
    """The next step completes these pages."""

    kind: ClassVar[str] = "written"
    lease: bytes
    dp_rank: int
    keys: list[bytes]
    pages: list[int]


@dataclass(frozen=True)
class LeaseGrown:
    """Adds pages to a lease."""

    kind: ClassVar[str] = "grown"
    lease: bytes
    dp_rank: int
    keys: list[bytes]
    pages: list[int]
    complete: bool


@dataclass(frozen=True)
class LeasesClosed:
    kind: ClassVar[str] = "close"
    leases: list[bytes]


@dataclass(frozen=True)
class FetchPages:
    """Each rank of one data-parallel rank fetches its part, and reports it (PagesFetched). sources:
    for each of these ranks, which part to fetch from where. pages: of the cache, one for each key,
    reserved until FetchOver: received pages are written there at once; none where they wait for
    PagesPlaced."""

    kind: ClassVar[str] = "fetch"
    number: int
    dp_rank: int
    lease: bytes
    secret: bytes
    keys: list[bytes]
    page_size: int
    sources: list[list[tuple[Address, PagePart]]]
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PagesPlaced:
    """Write what was fetched into these pages; its first `skipped` tokens are before them."""

    kind: ClassVar[str] = "place"
    number: int
    pages: list[int]
    skipped: int


@dataclass(frozen=True)
class FetchOver:
    """The fetch is cancelled, or all of it is placed. Later steps may write to its pages."""

    kind: ClassVar[str] = "over"
    number: int


@dataclass(frozen=True)
class ServerStarted:
    """The address at which this rank serves its part of pages; port 0 where it serves none."""

    kind: ClassVar[str] = "started"
    host: str
    port: int


@dataclass(frozen=True)
class LeaseRead:
    """`pages` more pages of the lease were sent, of `size` bytes."""

    kind: ClassVar[str] = "read"
    lease: bytes
    pages: int
    size: int


@dataclass(frozen=True)
class LeaseDone:
    kind: ClassVar[str] = "done"
    lease: bytes


@dataclass(frozen=True)
class PagesFetched:
    """The first `found` pages were received; error: why not all. size: bytes received, of all
    parts; seconds: of the slowest part."""

    kind: ClassVar[str] = "fetched"
    number: int
    found: int
    error: str
    size: int
    seconds: float


ToRank = (
    LeaseOpened | LeaseWritten | LeaseGrown | LeasesClosed | FetchPages | PagesPlaced | FetchOver
)
FromRank = ServerStarted | LeaseRead | LeaseDone | PagesFetched
KINDS: dict[str, Any] = {
    made.kind: made
    for made in (
        LeaseOpened,
        LeaseWritten,
        LeaseGrown,
        LeasesClosed,
        FetchPages,
        PagesPlaced,
        FetchOver,
        ServerStarted,
        LeaseRead,
        LeaseDone,
        PagesFetched,
    )
}
IN_HEX = ("lease", "secret")


def encode(message: ToRank | FromRank) -> bytes:
    values = {item.name: getattr(message, item.name) for item in fields(message)}
    for name, value in values.items():
        if name in IN_HEX:
            values[name] = value.hex()
        elif name in ("keys", "leases"):
            values[name] = [one.hex() for one in value]
    if isinstance(message, FetchPages):
        values["sources"] = [
            [[address, part.fields] for address, part in sources] for sources in message.sources
        ]
    return json.dumps([message.kind, values], separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    kind, values = json.loads(data)
    for name, value in values.items():
        if name in IN_HEX:
            values[name] = bytes.fromhex(value)
        elif name in ("keys", "leases"):
            values[name] = [bytes.fromhex(one) for one in value]
    if kind == FetchPages.kind:
        values["sources"] = [
            [((host, port), PagePart(*part)) for (host, port), part in sources]
            for sources in values["sources"]
        ]
    return KINDS[kind](**values)
