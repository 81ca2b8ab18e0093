"""The server's errors in Anthropic's format (config/api_errors.py)."""

from __future__ import annotations

import msgspec

from rorqual.config.api_errors import anthropic_error, is_anthropic
from rorqual.config.log import request_id
from rorqual.serve.errors import ApiError, encodable


def error_body(error: ApiError, path: str) -> bytes:
    """An error in the format of the path's API."""
    return anthropic_body(error) if is_anthropic(path) else error.body()


def anthropic_body(error: ApiError) -> bytes:
    """This format has no field for the parameter, so the message names it."""
    message = error.message
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    found = anthropic_error(error.status, encodable(message), request_id.get(), error.details)
    return msgspec.json.encode(found)
