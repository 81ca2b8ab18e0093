"""A server makes itself known to routers (`rorqual route`), to each or through etcd, again and
again for as long as it serves."""

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
    """routers: their URLs. etcd: where several routers look. url: where they find this server.
    role: as --role."""

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
        # not the loop's: who is told may be silent for long, and requests need those
        count = len(self.routers) + len(self.memberships)
        self.threads = ThreadPoolExecutor(count, "registration")

    async def run(self) -> None:
        """Until cancelled. A router or an etcd that is away is told when it is back."""
        await asyncio.gather(
            *(self._renew(router, self._register, router) for router in self.routers),
            *(self._renew(m.client.bases[0], self._join, m) for m in self.memberships),
        )

    async def _renew(self, where: str, tell: Callable[[T], str | None], whom: T) -> None:
        """Each of those who are told has a rhythm of its own: one that does not answer holds up no
        other."""
        while True:
            self._note(where, await self._on_thread(tell, whom))
            await asyncio.sleep(LEASE_SECONDS / 5)

    def _note(self, where: str, error: str | None) -> None:
        if error is not None and where not in self.away:
            log.warning("%s does not take this server: %s", where, error)
        elif error is None and where in self.away:
            log.warning("%s takes this server again", where)
        (self.away.discard if error is None else self.away.add)(where)

    async def leave(self) -> None:
        """No more requests, please."""
        told = [
            *(self._on_thread(self._leave, router) for router in self.routers),
            *(self._on_thread(self._part, one) for one in self.memberships),
        ]
        await asyncio.wait(told, timeout=TIMEOUT)

    def _on_thread(self, tell: Callable[[T], str | None], whom: T) -> asyncio.Future[str | None]:
        return asyncio.get_running_loop().run_in_executor(self.threads, tell, whom)

    # ---- on a thread: what went wrong, if anything did

    def _join(self, membership: Membership) -> str | None:
        try:
            membership.renew()
        except EtcdError as error:
            return str(error)
        return None

    def _part(self, membership: Membership) -> str | None:
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

    def _leave(self, router: str) -> str | None:
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
