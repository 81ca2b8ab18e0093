"""What a reader and a keeper of pages say to each other over TCP, once each knows the other
(parallel/remote/link.py). No torch.

    reader -> READ       lease (32 bytes), part (16 bytes), keys (32 bytes each), at most MOST_KEYS
    keeper -> PAGE       for each key in order: the bytes of this part of the page, or nothing where
                         it is kept no more
    keeper -> PIECE      in place of PAGEs, of a prompt whose pages leave layer by layer: a page's
                         number among the keys, and the next bytes of it; of any of the pages, and
                         no bytes for one that is kept no more
    keeper -> COMING     before a PAGE, PIECE or STAGED, any number of times: it is still being
                         computed
    reader -> DONE       lease: its pages may go; to rank 0 of the keeper's engine alone

Where a library carries the bytes (transports/):

    reader -> STAGE      lease, part, keys, as READ
    keeper -> STAGED     generation, offset in its staging memory, pages, their CRC-32, and how its
                         library is reached; UNSTAGED with a sentence where it cannot
    reader -> CONFIRM    generation: once the bytes have come
    keeper -> CONFIRMED  1 where the window held these pages to this moment, else 0

A page is asked for by its key, the SHA-256 chain over all tokens before its end, so no page of
other tokens can come. A part is four numbers, the layers and the heads of a PagePart.

Links of an engine have a secret of their own, made from the one that all engines share and the
engine's id: the latter stays with rank 0, and other hosts' ranks are told the former.
"""

from __future__ import annotations

import hmac
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from rorqual.cache.page_parts import PagePart
from rorqual.parallel.remote import link
from rorqual.parallel.remote.link import Fingerprint, LinkError, LinkMessage

PURPOSE = "pages"
KEY = 32
LEASE = 32
MOST_KEYS = 256
PART = struct.Struct("!4I")
STAGED = struct.Struct("!QQII")
CONFIRM = struct.Struct("!Q")
PIECE = struct.Struct("!I")


class PageMessage(IntEnum):
    """Numbers below are those of LinkMessage."""

    READ = 5
    PAGE = 6
    DONE = 7
    COMING = 8
    STAGE = 9
    STAGED = 10
    UNSTAGED = 11
    CONFIRM = 12
    CONFIRMED = 13
    PIECE = 14


def engine_secret(secret: str, engine_id: str) -> bytes:
    """Of the links of one engine."""
    return hmac.digest(secret.encode(), b"pages of " + engine_id.encode(), "sha256")


def pack_read(lease: bytes, part: PagePart, keys: list[bytes]) -> bytes:
    return lease + PART.pack(*part.fields) + b"".join(keys)


def unpack_read(message: bytes) -> tuple[PagePart, list[bytes]]:
    """Of a READ, without its lease."""
    if len(message) < PART.size or (len(message) - PART.size) % KEY:
        raise LinkError("READ has half a key")
    part = PagePart(*PART.unpack_from(message))
    return part, [message[i : i + KEY] for i in range(PART.size, len(message), KEY)]


@dataclass(frozen=True)
class StagedAnswer:
    """`count` pages, at `offset` of the keeper's staging memory for as long as `generation` holds.
    check: their CRC-32; peer: how the keeper's library is reached."""

    generation: int
    offset: int
    count: int
    check: int
    peer: bytes


def unpack_staged(kind: PageMessage, message: bytes, asked: int) -> StagedAnswer:
    """Of a STAGED that answers for at most `asked` pages. Raises LinkError."""
    if kind is not PageMessage.STAGED or len(message) < STAGED.size:
        raise LinkError(f"{kind.name} of {len(message)} bytes came where pages were to be staged")
    generation, offset, count, check = STAGED.unpack_from(message)
    if count > asked:
        raise LinkError(f"{count} pages were staged where {asked} were asked for")
    return StagedAnswer(generation, offset, count, check, message[STAGED.size :])


def check_confirmed(answer: bytes) -> None:
    """Raises LinkError where pages that were read may not be what was asked for."""
    if answer not in (b"\0", b"\1"):
        raise LinkError(f"CONFIRMED of {len(answer)} bytes came; accepted: 0 or 1 in one byte")
    if answer == b"\0":
        raise LinkError("the pages were given up while they were read")


def receive_head(sock: socket.socket, most: int) -> tuple[PageMessage, int]:
    kind, size = link.receive_head(sock, most)
    if kind == LinkMessage.REFUSED and size <= link.GREETING:
        raise LinkError(link.receive_exactly(sock, size).decode(errors="replace"))
    try:
        return PageMessage(kind), size
    except ValueError:
        raise LinkError(f"a message of kind {kind} came") from None


def receive(sock: socket.socket, most: int) -> tuple[PageMessage, bytes]:
    kind, size = receive_head(sock, most)
    return kind, link.receive_exactly(sock, size)


def introduce(sock: socket.socket, secret: bytes, mine: Fingerprint) -> None:
    """The reader's part."""
    link.introduce(sock, secret, mine, PURPOSE)
