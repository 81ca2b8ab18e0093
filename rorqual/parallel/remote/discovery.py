"""Expert servers that come and go by a registry: those it lists are linked, those whose lease has
ended are left out.

A failing registry removes no server. While it does not answer all known servers stay; once it
answers again, or has lost its data, none leaves for a lease's length, in which servers register
again. And a server that is linked, and alone holds an expert, stays until its link ends.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref

from rorqual.errors import ConfigError
from rorqual.parallel.remote.config import MAX_SERVERS, read_address
from rorqual.parallel.remote.control import Address
from rorqual.parallel.remote.servers import ExpertServers
from rorqual.registry.expert_registry import ExpertRegistry, FoundExperts
from rorqual.registry.experts import ExpertRecord, RegistryError
from rorqual.registry.membership import LEASE_SECONDS

log = logging.getLogger("rorqual.engine")
LOOK_SECONDS = 1.0


class ExpertDiscovery:
    """Looks every LOOK_SECONDS, on a thread, from `start` until the servers are closed, or nothing
    else uses them. fixed: addresses that were given, and stay."""

    def __init__(
        self, servers: ExpertServers, registry: ExpertRegistry, fixed: tuple[Address, ...]
    ):
        self.owner = weakref.ref(servers)
        self.registry = registry
        self.fixed = frozenset(fixed)
        self.listed: set[Address] = set()
        self.epoch: str | None = None
        self.away = ""  # why
        self.stay_until = 0.0  # no server leaves before
        self.refused: set[str] = set()
        self.thread = threading.Thread(target=self._run, name="expert registry", daemon=True)

    @property
    def servers(self) -> ExpertServers:
        found = self.owner()
        assert found is not None, "an engine's servers went while they were looked for"
        return found

    def start(self) -> None:
        self.servers.registry = f"{self.registry.name} has not answered yet"
        self.thread.start()

    def _run(self) -> None:
        closing = self.servers.closing
        while not closing.is_set() and self.owner() is not None:
            try:
                self.look()
            except Exception:  # whatever an answer holds, those who are known stay
                log.exception("%s: its list is passed over", self.registry.name)
            closing.wait(LOOK_SECONDS)

    def look(self) -> None:
        """Once."""
        servers = self.owner()  # stays meanwhile
        if servers is None:
            return
        try:
            found = self.registry.find()
        except RegistryError as error:
            if not self.away:
                log.warning("%s is away: %s", self.registry.name, error)
            self.away = str(error)
            servers.registry = f"{self.registry.name} is away: {error}"
            return
        if self.away:
            log.warning("%s is back", self.registry.name)
        if self.away or found.epoch != self.epoch:
            self.stay_until = time.monotonic() + LEASE_SECONDS
        self.away = ""
        self.epoch = found.epoch
        self.take(found)

    def take(self, found: FoundExperts) -> None:
        """Join who is new, leave who is there no more."""
        there = self._addresses(found.records)
        self.servers.registry = f"{self.registry.name} lists {len(there) or 'no'} servers"
        for address in sorted(there - self.listed):
            self.servers.join(address)
        self.listed |= there
        if time.monotonic() < self.stay_until:
            return
        for address in sorted(self.listed - there):
            if self.servers.leave(address):
                self.listed.discard(address)

    def _addresses(self, records: tuple[ExpertRecord, ...]) -> set[Address]:
        """Those who can be called, MAX_SERVERS at most with those that were given: who is known
        before others."""
        found: set[Address] = set()
        refused: dict[str, str] = {}
        for record in records:
            try:
                found.add(read_address(record.address, "address"))
            except ConfigError as error:
                refused[record.address] = str(error)
        found -= self.fixed
        room = MAX_SERVERS - len(self.fixed)
        inside = sorted(found, key=lambda one: (one not in self.listed, one))
        for host, port in inside[room:]:
            refused[f"{host}:{port}"] = f"there are {MAX_SERVERS} servers already"
        for name in sorted(refused.keys() - self.refused):
            log.warning("%s: %s is passed over: %s", self.registry.name, name, refused[name])
        self.refused = set(refused)
        return set(inside[:room])
