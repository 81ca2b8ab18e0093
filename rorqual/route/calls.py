"""A client's request in the router: what is forwarded, and the body fields the router reads."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rorqual.telemetry.spans import NO_SPAN, RequestSpan

# hop-by-hop headers (RFC 9110, 7.6.1), and those that the router sets itself
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
REQUEST_ID = "X-Request-Id"
OWN_NAMES = frozenset(("x-request-id", "x-rorqual-resumable"))
CAN_GO_ON = frozenset(("/v1/completions", "/v1/chat/completions"))
GENERATES = CAN_GO_ON | {"/v1/responses", "/v1/messages"}
Transfer = dict[str, Any] | list[dict[str, Any] | None]  # kv_transfer_params, or one each prompt
LONG_BODY = 1 << 18  # bytes from which parsing or encoding is worth a thread
KEY_BYTES = 1 << 17  # of a prompt, for prefix policies
# fields removed from a prefill request: they would make its one token costlier, or the response
# longer
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
    """body: as received; fields: parsed, None where it is not an object (the server will reject
    it). key: the beginning of the prompt. transfer: where the prompts' pages are. span: of the
    whole request; attempts: servers tried so far."""

    method: str
    path: str
    target: str  # path and query, as the client sent them
    headers: dict[str, str]
    body: bytes
    fields: dict[str, Any] | None = None
    key: bytes = b""
    transfer: Transfer | None = field(default=None, repr=False)
    span: RequestSpan = NO_SPAN
    attempts: int = 0

    @staticmethod
    def of(
        method: str, path: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> RoutedCall:
        call = RoutedCall(method, path, target, passed_on(headers), body)
        call.headers.setdefault(REQUEST_ID, f"route-{secrets.token_hex(12)}")
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
        """Whether the client itself continues streams elsewhere."""
        return self.headers.get(RESUMABLE) == "1"

    def choices(self) -> int:
        """The stream's number of choices."""
        assert self.fields is not None
        given = self.fields.get("n")
        if isinstance(given, float) and given.is_integer():
            given = int(given)  # servers take 2.0 as 2
        count = given if isinstance(given, int) and not isinstance(given, bool) else 1
        return count * self.prompts()

    def prompts(self) -> int:
        assert self.fields is not None
        prompt = self.fields.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            return len(prompt)
        return 1

    def wants_usage(self) -> bool:
        assert self.fields is not None
        options = self.fields.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def wants_prefill(self, least: int) -> bool:
        """Whether to prefill on another server: not done yet; no prompt log probabilities, for
        which the decoding server computes the whole prompt; and no prompt that is cut to leave room
        for max_tokens, which a prefill request may change."""
        return (
            self.path in CAN_GO_ON
            and self.fields is not None
            and "kv_transfer_params" not in self.fields
            and self.fields.get("prompt_logprobs") is None
            and not self.fields.get("echo")
            and self.fields.get("truncate_prompt_tokens") != -1
            and len(self.key) >= least
        )

    def takes_first_token(self) -> bool:
        """Whether the prefill server's own token can begin the stream: it has one choice, which is
        new and has tokens."""
        return (
            self.can_go_on
            and self.fields is not None
            and self.choices() == 1
            and self.fields.get("rorqual_resume") is None
            and self.fields.get("max_tokens") != 0
        )

    def first_token_body(self) -> bytes:
        """The client's request, which the prefill server ends after its first token."""
        params = {"kv_transfer_params": {"do_remote_decode": True, "first_token": True}}
        return json.dumps({**(self.fields or {}), **params}).encode()

    def prefill_body(self) -> bytes:
        assert self.fields is not None
        kept = {name: value for name, value in self.fields.items() if name not in NOT_FOR_PREFILL}
        asked = {"stream": False, "max_tokens": 1, "n": 1}
        params = {"kv_transfer_params": {"do_remote_decode": True}}
        return json.dumps({**kept, **asked, **params}).encode()

    def transfer_of(self, answer: Any) -> Transfer | None:
        """kv_transfer_params of a prefill server's answer: a list where there are several prompts.
        Raises ValueError where they are of another number of prompts: pages of one prompt are not
        those of another."""
        found = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
        prompts = self.prompts()
        if isinstance(found, dict) and prompts == 1:
            return found
        if not isinstance(found, dict | list):
            return None
        if prompts == 1 or not isinstance(found, list) or len(found) != prompts:
            raise ValueError(f"its kv_transfer_params are not those of {prompts} prompts")
        if not all(one is None or isinstance(one, dict) for one in found):
            raise ValueError("its kv_transfer_params are no objects")
        return found

    def answer_body(self, resume: dict[str, Any] | None) -> bytes:
        """As the client sent it, with the router's additions."""
        more: dict[str, Any] = {}
        if self.transfer is not None:
            more["kv_transfer_params"] = self.transfer
        if resume is not None:
            more["rorqual_resume"] = resume
        return json.dumps({**(self.fields or {}), **more}).encode() if more else self.body


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers without hop-by-hop ones, named by the standard (RFC 9110, 7.6.1) or by the
    sender."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return {
        name.title() if name.lower() in OWN_NAMES else name: value
        for name, value in headers.items()
        if name.lower() not in HOP and name.lower() not in named
    }


def prompt_key(fields: Mapping[str, Any]) -> bytes:
    """The prompt's beginning as bytes, at most KEY_BYTES; prompts with equal prefixes have keys
    with equal prefixes."""
    if "messages" in fields:
        given: Any = [fields.get("tools"), fields.get("system"), fields["messages"]]
    else:
        given = fields.get("prompt", fields.get("input"))
        if isinstance(given, str):
            return given[:KEY_BYTES].encode(errors="replace")[:KEY_BYTES]
        if isinstance(given, list) and given and isinstance(given[0], str):
            return given[0][:KEY_BYTES].encode(errors="replace")[:KEY_BYTES]
    return json.dumps(given).encode()[:KEY_BYTES]
