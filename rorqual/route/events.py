"""Streams of server-sent events in transit: passes on whole events, without the comments that name
the tokens they cover, and records these so that another server can continue the stream (serving.md,
"Streams that can be continued")."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rorqual.config.api_errors import ERROR_CODE

MARK = b": rorqual "
TRANSFER = b": rorqual_transfer "  # before kv_transfer_params: another server goes on
ERROR = b'data: {"error"'
LAST = b"data: [DONE]"
LAST_OF_ANTHROPIC = (b"event: message_stop\n", b"event: error\n")
MAX_EVENT_BYTES = 16 << 20
MAX_ERROR_BYTES = 4096  # of a response whose body is read for its code
# errors after which another server can continue; others are about the request. FULL: for all
# clients. LOST: an engine or server.
FULL = frozenset(("queue_full", "engine_busy"))
LOST = frozenset(("engine_dead", "shutting_down", "not_ready", "kv_load_failure"))


class BadStream(Exception):
    """A server's response is not a stream of events."""


@dataclass
class ChoiceSoFar:
    """tokens: their ids as text, with commas between them."""

    tokens: bytearray = field(default_factory=bytearray)
    count: int = 0
    ended: bool = False

    def ids(self) -> list[int]:
        return [int(part) for part in bytes(self.tokens).split(b",")] if self.tokens else []


class StreamRecord:
    """What was sent to the client. marked: every event so far named its tokens. complete: no token
    is missing, so the stream can be continued."""

    def __init__(self, most_tokens: int, given: Any = None):
        self.most_tokens = most_tokens
        self.choices: dict[int, ChoiceSoFar] = {}
        self.head: dict[str, Any] | None = None
        self.events = 0
        self.marked = True
        self.tokens = 0
        self.usage_sent = False
        if isinstance(given, dict):
            self._continue(given)

    def _continue(self, given: dict[str, Any]) -> None:
        """The client's request itself continues a stream."""
        try:
            self.head = {"id": str(given["id"]), "created": int(given["created"])}
            for choice in given["choices"]:
                ids = ",".join(str(int(token)) for token in choice["token_ids"])
                self._count(int(choice["index"]), ids.encode(), bool(choice.get("ended")))
        except (KeyError, TypeError, ValueError):
            self.marked = False  # the server will report what is wrong

    def _count(self, index: int, ids: bytes, ended: bool) -> None:
        choice = self.choices.setdefault(index, ChoiceSoFar())
        if ids:
            count = ids.count(b",") + 1
            choice.tokens += b"," + ids if choice.tokens else ids
            choice.count += count
            self.tokens += count
        choice.ended = choice.ended or ended
        if self.tokens > self.most_tokens:
            self.marked = False
            self.choices.clear()

    @property
    def can_go_on(self) -> bool:
        return self.marked and self.head is not None

    def finished(self, expected: int, usage: bool) -> bool:
        """Whether only the stream's last line is missing."""
        ended = sum(choice.ended for choice in self.choices.values())
        return self.can_go_on and ended >= expected and (self.usage_sent or not usage)

    def resume(self) -> dict[str, Any]:
        """The request field that makes another server continue."""
        assert self.head is not None
        choices = [
            {"index": index, "token_ids": choice.ids(), "ended": choice.ended}
            for index, choice in self.choices.items()
        ]
        return {**self.head, "choices": choices}

    def mark(self, line: bytes) -> None:
        """Process a line after MARK: choice, tokens, whether it ends."""
        choice, _, rest = line.partition(b" ")
        ids, _, end = rest.partition(b" ")
        known = choice.isdigit() and (not ids or ids.replace(b",", b"").isdigit())
        if not known or end not in (b"", b"end"):
            raise BadStream(f"a line of tokens reads {line[:80]!r}")
        self._count(int(choice), ids, end == b"end")

    def passed(self, event: bytes, marked: bool) -> None:
        """Record an event sent to the client."""
        self.events += 1
        if self.head is None and self.marked:
            self._read_head(event)
        if marked or not self.marked:
            return
        # only the usage event has no tokens; it follows all choices
        if b'"choices":[]' in event:
            self.usage_sent = True
        else:
            self.marked = False

    def _read_head(self, event: bytes) -> None:
        try:
            found = json.loads(event.removeprefix(b"data:"))
            self.head = {"id": str(found["id"]), "created": int(found["created"])}
        except (KeyError, TypeError, ValueError):
            self.marked = False


@dataclass
class Passed:
    """The result of some bytes: data for the client, whether the stream ended regularly, an error
    after which another server can continue, and where the server that is to continue finds the
    prompt's pages."""

    out: bytes
    done: bool = False
    lost: bytes | None = None
    transfer: dict[str, Any] | None = None


class EventSplitter:
    """Splits one server's stream. keep_marks: the client requested the comments itself. hands_over:
    the server ends the stream after its first token. anthropic: the events are those of Anthropic's
    API, which end without a [DONE] line."""

    def __init__(
        self,
        record: StreamRecord,
        keep_marks: bool,
        hands_over: bool = False,
        anthropic: bool = False,
    ):
        self.record = record
        self.keep_marks = keep_marks
        self.hands_over = hands_over
        self.anthropic = anthropic
        self.rest = b""

    def feed(self, data: bytes) -> Passed:
        """Raises BadStream."""
        if self.rest:
            data = self.rest + data
        end = data.rfind(b"\n\n")
        if end < 0 and b"\r\n\r\n" in data:  # other servers' line ends
            data = data.replace(b"\r\n", b"\n")
            end = data.rfind(b"\n\n")
        if end < 0:
            self.rest = data
            if len(data) > MAX_EVENT_BYTES:
                raise BadStream(f"an event has more than {MAX_EVENT_BYTES} bytes")
            return Passed(b"")
        self.rest = data[end + 2 :]
        out: list[bytes] = []
        for event in data[:end].split(b"\n\n"):
            body = event
            marks = []
            while body.startswith(MARK):
                line, _, body = body.partition(b"\n")
                marks.append(line)
            if self.hands_over and body.startswith(TRANSFER):
                return Passed(b"".join(out), transfer=_object(body[len(TRANSFER) :]))
            if body.startswith(b":"):  # a keep-alive comment
                out.append(event + b"\n\n")
                continue
            if self.record.marked and self._is_loss(body):
                return Passed(b"".join(out), lost=body)
            for line in marks:
                self.record.mark(line[len(MARK) :])
            out.append((event if self.keep_marks else body) + b"\n\n")
            if body == LAST or (self.anthropic and body.startswith(LAST_OF_ANTHROPIC)):
                return Passed(b"".join(out), done=True)
            self.record.passed(body, bool(marks))
        return Passed(b"".join(out))

    def _is_loss(self, event: bytes) -> bool:
        return event.startswith(ERROR) and _field(event.removeprefix(b"data:"), "code") in LOST


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadStream(f"kv_transfer_params read {data[:80]!r}")
    return found


def error_code(headers: Mapping[str, str], body: bytes) -> str | None:
    """What an error response is about: by its header, since not every API's format has a code, or
    by the body of a server that sends none."""
    named = headers.get(ERROR_CODE)
    return named or (_field(body, "code") if len(body) < MAX_ERROR_BYTES else None)


def refuses_pages(body: bytes) -> bool:
    """Whether an error is about kv_transfer_params."""
    return _field(body, "param") == "kv_transfer_params"


def _field(body: bytes, name: str) -> str | None:
    """A field of an error."""
    try:
        found = json.loads(body)["error"].get(name)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
    return found if isinstance(found, str) else None
