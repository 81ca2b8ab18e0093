"""Error responses of servers and the router: Anthropic's format, {"type": "error", "error":
{"type", "message", "details"}}, and the header that names an error's code."""

from __future__ import annotations

from typing import Any

# Anthropic's format has no field for a code, by which a router decides what it does about an error
ERROR_CODE = "X-Rorqual-Error"
ANTHROPIC_ROOT = "/v1/messages"
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's API."""
    return path == ANTHROPIC_ROOT or path.startswith(ANTHROPIC_ROOT + "/")


def anthropic_error(
    status: int, message: str, request_id: str, details: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The body of an error response in Anthropic's format. details: for programs to read."""
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    found: dict[str, Any] = {"type": kind, "message": message}
    if details is not None:
        found["details"] = details
    return {"type": "error", "error": found, "request_id": request_id}


def anthropic_event(body: bytes) -> bytes:
    """An error as a stream's last event: nothing follows it."""
    return b"event: error\ndata: " + body + b"\n\n"
