"""Server discovery through etcd: a list, a watch for changes, and periodic lists, which show that
etcd is reachable and that no change was missed.

While etcd is unreachable the router keeps known servers as long as they are ready; one not ready
for KEEP_SECONDS is removed. When etcd is back nothing is removed until servers have had time to
register again: etcd may have lost its data, or been suspended past the end of every lease.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import aiohttp

from rorqual.errors import ConfigError
from rorqual.registry.address import EtcdAddress
from rorqual.registry.gateway import (
    MAX_ANSWER_BYTES,
    MAX_RECORDS,
    SECONDS,
    EtcdError,
    decoded,
    keys_below,
)
from rorqual.registry.membership import LEASE_SECONDS
from rorqual.registry.records import BadRecord, ServerRecord, read_record
from rorqual.route.config import MAX_SERVERS, ROLES, server_url
from rorqual.route.health import HealthChecks
from rorqual.route.servers import READY, ServerList

log = logging.getLogger("rorqual.route")

# between two lists: a suspended etcd is noticed before leases expire meanwhile
LIST_SECONDS = 5.0
RETRY_SECONDS = 1.0  # while etcd is unreachable
KEEP_SECONDS = 600.0


class RegistryWatch:
    """found: the server added for each key. away: etcd does not respond. grace: until then nothing
    is removed. seen: the newest revision received from the current watch."""

    def __init__(
        self,
        address: EtcdAddress,
        secret: str,
        servers: ServerList,
        checks: HealthChecks,
        session: aiohttp.ClientSession,
    ):
        self.bases = list(address.bases)
        self.prefix = address.prefix
        self.secret = secret
        self.servers = servers
        self.checks = checks
        self.session = session
        self.found: dict[str, ServerRecord] = {}
        self.refused: dict[str, str] = {}  # reasons, by key
        self.away = False
        self.grace = 0.0
        self.seen = 0

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                self.seen = 0
                revision = await self.refresh()
                self._note(None)
                await self._watch_and_list(revision)
            except Exception as error:  # whatever a response contains, the watch continues
                self._note(f"{type(error).__name__}: {error}")
                self._keep()
                self.bases.append(self.bases.pop(0))
                await asyncio.sleep(RETRY_SECONDS)

    async def start(self) -> None:
        """Fetch the first list, if etcd is reachable."""
        try:
            await self.refresh()
        except Exception as error:
            self._note(f"{type(error).__name__}: {error}")

    def _note(self, error: str | None) -> None:
        if error is not None and not self.away:
            log.warning("etcd at %s is away: %s", self.bases[0], error)
        elif error is None and self.away:
            log.warning("etcd at %s is back", self.bases[0])
            self.grace = time.monotonic() + LEASE_SECONDS
        self.away = error is not None

    # ---- list and watch

    async def refresh(self) -> int:
        """Process all records; returns etcd's revision."""
        asked = {**keys_below(self.prefix), "limit": str(MAX_RECORDS)}
        timeout = aiohttp.ClientTimeout(total=SECONDS)
        url = f"{self.bases[0]}/v3/kv/range"
        async with self.session.post(url, json=asked, timeout=timeout) as answer:
            data = await self._read(answer)
        revision = int(data["header"]["revision"])
        if revision < self.seen:  # the watch was ahead
            return revision
        there = dict(decoded(kv) for kv in data.get("kvs", ()))
        for key, value in there.items():
            self._join(key, value)
        for key in [key for key in self.found if key not in there]:
            self._leave(key, "it is not in etcd any more")
        self.refused = {key: why for key, why in self.refused.items() if key in there}
        return revision

    async def _read(self, answer: aiohttp.ClientResponse) -> dict[str, Any]:
        data = bytearray()
        async for part in answer.content.iter_any():
            data += part
            if len(data) > MAX_ANSWER_BYTES:
                raise EtcdError(f"an answer has more than {MAX_ANSWER_BYTES} bytes")
        found = json.loads(data)
        if answer.status != 200 or not isinstance(found, dict) or "header" not in found:
            raise EtcdError(f"it answers {answer.status} {bytes(data[:200])!r}")
        return found

    async def _watch_and_list(self, revision: int) -> None:
        """Run both until one fails."""
        watch = asyncio.create_task(self._watch(revision + 1))
        try:
            while True:
                await asyncio.wait({watch}, timeout=LIST_SECONDS)
                if watch.done():
                    await watch  # raises
                    return
                await self.refresh()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self, revision: int) -> None:
        """Process changes from a revision on. Returns when etcd ends the watch."""
        asked = {"create_request": {**keys_below(self.prefix), "start_revision": str(revision)}}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SECONDS)
        url = f"{self.bases[0]}/v3/watch"
        async with self.session.post(url, json=asked, timeout=timeout) as answer:
            rest = b""
            async for part in answer.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > MAX_ANSWER_BYTES:
                    raise EtcdError(f"an event has more than {MAX_ANSWER_BYTES} bytes")
                for line in lines:
                    if line.strip():
                        self._take(json.loads(line))
        raise EtcdError("the watch ended")

    def _take(self, message: Any) -> None:
        found = message.get("result") if isinstance(message, dict) else None
        if not isinstance(found, dict) or found.get("canceled"):
            raise EtcdError(f"the watch ended: {str(message)[:200]}")
        for event in found.get("events", ()):
            key, value = decoded(event["kv"])
            self.seen = max(self.seen, int(event["kv"]["mod_revision"]))
            if event.get("type") == "DELETE":
                self._leave(key, "its registration ended")
            else:
                self._join(key, value)

    # ---- changes of the server list

    def _join(self, key: str, value: bytes) -> None:
        try:
            record = read_record(value, self.secret, ROLES)
            url = server_url(record.url)
            if key != record.key(self.prefix) or url != record.url:
                raise BadRecord("it stands under another's key")
            if url not in self.servers.servers and len(self.servers.servers) >= MAX_SERVERS:
                raise BadRecord(f"there are {MAX_SERVERS} servers already")
        except (BadRecord, ConfigError) as error:
            self._refuse(key, str(error))
            return
        self.refused.pop(key, None)
        new = key not in self.found
        self.found[key] = record
        server = self.servers.add(url, record.role, time.monotonic() + KEEP_SECONDS)
        self.checks.start(server)
        if new:
            log.info("%s joined as %s", url, record.role)
            server.look.set()

    def _refuse(self, key: str, why: str) -> None:
        if key not in self.refused and len(self.refused) < MAX_RECORDS:
            log.warning("a record in etcd is passed over: %s: %s", key, why)
            self.refused[key] = why
        self._leave(key, why)

    def _leave(self, key: str, why: str) -> None:
        record = self.found.get(key)
        if record is None or self.away or time.monotonic() < self.grace:
            return  # if it does not register again, a later list removes it
        del self.found[key]
        server = self.servers.servers.get(record.url)
        if server is None or server.leases.get(record.role) is None:
            return
        if len(server.leases) == 1:
            self.checks.leave(server, why)
        else:
            del server.leases[record.role]

    def _keep(self) -> None:
        """While etcd is unreachable: keep the servers that are ready."""
        now = time.monotonic()
        for record in self.found.values():
            server = self.servers.servers.get(record.url)
            if server is not None and server.state == READY:
                self.servers.add(record.url, record.role, now + KEEP_SECONDS)
