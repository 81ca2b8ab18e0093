"""Serves leased pages to other engines."""

from __future__ import annotations

import socket
import threading

from rorqual.cache.page_memory import PageMemory
from rorqual.disagg.leases import Leases
from rorqual.disagg.page_link import KEY, LEASE, MOST_KEYS, PURPOSE, PageMessage, receive
from rorqual.disagg.staged_server import StagedLink, StagedPages, check_confirm
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.parallel.remote.link import Fingerprint, LinkError, send
from rorqual.parallel.remote.link_server import LinkServer

MOST_READERS = 32
QUIET_SECONDS = 30.0  # between two messages of a reader, and for a message to leave


class PageServer:
    """`host`, `port`: where it listens. staged: where a library carries the bytes; else they go by
    the link itself. Raises ConfigError where it cannot listen."""

    def __init__(
        self,
        config: TransferConfig,
        leases: Leases,
        memory: PageMemory,
        fingerprint: Fingerprint,
        staged: StagedPages | None = None,
    ):
        self.staged = staged
        self.leases = leases
        self.memory = memory
        self.sent = 0  # pages
        self.lock = threading.Lock()
        secret = config.secret.encode()
        self.server = LinkServer(
            config.host, config.port, secret, fingerprint, PURPOSE, self._serve, MOST_READERS
        )
        self.host = self.server.host
        self.port = self.server.port

    def close(self) -> None:
        self.server.close()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(QUIET_SECONDS)
        if self.staged is not None:
            self._serve_staged(sock, self.staged)
            return
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

    def _serve_staged(self, sock: socket.socket, staged: StagedPages) -> None:
        link = StagedLink(staged)
        try:
            while True:
                kind, message = receive(sock, LEASE + KEY * MOST_KEYS)
                if kind is PageMessage.DONE:
                    self.leases.close(message)
                elif kind is PageMessage.CONFIRM:
                    check_confirm(message)
                    count = link.confirm(sock, message)
                    with self.lock:
                        self.sent += count
                elif kind is PageMessage.STAGE and not (len(message) - LEASE) % KEY:
                    name, keys = message[:LEASE], range(LEASE, len(message), KEY)
                    link.stage(sock, name, [message[start : start + KEY] for start in keys])
                else:
                    raise LinkError(f"{kind.name} came where pages are staged")
        finally:
            link.close()
