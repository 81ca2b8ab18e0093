"""A response as a sequence of blocks: reasoning, text and function calls. The Responses and the
Messages API both have this structure; each writes the blocks in its own format."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rorqual.request import FinishReason
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.http.calls import Call
from rorqual.serve.http.choice import ChatChoiceBuilder
from rorqual.serve.http.sse import Entries
from rorqual.serve.messages import Output
from rorqual.text.reasoning import END


class Kind(StrEnum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


KIND_OF = {"reasoning_content": Kind.REASONING, "content": Kind.TEXT}


@dataclass
class Block:
    """`parts` form its text, or a call's arguments. name: the function's; call: the call's id.
    entries: log probabilities of a text's tokens. cut: the response was truncated inside it."""

    kind: Kind
    index: int
    name: str = ""
    call: str = ""
    parts: list[str] = field(default_factory=list)
    entries: Entries = field(default_factory=list)
    open: bool = True
    cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockCall(Call):
    """One choice, as blocks. Subclasses write the events in begun(), opened(), grown(), closed()
    and ended(); these are only called when streaming."""

    end = b""

    def __init__(self, *args: Any, include_reasoning: bool = True):
        super().__init__(*args)
        self.include_reasoning = include_reasoning
        self.id = str(self.head.fields["id"]).rpartition("-")[2]
        self.blocks: list[Block] = []
        self.has_begun = False
        self.waiting: Entries = []  # of tokens whose text is not yet known
        self.thinking = 0  # tokens up to the end of the reasoning, if any
        self.has_reasoned = self.has_thought = False  # reasoning has started; has ended
        self.end_of_thought = self.tokenizer.raw.token_to_id(END)

    @property
    def reply(self) -> ChatChoiceBuilder:
        (found,) = self.replies
        assert isinstance(found, ChatChoiceBuilder)
        return found

    # ---- outputs of the engine

    def take(self, items: list[tuple[int, Output]], job: EngineJob) -> list[bytes]:
        if self.reply.reasoning is not None and not self.has_thought:
            for _, output in items:
                self._count(output.tokens)
        return super().take(items, job)

    def _count(self, tokens: list[int]) -> None:
        """Count reasoning tokens, up to and including its end token."""
        if self.has_thought:
            return
        end = self.end_of_thought
        self.has_thought = end in tokens
        self.thinking += len(tokens) if end not in tokens else tokens.index(end) + 1

    def _note(self, choice: int, text: str, entries: Entries | None, events: list[bytes]) -> None:
        reply = self.reply
        if not self.has_begun:
            self.has_begun = True
            if self.stream:
                events.extend(self.begun())
        if reply.plain:
            self.waiting.extend(entries or ())
            if text:
                self._grow(Kind.TEXT, text, events)
        else:
            self._split(reply, text, entries or [], events)
        if reply.finish is not None:
            self._finish(reply.finish, events)

    def _split(
        self, reply: ChatChoiceBuilder, text: str, entries: Entries, events: list[bytes]
    ) -> None:
        before = reply.reasoning.state if reply.reasoning is not None else "outside"
        fields = list(reply.fields(text))
        after = reply.reasoning.state if reply.reasoning is not None else "outside"
        self.has_reasoned |= any(name == "reasoning_content" for name, _ in fields)
        if entries:
            self._keep(entries, before, after)
        for name, value in fields:
            if name == "tool_calls":
                for delta in value:
                    self._call(delta, events)
            elif name == "content" or self.include_reasoning:
                self._grow(KIND_OF[name], value, events)

    def _keep(self, entries: Entries, before: str, after: str) -> None:
        """Keep log probabilities of content tokens only, not of reasoning."""
        if after == "inside":
            self.waiting.clear()
        elif before != "outside" and self.has_reasoned:
            self.waiting = _after_reasoning(entries)
        else:
            self.waiting.extend(entries)

    def _call(self, delta: dict[str, Any], events: list[bytes]) -> None:
        """Process a call's delta in OpenAI's format: the first has its id and name."""
        if "id" in delta:
            self.waiting.clear()
            self._open(Kind.CALL, events, delta["function"]["name"], delta["id"])
        arguments = delta["function"]["arguments"]
        if arguments:
            self._grow(Kind.CALL, arguments, events)

    # ---- the sequence of blocks

    def _open(self, kind: Kind, events: list[bytes], name: str = "", call: str = "") -> Block:
        self._close(events)
        block = Block(kind, len(self.blocks), name, call)
        self.blocks.append(block)
        if self.stream:
            events.extend(self.opened(block))
        return block

    def _grow(self, kind: Kind, text: str, events: list[bytes]) -> None:
        block = self.blocks[-1] if self.blocks else None
        if block is None or block.kind is not kind:
            block = self._open(kind, events)
        block.parts.append(text)
        entries: Entries = []
        if self.waiting and kind is Kind.TEXT:
            entries = self.waiting
            self.waiting = []
            block.entries.extend(entries)
        if self.stream:
            events.append(self.grown(block, text, entries))

    def _close(self, events: list[bytes]) -> None:
        block = self.blocks[-1] if self.blocks else None
        if block is not None and block.open:
            block.open = False
            if self.stream:
                events.extend(self.closed(block))

    def _finish(self, finish: str, events: list[bytes]) -> None:
        """Close the last block; an empty response has one empty text."""
        if not self.blocks:
            self._open(Kind.TEXT, events)
        last = self.blocks[-1]
        if self.waiting and last.kind is Kind.TEXT:
            self._grow(Kind.TEXT, "", events)  # the last token has no text of its own
        last.cut = finish == FinishReason.LENGTH
        self._close(events)

    def reasoning_tokens(self) -> int:
        """Tokens of reasoning; where no single token ends it, those of its text."""
        reply = self.reply
        if not self.has_reasoned:
            return 0
        if self.end_of_thought is None:
            thoughts = [block.text for block in self.blocks if block.kind is Kind.REASONING]
            self.thinking = sum(len(self.tokenizer.encode(text, False)) for text in thoughts)
        return min(self.thinking, reply.tokens)

    # ---- events, by API

    def begun(self) -> list[bytes]:
        raise NotImplementedError

    def opened(self, block: Block) -> list[bytes]:
        raise NotImplementedError

    def grown(self, block: Block, text: str, entries: Entries) -> bytes:
        raise NotImplementedError

    def closed(self, block: Block) -> list[bytes]:
        raise NotImplementedError

    def ended(self) -> list[bytes]:
        raise NotImplementedError

    def last_events(self) -> list[bytes]:
        return self.ended()


def _after_reasoning(entries: Entries) -> Entries:
    """The entries after the end of the reasoning; none where the end was in an earlier output."""
    tail = ""
    for i, (token, found) in enumerate(entries):
        text = found[token].decoded_token or ""
        if END in tail + text:
            return entries[i + 1 :]
        tail = (tail + text)[-len(END) :]
    return []
