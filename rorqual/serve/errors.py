"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

import msgspec

from rorqual.config.api_errors import ERROR_CODE

BUSY_SECONDS = 5  # after which a busy engine may have room again


class ApiError(Exception):
    """An error response. `param` names the field at fault; retry_after is in seconds. details: what
    Anthropic's format has beside the message, for programs to read."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        details: dict[str, Any] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.details = details

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "error": {
                    "message": encodable(self.message),
                    "type": self.kind,
                    "param": self.param and encodable(self.param),
                    "code": self.code,
                }
            }
        )

    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return found if self.code is None else {**found, ERROR_CODE.lower(): self.code}


def encodable(text: str) -> str:
    """A caller's text, made valid Unicode for the response."""
    return text.encode(errors="backslashreplace").decode()


class Disconnected(Exception):
    """The client has disconnected."""


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def too_long(param: str, tokens: int, most: int, more: str = "") -> ApiError:
    """A prompt beyond the model's context. Clients that then shorten it know this error by its code
    or by parts of these words, which are those of OpenAI's API and of Anthropic's."""
    message = (
        f"the prompt is too long: {tokens} tokens > {most} maximum ({more}this model's maximum "
        f"context length is {most + 1} tokens)"
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def engine_died() -> ApiError:
    return ApiError(
        500,
        "the engine process ended while it worked on this request",
        "server_error",
        code="engine_dead",
    )


def not_ready(state: str) -> ApiError:
    return ApiError(
        503,
        f"the server cannot take requests: {state}",
        "server_error",
        code="not_ready",
        retry_after=5,
    )


def queue_full(message: str, seconds: int) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="queue_full", retry_after=seconds)


def over_share(message: str, seconds: int) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="client_limit", retry_after=seconds)


def engine_busy(message: str) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="engine_busy", retry_after=BUSY_SECONDS)


def pages_lost(message: str) -> ApiError:
    return ApiError(503, message, "server_error", code="kv_load_failure", retry_after=BUSY_SECONDS)


def experts_missing(message: str) -> ApiError:
    return ApiError(503, message, "server_error", code="experts_missing", retry_after=BUSY_SECONDS)


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504, f"the request took longer than {seconds:g} s", "timeout_error", code="request_timeout"
    )


def too_slow(tokens: int) -> ApiError:
    return ApiError(400, f"the reader fell {tokens} tokens behind", code="slow_reader")


def drained() -> ApiError:
    return ApiError(
        503, "the server is shutting down", "server_error", code="shutting_down", retry_after=5
    )
