"""What stands before every route: the API key, the size of the body, and the time it may take to
arrive."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rorqual.serve.errors import ApiError
from rorqual.serve.http.clients import CLIENT, ApiKeys, address_of
from rorqual.serve.http.response import error_response
from rorqual.serve.limits import ServerLimits

OPEN = frozenset(("/live", "/health"))
# dashboard.py asks for a session
BY_COOKIE = frozenset(("/dashboard", "/dashboard/data", "/dashboard/login", "/dashboard/logout"))
DISCARDED = 4  # times the largest body that is read of one that is refused
DISCARD_SECONDS = 5.0


class Authenticator:
    """ASGI middleware. With a key, every path but OPEN and BY_COOKIE needs `Authorization:
    Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, limits: ServerLimits):
        self.app = app
        self.limits = limits
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        holder = self.keys.bearer(headers.get(b"authorization", b""))
        scope[CLIENT] = holder or address_of(scope)
        error = self._refusal(scope["path"], headers, holder)
        has_body = b"content-length" in headers or b"transfer-encoding" in headers
        if error is not None:
            if has_body:
                await self._discard(receive)
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, self._limited(receive) if has_body else receive, send)

    def _refusal(
        self, path: str, headers: dict[bytes, bytes], holder: str | None
    ) -> ApiError | None:
        if self.keys.keys and holder is None and path not in OPEN | BY_COOKIE:
            return ApiError(
                401,
                "the API key is missing or wrong",
                "authentication_error",
                code="invalid_api_key",
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limits.body:
            return too_large(self.limits.body)
        return None

    async def _discard(self, receive: Receive) -> None:
        """Read on for a while: a client that is still sending would see a reset connection
        rather than the answer."""
        seen = 0
        most = DISCARDED * self.limits.body
        with suppress(TimeoutError):
            async with asyncio.timeout(min(self.limits.patience, DISCARD_SECONDS)):
                while seen <= most and (message := await receive()).get("more_body", False):
                    seen += len(message.get("body", b""))

    def _limited(self, receive: Receive) -> Receive:
        """Counts the body's bytes and the time until it is complete; afterwards it stands aside."""
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
                    {"connection": "close"},  # else the sender could go on
                ) from None
            seen += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if seen > self.limits.body:
                raise HTTPException(413, too_large(self.limits.body).message)
            return message

        return counted


def too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body is too large; accepted: at most {most} bytes", code="body_too_large"
    )
