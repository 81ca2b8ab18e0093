"""An API request in progress: its sequences, its replies, and how they are written. Kinds: chat and
completion; those of other APIs are in blocks/, responses/ and anthropic/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rorqual.request import Request
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.errors import ApiError
from rorqual.serve.http.choice import ChatChoiceBuilder, ChoiceBuilder
from rorqual.serve.http.sse import (
    DONE,
    ChatChoice,
    ChunkHead,
    Entries,
    PromptEntries,
    TextChoice,
    chat_logprobs,
    encode,
    prompt_logprobs,
    text_logprobs,
    usage,
)
from rorqual.serve.messages import Counting, Output
from rorqual.text.detokenizer import prompt_entries
from rorqual.text.tokenizer import Tokenizer


class Call:
    """`requests` and `replies` correspond, one per choice. take() feeds replies and returns the
    `events` to send.

    top: number of likely tokens to list, None for no log probabilities. scores: some request wants
    prompt log probabilities: call `read_scores` before take(), which then has `prompt_entries` by
    choice. prompt_top: number of likely tokens to list for each prompt token, None for none.
    returns_ids: token ids are returned with the text; `new_ids` are those of the current output.
    as_ids: log probabilities name tokens by id. more: extra fields of a non-streamed response.
    prompts: number of prompts, with as many choices each. lists_transfers: the response has a list
    of kv_transfer_params, one of each prompt. end: a stream's last bytes. over: choices already
    complete in the stream that this one continues (resume/replay.py); early: the events of their
    end. structure: the parameter that gave the structure of the answer. names: for errors, a chat's
    parameter to that of the body, see blocks/tagged.py.
    """

    end = DONE

    def __init__(
        self,
        head: ChunkHead,
        requests: list[Request],
        prompt_tokens: int,
        tokenizer: Tokenizer,
        top: int | None,
    ):
        self.head = head
        self.requests = requests
        self.prompt_tokens = prompt_tokens
        self.tokenizer = tokenizer
        self.top = top
        self.replies: list[ChoiceBuilder] = []
        self.stream = self.include_usage = self.continuous_usage = False
        self.open = len(requests)
        self.scores = any(request.params.prompt_logprobs is not None for request in requests)
        self.prompt_entries: dict[int, PromptEntries] = {}
        self.prompt_top: int | None = None
        self.returns_ids = self.as_ids = False
        self.new_ids: list[int] | None = None
        self.token_ids: list[list[int]] = [[] for _ in requests]
        self.more: dict[str, Any] = {}
        self.prompts = 1
        self.lists_transfers = False
        self.over: set[int] = set()
        self.early: list[bytes] = []
        self.structure: str | None = None
        self.names: Mapping[str, str] = {}

    @property
    def wanted(self) -> list[Request]:
        """Requests to send to an engine."""
        return [request for i, request in enumerate(self.requests) if i not in self.over]

    @property
    def cached_tokens(self) -> int:
        """Of all prompts, what the prefix cache had when the first choice of each began: the others
        find what that one computes."""
        each = max(1, len(self.replies) // self.prompts)
        return sum(reply.cached for reply in self.replies[::each])

    def read_scores(self, items: list[tuple[int, Output]]) -> None:
        """On a thread: a prompt may have a hundred thousand tokens."""
        for choice, output in items:
            if output.prompt_logprobs is not None:
                prompt = self.requests[choice].prompt
                show = self.tokenizer.token
                self.prompt_entries[choice] = prompt_entries(prompt, output.prompt_logprobs, show)

    @property
    def every_step(self) -> bool:
        """Whether the engine must send tokens as they are sampled."""
        return self.stream or any(reply.params.stop for reply in self.replies)

    @property
    def counting(self) -> Counting:
        """Of its requests, whose parameters are the same in this."""
        return self.replies[0].counting

    @property
    def sinks(self) -> bool:
        """Whether choices end only with the engine's finish, and every output is quick to
        process."""
        return not self.scores and all(reply.plain_text for reply in self.replies)

    def take(self, items: list[tuple[int, Output]], job: EngineJob) -> list[bytes]:
        """Process outputs; returns the events to send when streaming. Outputs of one choice become
        one event."""
        events: list[bytes] = []
        for choice, output in _merged(items):
            reply = self.replies[choice]
            if reply.finish is not None:
                continue
            before = reply.tokens
            piece = reply.push(output)
            if output.times is not None:
                job.read(choice, output.times, reply.tokens - before)
            if output.transfer is not None:
                self._note_transfer(choice, output.transfer)
            if self.returns_ids:
                # a stop string may end the text before the engine did
                self.new_ids = output.tokens[: reply.tokens - before]
                self.token_ids[choice] += self.new_ids
            if reply.finish is not None:
                self.open -= 1
                if reply.counting is Counting.READ:
                    job.end_text(choice, reply.stopped)
                if not output.tokens:
                    events.append(self.last_event(choice))
                    continue
            self._note(choice, piece.text, piece.entries, events)
        return events

    def _note_transfer(self, choice: int, transfer: dict[str, Any]) -> None:
        """Where the pages of this choice's prompt are."""
        name = "kv_transfer_params"
        if not self.lists_transfers:
            self.more[name] = transfer
            return
        found = self.more.get(name) or [None] * self.prompts
        found[choice * self.prompts // len(self.requests)] = transfer
        self.more[name] = found

    def _note(self, choice: int, text: str, entries: Entries | None, events: list[bytes]) -> None:
        raise NotImplementedError

    def last_event(self, choice: int) -> bytes:
        """The final event of a choice whose text was already sent."""
        raise NotImplementedError

    def _event(self, choice: bytes) -> bytes:
        if self.new_ids is not None:
            choice = choice[:-1] + b',"token_ids":' + encode(self.new_ids) + b"}"
            self.new_ids = None
        return self.head.event(
            choice,
            encode(usage(self.prompt_tokens, self.cached_tokens, self.replies))
            if self.continuous_usage
            else b"",
        )

    def last_events(self) -> list[bytes]:
        if not self.include_usage:
            return []
        return [
            self.head.event(
                b"", encode(usage(self.prompt_tokens, self.cached_tokens, self.replies))
            )
        ]

    def whole(self) -> bytes:
        raise NotImplementedError

    def refusal(self, error: ApiError) -> bytes:
        """The body of an error response."""
        return error.body()

    def failure(self, error: ApiError) -> bytes:
        """The error event of a started stream."""
        return b"data: " + error.body() + b"\n\n" + DONE


class ChatCall(Call):
    def __init__(self, *args: Any, include_reasoning: bool = True):
        super().__init__(*args)
        self.include_reasoning = include_reasoning
        self.parts = [ChatChoice(i) for i in range(len(self.requests))]
        self.begun = [False] * len(self.requests)
        self.texts: list[list[tuple[str, Any]]] = [[] for _ in self.requests]
        self.entries: list[Entries] = [[] for _ in self.requests]

    def _note(self, choice: int, text: str, entries: Entries | None, events: list[bytes]) -> None:
        reply = self.replies[choice]
        assert isinstance(reply, ChatChoiceBuilder)
        if not self.stream:
            self.texts[choice].extend(reply.fields(text))
            self.entries[choice].extend(entries or ())
            return
        part = self.parts[choice]
        first = not self.begun[choice]
        if first:
            self.begun[choice] = True
            events.append(self._role(part, self.requests[choice]))
        before = len(events)
        if entries and self.top is not None:
            self._with_logprobs(reply, part, text, entries, events)
        elif reply.plain:
            if text or reply.finish is None:
                events.append(self._event(part.content(text)))
        else:
            self._fields(reply, part, text, events)
        if first and len(events) == before:
            # clients measure TTFT by the chunk after the role's
            events.append(self._event(part.content("")))
        if reply.finish is not None:
            events.append(self._last(choice))
        if self.new_ids:
            events.append(self._event(part.content("")))  # for tokens whose text is held back

    def _last(self, choice: int) -> bytes:
        reply = self.replies[choice]
        assert isinstance(reply, ChatChoiceBuilder)
        finish = reply.finish_reason or "stop"
        return self._event(self.parts[choice].last(finish, reply.stop_reason))

    def last_event(self, choice: int) -> bytes:
        return self._last(choice)

    def _role(self, part: ChatChoice, request: Request) -> bytes:
        """The first chunk of a choice, before those of its tokens."""
        new = self.new_ids
        self.new_ids = None
        event = self._event(part.role())
        self.new_ids = new
        if not self.returns_ids:
            return event
        return event[:-3] + b',"prompt_token_ids":' + encode(request.prompt) + event[-3:]

    def _with_logprobs(
        self,
        reply: ChatChoiceBuilder,
        part: ChatChoice,
        text: str,
        entries: Entries,
        events: list[bytes],
    ) -> None:
        """Log probabilities are sent with the content, even if empty: a token may end inside a
        character."""
        assert self.top is not None
        found = encode(chat_logprobs(entries, self.top, self.tokenizer, self.as_ids))
        content = text
        if not reply.plain:
            fields = list(reply.fields(text))
            content = "".join(value for name, value in fields if name == "content")
            events.extend(
                self._event(part.other(name, value))
                for name, value in fields
                if name != "content" and self._shown(name)
            )
        events.append(self._event(part.content(content, found)))

    def _fields(
        self, reply: ChatChoiceBuilder, part: ChatChoice, text: str, events: list[bytes]
    ) -> None:
        for name, value in reply.fields(text):
            if self._shown(name):
                events.append(
                    self._event(
                        part.content(value) if name == "content" else part.other(name, value)
                    )
                )

    def _shown(self, name: str) -> bool:
        return name != "reasoning_content" or self.include_reasoning

    def whole(self) -> bytes:
        choices = [self._choice(i) for i in range(len(self.replies))]
        more = dict(self.more)
        if self.returns_ids:
            more["prompt_token_ids"] = self.requests[0].prompt
        if self.prompt_top is not None:
            found = prompt_logprobs(
                self.requests[0].prompt, self.prompt_entries[0], self.prompt_top
            )
            more["prompt_logprobs"] = found
        counts = usage(self.prompt_tokens, self.cached_tokens, self.replies)
        return self.head.whole("chat.completion", choices, counts, **more)

    def _choice(self, i: int) -> dict[str, Any]:
        reply = self.replies[i]
        assert isinstance(reply, ChatChoiceBuilder)
        logprobs = None
        if self.top is not None:
            logprobs = chat_logprobs(self.entries[i], self.top, self.tokenizer, self.as_ids)
        choice = {
            "index": i,
            "message": self._message(i),
            "logprobs": logprobs,
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop_reason,
        }
        return {**choice, "token_ids": self.token_ids[i]} if self.returns_ids else choice

    def _message(self, i: int) -> dict[str, Any]:
        content = "".join(value for name, value in self.texts[i] if name == "content")
        thought = "".join(value for name, value in self.texts[i] if name == "reasoning_content")
        calls = _joined(
            [delta for name, value in self.texts[i] if name == "tool_calls" for delta in value]
        )
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if thought and self.include_reasoning:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return message


class TextCall(Call):
    """`echo`: each choice's text begins with its prompt, and so do its log probabilities. `count`:
    choices of one prompt."""

    def __init__(self, *args: Any, echo: list[str] | None = None, count: int = 1):
        super().__init__(*args)
        self.count = count
        self.echo_scores = echo is not None and self.top is not None
        self.begun = [False] * len(self.requests)
        self.echo = echo or [""] * len(self.requests)
        self.parts = [TextChoice(i) for i in range(len(self.requests))]
        self.texts: list[list[str]] = [[text] if text else [] for text in self.echo]
        self.offsets = [len(text) for text in self.echo]
        self.echoed: dict[int, dict[str, Any]] = {}
        self.entries: list[Entries] = [[] for _ in self.requests]

    def _note(self, choice: int, text: str, entries: Entries | None, events: list[bytes]) -> None:
        if not self.stream:
            self.texts[choice].append(text)
            self.entries[choice].extend(entries or ())
            return
        reply = self.replies[choice]
        logprobs = b"null"
        first = not self.begun[choice]
        if first:
            self.begun[choice] = True
            text = self.echo[choice] + text
        with_prompt = first and self.echo_scores
        if self.top is not None and (entries or with_prompt):
            logprobs = encode(self._logprobs(choice, entries or [], with_prompt))
        # even without text, where a token ends inside a character: clients time tokens by chunks
        made = self.parts[choice].content(text, logprobs, reply.finish, reply.stop_reason)
        if self.returns_ids and first:
            prompt = encode(self.requests[choice].prompt)
            made = made[:-1] + b',"prompt_token_ids":' + prompt + b"}"
        events.append(self._event(made))

    def last_event(self, choice: int) -> bytes:
        reply = self.replies[choice]
        made = self.parts[choice].content("", b"null", reply.finish, reply.stop_reason)
        return self._event(made)

    def swallow(self, choice: int, entries: Entries) -> None:
        """Count tokens whose text was already sent, for the offsets of later ones."""
        if self.top is not None:
            self._logprobs(choice, entries, with_prompt=False)

    def read_scores(self, items: list[tuple[int, Output]]) -> None:
        super().read_scores(items)
        if self.top is None or not self.echo_scores:
            return
        for choice, entries in self.prompt_entries.items():
            if choice not in self.echoed:
                pairs = zip(self.requests[choice].prompt, entries, strict=True)
                self.echoed[choice], _ = text_logprobs(
                    pairs, self.top, 0, self.tokenizer, self.as_ids, self.echo[choice]
                )

    def _logprobs(self, choice: int, entries: Entries, with_prompt: bool) -> dict[str, Any]:
        assert self.top is not None
        offset = self.offsets[choice]
        found, self.offsets[choice] = text_logprobs(
            entries, self.top, offset, self.tokenizer, self.as_ids
        )
        if not with_prompt:
            return found
        before = self.echoed[self._scored(choice)]
        return {name: before[name] + found[name] for name in found}

    def _scored(self, choice: int) -> int:
        """The choice that scored this one's prompt."""
        first = choice - choice % self.count
        return choice if choice in self.prompt_entries else first

    def whole(self) -> bytes:
        choices = [self._choice(i) for i in range(len(self.replies))]
        counts = usage(self.prompt_tokens, self.cached_tokens, self.replies)
        return self.head.whole("text_completion", choices, counts, **self.more)

    def _choice(self, i: int) -> dict[str, Any]:
        reply = self.replies[i]
        logprobs = None
        if self.top is not None:
            logprobs = self._logprobs(i, self.entries[i], self.echo_scores)
        choice = {
            "index": i,
            "text": "".join(self.texts[i]),
            "logprobs": logprobs,
            "finish_reason": reply.finish,
            "stop_reason": reply.stop_reason,
        }
        if self.returns_ids:
            choice["prompt_token_ids"] = self.requests[i].prompt
            choice["token_ids"] = self.token_ids[i]
        if self.prompt_top is not None:
            entries = self.prompt_entries[self._scored(i)]
            found = prompt_logprobs(self.requests[i].prompt, entries, self.prompt_top)
            choice["prompt_logprobs"] = found
        return choice


def _merged(items: list[tuple[int, Output]]) -> list[tuple[int, Output]]:
    """Merge several waiting outputs of a choice into one."""
    if len(items) == 1:
        return items
    found: dict[int, Output] = {}
    for choice, output in items:
        first = found.get(choice)
        if first is None:
            found[choice] = output
            continue
        first.tokens.extend(output.tokens)
        if output.logprobs is not None:
            first.logprobs = [*(first.logprobs or ()), *output.logprobs]
        first.finish = output.finish
        first.stop_token = output.stop_token
        first.transfer = output.transfer
        if first.times is not None:
            first.times.extend(output.times or ())
    return list(found.items())


def _joined(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge deltas of tool calls into whole calls."""
    heads: list[dict[str, Any]] = []
    parts: list[list[str]] = []
    for delta in deltas:
        if "id" in delta:
            heads.append(delta)
            parts.append([])
        else:
            parts[-1].append(delta["function"]["arguments"])
    return [
        {
            "id": head["id"],
            "type": "function",
            "function": {"name": head["function"]["name"], "arguments": "".join(texts)},
        }
        for head, texts in zip(heads, parts, strict=True)
    ]
