"""A server's part: it is in etcd for as long as it serves, under a lease that it renews."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rorqual.registry.address import EtcdAddress
from rorqual.registry.gateway import EtcdClient, EtcdError
from rorqual.registry.records import SIGNED_SECONDS, ServerRecord

LEASE_SECONDS = 15.0  # after which a server that renews nothing is there no more


class LeasedRecords:
    """records: what is written, by key, signed anew. Calls wait for etcd, and so are for threads;
    they raise EtcdError. Nothing is renewed once it leaves."""

    def __init__(self, client: EtcdClient, records: Callable[[], dict[str, bytes]]):
        self.client = client
        self.records = records
        self.lease: str | None = None
        self.signed = 0.0  # when, on the monotonic clock
        self.left = False
        self.lock = threading.Lock()

    def renew(self) -> None:
        """Joins, or stays. A lease that ended meanwhile (a process that was stopped and continued,
        an etcd that lost its data) is replaced by a new one."""
        with self.lock:
            if not self.left:
                self._renew()

    def _renew(self) -> None:
        if self.lease is not None:
            try:
                self.client.keep_alive(self.lease)
            except EtcdError as error:
                if not error.gone:
                    raise
                self.lease = None
        if self.lease is None:
            lease = self.client.grant(LEASE_SECONDS)
            self._write(lease)
            self.lease = lease
        elif time.monotonic() - self.signed > SIGNED_SECONDS / 3:
            self._write(self.lease)

    def _write(self, lease: str) -> None:
        for key, value in self.records().items():
            self.client.put(key, value, lease)
        self.signed = time.monotonic()

    def leave(self) -> None:
        """What was written under its lease goes; a newer process's records at the same URL stay."""
        self.left = True
        with self.lock:
            if self.lease is not None:
                self.client.revoke(self.lease)


class Membership(LeasedRecords):
    """Of a server that answers requests. roles: under each of which the URL is registered."""

    def __init__(self, address: EtcdAddress, secret: str, url: str, roles: tuple[str, ...]):
        self.prefix = address.prefix
        self.secret = secret
        self.url = url
        self.roles = roles
        super().__init__(EtcdClient(address), self._signed)

    def _signed(self) -> dict[str, bytes]:
        made = [ServerRecord.new(self.url, role) for role in self.roles]
        return {record.key(self.prefix): record.signed(self.secret) for record in made}
