"""Restricts sockets that a library listens on, on all addresses, to one address. No torch.

Mooncake cannot be told where to listen. A classic BPF filter on a listening socket sees the
connection requests; those not for the address are dropped, as if nothing listened. Attached before
any memory is registered. Linux.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from ipaddress import IPv4Address, ip_address

from rorqual.disagg.transports.interface import TransportError

SO_ATTACH_FILTER = 26
SO_LOCK_FILTER = 44
NETWORK_HEADER = -0x100000 & 0xFFFFFFFF  # offsets from here on are of the IP header
LOAD_BYTE = 0x30  # BPF_LD | BPF_B | BPF_ABS
LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
DESTINATION = 16  # of an IPv4 header


def bind_listeners(host: str) -> int:
    """Make every socket of this process that listens on all addresses accept connections to `host`,
    an IPv4 address, only. Returns their number. Raises TransportError where a filter cannot be
    attached."""
    bound = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # not a socket, or the folder's own descriptor
        with sock:
            if _listens_everywhere(sock):
                _attach(sock, host)
                bound += 1
    return bound


def _listens_everywhere(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return ip_address(sock.getsockname()[0]).is_unspecified


def _attach(sock: socket.socket, host: str) -> None:
    code = _program(int(IPv4Address(host)))
    buffer = ctypes.create_string_buffer(b"".join(code), 8 * len(code))
    # struct sock_fprog: a count and, after padding, a pointer to the instructions
    program = struct.pack("@HP", len(code), ctypes.addressof(buffer))
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        sock.setsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER, 1)
    except OSError as error:
        raise TransportError(f"a listener cannot be kept to {host}: {error.strerror}") from None


def _program(address: int) -> list[bytes]:
    """Accept IPv4 packets to `address`, drop all others."""
    steps = (
        (LOAD_BYTE, 0, 0, NETWORK_HEADER),
        (AND, 0, 0, 0xF0),
        (JUMP_EQUAL, 0, 3, 0x40),  # version 4, else drop
        (LOAD_WORD, 0, 0, NETWORK_HEADER + DESTINATION),
        (JUMP_EQUAL, 0, 1, address),
        (RETURN, 0, 0, 0xFFFFFFFF),
        (RETURN, 0, 0, 0),
    )
    return [struct.pack("@HBBI", *step) for step in steps]
