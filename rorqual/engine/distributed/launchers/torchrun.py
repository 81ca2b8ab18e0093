"""Ranks started by torchrun, or by anything that sets the same variables: RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT.

The process of rank 0 runs the command; every other calls `take_part` and ends with rank 0. They
exchange data once through the TCPStore at MASTER_ADDR: rank 0 publishes its listener's address
there and, where none is configured, a random secret. One engine a run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rorqual.config.model import shared_secret, torchrun_variables
from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.launchers.remote import RemoteLauncher
from rorqual.engine.distributed.listener import listening
from rorqual.engine.distributed.network import is_loopback, route_to
from rorqual.engine.distributed.rendezvous import START_SECONDS
from rorqual.engine.distributed.worker_process import connected, serve
from rorqual.errors import ConfigError, EngineError

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# keys in the store
ENGINES = "engines"
WHERE = "where"


@dataclass(frozen=True)
class TorchrunPlace:
    """torchrun's variables of a process. agent: torchrun itself runs the store; else rank 0 does.
    attempt: how often ranks were restarted."""

    rank: int
    world: int
    local_rank: int
    host: str
    port: int
    agent: bool
    attempt: str

    @staticmethod
    def read() -> TorchrunPlace:
        """Raises ConfigError where this process was not started by torchrun."""
        found = torchrun_variables()
        missing = [name for name in NEEDED if name not in found]
        if missing:
            raise ConfigError(
                "launcher='torchrun' needs the variables that torchrun sets; missing: "
                f"{', '.join(missing)}"
            )
        try:
            numbers = [
                int(found[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
            ]
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be integers: {error}"
            ) from None
        rank, world, local, port = numbers
        agent = found.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
        return TorchrunPlace(
            rank,
            world,
            local,
            found["MASTER_ADDR"],
            port,
            agent,
            found.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    def check(self, config: EngineConfig) -> None:
        """Called on every rank, so that all fail with the same message."""
        if config.parallel.world != self.world:
            sizes = f"tp={config.tp} x dp={config.dp} x pp={config.pp}"
            raise ConfigError(
                f"{sizes} needs {config.parallel.world} ranks, torchrun has started {self.world}"
            )

    def store(self) -> dist.Store:
        """Raises EngineError where there is none at MASTER_ADDR."""
        patience: dict[str, Any] = {"timeout": timedelta(seconds=START_SECONDS)}
        try:
            if self.agent or self.rank:
                whole: dist.Store = dist.TCPStore(self.host, self.port, is_master=False, **patience)
            else:
                door = listening(route_to(self.host), self.world, self.port)
                whole = dist.TCPStore(
                    self.host,
                    self.port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=door.detach(),
                    **patience,
                )
        except dist.DistError as error:
            raise EngineError(
                f"rank {self.rank} cannot reach the store at {self.host}:{self.port}: "
                f"{_first_line(error)}"
            ) from None
        return dist.PrefixStore(f"rorqual/{self.attempt}", whole)


class TorchrunLauncher(RemoteLauncher):
    """Rank 0's side."""

    def __init__(self, config: EngineConfig):
        self.place = TorchrunPlace.read()
        self.place.check(config)
        if self.place.rank:
            raise ConfigError(
                f"this process is rank {self.place.rank} of torchrun's; accepted: 0 (other "
                "ranks call take_part)"
            )
        self.store = self.place.store()
        if self.store.add(ENGINES, 1) > 1:
            raise ConfigError(
                "launcher='torchrun': the ranks are started once, for one engine; this is "
                "the second"
            )
        super().__init__(config)

    @property
    def _peer(self) -> str:
        return self.place.host

    def device_index(self) -> int:
        return self.config.first_device + self.place.local_rank

    def _announce(self, port: int, secret: bytes | None) -> None:
        self.store.set(WHERE, json.dumps([self.address, port, secret.decode() if secret else None]))


def take_part(config: EngineConfig, model: str | None = None) -> int | None:
    """Returns None in rank 0's process. Any other runs as a rank of rank 0's engine until that
    ends; returns its exit status.

    config: of this process's own command; sizes must match torchrun's, `interface` and
    `secret_file` are this host's, all else comes from rank 0. model: as named in the command; each
    host finds or downloads it itself."""
    place = TorchrunPlace.read()
    place.check(config)
    if not place.rank:
        return None
    address, port, published = _where(place)
    own = shared_secret(config.secret_file)
    if own is not None and published is not None:
        raise ConfigError(
            f"rank {place.rank} was given a secret, rank 0 was not; accepted: all hosts or none"
        )
    secret = own or (published.encode() if published else None)
    if secret is None:
        raise ConfigError(
            f"rank 0 was given a secret, rank {place.rank} was not: set RORQUAL_SECRET or "
            "secret_file on every host"
        )
    channel, interface = connected(
        address, port, secret, (place.rank, place.world), config.interface
    )
    return serve(channel, interface, config.first_device + place.local_rank, model)


def _where(place: TorchrunPlace) -> tuple[str, int, str | None]:
    store = place.store()
    try:
        store.wait([WHERE], timedelta(seconds=START_SECONDS))
        address, port, secret = json.loads(store.get(WHERE))
    except dist.DistError as error:
        raise EngineError(
            f"rank {place.rank}: rank 0 has not come, or has gone: {_first_line(error)}"
        ) from None
    if is_loopback(address) and not is_loopback(route_to(place.host)):
        raise ConfigError(
            f"rank 0 listens on {address}, out of reach for rank {place.rank}; name its "
            "network interface (interface)"
        )
    return address, port, secret


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
