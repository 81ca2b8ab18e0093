"""What a reader and a keeper of pages say to each other over TCP, once each knows the other
(parallel/remote/link.py). No torch.

    reader -> READ       lease (32 bytes), then keys (32 bytes each), at most MOST_KEYS
    keeper -> PAGE       for each key in order: the page's bytes, or nothing where it has it no more
    reader -> DONE       lease: its pages may go

Where a library carries the bytes (transports/):

    reader -> STAGE      lease, then keys, as READ
    keeper -> STAGED     generation, offset in its staging memory, pages, their CRC-32, and how its
                         library is reached; UNSTAGED with a sentence where it cannot
    reader -> CONFIRM    generation: once the bytes have come
    keeper -> CONFIRMED  1 where the window held these pages to this moment, else 0

A page is asked for by its key, the SHA-256 chain over all tokens before its end, so no page of
other tokens can come.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum

from rorqual.parallel.remote import link
from rorqual.parallel.remote.link import Fingerprint, LinkError

PURPOSE = "pages"
KEY = 32
LEASE = 32
MOST_KEYS = 256
STAGED = struct.Struct("!QQII")
CONFIRM = struct.Struct("!Q")


class PageMessage(IntEnum):
    """Numbers below are those of LinkMessage."""

    READ = 5
    PAGE = 6
    DONE = 7
    STAGE = 8
    STAGED = 9
    UNSTAGED = 10
    CONFIRM = 11
    CONFIRMED = 12


def receive_head(sock: socket.socket, most: int) -> tuple[PageMessage, int]:
    kind, size = link.receive_head(sock, most)
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
