"""Checks every server's /health, ends leases, and aborts streams of servers that are down."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp

from rorqual.route.attempt import is_own_fault, state_after
from rorqual.route.config import RouteConfig
from rorqual.route.metrics import RouteMetrics
from rorqual.route.servers import DOWN, READY, Server, ServerList

FIRST_TOKEN = "X-Rorqual-First-Token"
log = logging.getLogger("rorqual.route")


class HealthChecks:
    """Runs a task for each server of the list."""

    def __init__(
        self,
        config: RouteConfig,
        servers: ServerList,
        session: aiohttp.ClientSession,
        metrics: RouteMetrics,
    ):
        self.config = config
        self.servers = servers
        self.session = session
        self.metrics = metrics
        self.tasks: dict[Server, asyncio.Task[None]] = {}

    def start(self, server: Server) -> None:
        if server not in self.tasks:
            self.tasks[server] = asyncio.create_task(self._watch(server))

    def leave(self, server: Server, why: str) -> None:
        """Remove a server: no new requests; open ones continue, and the server is checked until
        they end. If it registers again it is a new Server."""
        log.info("%s left: %s", server.url, why)
        self.servers.remove(server)
        self.metrics.forget(server.url)
        server.look.set()

    async def close(self) -> None:
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, server: Server) -> None:
        while True:
            server.look.clear()
            await self.look(server)
            server.end_roles(time.monotonic())
            known = self.servers.knows(server)
            if known and server.lease is not None and time.monotonic() > server.lease:
                self.leave(server, "its lease ran out")
            elif not known and not server.attempts:
                del self.tasks[server]
                return
            try:
                await asyncio.wait_for(server.look.wait(), self.config.health_interval)
            except TimeoutError:
                continue
            await asyncio.sleep(min(0.1, self.config.health_interval))  # failures cluster

    async def look(self, server: Server) -> None:
        """Check a server once."""
        timeout = aiohttp.ClientTimeout(total=self.config.health_timeout)
        before = server.state
        try:
            async with self.session.get(f"{server.url}/health", timeout=timeout) as answer:
                state = state_after(answer.status)
                if state == READY:
                    server.hands_over = answer.headers.get(FIRST_TOKEN) == "1"
            server.missed = 0
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: bad host
            if is_own_fault(error):
                log.warning("%s cannot be looked at: %s", server.url, error)
                return
            server.missed += 1
            # connection refused: no need to retry
            refused = isinstance(error, aiohttp.ClientConnectorError)
            state = DOWN if refused or server.missed >= self.config.health_failures else before
        self.servers.set_state(server, state)
        if self.servers.knows(server):
            self.metrics.note_state(server)
        if state != before:
            log.info("%s is %s", server.url, state)
        for attempt in list(server.attempts):
            if attempt.end_unread(self.config.reader_timeout):
                log.warning("a client does not read its stream: its request ends")
        if state == DOWN:
            self._give_up(server)

    def _give_up(self, server: Server) -> None:
        """Abort attempts on this server that have received nothing for `stall_timeout`."""
        now = time.monotonic()
        for attempt in list(server.attempts):
            if now - attempt.last_received >= self.config.stall_timeout:
                attempt.give_up(f"no sign of life for {self.config.stall_timeout:g} s")
