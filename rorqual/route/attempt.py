"""One attempt of a request on one server: its start, its bytes, and its abort when the server is
lost."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

import aiohttp
from yarl import URL

from rorqual.route.servers import DOWN, READY, UNREADY, Server
from rorqual.telemetry.spans import NO_SPAN, RequestSpan

T = TypeVar("T")


class ServerLost(Exception):
    """The server disconnected, or was abandoned. state: the server state that this implies, if
    any."""

    def __init__(self, why: str, state: str | None = None):
        super().__init__(why)
        self.state = state


class OwnFault(Exception):
    """This process cannot open any connection: not a server's failure."""


OWN_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


def is_own_fault(error: BaseException) -> bool:
    """Whether a connection failed because this process or host is out of files or memory."""
    return isinstance(error, OSError) and error.errno in OWN_ERRORS


class Attempt:
    """A context manager: inside, the request counts for the server's load. Belongs to the task that
    made it; any task may call `give_up`. span: ends with it."""

    def __init__(self, server: Server, span: RequestSpan = NO_SPAN):
        self.server = server
        self.span = span
        self.response: aiohttp.ClientResponse | None = None
        self.last_received = time.monotonic()
        self.task = asyncio.current_task()
        self.given_up = ""
        self.waits = False

    def __enter__(self) -> Attempt:
        self.server.in_flight += 1
        self.server.attempts.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.server.in_flight -= 1
        self.server.attempts.discard(self)
        if self.response is not None:
            # closes the connection unless all was read, which the server notices
            self.response.close() if kind else self.response.release()
        self._end_span(error)

    def _end_span(self, error: BaseException | None) -> None:
        if self.response is not None:
            self.span.set({"http.response.status_code": self.response.status})
            if error is None and self.response.status >= 500:
                self.span.fail(str(self.response.status))
        if isinstance(error, asyncio.CancelledError):
            self.span.fail("left", "the client has gone, or was cut off")
        elif error is not None:
            self.span.fail("lost" if isinstance(error, ServerLost) else "failed", str(error))
        self.span.end()

    def give_up(self, why: str) -> None:
        """Abandon the server; whatever it still sends is dropped."""
        if self.given_up:
            return
        self.given_up = why
        if self.waits and self.task is not None:
            self.task.cancel()

    def end_unread(self, seconds: float) -> bool:
        """End the request, as if the client had disconnected, if the client has read nothing for
        `seconds`; returns whether it did."""
        if self.waits or self.task is None or time.monotonic() - self.last_received < seconds:
            return False
        return self.task.cancel()

    async def of_server(self, wait: Callable[[], Awaitable[T]]) -> T:
        """Await something from the server. Raises ServerLost and OwnFault."""
        if self.given_up:
            raise ServerLost(self.given_up)
        self.waits = True
        try:
            found = await wait()
        except asyncio.CancelledError:
            assert self.task is not None
            if self.given_up and self.task.uncancel() == 0:
                raise ServerLost(self.given_up) from None
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if is_own_fault(error):
                raise OwnFault(str(error)) from None
            raise ServerLost(f"it cannot be reached: {error}", DOWN) from None
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise ServerLost(f"it broke off: {type(error).__name__}: {error}") from None
        finally:
            self.waits = False
        self.last_received = time.monotonic()
        return found

    async def begin(
        self,
        session: aiohttp.ClientSession,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        """The response's head. timeout: in place of the session's."""

        async def request() -> aiohttp.ClientResponse:
            return await session.request(
                method,
                URL(self.server.url + target, encoded=True),  # as the client sent it
                data=body or None,
                headers=self.span.carry(headers),
                allow_redirects=False,
                timeout=timeout or session.timeout,
            )

        self.response = await self.of_server(request)
        return self.response

    async def read_all(self, most: int) -> bytes:
        """The response's body. Raises ServerLost, and ValueError where it is longer than `most`."""
        assert self.response is not None
        parts = []
        size = 0
        while data := await self.of_server(self.response.content.readany):
            size += len(data)
            if size > most:
                raise ValueError(f"an answer has more than {most} bytes")
            parts.append(data)
        return b"".join(parts)


def state_after(status: int) -> str:
    """The server state for a status of /health."""
    return READY if status == 200 else UNREADY
