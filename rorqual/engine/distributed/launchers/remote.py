"""Base of launchers over several hosts: rank 0 listens on one address and accepts peers that know
the secret."""

from __future__ import annotations

import secrets

from rorqual.config.model import shared_secret
from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.channel import Channel
from rorqual.engine.distributed.handshake import PeerIdentity
from rorqual.engine.distributed.launchers.base import Launcher
from rorqual.engine.distributed.listener import Listener
from rorqual.engine.distributed.network import interface_of, is_public, named_address, route_to
from rorqual.engine.distributed.rendezvous import RendezvousStore
from rorqual.engine.distributed.worker_handle import ConnectedWorker
from rorqual.errors import ConfigError


class RemoteLauncher(Launcher):
    """Subclasses name a peer host, send the others rank 0's address, and watch their start."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.shared = shared_secret(config.secret_file)
        self.address = own_address(config.interface, self._peer)
        self.interface = interface_to(config.interface, self.address)

    def start(self) -> list[ConnectedWorker]:
        secret = self.shared or secrets.token_hex(32).encode()
        listener = Listener(self.address, self.world, secret)
        try:
            self.rendezvous_store = RendezvousStore(self.address, self.world)
            self.rendezvous = self.rendezvous_store.rendezvous
            self._announce(listener.port, None if self.shared else secret)
            found = listener.gather(self._check)
        except BaseException:
            for channel, _ in list(listener.joined.values()):
                channel.close()
            raise
        finally:
            listener.close()
        return [self._joined(rank, *found[rank]) for rank in range(1, self.world)]

    def _joined(self, rank: int, channel: Channel, identity: PeerIdentity) -> ConnectedWorker:
        return ConnectedWorker(channel, identity.pid, host=f"{identity.host} ({channel.peer})")

    @property
    def _peer(self) -> str:
        """A host from which the listening address must be reachable; by default the route to it
        chooses that address."""
        raise AssertionError("launchers over several hosts know one")

    def _announce(self, port: int, secret: bytes | None) -> None:
        """Start the other ranks, or send them rank 0's address. `secret` is None where all hosts
        are configured with one."""
        raise AssertionError("launchers over several hosts say how the others learn of rank 0")

    def _check(self) -> None:
        """Called while rank 0 waits for the others; raises when they have failed."""


def own_address(named: str | None, peer: str) -> str:
    """The address rank 0 listens on: the configured one, else this host's address on the route to
    `peer`. Raises ConfigError for a public address that was not configured."""
    if named is not None:
        return named_address(named)
    found = route_to(peer)
    if is_public(found):
        raise ConfigError(
            f"the way to {peer} leaves from {found}, a public address; name an interface of "
            "a private network (interface)"
        )
    return found


def interface_to(named: str | None, address: str) -> str:
    """The network interface for collectives: the one with an address of this host. Raises
    ConfigError where none has it."""
    found = interface_of(address if named is None else named_address(named))
    if found is None:
        raise ConfigError(f"no interface has {address} as its first address; name one (interface)")
    return found
