"""A response of the Responses API: its items, whole or as stream events."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from rorqual.request import FinishReason
from rorqual.serve.errors import ApiError, encodable
from rorqual.serve.http.blocks.call import Block, BlockCall, Kind
from rorqual.serve.http.sse import Entries, chat_logprobs, encode

PREFIX = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
PART_OF = {Kind.REASONING: "reasoning_text", Kind.TEXT: "output_text"}


class ResponsesCall(BlockCall):
    """echoed: fields of the request that the response repeats, as JSON."""

    def __init__(self, *args: Any, echoed: dict[str, msgspec.Raw], **more: Any):
        super().__init__(*args, **more)
        self.echoed = echoed
        self.sequence = 0
        self.start = b""  # of the events of the block that is open

    # ---- whole response

    def whole(self) -> bytes:
        return encode(self._response(self._status()))

    def _status(self) -> str:
        return "incomplete" if self.reply.finish == FinishReason.LENGTH else "completed"

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        params = self.requests[0].params
        done = status in ("completed", "incomplete")
        cut = {"reason": "max_output_tokens"}
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.head.fields["created"],
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": cut if status == "incomplete" else None,
            "model": self.head.fields["model"],
            "output": [self._item(block) for block in self.blocks],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": self._usage() if done else None,
            **self.echoed,
        }

    def _usage(self) -> dict[str, Any]:
        reply = self.reply
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached, "cache_write_tokens": 0},
            "output_tokens": reply.tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens()},
            "total_tokens": self.prompt_tokens + reply.tokens,
        }

    def _name(self, block: Block) -> str:
        return f"{PREFIX[block.kind]}_{self.id}{block.index:02x}"

    def _item(self, block: Block) -> dict[str, Any]:
        """A newly opened block has no parts yet."""
        status = "in_progress" if block.open else "incomplete" if block.cut else "completed"
        item = {"id": self._name(block), "status": status}
        if block.kind is Kind.CALL:
            called = {"call_id": block.call, "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **called}
        content = [self._part(block)] if block.parts or not block.open else []
        if block.kind is Kind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block) -> dict[str, Any]:
        part: dict[str, Any] = {"type": PART_OF[block.kind], "text": block.text}
        if block.kind is Kind.TEXT:
            part |= {"annotations": [], "logprobs": self._logprobs(block.entries)}
        return part

    def _logprobs(self, entries: Entries) -> list[dict[str, Any]]:
        if self.top is None or not entries:
            return []
        found = chat_logprobs(entries, self.top, self.tokenizer)["content"]
        return [_with_bytes(entry) for entry in found]

    # ---- stream events

    def _encode_event(self, kind: str, **fields: Any) -> bytes:
        found = {"type": kind, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(found) + b"\n\n"

    def begun(self) -> list[bytes]:
        response = msgspec.Raw(encode(self._response("in_progress")))
        return [
            self._encode_event("response.created", response=response),
            self._encode_event("response.in_progress", response=response),
        ]

    def opened(self, block: Block) -> list[bytes]:
        events = [
            self._encode_event(
                "response.output_item.added", output_index=block.index, item=self._item(block)
            )
        ]
        if block.kind is Kind.CALL:
            kind = "response.function_call_arguments"
        else:
            kind = f"response.{PART_OF[block.kind]}"
            part = self._part(block)
            events.append(
                self._encode_event("response.content_part.added", **self._at(block), part=part)
            )
        head = encode({"type": f"{kind}.delta", **self._at(block)})[:-1]
        self.start = f"event: {kind}.delta\ndata: ".encode() + head + b',"delta":'
        return events

    def _at(self, block: Block) -> dict[str, Any]:
        found = {"item_id": self._name(block), "output_index": block.index}
        return found if block.kind is Kind.CALL else {**found, "content_index": 0}

    def grown(self, block: Block, text: str, entries: Entries) -> bytes:
        number = b',"sequence_number":%d' % self.sequence
        self.sequence += 1
        rest = b',"logprobs":[]}\n\n' if block.kind is Kind.TEXT else b"}\n\n"
        if entries:
            rest = b',"logprobs":' + encode(self._logprobs(entries)) + b"}\n\n"
        return self.start + encode(text) + number + rest

    def closed(self, block: Block) -> list[bytes]:
        at = self._at(block)
        if block.kind is Kind.CALL:
            kind = "response.function_call_arguments.done"
            events = [self._encode_event(kind, **at, name=block.name, arguments=block.text)]
        else:
            part = self._part(block)
            kind = f"response.{PART_OF[block.kind]}.done"
            fields = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [
                self._encode_event(kind, **at, **fields),
                self._encode_event("response.content_part.done", **at, part=part),
            ]
        item = self._item(block)
        done = self._encode_event("response.output_item.done", output_index=block.index, item=item)
        return [*events, done]

    def ended(self) -> list[bytes]:
        status = self._status()
        return [self._encode_event(f"response.{status}", response=self._response(status))]

    def failure(self, error: ApiError) -> bytes:
        """Two events, as clients look for one or the other."""
        for block in self.blocks[-1:]:
            block.cut = block.open
            block.open = False
        code = CODES.get(error.status, "server_error")
        message = encodable(error.message)
        fields = {"code": error.code or error.kind, "message": message, "param": error.param}
        failed = self._response("failed", {"code": code, "message": message})
        return self._encode_event("error", **fields) + self._encode_event(
            "response.failed", response=failed
        )


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """Where a token's bytes are unknown, use those of its text: this API requires them."""
    found = {**entry, "bytes": entry["bytes"] or list(entry["token"].encode())}
    if "top_logprobs" in entry:
        found["top_logprobs"] = [_with_bytes(it) for it in entry["top_logprobs"]]
    return found
