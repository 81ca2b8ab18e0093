"""The servers that a router knows: their roles and state, and the choice of one for a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from rorqual.route.policies import Policy

PREFILL = "prefill"
ANSWERS = frozenset(("replica", "decode"))
READY = "ready"
UNREADY = "unready"  # it responds, but takes no requests: starting, draining, without an engine
DOWN = "down"


@dataclass(eq=False)
class Server:
    """`state`: result of the last /health. leases: by role, when its registration ends; None for
    roles configured at start. strikes: consecutive failed requests; after `breaker_failures` it
    gets none before `closed_until` (circuit breaker), and then one at a time. hands_over: it
    streams the first token of a prompt that another server answers."""

    url: str
    leases: dict[str, float | None]
    state: str = DOWN
    draining: bool = False
    in_flight: int = 0
    missed: int = 0
    strikes: int = 0
    closed_until: float = 0.0
    attempts: set[Any] = field(default_factory=set)
    hands_over: bool = False
    look: asyncio.Event = field(default_factory=asyncio.Event)  # set: check /health now

    @property
    def roles(self) -> Set[str]:
        return self.leases.keys()

    @property
    def lease(self) -> float | None:
        """When the last registration ends; None where a role does not expire."""
        ends = list(self.leases.values())
        return None if None in ends else max(end for end in ends if end is not None)

    def end_roles(self, now: float) -> None:
        """Remove expired roles beside others: the server was restarted with another role."""
        left = {role: end for role, end in self.leases.items() if end is None or end > now}
        self.leases = left or self.leases

    @property
    def ready(self) -> bool:
        return self.state == READY and not self.draining

    def usable(self, breaker_failures: int) -> bool:
        if not self.ready:
            return False
        if self.strikes < breaker_failures:
            return True
        return time.monotonic() >= self.closed_until and not self.in_flight

    def as_json(self) -> dict[str, Any]:
        """As shown by /admin/servers."""
        return {
            "url": self.url,
            "roles": sorted(self.roles),
            "state": self.state,
            "draining": self.draining,
            "in_flight": self.in_flight,
            "failures_in_a_row": self.strikes,
            "lease_seconds_left": None
            if self.lease is None
            else round(self.lease - time.monotonic(), 1),
        }


class ServerList:
    """Servers by URL. Prefill and other requests have separate policies, so that their state does
    not mix."""

    def __init__(self, prefill: Policy, answers: Policy, breaker_failures: int, seconds: float):
        self.servers: dict[str, Server] = {}
        self.policies = {True: prefill, False: answers}
        self.breaker_failures = breaker_failures
        self.breaker_seconds = seconds
        self.changed = asyncio.Event()

    def __iter__(self) -> Iterator[Server]:
        return iter(list(self.servers.values()))

    def add(self, url: str, role: str, lease: float | None = None) -> Server:
        """Add a server, a role of it, or a longer lease of that role."""
        server = self.servers.get(url)
        if server is None:
            server = self.servers[url] = Server(url, {role: lease})
        elif role not in server.leases or server.leases[role] is not None:
            server.leases[role] = lease
        return server

    def knows(self, server: Server) -> bool:
        """Whether the server has not been removed."""
        return self.servers.get(server.url) is server

    def remove(self, server: Server) -> None:
        if self.knows(server):
            del self.servers[server.url]
        for policy in self.policies.values():
            policy.remove_server(server)

    def usable(self, prefill: bool) -> list[Server]:
        """Usable servers. If the breakers of all are open, every ready server is usable: the
        failures may be due to one client's requests, and rejecting everyone does not help. Prompts
        do not need a prefill server."""
        ready = [
            server
            for server in self.servers.values()
            if (PREFILL in server.roles if prefill else server.roles & ANSWERS) and server.ready
        ]
        found = [server for server in ready if server.usable(self.breaker_failures)]
        return found if found or prefill else ready

    def pick(self, prefill: bool, key: bytes, without: Collection[Server] = ()) -> Server | None:
        """A server for a prompt that begins with `key`; one of `without` only where there is no
        other."""
        usable = self.usable(prefill)
        rest = [server for server in usable if server not in without] or usable
        return self.policies[prefill].choose(rest, key) if rest else None

    async def wait(
        self, prefill: bool, key: bytes, without: Collection[Server], seconds: float
    ) -> Server | None:
        """As `pick`, but waits for a server to become usable."""
        deadline = time.monotonic() + seconds
        while True:
            self.changed.clear()
            server = self.pick(prefill, key, without)
            left = deadline - time.monotonic()
            if server is not None or left <= 0:
                return server
            try:
                # a breaker's time runs out without a notification
                await asyncio.wait_for(self.changed.wait(), min(left, 0.25))
            except TimeoutError:
                continue

    def set_state(self, server: Server, state: str) -> None:
        if server.state != state:
            server.state = state
            self.changed.set()

    def failed(self, server: Server, state: str | None = None) -> None:
        """A request failed on this server."""
        server.strikes += 1
        if server.strikes >= self.breaker_failures:
            server.closed_until = time.monotonic() + self.breaker_seconds
        if state is not None and server.state == READY:
            self.set_state(server, state)
        server.look.set()

    def worked(self, server: Server) -> None:
        server.strikes = 0
