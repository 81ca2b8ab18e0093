"""A client's request as a router sees it: what it sends on, and what of the body it has to know."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rorqual.telemetry.spans import NO_SPAN, RequestSpan

# headers of one connection (RFC 9110, 7.6.1), and those that the router makes itself
HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "accept-encoding",
        "expect",
    )
)
RESUMABLE = "X-Rorqual-Resumable"
OWN_NAMES = frozenset(("x-request-id", "x-rorqual-resumable"))
CAN_GO_ON = frozenset(("/v1/completions", "/v1/chat/completions"))
GENERATES = CAN_GO_ON | {"/v1/responses", "/v1/messages"}
LONG_BODY = 1 << 18  # bytes from which on to read or write it is worth a thread
KEY_BYTES = 1 << 17  # of a prompt, for policies that look at it
# of a request for a prompt alone: what would make its one token dearer, or the answer longer
NOT_FOR_PREFILL = (
    "stream_options",
    "logprobs",
    "top_logprobs",
    "max_completion_tokens",
    "min_tokens",
    "best_of",
    "stop",
    "rorqual_resume",
)


@dataclass
class RoutedCall:
    """body: as it came; fields: as an object, None where it is none (the server will say so).
    key: the beginning of the prompt. span: of it as a whole; attempts: servers asked so far."""

    method: str
    path: str
    target: str  # path and query, as the client wrote them
    headers: dict[str, str]
    body: bytes
    fields: dict[str, Any] | None = None
    key: bytes = b""
    transfer: dict[str, Any] | None = field(default=None, repr=False)
    span: RequestSpan = NO_SPAN
    attempts: int = 0

    @staticmethod
    def of(
        method: str, path: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> RoutedCall:
        call = RoutedCall(method, path, target, passed_on(headers), body)
        call.headers.setdefault("X-Request-Id", f"route-{secrets.token_hex(12)}")
        if method == "POST" and path in GENERATES:
            try:
                found = json.loads(body)
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict):
                call.fields = found
                call.key = prompt_key(found)
        return call

    @property
    def streams(self) -> bool:
        return self.fields is not None and self.fields.get("stream") is True

    @property
    def can_go_on(self) -> bool:
        return self.path in CAN_GO_ON and self.streams

    @property
    def keeps_marks(self) -> bool:
        """The client is itself one who goes on elsewhere."""
        return self.headers.get(RESUMABLE) == "1"

    def choices(self) -> int:
        """How many the stream has."""
        assert self.fields is not None
        given = self.fields.get("n")
        count = given if isinstance(given, int) else 1
        prompt = self.fields.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            count *= len(prompt)
        return count

    def wants_usage(self) -> bool:
        assert self.fields is not None
        options = self.fields.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def wants_prefill(self, least: int) -> bool:
        """Whether a prompt of its own is worth it: nobody did it, and no log probabilities of the
        prompt are asked for, for which the answering server computes it all."""
        return (
            self.path in CAN_GO_ON
            and self.fields is not None
            and "kv_transfer_params" not in self.fields
            and self.fields.get("prompt_logprobs") is None
            and not self.fields.get("echo")
            and len(self.key) >= least
        )

    def prefill_body(self) -> bytes:
        assert self.fields is not None
        kept = {name: value for name, value in self.fields.items() if name not in NOT_FOR_PREFILL}
        asked = {"stream": False, "max_tokens": 1, "n": 1}
        params = {"kv_transfer_params": {"do_remote_decode": True}}
        return json.dumps({**kept, **asked, **params}).encode()

    def answer_body(self, resume: dict[str, Any] | None) -> bytes:
        """As the client wrote it, but for what the router adds."""
        more: dict[str, Any] = {}
        if self.transfer is not None:
            more["kv_transfer_params"] = self.transfer
        if resume is not None:
            more["rorqual_resume"] = resume
        return json.dumps({**(self.fields or {}), **more}).encode() if more else self.body


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Without those of one connection, named by the standard (RFC 9110, 7.6.1) or by the sender."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return {
        name.title() if name.lower() in OWN_NAMES else name: value
        for name, value in headers.items()
        if name.lower() not in HOP and name.lower() not in named
    }


def prompt_key(fields: Mapping[str, Any]) -> bytes:
    """The text that the prompt begins with, at most KEY_BYTES; equal beginnings of prompts have
    equal beginnings here."""
    if "messages" in fields:
        given: Any = [fields.get("tools"), fields.get("system"), fields["messages"]]
    else:
        given = fields.get("prompt", fields.get("input"))
        if isinstance(given, str):
            return given[:KEY_BYTES].encode(errors="replace")[:KEY_BYTES]
        if isinstance(given, list) and given and isinstance(given[0], str):
            return given[0][:KEY_BYTES].encode(errors="replace")[:KEY_BYTES]
    return json.dumps(given).encode()[:KEY_BYTES]
