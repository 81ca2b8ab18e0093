"""Addresses: of etcd, and of servers that are looked up there."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from rorqual.errors import ConfigError

SCHEME = "etcd://"
PREFIX = "/rorqual/servers"
FORM = "etcd://HOST:PORT, more of them with commas between, and a path for keys of its own"


@dataclass(frozen=True)
class EtcdAddress:
    """bases: URLs of members of one cluster. prefix: of keys, with a slash at its end."""

    bases: tuple[str, ...]
    prefix: str


def etcd_address(given: str, prefix: str = PREFIX) -> EtcdAddress:
    """prefix: of keys, where the address names no path. Raises ConfigError. Hosts are names, or
    loopback or private addresses: what is said to etcd is not encrypted."""
    if not given.startswith(SCHEME):
        raise ConfigError(f"{given!r} is no address of etcd; accepted: {FORM}")
    hosts, _, path = given[len(SCHEME) :].partition("/")
    bases = tuple(_base(host, given) for host in hosts.split(","))
    path = "/" + path.strip("/") if path.strip("/") else prefix
    if not path.isascii() or not path.isprintable() or " " in path:
        raise ConfigError(f"{given!r}: its path is no prefix of keys; accepted: printable ASCII")
    return EtcdAddress(bases, path + "/")


def router_address(given: str) -> str:
    """URL of a router that is asked for servers, without a slash at its end. Raises ConfigError."""
    found = given.rstrip("/")
    try:
        parts = urlsplit(found)
        known = bool(parts.hostname) and parts.port != 0 and not (parts.path or parts.query)
        known = known and parts.scheme in ("http", "https") and "@" not in parts.netloc
    except ValueError:
        known = False
    if not known:
        raise ConfigError(f"{given!r} is no address; accepted: http://HOST:PORT, or {FORM}")
    if parts.scheme == "http" and not is_private(parts.hostname or ""):
        raise ConfigError(f"{given!r} is public; accepted: private addresses, names, or https://")
    return found


def _base(host: str, given: str) -> str:
    try:
        parts = urlsplit(f"http://{host}")
        known = bool(parts.hostname) and bool(parts.port) and parts.netloc == host
    except ValueError:
        known = False
    if not known or "@" in host:
        raise ConfigError(f"{given!r} is no address of etcd; accepted: {FORM}")
    if not is_private(parts.hostname or ""):
        raise ConfigError(f"{given!r} is public; accepted: loopback or private addresses, names")
    return f"http://{host}"


def is_private(host: str) -> bool:
    """A name, or an address of loopback or of a private network."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True
    return (address.is_loopback or address.is_private) and not address.is_unspecified
