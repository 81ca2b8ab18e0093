"""This host's IPv4 interfaces and addresses, for listening and for collectives. No torch."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from rorqual.errors import ConfigError

GET_ADDRESS = 0x8915  # SIOCGIFADDR, see netdevice(7): the address of an interface
DISCARD = 9  # nothing is sent to this port; connecting a datagram socket only looks up the route


def interfaces() -> dict[str, str]:
    """Name to address, of interfaces that have one."""
    return {
        name: address
        for _, name in socket.if_nameindex()
        if (address := _address(name)) is not None
    }


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(
                probe.fileno(), GET_ADDRESS, struct.pack("256s", interface.encode()[:15])
            )
        except OSError:
            return None
    return socket.inet_ntoa(found[20:24])


def named_address(name: str) -> str:
    """The address of an interface of this host, or such an address itself. Raises ConfigError for
    any other, in particular for the wildcard address."""
    known = interfaces()
    if name in known:
        return known[name]
    if name in known.values():
        return name
    there = ", ".join(f"{interface} ({address})" for interface, address in sorted(known.items()))
    raise ConfigError(
        f"interface={name!r} is neither an interface of this host nor its address; accepted: "
        f"{there}"
    )


def interface_of(address: str) -> str | None:
    """The interface with this address; loopback has all of 127.0.0.0/8."""
    return (
        "lo"
        if is_loopback(address)
        else next((name for name, found in interfaces().items() if found == address), None)
    )


def route_to(host: str) -> str:
    """This host's address on the route to `host`. Raises ConfigError where `host` is unknown or
    unreachable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, DISCARD))
        except OSError as error:
            raise ConfigError(
                f"no way leads to the host {host!r}: {error.strerror or error}"
            ) from None
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_public(address: str) -> bool:
    return ipaddress.ip_address(address).is_global
