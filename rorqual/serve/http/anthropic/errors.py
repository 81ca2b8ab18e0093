"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message", "details"}}."""

from __future__ import annotations

from typing import Any

import msgspec

from rorqual.config.log import request_id
from rorqual.serve.errors import ApiError, encodable

ROOT = "/v1/messages"
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
    return path == ROOT or path.startswith(ROOT + "/")


def error_body(error: ApiError, path: str) -> bytes:
    """An error in the format of the path's API."""
    return anthropic_body(error) if is_anthropic(path) else error.body()


def anthropic_body(error: ApiError) -> bytes:
    """This format has no field for the parameter, so the message names it."""
    message = error.message
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    found: dict[str, Any] = {"type": kind, "message": encodable(message)}
    if error.details is not None:
        found["details"] = error.details
    return msgspec.json.encode({"type": "error", "error": found, "request_id": request_id.get()})
