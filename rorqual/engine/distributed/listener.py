"""Accepts the ranks of other hosts: rank 0 listens on one address until all are connected. No
torch."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from rorqual.engine.distributed.channel import Channel, FrameError, FrameKind
from rorqual.engine.distributed.handshake import (
    SECONDS,
    HandshakeError,
    PeerIdentity,
    answer,
    challenge,
    refuse,
)
from rorqual.errors import ConfigError, EngineError

log = logging.getLogger("rorqual.engine")

# unauthenticated connections; further ones are closed at once
MAX_PENDING = 64
MAX_LOGGED = 10  # refused connections that are logged
JOIN_SECONDS = 300.0  # for all ranks to connect
RETRY_SECONDS = 0.5


class Listener:
    """Rank 0's listener on `address`, an IPv4 address of this host. Raises ConfigError where it
    cannot listen there."""

    def __init__(self, address: str, world: int, secret: bytes):
        self.world = world
        self.secret = secret
        self.socket = listening(address, world + MAX_PENDING)
        self.address, self.port = self.socket.getsockname()
        self.joined: dict[int, tuple[Channel, PeerIdentity]] = {}
        self.lock = threading.Lock()
        self.pending = self.refused = 0

    def gather(
        self, check: Callable[[], None] = lambda: None
    ) -> dict[int, tuple[Channel, PeerIdentity]]:
        """Channels and identities by rank, once ranks 1 to world - 1 are connected. `check` is
        called repeatedly; its exceptions end the wait. Raises EngineError after JOIN_SECONDS."""
        deadline = time.monotonic() + JOIN_SECONDS
        self.socket.settimeout(0.1)
        while len(self.joined) < self.world - 1:
            check()
            if time.monotonic() > deadline:
                raise EngineError(self._missing())
            try:
                connection, peer = self.socket.accept()
            except TimeoutError:
                continue
            self._accept(connection, peer[0])
        return self.joined

    def _missing(self) -> str:
        missing = [rank for rank in range(1, self.world) if rank not in self.joined]
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return (
            f"rank 0 has waited {JOIN_SECONDS:.0f} s on {self.address}:{self.port} for "
            f"ranks {shown}; connections refused: {self.refused}"
        )

    def _accept(self, connection: socket.socket, peer: str) -> None:
        with self.lock:
            if self.pending >= MAX_PENDING:
                connection.close()
                return
            self.pending += 1
        threading.Thread(target=self._admit, args=(connection, peer), daemon=True).start()

    def _admit(self, connection: socket.socket, peer: str) -> None:
        channel = Channel(connection)
        try:
            identity, welcome = challenge(channel, self.secret)
            with self.lock:
                self._check(channel, identity)
                channel.send(FrameKind.WELCOME, welcome)
                self.joined[identity.rank] = (channel, identity)
        except (
            HandshakeError,
            FrameError,
            EOFError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ) as error:
            channel.close()
            self._log_refused(peer, error)
        finally:
            with self.lock:
                self.pending -= 1

    def _check(self, channel: Channel, identity: PeerIdentity) -> None:
        if identity.world != self.world:
            refuse(channel, f"it knows of {identity.world} ranks, the layout has {self.world}")
        if not 0 < identity.rank < self.world:
            refuse(
                channel,
                f"its rank {identity.rank} is out of range; accepted: 1 to {self.world - 1}",
            )
        if identity.rank in self.joined:
            refuse(
                channel,
                f"rank {identity.rank} is there already, from {self.joined[identity.rank][1].host}",
            )

    def _log_refused(self, peer: str, error: Exception) -> None:
        with self.lock:
            self.refused += 1
            if self.refused <= MAX_LOGGED:
                log.warning("a connection from %s was refused: %s", peer, error)

    def close(self) -> None:
        self.socket.close()


def listening(address: str, backlog: int, port: int = 0) -> socket.socket:
    """A socket that listens on one address; port 0 chooses a free one."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.bind((address, port))
        found.listen(backlog)
    except OSError as error:
        found.close()
        raise ConfigError(f"cannot listen on {address}:{port}: {error.strerror}") from None
    return found


def join(address: str, port: int, secret: bytes, identity: PeerIdentity) -> Channel:
    """Connect a worker to rank 0. Retries while nothing listens there or too many connections are
    pending; raises HandshakeError where refused, EngineError after JOIN_SECONDS."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            return _joined(address, port, secret, identity)
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"rank {identity.rank} cannot reach rank 0 at {address}:{port}: {error}"
                ) from None
            time.sleep(RETRY_SECONDS)


def _joined(address: str, port: int, secret: bytes, identity: PeerIdentity) -> Channel:
    channel = Channel(socket.create_connection((address, port), timeout=SECONDS))
    try:
        answer(channel, secret, identity)
    except BaseException:
        channel.close()
        raise
    return channel
