"""A response of the Messages API: its blocks, whole or as stream events."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from rorqual.config.api_errors import anthropic_event
from rorqual.request import FinishReason
from rorqual.serve.errors import ApiError
from rorqual.serve.http.anthropic.errors import anthropic_body
from rorqual.serve.http.blocks.call import Block, BlockCall, Kind
from rorqual.serve.http.sse import Entries, encode

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
DELTA = {
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}
EMPTY: dict[Kind, dict[str, Any]] = {
    Kind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
    Kind.TEXT: {"type": "text", "text": ""},
    Kind.CALL: {"type": "tool_use", "input": {}},
}


class MessagesCall(BlockCall):
    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.start = b""  # of the events of the block that is open

    # ---- whole response

    def whole(self) -> bytes:
        stop = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        content = [_content(block) for block in self.blocks]
        return encode({**self._message(content), **stop, "usage": self._usage()})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.head.fields["model"],
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _stop_sequence(self) -> str | None:
        reason = self.reply.stop_reason
        return reason if isinstance(reason, str) else None

    def _stop_reason(self) -> str:
        """A stop string may truncate a call, so it takes precedence over tool_use."""
        reply = self.reply
        if reply.finish == FinishReason.LENGTH:
            return "max_tokens"
        if self._stop_sequence() is not None:
            return "stop_sequence"
        return "tool_use" if reply.finish_reason == "tool_calls" else "end_turn"

    def _usage(self) -> dict[str, Any]:
        """Tokens found in the prefix cache are not among input_tokens in this API."""
        reply = self.reply
        return {
            "input_tokens": self.prompt_tokens - reply.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reply.cached,
            "output_tokens": reply.tokens,
        }

    def refusal(self, error: ApiError) -> bytes:
        return anthropic_body(error)

    # ---- stream events

    def begun(self) -> list[bytes]:
        message = {**self._message([]), "usage": self._usage()}
        return [_event("message_start", message=message), PING]

    def opened(self, block: Block) -> list[bytes]:
        content = dict(EMPTY[block.kind])
        if block.kind is Kind.CALL:
            content |= {"id": block.call, "name": block.name}
        kind, field = DELTA[block.kind]
        self.start = b"event: content_block_delta\ndata: " + (
            b'{"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
            % (block.index, kind.encode(), field.encode())
        )
        return [_event("content_block_start", index=block.index, content_block=content)]

    def grown(self, block: Block, text: str, entries: Entries) -> bytes:
        return self.start + encode(text) + b"}}\n\n"

    def closed(self, block: Block) -> list[bytes]:
        stop = _event("content_block_stop", index=block.index)
        if block.kind is not Kind.REASONING:
            return [stop]
        delta = {"type": "signature_delta", "signature": _signature(block)}
        return [_event("content_block_delta", index=block.index, delta=delta), stop]

    def ended(self) -> list[bytes]:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        event = _event("message_delta", delta=delta, usage=self._usage())
        return [event, _event("message_stop")]

    def failure(self, error: ApiError) -> bytes:
        return anthropic_event(anthropic_body(error))


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


def _content(block: Block) -> dict[str, Any]:
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": _signature(block)}
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": block.text}
    called = {"id": block.call, "name": block.name, "input": input_of(block.text)}
    return {"type": "tool_use", **called}


def _signature(block: Block) -> str:
    """Clients drop thinking blocks without a signature from later requests. It is a digest, and
    never verified."""
    return hashlib.blake2b(block.text.encode(errors="replace"), digest_size=16).hexdigest()


def input_of(arguments: str) -> Any:
    """Arguments must be an object in this API. Anything else, such as a truncated object, is
    wrapped as Anthropic recommends."""
    if not arguments.strip():
        return {}
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return {"INVALID_JSON": arguments}
    return msgspec.Raw(arguments.encode())
