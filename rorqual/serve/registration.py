"""A server registers with routers (`rorqual route`), with each or through etcd, and renews the
registration while it serves."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rorqual.errors import ConfigError
from rorqual.registry.address import EtcdAddress
from rorqual.registry.gateway import EtcdError
from rorqual.registry.membership import LEASE_SECONDS, Membership

log = logging.getLogger("rorqual.serve")
T = TypeVar("T")

TIMEOUT = 3.0
ROLES = {"none": ("replica",), "attention": ("replica",), "both": ("prefill", "decode")}


@dataclass
class Registration:
    """routers: their URLs. etcd: a registry that several routers watch. url: this server's address
    for them. role: as --role."""

    routers: tuple[str, ...]
    secret: str
    url: str
    role: str
    etcd: tuple[EtcdAddress, ...] = ()
    away: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.roles = ROLES.get(self.role, (self.role,))
        self.memberships = [
            Membership(address, self.secret, self.url, self.roles) for address in self.etcd
        ]
        # not the loop's executor: a silent router may block for long, and requests need those
        # threads
        count = len(self.routers) + len(self.memberships)
        self.threads = ThreadPoolExecutor(count, "registration")

    async def run(self) -> None:
        """Register and renew until cancelled, also with a router or an etcd that was
        unreachable."""
        await asyncio.gather(
            *(self._renew(router, self._register, router) for router in self.routers),
            *(self._renew(m.client.bases[0], self._join_registry, m) for m in self.memberships),
        )

    async def _renew(self, where: str, send: Callable[[T], str | None], target: T) -> None:
        """Each router or etcd has its own loop: one that does not respond delays no other."""
        while True:
            self._note(where, await self._on_thread(send, target))
            await asyncio.sleep(LEASE_SECONDS / 5)

    def _note(self, where: str, error: str | None) -> None:
        if error is not None and where not in self.away:
            log.warning("%s does not take this server: %s", where, error)
        elif error is None and where in self.away:
            log.warning("%s takes this server again", where)
        (self.away.discard if error is None else self.away.add)(where)

    async def deregister(self) -> None:
        """Deregister, so that no more requests are sent here."""
        waiting = [
            *(self._on_thread(self._deregister, router) for router in self.routers),
            *(self._on_thread(self._leave_registry, one) for one in self.memberships),
        ]
        await asyncio.wait(waiting, timeout=TIMEOUT)

    def _on_thread(self, send: Callable[[T], str | None], target: T) -> asyncio.Future[str | None]:
        return asyncio.get_running_loop().run_in_executor(self.threads, send, target)

    # ---- on a thread; each returns an error message or None

    def _join_registry(self, membership: Membership) -> str | None:
        try:
            membership.renew()
        except EtcdError as error:
            return str(error)
        return None

    def _leave_registry(self, membership: Membership) -> str | None:
        try:
            membership.leave()
        except EtcdError as error:
            return str(error)
        return None

    def _register(self, router: str) -> str | None:
        for role in self.roles:
            fields = {"url": self.url, "role": role, "lease_seconds": LEASE_SECONDS}
            error = self._post(f"{router}/admin/register", fields)
            if error is not None:
                return error
        return None

    def _deregister(self, router: str) -> str | None:
        return self._post(f"{router}/admin/leave", {"url": self.url})

    def _post(self, url: str, fields: dict[str, object]) -> str | None:
        headers = {"authorization": f"Bearer {self.secret}", "content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT):
                return None
        except urllib.error.HTTPError as error:
            return f"it answers {error.code} {error.read(300).decode(errors='replace')}"
        except (OSError, ValueError) as error:
            return str(getattr(error, "reason", error))


def read_secret(path: str) -> str:
    """Raises ConfigError."""
    try:
        found = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"register_secret_file={path!r} cannot be read: {error}") from None
    if not found or not found.isprintable():
        raise ConfigError(f"register_secret_file={path!r} holds no secret of one line")
    return found
