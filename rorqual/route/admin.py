"""/admin: servers register and deregister while the router runs; needs the secret."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rorqual.errors import ConfigError
from rorqual.registry.experts import ExpertRecord
from rorqual.route.answers import RouteError
from rorqual.route.config import MAX_SERVERS, ROLES, server_url
from rorqual.route.experts import EXPERTS, ExpertList
from rorqual.route.health import HealthChecks
from rorqual.route.servers import Server, ServerList

SHORTEST_LEASE = 1.0
MAX_LEASE_SECONDS = 3600.0
BODY_BYTES = 4096
Handler = Callable[[web.Request], Awaitable[web.Response]]


class Admin:
    """POST register {url, role, lease_seconds}: register or renew; drain, undrain and leave {url},
    or ?server=URL; GET servers. Of expert servers: register and leave {role: "experts", address,
    slots, layers}; GET experts."""

    def __init__(self, secret: str, servers: ServerList, checks: HealthChecks):
        self.expected = f"Bearer {secret}".encode()
        self.servers = servers
        self.checks = checks
        self.experts = ExpertList()

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/admin/servers", self._guarded(self.list))
        app.router.add_get("/admin/experts", self._guarded(self.list_experts))
        for name, handler in (
            ("register", self.register),
            ("drain", self.drain),
            ("undrain", self.undrain),
            ("leave", self.leave),
        ):
            app.router.add_post(f"/admin/{name}", self._guarded(handler))

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.Response:
            given = request.headers.get("Authorization", "").encode(errors="replace")
            if not secrets.compare_digest(given, self.expected):
                raise RouteError(401, "the secret is wrong or missing", "bad_secret")
            return await handler(request)

        return guarded

    async def list(self, request: web.Request) -> web.Response:
        return web.json_response({"servers": [server.as_json() for server in self.servers]})

    async def list_experts(self, request: web.Request) -> web.Response:
        return web.json_response({"list": self.experts.name, "servers": self.experts.as_json()})

    async def register(self, request: web.Request) -> web.Response:
        fields = await _fields(request)
        role = fields.get("role", "replica")
        lease = fields.get("lease_seconds", 30.0)
        if role not in (*ROLES, EXPERTS):
            accepted = ", ".join((*ROLES, EXPERTS))
            raise _wrong(f"role={role!r} is not known; accepted: {accepted}")
        known = isinstance(lease, int | float) and not isinstance(lease, bool)
        if not known or not SHORTEST_LEASE <= lease <= MAX_LEASE_SECONDS:
            raise _wrong(
                f"lease_seconds={lease!r} is out of range; accepted: {SHORTEST_LEASE:g} to "
                f"{MAX_LEASE_SECONDS:g}"
            )
        if role == EXPERTS:
            return web.json_response(self.experts.join(_experts(fields), lease))
        url = _url(fields)
        if url not in self.servers.servers and len(self.servers.servers) >= MAX_SERVERS:
            raise RouteError(503, f"there are {MAX_SERVERS} servers already", "too_many_servers")
        server = self.servers.add(url, role, time.monotonic() + lease)
        self.checks.start(server)
        server.look.set()
        return web.json_response(server.as_json())

    async def drain(self, request: web.Request) -> web.Response:
        return self._drained(await self._server(request), True)

    async def undrain(self, request: web.Request) -> web.Response:
        return self._drained(await self._server(request), False)

    def _drained(self, server: Server, drained: bool) -> web.Response:
        server.draining = drained
        self.servers.changed.set()
        return web.json_response(server.as_json())

    async def leave(self, request: web.Request) -> web.Response:
        fields = {} if "server" in request.query else await _fields(request)
        if fields.get("role") == EXPERTS:
            return web.json_response(self.experts.leave(str(fields.get("address"))))
        server = self._named(request, fields)
        self.checks.leave(server, "it was told to")
        return web.json_response({"url": server.url})

    async def _server(self, request: web.Request) -> Server:
        return self._named(request, {} if "server" in request.query else await _fields(request))

    def _named(self, request: web.Request, fields: dict[str, Any]) -> Server:
        named = request.query.get("server")
        url = _url(fields if named is None else {"url": named})
        server = self.servers.servers.get(url)
        if server is None:
            raise RouteError(404, f"{url} is no server of this router", "no_such_server")
        return server


async def _fields(request: web.Request) -> dict[str, Any]:
    if (request.content_length or 0) > BODY_BYTES:
        raise RouteError(413, f"the body has more than {BODY_BYTES} bytes", "body_too_long")
    data = await request.content.read(BODY_BYTES + 1)
    try:
        found = json.loads(data) if len(data) <= BODY_BYTES else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _wrong("the body is no JSON object")
    return found


def _url(fields: dict[str, Any]) -> str:
    try:
        return server_url(str(fields.get("url")))
    except (ConfigError, ValueError) as error:
        raise _wrong(str(error)) from None


def _experts(fields: dict[str, Any]) -> ExpertRecord:
    try:
        given = [fields.get(name, "all") for name in ("slots", "layers")]
        return ExpertRecord(str(fields.get("address")), *given)
    except ConfigError as error:
        raise _wrong(str(error)) from None


def _wrong(message: str) -> RouteError:
    return RouteError(400, message, "bad_request")
