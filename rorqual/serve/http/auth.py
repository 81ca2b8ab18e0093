"""Middleware before every route: the API key, the body's size, the time it may take to arrive, and
the request id."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Iterable
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rorqual.config.api_errors import is_anthropic
from rorqual.config.log import request_id
from rorqual.errors import quoted
from rorqual.serve.errors import ApiError
from rorqual.serve.http.clients import CLIENT, address_of, bearer
from rorqual.serve.http.key_guard import KeyGuard
from rorqual.serve.http.memory import MemoryTrimmer
from rorqual.serve.http.response import error_response
from rorqual.serve.limits import MAX_REQUEST_ID_LENGTH, ServerLimits

OPEN = frozenset(("/live", "/health"))
# dashboard.py asks for a session
BY_COOKIE = frozenset(("/dashboard", "/dashboard/data", "/dashboard/login", "/dashboard/logout"))
DISCARDED = 4  # times the largest body: how much is read of a rejected one
DISCARD_SECONDS = 5.0
NAME = re.compile(rb"[!-~]+")  # printable ASCII without spaces


class Authenticator:
    """ASGI middleware. With keys, every path but OPEN and BY_COOKIE needs `Authorization: Bearer
    KEY`; Anthropic's routes take `x-api-key: KEY` in its place. Requests rejected here are counted
    in `counts`, as the routes count theirs."""

    def __init__(
        self,
        app: ASGIApp,
        guard: KeyGuard,
        limits: ServerLimits,
        counts: Counter[str],
        memory: MemoryTrimmer,
    ):
        self.app = app
        self.limits = limits
        self.guard = guard
        self.counts = counts
        self.memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = _request_name(headers.get(b"x-request-id", b""))
        request_id.set(name.decode())

        def named(message: Message) -> Awaitable[None]:
            # not a coroutine: every chunk of a stream passes here
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
            return send(message)

        given = bearer(headers.get(b"authorization"))
        if not given and is_anthropic(scope["path"]):
            given = headers.get(b"x-api-key", given)
        holder = self.guard.keys.holder(given) if given else None
        scope[CLIENT] = holder or address_of(scope)
        error = self._refusal(scope, given, headers)
        has_body = b"content-length" in headers or b"transfer-encoding" in headers
        if error is None and has_body and b"content-encoding" in headers:
            error = encoding_refusal(scope["headers"])
        if error is not None:
            self.counts[f"failed_{error.status}"] += 1
            if has_body:
                await self._discard(receive)
            await error_response(error, scope["path"])(scope, receive, named)
            return
        await self.app(scope, self._limited(receive) if has_body else receive, named)

    def _refusal(
        self, scope: Scope, given: bytes | None, headers: dict[bytes, bytes]
    ) -> ApiError | None:
        if scope["path"] not in OPEN | BY_COOKIE:
            error = self.guard.refusal(given, (scope["client"] or ("",))[0])
            if error is not None:
                return error
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limits.body:
            return too_large(self.limits.body)
        return None

    async def _discard(self, receive: Receive) -> None:
        """Keep reading for a while: a client that is still sending would see a reset connection
        instead of the response."""
        seen = 0
        most = DISCARDED * self.limits.body
        with suppress(TimeoutError):
            async with asyncio.timeout(min(self.limits.patience, DISCARD_SECONDS)):
                while seen <= most and (message := await receive()).get("more_body", False):
                    seen += len(message.get("body", b""))

    def _limited(self, receive: Receive) -> Receive:
        """Limits the body's bytes and the time until it is complete; afterwards passes messages
        through."""
        seen = 0
        complete = False
        deadline = time.monotonic() + self.limits.patience

        async def counted() -> Message:
            nonlocal seen, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"the body did not arrive within {self.limits.patience:g} s",
                    {"connection": "close"},  # else the client could keep sending
                ) from None
            seen += len(message.get("body", b""))
            self.memory.note(len(message.get("body", b"")))
            complete = not message.get("more_body", False)
            if seen > self.limits.body:
                raise HTTPException(413, too_large(self.limits.body).message)
            return message

        return counted


def _request_name(given: bytes) -> bytes:
    """The caller's request id, if valid; else a new one."""
    fits = 0 < len(given) <= MAX_REQUEST_ID_LENGTH and NAME.fullmatch(given)
    return given if fits else secrets.token_hex(16).encode()


def encoding_refusal(headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
    """Why a body of these headers is not read."""
    values = [value for name, value in headers if name == b"content-encoding"]
    given = b",".join(values).decode("latin-1")
    if all(name.strip().lower() in ("", "identity") for name in given.split(",")):
        return None
    return ApiError(
        415,
        f"the header Content-Encoding should be identity, or left out; given: {quoted(given)}",
        code="unsupported_encoding",
    )


def too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body is too large; accepted: at most {most} bytes", code="body_too_large"
    )
