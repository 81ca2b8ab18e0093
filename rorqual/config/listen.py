"""The socket that a server listens on. No torch."""

from __future__ import annotations

import socket

from rorqual.errors import ConfigError


def bound_socket(host: str, port: int, send_buffer: int | None = None) -> socket.socket:
    """Bound and not yet listening; call it before anything else is started, so that a port in use
    is reported at once. send_buffer: bytes of each connection's; None: the kernel's own choice.
    Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock
