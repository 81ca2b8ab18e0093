"""What a reader and a keeper of pages say to each other over TCP, once each knows the other
(parallel/remote/link.py). No torch.

    reader -> READ       lease (32 bytes), then keys (32 bytes each), at most MOST_KEYS
    keeper -> PAGE       for each key in order: the page's bytes, or nothing where it has it no more
    reader -> DONE       lease: its pages may go

A page is asked for by its key, the SHA-256 chain over all tokens before its end, so no page of
other tokens can come.
"""

from __future__ import annotations

import socket
from enum import IntEnum

from rorqual.parallel.remote import link
from rorqual.parallel.remote.link import Fingerprint, LinkError

PURPOSE = "pages"
KEY = 32
LEASE = 32
MOST_KEYS = 256


class PageMessage(IntEnum):
    """Numbers below are those of LinkMessage."""

    READ = 5
    PAGE = 6
    DONE = 7


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
