"""How two processes of a deployment find out over TCP that they belong together. No torch.

    keeper -> CHALLENGE  a: 32 random bytes
    caller -> HELLO      HMAC(secret, "caller" + a + rest), rest: b (32 random bytes) + fingerprint
    keeper -> WELCOME    HMAC(secret, "keeper" + a + b), or REFUSED with a sentence

Every message is a kind and a length (5 bytes), then its data. HMAC is that of SHA-256 over the
purpose of the link as well, compared in constant time; nothing of a HELLO is looked at before its
HMAC is right. What follows is neither encrypted nor signed: both sides listen on loopback or on a
private network. The fingerprint is JSON: all that must be equal on both sides.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
import threading
from contextlib import suppress
from enum import IntEnum

from rorqual.errors import RorqualError

HEAD = struct.Struct("!BI")
NONCE = 32
DIGEST = 32
GREETING = 16_384  # bytes: the largest message before the peer is known
GREETING_SECONDS = 5.0
SHOWN = 120  # characters of a value that differs
SHORTEST_SECRET = 16  # bytes


class LinkMessage(IntEnum):
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4


class LinkError(RorqualError):
    """The other side is not who it should be, or does not keep to the protocol."""


class LinkRefused(LinkError):
    """The sides' secrets or fingerprints differ, which waiting does not change."""


Fingerprint = dict[str, str]


def send(sock: socket.socket, kind: int, data: bytes | memoryview = b"") -> None:
    sock.sendall(HEAD.pack(kind, len(data)))
    if len(data):
        sock.sendall(data)


def receive_head(sock: socket.socket, most: int) -> tuple[int, int]:
    """(kind, bytes of data). Raises LinkError above `most` bytes."""
    kind, size = HEAD.unpack(receive_exactly(sock, HEAD.size))
    if size > most:
        raise LinkError(f"a message of {size} bytes came; accepted: at most {most}")
    return kind, size


def receive(sock: socket.socket, most: int) -> tuple[int, bytes]:
    kind, size = receive_head(sock, most)
    return kind, receive_exactly(sock, size)


def receive_into(sock: socket.socket, into: memoryview) -> None:
    while len(into):
        count = sock.recv_into(into)
        if not count:
            raise LinkError("the link ended in the midst of a message")
        into = into[count:]


def readable(sock: socket.socket, seconds: float) -> bool:
    """Whether something has come within so many seconds, or the link has ended. For sockets of any
    number, where select takes those below 1,024."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1e3 * seconds))


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    receive_into(sock, memoryview(data))
    return bytes(data)


def greet(sock: socket.socket, secret: bytes, mine: Fingerprint, purpose: str) -> None:
    """The keeper's part, within GREETING_SECONDS, however slowly the caller's bytes come. Raises
    LinkError, having sent the caller the reason."""
    alarm = threading.Timer(GREETING_SECONDS, shut, (sock,))
    alarm.daemon = True
    alarm.start()
    try:
        _greet(sock, secret, mine, purpose)
    finally:
        alarm.cancel()


def _greet(sock: socket.socket, secret: bytes, mine: Fingerprint, purpose: str) -> None:
    nonce = secrets.token_bytes(NONCE)
    send(sock, LinkMessage.CHALLENGE, nonce)
    kind, data = receive(sock, GREETING)
    digest, rest = data[:DIGEST], data[DIGEST:]
    if kind != LinkMessage.HELLO or not hmac.compare_digest(
        digest, _seal(secret, purpose, b"caller", nonce, rest)
    ):
        _refuse(sock, "the secrets differ")
    different = differences(mine, _fingerprint(rest[NONCE:]))
    if different:
        _refuse(sock, f"{purpose} cannot be exchanged: {different}")
    send(sock, LinkMessage.WELCOME, _seal(secret, purpose, b"keeper", nonce, rest[:NONCE]))


def introduce(sock: socket.socket, secret: bytes, mine: Fingerprint, purpose: str) -> None:
    """The caller's part. The socket has a timeout."""
    kind, nonce = receive(sock, GREETING)
    if kind != LinkMessage.CHALLENGE or len(nonce) != NONCE:
        raise LinkError(f"what answers does not keep {purpose}")
    own = secrets.token_bytes(NONCE)
    rest = own + json.dumps(mine, sort_keys=True).encode()
    send(sock, LinkMessage.HELLO, _seal(secret, purpose, b"caller", nonce, rest) + rest)
    kind, data = receive(sock, GREETING)
    if kind == LinkMessage.REFUSED:
        raise LinkRefused(data.decode(errors="replace"))
    if kind != LinkMessage.WELCOME or not hmac.compare_digest(
        data, _seal(secret, purpose, b"keeper", nonce, own)
    ):
        raise LinkRefused("what answers does not know the secret")


def differences(keeper: Fingerprint, caller: Fingerprint) -> str:
    """What keeps the sides from working together; nothing if they are alike."""
    found = [
        f"{name} is {_short(keeper.get(name))} at the keeper, {_short(caller.get(name))} here"
        for name in sorted({*keeper, *caller})
        if keeper.get(name) != caller.get(name)
    ]
    return "; ".join(found)


def shut(sock: socket.socket) -> None:
    """Wakes threads that read from it or write to it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


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
    send(sock, LinkMessage.REFUSED, reason.encode()[:GREETING])
    raise LinkError(reason)


def _seal(secret: bytes, purpose: str, role: bytes, *parts: bytes) -> bytes:
    head = b"rorqual " + purpose.encode() + b" 1 " + role
    return hmac.digest(secret, head + b"".join(parts), "sha256")
