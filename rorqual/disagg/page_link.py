"""The protocol between a reader and a server of pages over TCP, after authentication
(parallel/remote/link.py). No torch.

    reader -> READ       lease (32 bytes), part (16 bytes), keys (32 bytes each), at most MAX_KEYS
    server -> PAGE       for each key in order: the bytes of this part of the page; empty where it
                         is not leased any more
    server -> PIECE      in place of PAGEs, for a prompt sent layer by layer: a page's number among
                         the keys, and its next bytes; the pages in any order; no bytes for a page
                         that is not leased any more
    server -> COMING     before a PAGE, PIECE or STAGED, any number of times: it is still being
                         computed
    reader -> DONE       lease: its pages may be released; only to rank 0 of the server's engine

Where a library carries the bytes (transports/):

    reader -> STAGE      lease, part, keys, as READ
    server -> STAGED     generation, offset in its staging memory, pages, their CRC-32, and the
                         address of its library; UNSTAGED with a sentence where it cannot
    reader -> CONFIRM    generation: once the bytes have arrived
    server -> CONFIRMED  1 where the window still holds these pages, else 0

With handles a STAGED has the window's number in place of the CRC-32, and CONFIRM has no answer: the
reader has looked at the window's stamp (transports/window_stamps.py), and has done with it.

A page is requested by its key, the SHA-256 chain over all tokens before its end, so a page of other
tokens can never be sent. A part is four numbers, the layers and the heads of a PagePart.

Each engine's connections have their own secret, derived from the one that all engines share and the
engine's id: the shared secret stays on rank 0, and only the derived one is sent to other hosts'
ranks.
"""

from __future__ import annotations

import hmac
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from rorqual.cache.page_parts import PagePart
from rorqual.disagg.transports.interface import MAX_DESCRIPTION
from rorqual.parallel.remote import link
from rorqual.parallel.remote.link import Fingerprint, LinkError, LinkMessage

PURPOSE = "pages"
KEY = 32
LEASE = 32
MAX_KEYS = 256
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
    """The secret of one engine's connections."""
    return hmac.digest(secret.encode(), b"pages of " + engine_id.encode(), "sha256")


def pack_read(lease: bytes, part: PagePart, keys: list[bytes]) -> bytes:
    return lease + PART.pack(*part.fields) + b"".join(keys)


def unpack_read(message: bytes) -> tuple[PagePart, list[bytes]]:
    """The part and keys of a READ, without its lease."""
    if len(message) < PART.size or (len(message) - PART.size) % KEY:
        raise LinkError("READ has half a key")
    part = PagePart(*PART.unpack_from(message))
    return part, [message[i : i + KEY] for i in range(PART.size, len(message), KEY)]


@dataclass(frozen=True)
class StagedReply:
    """`count` pages, at `offset` of the server's staging memory while `generation` is valid. check:
    their CRC-32, or the window's number; peer: the address of the server's library."""

    generation: int
    offset: int
    count: int
    check: int
    peer: bytes


class NotStaged(LinkError):
    """The server staged none of the requested pages; earlier ones are valid."""


def receive_reply(sock: socket.socket) -> tuple[PageMessage, bytes]:
    """A message that may come after STAGE."""
    return receive(sock, STAGED.size + MAX_DESCRIPTION)


def unpack_staged(kind: PageMessage, message: bytes, asked: int) -> StagedReply:
    """The reply to a STAGE of `asked` pages; it has at least one of them. Raises NotStaged, and
    LinkError where it is no such reply."""
    if kind is PageMessage.UNSTAGED:
        reason = message.decode(errors="replace")
        raise NotStaged(f"the other engine cannot offer its pages: {reason}")
    if kind is not PageMessage.STAGED or len(message) < STAGED.size:
        raise LinkError(f"{kind.name} of {len(message)} bytes came where pages were to be staged")
    generation, offset, count, check = STAGED.unpack_from(message)
    if count > asked:
        raise LinkError(f"{count} pages were staged where {asked} were asked for")
    if not count:
        raise NotStaged("the pages are kept no more")
    return StagedReply(generation, offset, count, check, message[STAGED.size :])


def check_confirmed(answer: bytes) -> None:
    """Raises LinkError where the server did not confirm the pages that were read."""
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
