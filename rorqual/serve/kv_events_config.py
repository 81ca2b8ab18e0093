"""Where an engine publishes its prefix cache events. Needs nothing of the extra `serve`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from rorqual.errors import ConfigError


@dataclass(frozen=True)
class KVEventsConfig:
    """endpoint, replay: tcp://ADDRESS:PORT, on loopback or a private network; replay may be empty.
    Each further engine uses the next ports."""

    endpoint: str
    replay: str | None = None
    topic: str = ""

    def __post_init__(self) -> None:
        for name, address in (("kv_events", self.endpoint), ("kv_events_replay", self.replay)):
            if address is not None:
                _check(name, address)

    def of_engine(self, index: int) -> KVEventsConfig:
        replay = None if self.replay is None else _shifted(self.replay, index)
        return KVEventsConfig(_shifted(self.endpoint, index), replay, self.topic)


def _check(name: str, address: str) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        found = ipaddress.IPv4Address(host)
    except ValueError:
        found = None
    fits = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not address.startswith("tcp://") or found is None or not fits:
        raise ConfigError(f"{name}={address!r} is no address; accepted: tcp://ADDRESS:PORT")
    if not (found.is_loopback or found.is_private) or found.is_unspecified:
        raise ConfigError(
            f"{name}={address!r} is public; accepted: loopback, or an address of a private network"
        )


def _shifted(address: str, by: int) -> str:
    before, _, port = address.rpartition(":")
    return f"{before}:{int(port) + by}"
