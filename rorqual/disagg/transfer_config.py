"""How an engine sends prompts' pages to other engines, and fetches theirs. No torch."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from dataclasses import dataclass

from rorqual.errors import ConfigError

ROLES = ("prefill", "decode", "both")
TRANSPORTS = ("tcp", "nixl", "mooncake", "handles")
ON_FAILURE = ("recompute", "fail")
MAX_STAGING_MB = 65_536
SHORTEST_SECRET = 16  # bytes
PEER_FORMS = "HOST, HOST:PORT or NETWORK/BITS"


@dataclass(frozen=True)
class TransferConfig:
    """role: prefill leases pages and serves them, decode fetches them, both does both. host, port:
    where pages are served, 0 for a free port; further ranks use the following ports. peers:
    addresses, in PEER_FORMS, that pages may be fetched from. secret: shared by all of them.
    lease_seconds: how long pages are kept for readers. on_failure: what happens to a request whose
    pages are not received. overlap: pages are sent while their prompt is still being computed,
    chunk by chunk; by_layer: layer by layer. transport: what carries the bytes of pages, one of
    TRANSPORTS, the same on both sides. staging_mb: MiB of staging memory of each rank, which peers
    read and reads go to: host memory, or with handles GPU memory."""

    role: str
    secret: str
    host: str = "127.0.0.1"
    port: int = 0
    peers: tuple[str, ...] = ("127.0.0.1",)
    lease_seconds: float = 30.0
    on_failure: str = "recompute"
    overlap: bool = False
    transport: str = "tcp"
    staging_mb: int = 256
    by_layer: bool = False

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role={self.role!r} is not known; accepted: {', '.join(ROLES)}")
        if self.on_failure not in ON_FAILURE:
            raise ConfigError(
                f"kv_load_failure={self.on_failure!r} is not known; accepted: "
                f"{', '.join(ON_FAILURE)}"
            )
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"kv_transport={self.transport!r} is not known; accepted: {', '.join(TRANSPORTS)}"
            )
        if not 32 <= self.staging_mb <= MAX_STAGING_MB:
            raise ConfigError(
                f"kv_staging_mb={self.staging_mb} is out of range; accepted: 32 to {MAX_STAGING_MB}"
            )
        if len(self.secret.encode()) < SHORTEST_SECRET:
            raise ConfigError(
                f"the secret of kv_secret_file has {len(self.secret.encode())} bytes; accepted: "
                f"at least {SHORTEST_SECRET}"
            )
        if not 1 <= self.lease_seconds <= 3600:
            raise ConfigError(
                f"kv_lease_seconds={self.lease_seconds} is out of range; accepted: 1 to 3600"
            )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"kv_port={self.port} is out of range; accepted: 0 to 65535")
        _private(self.host, "kv_host")
        for peer in self.peers:
            if "/" in peer:
                _private_network(peer)
                continue
            host, _, port = peer.partition(":")
            _private(host, "kv_peers")
            if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ConfigError(f"kv_peers={peer!r} is no address; accepted: {PEER_FORMS}")

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def from_json(data: bytes) -> TransferConfig:
        found = json.loads(data)
        return TransferConfig(**{**found, "peers": tuple(found["peers"])})

    @property
    def sends(self) -> bool:
        return self.role != "decode"

    @property
    def early(self) -> bool:
        """Whether prompts are answered before their first token."""
        return self.overlap or self.by_layer

    @property
    def fetches(self) -> bool:
        return self.role != "prefill"

    def allows(self, host: str, port: int) -> bool:
        """Whether pages may be fetched from there: requests name the address, and must not make
        this process connect to arbitrary ones."""
        try:
            address = ipaddress.IPv4Address(host)
        except ValueError:
            return False
        if host in self.peers or f"{host}:{port}" in self.peers:
            return True
        return any(address in ipaddress.IPv4Network(peer) for peer in self.peers if "/" in peer)


def _private_network(peer: str) -> None:
    try:
        network = ipaddress.IPv4Network(peer)
    except ValueError as error:
        raise ConfigError(f"kv_peers={peer!r}: {error}; accepted: {PEER_FORMS}") from None
    if not (network.is_loopback or network.is_private) or network.network_address.is_unspecified:
        raise ConfigError(f"kv_peers={peer!r} is public; accepted: a private network")


def _private(host: str, name: str) -> None:
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        raise ConfigError(f"{name}={host!r} is no IPv4 address") from None
    if not (address.is_loopback or address.is_private) or address.is_unspecified:
        raise ConfigError(
            f"{name}={host!r} is public; accepted: loopback, or an address of a private network"
        )
