"""Serves leased pages to other engines: one thread listens, one a connection reads."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress

from rorqual.disagg.leases import Leases
from rorqual.disagg.page_link import (
    KEY,
    LEASE,
    MOST_KEYS,
    Fingerprint,
    LinkError,
    PageMessage,
    greet,
    receive,
    send,
)
from rorqual.disagg.page_memory import PageMemory
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.errors import ConfigError

log = logging.getLogger("rorqual.engine")
MOST_READERS = 32
GREETING_SECONDS = 5.0
PAUSE = 0.1
QUIET_SECONDS = 30.0  # between two messages of a reader, and for a message to leave


class PageServer:
    """`port`: where it listens. Raises ConfigError where it cannot."""

    def __init__(
        self, config: TransferConfig, leases: Leases, memory: PageMemory, fingerprint: Fingerprint
    ):
        self.leases = leases
        self.memory = memory
        self.secret = config.secret.encode()
        self.fingerprint = fingerprint
        self.sent = 0  # pages
        self.readers: set[socket.socket] = set()
        self.lock = threading.Lock()
        self.closing = False
        self.listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.listener.bind((config.host, config.port))
        except OSError as error:
            self.listener.close()
            raise ConfigError(
                f"cannot serve pages on {config.host}:{config.port}: {error.strerror}"
            ) from None
        self.listener.listen(MOST_READERS)
        self.host, self.port = self.listener.getsockname()
        threading.Thread(target=self._accept, name="pages", daemon=True).start()

    def close(self) -> None:
        self.closing = True
        _shut(self.listener)
        self.listener.close()
        with self.lock:
            for sock in self.readers:
                _shut(sock)

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
                full = len(self.readers) >= MOST_READERS
                if not full:
                    self.readers.add(sock)
            if full:
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="pages", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        """Within GREETING_SECONDS, however slowly its bytes come."""
        alarm = threading.Timer(GREETING_SECONDS, _shut, (sock,))
        alarm.daemon = True
        alarm.start()
        try:
            greet(sock, self.secret, self.fingerprint)
        finally:
            alarm.cancel()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(sock)
            sock.settimeout(QUIET_SECONDS)
            row = self.memory.rows(1)[0]
            data = row.numpy().data
            while True:
                kind, message = receive(sock, LEASE + KEY * MOST_KEYS)
                name = message[:LEASE]
                if kind is PageMessage.DONE:
                    self.leases.close(name)
                    continue
                if kind is not PageMessage.READ or (len(message) - LEASE) % KEY:
                    raise LinkError(f"{kind.name} came where pages are read")
                for start in range(LEASE, len(message), KEY):
                    key = message[start : start + KEY]
                    there = self.leases.read(name, key, lambda page: self.memory.read(page, row))
                    send(sock, PageMessage.PAGE, data if there else b"")
                    with self.lock:
                        self.sent += there
        except (LinkError, OSError) as error:
            if not (self.closing or "ended" in str(error)):
                log.warning("a reader of pages: %s", error)
        finally:
            with self.lock:
                self.readers.discard(sock)
            sock.close()


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
