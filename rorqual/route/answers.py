"""The router's own error responses, in OpenAI's format, or on Anthropic's routes in Anthropic's."""

from __future__ import annotations

import json

from rorqual.config.api_errors import ERROR_CODE, anthropic_error, anthropic_event, is_anthropic

DONE = b"data: [DONE]\n\n"
RETRY_SECONDS = 2


class RouteError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, code: str, retry_after: int | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after = retry_after

    def body(self, path: str, request_id: str) -> bytes:
        """In the format of the API that the request's path belongs to."""
        if is_anthropic(path):
            return json.dumps(anthropic_error(self.status, self.message, request_id)).encode()
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()

    def event(self, path: str, request_id: str) -> bytes:
        """The error as a stream's last event. Clients of Anthropic's API ignore an event without a
        name, and would take the stream for a complete one."""
        body = self.body(path, request_id)
        return anthropic_event(body) if is_anthropic(path) else b"data: " + body + b"\n\n" + DONE

    def headers(self) -> dict[str, str]:
        more = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return {"Content-Type": "application/json", ERROR_CODE: self.code, **more}


def no_server() -> RouteError:
    return RouteError(503, "no server can take requests now", "no_server", RETRY_SECONDS)


def too_many(count: int) -> RouteError:
    message = f"{count} requests are open, which is as many as this router takes"
    return RouteError(503, message, "router_full", RETRY_SECONDS)


def body_too_long(most: int) -> RouteError:
    return RouteError(413, f"the body has more than {most} bytes", "body_too_long")


def too_large_together(count: int) -> RouteError:
    message = f"the bodies of {count} open requests are as large as this router takes"
    return RouteError(503, message, "router_full", RETRY_SECONDS)


def stream_lost() -> RouteError:
    return RouteError(502, "the server that made this answer is lost", "stream_lost")


def server_lost() -> RouteError:
    return RouteError(502, "the servers that were tried broke off", "servers_lost", RETRY_SECONDS)


def no_connection() -> RouteError:
    message = "the router cannot open another connection now"
    return RouteError(503, message, "router_full", RETRY_SECONDS)


def ending() -> RouteError:
    """This router is shutting down: another one, or this one restarted, can take the request."""
    return RouteError(503, "the router is ending", "router_ending", RETRY_SECONDS)


def reader_too_slow() -> RouteError:
    return RouteError(502, "the client read its stream too slowly", "reader_too_slow")
