"""Where expert servers tell that they are there, and attention processes look for them: a router's
list (http://HOST:PORT), or etcd. Both keep a record until a lease ends."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from rorqual.errors import ConfigError
from rorqual.registry.address import SCHEME, etcd_address, router_address
from rorqual.registry.experts import (
    ExpertRecord,
    RegistryError,
    forget_experts,
    list_experts,
    register_experts,
)
from rorqual.registry.gateway import EtcdClient, EtcdError
from rorqual.registry.membership import LEASE_SECONDS, LeasedRecords
from rorqual.registry.records import (
    SIGNED_SECONDS,
    BadRecord,
    check_expiry,
    sealed,
    unsealed,
)

log = logging.getLogger("rorqual.registry")
PREFIX = "/rorqual/experts"
PURPOSE = b"rorqual expert record 1\0"
RENEWALS = 5  # in a lease
SHORTEST_SECRET = 16  # characters, as the router asks


@dataclass(frozen=True)
class FoundExperts:
    """epoch: another one where the registry has forgotten what it knew before."""

    records: tuple[ExpertRecord, ...]
    epoch: str


class ExpertRegistry(Protocol):
    """Calls wait for an answer, a few seconds at most, and so are for threads. They raise
    RegistryError."""

    name: str

    def join(self, record: ExpertRecord) -> None:
        """For LEASE_SECONDS from now on; also again."""

    def leave(self, record: ExpertRecord) -> None:
        """At once, and for good."""

    def find(self) -> FoundExperts:
        """All whose leases have not ended."""


class RouterExperts:
    """In the memory of a router, which asks for its admin secret."""

    def __init__(self, url: str, secret: str):
        self.name = url
        self.secret = secret

    def join(self, record: ExpertRecord) -> None:
        register_experts(self.name, self.secret, record, LEASE_SECONDS)

    def leave(self, record: ExpertRecord) -> None:
        forget_experts(self.name, self.secret, record)

    def find(self) -> FoundExperts:
        records, epoch = list_experts(self.name, self.secret)
        return FoundExperts(tuple(records), epoch)


class EtcdExperts:
    """In etcd. A record counts if it is signed with the secret that callers and expert servers
    share."""

    def __init__(self, given: str, secret: bytes):
        address = etcd_address(given, PREFIX)
        self.name = given
        self.prefix = address.prefix
        self.secret = secret
        self.client = EtcdClient(address)
        self.leased: LeasedRecords | None = None
        self.revision = 0
        self.losses = 0  # times that etcd was found without what it had
        self.refused: dict[str, str] = {}  # why, by key

    def join(self, record: ExpertRecord) -> None:
        if self.leased is None:
            self.leased = LeasedRecords(self.client, lambda: self._signed(record))
        try:
            self.leased.renew()
        except EtcdError as error:
            raise RegistryError(str(error)) from None

    def leave(self, record: ExpertRecord) -> None:
        try:
            if self.leased is not None:
                self.leased.leave()
        except EtcdError as error:
            raise RegistryError(str(error)) from None

    def find(self) -> FoundExperts:
        try:
            cluster, revision, there = self.client.below(self.prefix)
        except EtcdError as error:
            raise RegistryError(str(error)) from None
        self.losses += revision < self.revision
        self.revision = revision
        self.refused = {key: why for key, why in self.refused.items() if key in there}
        records = [self._read(key, value) for key, value in sorted(there.items())]
        found = tuple(record for record in records if record is not None)
        return FoundExperts(found, f"{cluster} {self.losses}")

    def _key(self, address: str) -> str:
        return f"{self.prefix}{hashlib.sha256(address.encode()).hexdigest()[:32]}"

    def _signed(self, record: ExpertRecord) -> dict[str, bytes]:
        fields = {**asdict(record), "expires": time.time() + SIGNED_SECONDS}
        return {self._key(record.address): sealed(fields, self.secret, PURPOSE)}

    def _read(self, key: str, value: bytes) -> ExpertRecord | None:
        try:
            found = unsealed(value, self.secret, PURPOSE)
            record = ExpertRecord(found["address"], found["slots"], found["layers"])
            check_expiry(float(found["expires"]))
            if key != self._key(record.address):
                raise BadRecord("it stands under another's key")
            self.refused.pop(key, None)
            return record
        except (KeyError, TypeError, ValueError):
            self._refuse(key, "it says no address, slots, layers and time")
        except (BadRecord, ConfigError) as error:
            self._refuse(key, str(error))
        return None

    def _refuse(self, key: str, why: str) -> None:
        if key not in self.refused:
            log.warning("a record in etcd is passed over: %s: %s", key, why)
        self.refused[key] = why


def check_registry(given: str) -> None:
    """Raises ConfigError."""
    if given.startswith(SCHEME):
        etcd_address(given, PREFIX)
    else:
        router_address(given)


def expert_registry(
    given: str, secret: bytes, secret_file: str | None, name: str
) -> ExpertRegistry:
    """secret: of the links, which signs records in etcd. secret_file: with a router's admin secret.
    name: of the option, for messages. Raises ConfigError."""
    if given.startswith(SCHEME):
        if secret_file is not None:
            raise ConfigError(
                f"{name}_secret_file does not go with {given!r}: records in etcd are signed with "
                "the secret of expert_secret_file"
            )
        return EtcdExperts(given, secret)
    url = router_address(given)
    if secret_file is None:
        raise ConfigError(f"{name}={given!r} needs {name}_secret_file, as the router's /admin does")
    try:
        found = Path(secret_file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}_secret_file={secret_file!r} cannot be read: {error}") from None
    if len(found) < SHORTEST_SECRET or not found.isprintable():
        raise ConfigError(
            f"{name}_secret_file={secret_file!r} holds no secret of one line; accepted: at least "
            f"{SHORTEST_SECRET} characters"
        )
    return RouterExperts(url, found)


class ExpertMembership:
    """An expert server's part, on a thread: it is in the registry until `leave`."""

    def __init__(self, registry: ExpertRegistry, record: ExpertRecord):
        self.registry = registry
        self.record = record
        self.leaving = threading.Event()
        self.reported = ""
        self.thread = threading.Thread(target=self._run, name="registry", daemon=True)
        self.thread.start()

    def leave(self) -> None:
        """Waits a few seconds at most."""
        self.leaving.set()
        self.thread.join()
        self._try(self.registry.leave)

    def _run(self) -> None:
        while not self.leaving.is_set():
            self._try(self.registry.join)
            self.leaving.wait(LEASE_SECONDS / RENEWALS)

    def _try(self, what: Callable[[ExpertRecord], None]) -> None:
        try:
            what(self.record)
            error = ""
        except RegistryError as found:
            error = str(found)
        if error and not self.reported:
            log.warning("%s does not take this server: %s", self.registry.name, error)
        elif self.reported and not error:
            log.warning("%s takes this server again", self.registry.name)
        self.reported = error
