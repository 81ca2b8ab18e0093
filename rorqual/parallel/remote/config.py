"""How a process reaches experts in others. No torch."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from rorqual.errors import ConfigError
from rorqual.parallel.remote.link import SHORTEST_SECRET
from rorqual.registry.expert_registry import ExpertRegistry

MAX_SERVERS = 256
TRANSPORTS = ("auto", "tcp", "handles", "group")


@dataclass(frozen=True)
class RemoteConfig:
    """servers: HOST:PORT of each. timeout: seconds of silence after which a server is left out.
    wait: seconds that a step may wait for a server where none holds an expert. registry: where
    others are found. transport: of TRANSPORTS."""

    servers: tuple[tuple[str, int], ...]
    secret: bytes
    timeout: float = 2.0
    wait: float = 30.0
    registry: ExpertRegistry | None = None
    transport: str = "auto"


def read_address(text: str, name: str, least: int = 1) -> tuple[str, int]:
    """HOST:PORT of a private network. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and least <= int(port) < 65536):
        raise ConfigError(f"{name}={text!r} is no address; accepted: HOST:PORT")
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: {host!r} is no IPv4 address") from None
    if not (address.is_loopback or address.is_private) or address.is_unspecified:
        raise ConfigError(
            f"{name}={text!r} is public; accepted: loopback, or an address of a private network"
        )
    return host, int(port)


def read_link_secret(path: str | None, name: str) -> bytes:
    """From a file. Raises ConfigError."""
    if path is None:
        raise ConfigError(f"{name} is needed: a file with the secret that both sides know")
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{name}={path!r} cannot be read: {error.strerror}") from None
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"the secret of {name} has {len(secret)} bytes; accepted: at least {SHORTEST_SECRET}"
        )
    return secret
