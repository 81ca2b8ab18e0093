"""What rank 0 tells every rank about pages that travel, and what they tell it: JSON of plain lists.
No torch.

Rank 0 decides alone, of what all ranks have told it; a rank does as it is told, in the order of the
steps, and none of these answers is waited for within a step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from rorqual.cache.page_parts import PagePart
from rorqual.disagg.page_sources import Address


@dataclass(frozen=True)
class LeaseOpened:
    """Ranks of a data-parallel rank serve these pages under this lease; others take note of its
    name. complete: they are all it will have. by_layer: others are served as layers write them."""

    kind: ClassVar[str] = "open"
    lease: bytes
    dp_rank: int
    keys: list[bytes]
    pages: list[int]
    complete: bool
    by_layer: bool = False


@dataclass(frozen=True)
class LeaseWritten:
    """The next step writes these pages, to the last of their tokens."""

    kind: ClassVar[str] = "written"
    lease: bytes
    dp_rank: int
    keys: list[bytes]
    pages: list[int]


@dataclass(frozen=True)
class LeaseGrown:
    """More pages of it."""

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
    """Each rank of a data-parallel rank fetches its part, and says so (PagesFetched). sources: by
    number of the rank among these, from where it gets which part. pages: of the cache, one for each
    key, that nobody else has until FetchOver: what comes goes there at once; none where it is to
    wait for PagesPlaced."""

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
    """What was fetched goes into these pages; the first `skipped` tokens of it come before."""

    kind: ClassVar[str] = "place"
    number: int
    pages: list[int]
    skipped: int


@dataclass(frozen=True)
class FetchOver:
    """Nothing more of it is wanted, or all of it is placed. Steps that follow may write to the
    pages it was given."""

    kind: ClassVar[str] = "over"
    number: int


@dataclass(frozen=True)
class ServerStarted:
    """Where this rank serves its part of pages; a port of 0 where it serves none."""

    kind: ClassVar[str] = "started"
    host: str
    port: int


@dataclass(frozen=True)
class LeaseRead:
    """So many more pages of it have left, with so many bytes."""

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
    """`found` pages came, the first ones; error: why not all. size: bytes that came, of all parts;
    seconds: of the slowest part."""

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
