"""Pass file descriptors to another process of this host and user, over a Unix socket with a random
name in the abstract namespace, authorized by a token.

Name and token are sent over an authenticated link; whoever has the token may fetch the descriptors.
Names are not secret (/proc/net/unix lists them); tokens are sent nowhere else. Both ends check the
other's user with the kernel's credentials. A process in another network namespace cannot find the
name. Linux only.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

TOKEN = 16  # bytes
MAX_HOLDERS = 256  # open connections; beyond, the oldest is closed
MAX_DESCRIPTORS = 64  # per token; the kernel passes up to 253 at once
SECONDS = 2.0  # timeout for a message from the other side
PAUSE = 0.1  # seconds after a failed accept: descriptors may have run out
REQUEST = struct.Struct("!16sB")  # token, how many descriptors are expected
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
GIVEN = b"\1"
REFUSED = b"\0"


class HandleError(RuntimeError):
    """Descriptors could not be fetched."""


class DescriptorServer:
    """Serves descriptors on its own thread. `name`: of its socket, 32 hexadecimal digits. seconds:
    timeout for a peer's request. Raises OSError if the system has no such sockets."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds = seconds
        self.name = secrets.token_hex(16)
        self.offers: dict[bytes, tuple[int, ...]] = {}
        self.holding: list[tuple[bytes, socket.socket]] = []  # (token, connection) still open
        self.lock = threading.Lock()
        self.closed = False
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.sock.bind(_address(self.name))
            self.sock.listen(64)
        except OSError:
            self.sock.close()
            raise
        self.thread = threading.Thread(target=self._accept, name="descriptors", daemon=True)
        self.thread.start()

    def offer(self, descriptors: Sequence[int]) -> bytes:
        """A new token for these descriptors, valid any number of times until `withdraw`. Duplicates
        them; the caller keeps its own."""
        if not 0 < len(descriptors) <= MAX_DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} descriptors; accepted: 1 to {MAX_DESCRIPTORS}")
        token = secrets.token_bytes(TOKEN)
        kept: list[int] = []
        try:
            for fd in descriptors:
                kept.append(os.dup(fd))
        except OSError:
            _close_all(kept)
            raise
        with self.lock:
            self.offers[token] = tuple(kept)
        return token

    def withdraw(self, token: bytes) -> None:
        """Invalidate the token. Processes that fetched the descriptors keep them, and their
        connections are closed."""
        with self.lock:
            _close_all(self.offers.pop(token, ()))
            for given, peer in self.holding:
                if given == token:
                    peer.close()
            self.holding = [found for found in self.holding if found[0] != token]

    def end(self) -> None:
        """The thread ends, and gives nothing away any more. Takes no lock, so also where it is the
        collector that calls."""
        self.closed = True
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def close(self) -> None:
        self.end()
        self.thread.join(2 * self.seconds)
        self.sock.close()
        for token in list(self.offers):
            self.withdraw(token)

    def _accept(self) -> None:
        while not self.closed:
            try:
                peer, _ = self.sock.accept()
            except OSError:
                if not self.closed:
                    time.sleep(PAUSE)
                continue
            # one peer at a time, each with a timeout
            kept = False
            with suppress(OSError, struct.error):
                peer.settimeout(self.seconds)
                kept = _is_ours(peer) and self._answer(peer)
            if not kept:
                peer.close()

    def _answer(self, peer: socket.socket) -> bool:
        """Whether the peer got descriptors."""
        token, count = REQUEST.unpack(peer.recv(REQUEST.size + 1))
        with self.lock:
            self._forget_who_left()
            found: tuple[int, ...] = ()
            for known, descriptors in self.offers.items():
                if hmac.compare_digest(known, token):
                    found = descriptors
            if not found or len(found) != count:
                peer.send(REFUSED)
                return False
            socket.send_fds(peer, [GIVEN], found)
            self.holding.append((token, peer))
            return True

    def _forget_who_left(self) -> None:
        there = []
        for token, peer in self.holding:
            if _has_hung_up(peer):
                peer.close()
            else:
                there.append((token, peer))
        if len(there) >= MAX_HOLDERS:
            there.pop(0)[1].close()
        self.holding = there


def fetch_descriptors(name: str, token: bytes, count: int, seconds: float = SECONDS) -> list[int]:
    """`fetch_and_hold` without the connection."""
    found, link = fetch_and_hold(name, token, count, seconds)
    link.close()
    return found


def fetch_and_hold(
    name: str, token: bytes, count: int, seconds: float = SECONDS
) -> tuple[list[int], socket.socket]:
    """Fetch the descriptors for `token` from the server `name`. Returns them, for the caller to
    close, and a connection without further data, which is closed when the server exits or withdraws
    the token. Raises HandleError, within about twice `seconds`, if the server refuses, does not
    exist, or belongs to another user."""
    if len(token) != TOKEN or not 0 < count <= MAX_DESCRIPTORS:
        raise HandleError(
            f"a token of {len(token)} bytes for {count} descriptors; accepted: {TOKEN} bytes, 1 to "
            f"{MAX_DESCRIPTORS}"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(seconds)
        try:
            sock.connect(_address(name))
            if not _is_ours(sock):
                raise HandleError("the socket is another user's")
            sock.send(REQUEST.pack(token, count))
            answer, found, _, _ = socket.recv_fds(sock, 2, count)
        except (OSError, ValueError) as error:
            raise HandleError(f"no descriptors from {name!r}: {error}") from error
        if answer != GIVEN or len(found) != count:
            _close_all(found)
            raise HandleError(f"{name!r} refused, or gave {len(found)} of {count} descriptors")
    except HandleError:
        sock.close()
        raise
    for fd in found:
        os.set_inheritable(fd, False)  # recv_fds leaves them inheritable
    sock.settimeout(None)
    return found, sock


def _address(name: str) -> str:
    if len(name) != 32 or not set(name) <= set("0123456789abcdef"):
        raise ValueError("the name of a socket has 32 hexadecimal digits")
    return f"\0rorqual-{name}"


def _is_ours(sock: socket.socket) -> bool:
    """Whether the other end is a process of this user, or of root."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(data)
    return user in (0, os.geteuid())


def _has_hung_up(peer: socket.socket) -> bool:
    try:
        return not peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)
