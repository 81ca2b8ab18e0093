"""What a reader and a keeper of pages say to each other over TCP. No torch.

    keeper -> CHALLENGE  a: 32 random bytes
    reader -> HELLO      HMAC(secret, "reader" + a + rest), rest: b (32 random bytes) + fingerprint
    keeper -> WELCOME    HMAC(secret, "keeper" + a + b), or REFUSED with a sentence
    reader -> READ       lease (32 bytes), then keys (32 bytes each), at most MOST_KEYS
    keeper -> PAGE       for each key in order: the page's bytes, or nothing where it has it no more
    reader -> DONE       lease: its pages may go

Every message is a kind and a length (5 bytes), then its data. HMAC is that of SHA-256, compared in
constant time; nothing of a HELLO is looked at before its HMAC is right. What follows is neither
encrypted nor signed: both sides listen on loopback or on a private network.

The fingerprint is JSON: all that must be equal for one engine's pages to be the other's. A page is
asked for by its key, the SHA-256 chain over all tokens before its end, so no page of other tokens
can come.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from enum import IntEnum

from rorqual.errors import RorqualError

HEAD = struct.Struct("!BI")
NONCE = 32
DIGEST = 32
KEY = 32
LEASE = 32
GREETING = 16_384  # bytes: the largest message before the peer is known
MOST_KEYS = 256
SHOWN = 120  # characters of a value that differs


class PageMessage(IntEnum):
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    READ = 5
    PAGE = 6
    DONE = 7


class LinkError(RorqualError):
    """The other side is not who it should be, or does not keep to the protocol."""


Fingerprint = dict[str, str]


def send(sock: socket.socket, kind: PageMessage, data: bytes | memoryview = b"") -> None:
    sock.sendall(HEAD.pack(kind, len(data)))
    if len(data):
        sock.sendall(data)


def receive_head(sock: socket.socket, most: int) -> tuple[PageMessage, int]:
    kind, size = HEAD.unpack(_exactly(sock, HEAD.size))
    if size > most:
        raise LinkError(f"a message of {size} bytes came; accepted: at most {most}")
    try:
        return PageMessage(kind), size
    except ValueError:
        raise LinkError(f"a message of kind {kind} came") from None


def receive(sock: socket.socket, most: int) -> tuple[PageMessage, bytes]:
    kind, size = receive_head(sock, most)
    return kind, _exactly(sock, size)


def receive_into(sock: socket.socket, into: memoryview) -> None:
    while len(into):
        count = sock.recv_into(into)
        if not count:
            raise LinkError("the link ended in the midst of a message")
        into = into[count:]


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    receive_into(sock, memoryview(data))
    return bytes(data)


def greet(sock: socket.socket, secret: bytes, mine: Fingerprint) -> None:
    """The keeper's part. Raises LinkError, having told the reader."""
    nonce = secrets.token_bytes(NONCE)
    send(sock, PageMessage.CHALLENGE, nonce)
    kind, data = receive(sock, GREETING)
    digest, rest = data[:DIGEST], data[DIGEST:]
    if kind is not PageMessage.HELLO or not hmac.compare_digest(
        digest, _seal(secret, b"reader", nonce, rest)
    ):
        _refuse(sock, "the secrets differ")
    different = differences(mine, _fingerprint(rest[NONCE:]))
    if different:
        _refuse(sock, f"pages cannot be exchanged: {different}")
    send(sock, PageMessage.WELCOME, _seal(secret, b"keeper", nonce, rest[:NONCE]))


def introduce(sock: socket.socket, secret: bytes, mine: Fingerprint) -> None:
    """The reader's part."""
    kind, nonce = receive(sock, GREETING)
    if kind is not PageMessage.CHALLENGE or len(nonce) != NONCE:
        raise LinkError("what answers does not keep pages")
    own = secrets.token_bytes(NONCE)
    rest = own + json.dumps(mine, sort_keys=True).encode()
    send(sock, PageMessage.HELLO, _seal(secret, b"reader", nonce, rest) + rest)
    kind, data = receive(sock, GREETING)
    if kind is PageMessage.REFUSED:
        raise LinkError(data.decode(errors="replace"))
    if kind is not PageMessage.WELCOME or not hmac.compare_digest(
        data, _seal(secret, b"keeper", nonce, own)
    ):
        raise LinkError("what answers does not know the secret")


def differences(keeper: Fingerprint, reader: Fingerprint) -> str:
    """What keeps one side from reading the other's pages; nothing if they are alike."""
    found = [
        f"{name} is {_short(keeper.get(name))} at the keeper, {_short(reader.get(name))} here"
        for name in sorted({*keeper, *reader})
        if keeper.get(name) != reader.get(name)
    ]
    return "; ".join(found)


def _short(value: str | None) -> str:
    return repr(value if value is None or len(value) <= SHOWN else value[:SHOWN] + "...")


def _fingerprint(data: bytes) -> Fingerprint:
    try:
        found = json.loads(data)
    except ValueError:
        raise LinkError("a fingerprint that is no JSON came") from None
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise LinkError("a fingerprint that is no object of strings came")
    return found


def _refuse(sock: socket.socket, reason: str) -> None:
    send(sock, PageMessage.REFUSED, reason.encode()[:GREETING])
    raise LinkError(reason)


def _seal(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"rorqual pages 1 " + role + b"".join(parts), "sha256")
