"""Authenticates a new TCP connection: each side proves that it knows the secret without sending it.
No torch.

    rank 0 -> CHALLENGE   a: 32 random bytes
    worker -> ANSWER      HMAC(secret, "worker" + a + b + identity), b: 32 random bytes;
                          identity: PeerIdentity as JSON
    rank 0 -> WELCOME     HMAC(secret, "rank 0" + a + b + identity), or REFUSED with a sentence

HMAC is that of SHA-256 (RFC 2104), compared in constant time. Nothing in an ANSWER is used before
its HMAC is verified; no frame may be larger than FRAME bytes and no handshake longer than SECONDS.
What follows on the connection is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rorqual.engine.distributed.channel import LARGEST, Channel, FrameError, FrameKind
from rorqual.errors import EngineError

FRAME = 1024
SECONDS = 10.0
NONCE = 32
DIGEST = 32
MAX_HOST_LENGTH = 255


class HandshakeError(EngineError):
    """The peer does not know the secret, or is not an expected one."""


@dataclass(frozen=True)
class PeerIdentity:
    """A worker's claims: its rank, the world size it knows, its process and host."""

    rank: int
    world: int
    pid: int
    host: str

    def encode(self) -> bytes:
        return json.dumps({**asdict(self), "host": self.host[:MAX_HOST_LENGTH]}).encode()

    @staticmethod
    def decode(data: bytes) -> PeerIdentity:
        found = json.loads(data)
        host = "".join(letter for letter in str(found["host"]) if letter.isprintable())
        return PeerIdentity(int(found["rank"]), int(found["world"]), int(found["pid"]), host)


def seal(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"rorqual link 1 " + role + b"".join(parts), "sha256")


def challenge(channel: Channel, secret: bytes) -> tuple[PeerIdentity, bytes]:
    """Rank 0's part: returns the worker's identity and the WELCOME's data. Raises HandshakeError
    after sending REFUSED."""
    with hurried(channel):
        nonce = secrets.token_bytes(NONCE)
        channel.send(FrameKind.CHALLENGE, nonce)
        data = expect(channel, FrameKind.ANSWER)
        digest = data[:DIGEST]
        rest = data[DIGEST:]
        if not hmac.compare_digest(digest, seal(secret, b"worker", nonce, rest)):
            refuse(channel, "its secret is not that of rank 0")
        return PeerIdentity.decode(rest[NONCE:]), seal(secret, b"rank 0", nonce, rest)


def answer(channel: Channel, secret: bytes, identity: PeerIdentity) -> None:
    """The worker's part. Raises HandshakeError where rank 0 refuses or does not know the secret,
    EOFError where it disconnects."""
    with hurried(channel):
        nonce = expect(channel, FrameKind.CHALLENGE)
        rest = secrets.token_bytes(NONCE) + identity.encode()
        channel.send(FrameKind.ANSWER, seal(secret, b"worker", nonce, rest) + rest)
        if not hmac.compare_digest(
            expect(channel, FrameKind.WELCOME), seal(secret, b"rank 0", nonce, rest)
        ):
            raise HandshakeError("what listens at rank 0's address does not know the secret")


def refuse(channel: Channel, reason: str) -> None:
    channel.send(FrameKind.REFUSED, reason.encode())
    raise HandshakeError(reason)


def expect(channel: Channel, wanted: FrameKind) -> bytes:
    frame = channel.receive()
    if frame is None:
        raise EOFError(f"the link ended where {wanted.name} was to come")
    kind, data = frame
    if kind is FrameKind.REFUSED:
        raise HandshakeError(f"rank 0 refuses this rank: {data.decode(errors='replace')}")
    if kind is not wanted:
        raise FrameError(f"{kind.name} came instead of {wanted.name}")
    return data


@contextmanager
def hurried(channel: Channel) -> Iterator[None]:
    """Accept only small frames, and limit the whole handshake to SECONDS, however slowly bytes
    arrive."""
    channel.largest = FRAME
    alarm = threading.Timer(SECONDS, channel.shut)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
        channel.largest = LARGEST
