"""Streams with SSE comments before their events that name the tokens each event covers. A client
that has an event has its comment, and can ask any server with the same model to continue from
there. A stream may also end by itself after its first token, for another server to continue.

What was sent for a choice after n tokens follows from these tokens alone, however they were
grouped. So one engine output makes one event with text: a client that had half of it could not
express that as a number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rorqual.request import FinishReason
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.http.calls import Call, ChatCall, TextCall
from rorqual.serve.http.choice import ChatChoiceBuilder
from rorqual.serve.http.sse import ChatChoice, Entries, chat_logprobs, encode
from rorqual.serve.messages import Counting, Output

HEADER = "x-rorqual-resumable"


def resumable(headers: Mapping[str, str]) -> bool:
    """Whether the caller requests the comments."""
    return headers.get(HEADER) == "1"


def line(choice: int, tokens: list[int], end: bool = False) -> bytes:
    """The comment before an event: its choice, and the tokens not named by earlier lines."""
    return b": rorqual %d %s%s\n" % (
        choice,
        ",".join(map(str, tokens)).encode(),
        b" end" if end else b"",
    )


def handed_over(transfer: dict[str, Any]) -> bytes:
    """The last comment of a stream that another server continues after its first token: where the
    pages are."""
    return b": rorqual_transfer " + encode(transfer) + b"\n\n"


class MarkedCall(Call):
    """named: how many tokens of each choice the lines have named."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.named = [0] * len(self.requests)

    def hand_over(self) -> None:
        """End the stream of the only choice after its first token, unless that ends the choice: the
        engine samples one token, and events are those of the whole request."""
        (request,) = self.requests
        params = request.params
        if params.max_tokens == 1:
            self.requests[0] = replace(request, kv_transfer_params=None)
            return
        # of several tokens to come only that the first is not the last matters for the first
        least = min(1, params.min_tokens)
        self.requests[0] = replace(request, params=replace(params, max_tokens=1, min_tokens=least))

    def take(self, items: list[tuple[int, Output]], job: EngineJob) -> list[bytes]:
        transfer = None
        for choice, output in items:
            length = output.finish == FinishReason.LENGTH
            if length and output.transfer is not None and self.requests[choice].hands_over:
                transfer = output.transfer
                output.finish = None
        events = super().take(items, job)
        if transfer is not None and self.open:
            self.open -= 1
            if self.counting is Counting.READ:
                job.end_text(0, stopped=False)
            self.include_usage = False
            self.end = handed_over(transfer)
        return events

    def _opens(self, choice: int) -> bool:
        """Whether the next event of this choice comes before any token's."""
        return False

    def _note(self, choice: int, text: str, entries: Entries | None, events: list[bytes]) -> None:
        start = len(events)
        opens = self._opens(choice)
        super()._note(choice, text, entries, events)
        reply = self.replies[choice]
        for place in range(start, len(events)):
            tokens = [] if opens and place == start else self._tokens(choice)
            end = reply.finish is not None and place == len(events) - 1
            events[place] = line(choice, tokens, end) + events[place]

    def _tokens(self, choice: int) -> list[int]:
        """Tokens not named yet."""
        before = self.named[choice]
        self.named[choice] = count = self.replies[choice].tokens
        return self.replies[choice].completion.out.token_ids[before:count]

    def last_event(self, choice: int) -> bytes:
        return line(choice, self._tokens(choice), end=True) + super().last_event(choice)


class ResumableTextCall(MarkedCall, TextCall):
    """A completion."""


class ResumableChatCall(MarkedCall, ChatCall):
    """A chat. The events of one output are the role's, if it is the first, one with all its fields,
    and the end's."""

    def _opens(self, choice: int) -> bool:
        return self.stream and not self.begun[choice]

    def _fields(
        self, reply: ChatChoiceBuilder, part: ChatChoice, text: str, events: list[bytes]
    ) -> None:
        delta = self._delta(reply, text)
        if delta:
            events.append(self._event(part.delta(delta)))

    def _with_logprobs(
        self,
        reply: ChatChoiceBuilder,
        part: ChatChoice,
        text: str,
        entries: Entries,
        events: list[bytes],
    ) -> None:
        assert self.top is not None
        found = encode(chat_logprobs(entries, self.top, self.tokenizer, self.as_ids))
        delta = {"content": text} if reply.plain else {"content": "", **self._delta(reply, text)}
        events.append(self._event(part.delta(delta, found)))

    def _delta(self, reply: ChatChoiceBuilder, text: str) -> dict[str, Any]:
        """Merge text, and pieces of calls, into one delta: a call may end with the response."""
        delta: dict[str, Any] = {}
        for name, value in reply.fields(text):
            if self._shown(name):
                delta[name] = delta[name] + value if name in delta else value
        return delta
