"""Serves this rank's part of leased pages to ranks of other engines."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.page_parts import PagePart
from rorqual.cache.written_layers import Mark
from rorqual.disagg.handle_server import HandlePages, HandlePagesLink
from rorqual.disagg.leases import Found, LeaseTable
from rorqual.disagg.page_link import (
    KEY,
    LEASE,
    MAX_KEYS,
    PART,
    PIECE,
    PURPOSE,
    PageMessage,
    receive,
    unpack_read,
)
from rorqual.disagg.staged_server import StagedPages, check_confirm
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.parallel.remote.link import HEAD, Fingerprint, LinkError, LinkMessage, send
from rorqual.parallel.remote.link_server import LinkServer

MAX_READERS = 128  # every rank of a decode engine connects several times at once
QUIET_SECONDS = 30.0  # between two messages of a reader, and to send a message
BATCH_BYTES = 2**20  # of pages that are copied together, and sent in one call
RENEW_SHARE = 0.2  # of a lease's time: a longer read renews the lease this often


class ReadEvents(Protocol):
    """Called on threads: while a lease is read, with the pages and bytes sent since the last call;
    and when its reader has finished."""

    def reading(self, lease: bytes, pages: int, size: int) -> None: ...

    def done(self, lease: bytes) -> None: ...


class PageServer:
    """`host`, `port`: where it listens. staged: where a transport other than the connection itself
    carries the bytes. Raises ConfigError where it cannot listen."""

    def __init__(
        self,
        config: TransferConfig,
        secret: bytes,
        leases: LeaseTable,
        memory: PageMemory,
        fingerprint: Fingerprint,
        events: ReadEvents,
        staged: StagedPages | HandlePages | None = None,
    ):
        """secret: of the connections to this engine."""
        self.staged = staged
        self.leases = leases
        self.memory = memory
        self.events = events
        self.renew_seconds = RENEW_SHARE * config.lease_seconds
        self.server = LinkServer(
            config.host, config.port, secret, fingerprint, PURPOSE, self._serve, MAX_READERS
        )
        self.host = self.server.host
        self.port = self.server.port

    def close(self) -> None:
        self.server.close()
        if isinstance(self.staged, HandlePages):
            self.staged.close()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(QUIET_SECONDS)
        if self.staged is not None:
            self._serve_staged(sock, self.staged)
            return
        row = self.memory.rows(1)[0]
        while True:
            kind, message = receive(sock, LEASE + PART.size + KEY * MAX_KEYS)
            if kind not in (PageMessage.READ, PageMessage.DONE) or len(message) < LEASE:
                raise LinkError(f"{kind.name} of {len(message)} bytes came where pages are read")
            name = message[:LEASE]
            if kind is PageMessage.DONE:
                self.events.done(name)
                continue
            part, keys = self._asked(sock, message)
            own = row[: self.memory.part_size(part)]
            send_all = self._send_pieces if self.leases.is_by_layer(name) else self._send_pages
            send_all(sock, own, name, part, keys)

    def _asked(self, sock: socket.socket, message: bytes) -> tuple[PagePart, list[bytes]]:
        part, keys = unpack_read(message[LEASE:])
        if not self.memory.held.covers(part):
            reason = f"{part} is not on this rank, which has {self.memory.held}"
            send(sock, LinkMessage.REFUSED, reason.encode())
            raise LinkError(reason)
        return part, keys

    def _serve_staged(self, sock: socket.socket, staged: StagedPages | HandlePages) -> None:
        link = staged.link()
        try:
            while True:
                if isinstance(link, HandlePagesLink):
                    link.await_message(sock)
                kind, message = receive(sock, LEASE + PART.size + KEY * MAX_KEYS)
                name = message[:LEASE]
                if kind is PageMessage.DONE:
                    self.events.done(name)
                elif kind is PageMessage.CONFIRM:
                    check_confirm(message)
                    count = link.confirm(sock, message)
                    if count:
                        self.events.reading(link.lease, count, count * link.size)
                elif kind is PageMessage.STAGE and len(message) >= LEASE:
                    part, keys = self._asked(sock, message)
                    self.events.reading(name, 0, 0)
                    link.stage(sock, name, part, keys)
                else:
                    raise LinkError(f"{kind.name} came where pages are staged")
        finally:
            link.close()

    def _send_pages(
        self, sock: socket.socket, row: Tensor, lease: bytes, part: PagePart, keys: list[bytes]
    ) -> None:
        batch = self._batch(row.numel()) if self.memory.reads_together else None
        renewed = 0.0
        sent = 0
        done = 0
        while done < len(keys):
            data, count = self._next_pages(sock, row, batch, lease, part, keys[done:])
            now = time.monotonic()
            if count and now - renewed > self.renew_seconds:
                self.events.reading(lease, sent, sent * row.numel())
                renewed = now
                sent = 0
            sock.sendall(data)
            sent += count
            done += max(1, count)
        if sent:
            self.events.reading(lease, sent, sent * row.numel())

    @staticmethod
    def _batch(size: int) -> Tensor:
        """For some PAGE messages [n, bytes], with their heads."""
        count = min(MAX_KEYS, max(1, BATCH_BYTES // (HEAD.size + size)))
        batch = torch.empty(count, HEAD.size + size, dtype=torch.uint8)
        head = bytearray(HEAD.pack(PageMessage.PAGE, size))
        batch[:, : HEAD.size] = torch.frombuffer(head, dtype=torch.uint8)
        return batch

    def _next_pages(
        self,
        sock: socket.socket,
        row: Tensor,
        batch: Tensor | None,
        lease: bytes,
        part: PagePart,
        keys: list[bytes],
    ) -> tuple[memoryview | bytes, int]:
        """The messages of the next pages, and of how many: 0 where the next one is gone. Waits
        while the first is computed."""
        if batch is not None:

            def copy(places: list[tuple[int, Mark | None]]) -> None:
                self.memory.read_together(places, batch[: len(places), HEAD.size :], part)

            count = self.leases.read_together(lease, keys[: len(batch)], copy)
            if count:
                return batch[:count].view(-1).numpy().data, count
        there = self._read(sock, lease, keys[0], partial(self._copy, row, part))
        data = bytes(row.numpy().data) if there else b""
        return HEAD.pack(PageMessage.PAGE, len(data)) + data, int(there)

    def _send_pieces(
        self, sock: socket.socket, row: Tensor, lease: bytes, part: PagePart, keys: list[bytes]
    ) -> None:
        """Send the written layers of all pages as soon as they are written."""
        offset = self.memory.held.first_layer
        last = part.last_layer - offset
        sent = [part.first_layer - offset] * len(keys)
        size = 0

        def copy(number: int, page: int, layers: int, after: Mark | None = None) -> None:
            nonlocal size
            some = replace(part, first_layer=sent[number] + offset, last_layer=layers + offset)
            size = self.memory.part_size(some)
            self.memory.read(page, row[:size], some, after)
            sent[number] = layers

        renewed = 0.0
        pages = size_sent = 0
        while min(sent, default=last) < last:
            found, number = self.leases.read_more(lease, keys, sent, last, copy)
            if found is Found.COMING:
                send(sock, PageMessage.COMING)
                continue
            head = PIECE.pack(number)
            if found is Found.GONE:
                send(sock, PageMessage.PIECE, head)
                break
            send(sock, PageMessage.PIECE, head + bytes(row[:size].numpy().data))
            size_sent += size
            pages += sent[number] == last
            now = time.monotonic()
            if now - renewed > self.renew_seconds:
                self.events.reading(lease, pages, size_sent)
                renewed = now
                pages = size_sent = 0
        if size_sent:
            self.events.reading(lease, pages, size_sent)

    def _copy(self, row: Tensor, part: PagePart, page: int, after: Mark | None = None) -> None:
        self.memory.read(page, row, part, after)

    def _read(
        self, sock: socket.socket, lease: bytes, key: bytes, copy: Callable[..., None]
    ) -> bool:
        """Read a page, sending COMING while it is computed; returns whether it exists."""
        while (found := self.leases.read(lease, key, copy)) is Found.COMING:
            send(sock, PageMessage.COMING)
        return found is Found.HERE
