"""Listens for links: one thread accepts, one a link serves it. No torch."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from rorqual.errors import ConfigError
from rorqual.parallel.remote.link import Fingerprint, LinkError, greet, shut

log = logging.getLogger("rorqual.engine")
PAUSE = 0.1


class LinkServer:
    """`serve(sock)` runs on a thread of each link that was greeted, and ends it by returning or by
    LinkError or OSError. `port`: where it listens; 0 takes a free one. most: links at once; more
    are closed at once. Raises ConfigError where it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        fingerprint: Fingerprint,
        purpose: str,
        serve: Callable[[socket.socket], None],
        most: int,
    ):
        self.secret = secret
        self.fingerprint = fingerprint
        self.purpose = purpose
        self.serve = serve
        self.most = most
        self.links: set[socket.socket] = set()
        self.lock = threading.Lock()
        self.closing = False
        self.listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.listener.bind((host, port))
        except OSError as error:
            self.listener.close()
            raise ConfigError(
                f"cannot serve {purpose} on {host}:{port}: {error.strerror}"
            ) from None
        self.listener.listen(most)
        self.host, self.port = self.listener.getsockname()
        threading.Thread(target=self._accept, name=purpose, daemon=True).start()

    def close(self) -> None:
        self.closing = True
        shut(self.listener)
        self.listener.close()
        with self.lock:
            for sock in self.links:
                shut(sock)

    def _accept(self) -> None:
        while not self.closing:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                if self.closing:
                    return
                time.sleep(PAUSE)  # no open file is left, say
                continue
            with self.lock:
                # one that is accepted while the server is closed would be served on
                refused = self.closing or len(self.links) >= self.most
                if not refused:
                    self.links.add(sock)
            if refused:
                sock.close()
                continue
            threading.Thread(
                target=self._serve, args=(sock,), name=self.purpose, daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet(sock, self.secret, self.fingerprint, self.purpose)
            self.serve(sock)
        except (LinkError, OSError) as error:
            reason = str(error)  # who keeps a record is not to keep the frames, and their memory
            if not (self.closing or "ended" in reason):
                log.warning("a caller of %s: %s", self.purpose, reason)
        finally:
            with self.lock:
                self.links.discard(sock)
            sock.close()
