"""One choice of a response as it grows: from the engine's tokens to text, log probabilities,
reasoning and tool calls. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rorqual.request import FinishReason, Logprob, SamplingParams
from rorqual.serve.messages import Counting, Output
from rorqual.text.detokenizer import Completion
from rorqual.text.reasoning import Reasoning
from rorqual.text.tokenizer import Tokenizer
from rorqual.text.tool_calls import ToolParser, ToolParserOutput


@dataclass(slots=True)
class Piece:
    """What one output added. `entries`: one (token id, {token id: Logprob}) a token, where
    requested."""

    text: str
    entries: list[tuple[int, dict[int, Logprob]]] | None = None


class ChoiceBuilder:
    """`finish` is set on the last push; `stopped` where a stop string ended the text before the
    engine did."""

    def __init__(self, choice: int, params: SamplingParams, tokenizer: Tokenizer):
        self.choice = choice
        self.params = params
        self.tokenizer = tokenizer
        self.completion = Completion(choice, choice, params, tokenizer)
        self.plain_text = not self.every_token
        self.tokens = self.cached = 0
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self.stopped = False

    @property
    def every_token(self) -> bool:
        """Whether text must be checked token by token."""
        return bool(self.params.stop) or self.params.logprobs is not None

    @property
    def counting(self) -> Counting:
        return Counting.READ if self.params.stop else Counting.SENT

    def push(self, output: Output) -> Piece:
        if self.finish is not None:
            return Piece("")
        self.cached = output.cached
        whole = output.finish is not None and not self.tokens and not self.every_token
        piece = self._whole(output) if whole else self._grow(output)
        return piece

    def _whole(self, output: Output) -> Piece:
        """All tokens in one output: decode them together."""
        self.completion.out.token_ids = output.tokens
        self.tokens = len(output.tokens)
        self.finish = output.finish
        hidden = output.finish == FinishReason.STOP and not self.params.include_stop_str_in_output
        if output.stop_token in self.params.stop_token_ids:
            self.stop_reason = output.stop_token
        ids = output.tokens[:-1] if hidden else output.tokens
        return Piece(self.tokenizer.decode(ids, self.params.skip_special_tokens))

    def _grow(self, output: Output) -> Piece:
        if output.finish is None and self.plain_text:
            self.tokens += len(output.tokens)
            return Piece(self.completion.grow(output.tokens))
        take = self.completion.take
        last = len(output.tokens) - 1
        texts = []
        before = self.tokens
        for i, token in enumerate(output.tokens):
            finish = (
                FinishReason(output.finish) if i == last and output.finish is not None else None
            )
            logprobs = output.logprobs[i] if output.logprobs else None
            delta, stopped = take(
                token, logprobs, finish, output.stop_token if finish is not None else None
            )
            texts.append(delta.text)
            self.tokens += 1
            if delta.finish_reason is not None:
                self.finish = delta.finish_reason
                self.stop_reason = self.completion.out.stop_reason
                self.stopped = stopped
                break
        if not output.tokens:
            self.finish = output.finish
        return Piece("".join(texts), self._entries(before))

    def _entries(self, before: int) -> list[tuple[int, dict[int, Logprob]]] | None:
        out = self.completion.out
        return (
            None
            if out.logprobs is None
            else list(zip(out.token_ids[before:], out.logprobs[before:], strict=True))
        )


class ZeroTokenChoiceBuilder(ChoiceBuilder):
    """For max_tokens=0. The engine samples one token nevertheless, which ends the prompt; it is
    dropped."""

    @property
    def counting(self) -> Counting:
        return Counting.NONE

    def push(self, output: Output) -> Piece:
        self.cached = output.cached
        self.finish = FinishReason.LENGTH.value
        return Piece("", None)


class ChatChoiceBuilder(ChoiceBuilder):
    """Splits the text: fields() yields (name, value) of the deltas, in order. forced: the text
    consists of tool calls only, so the rest of a truncated one is not content."""

    def __init__(
        self,
        choice: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        reasoning: Reasoning | None,
        tools: ToolParser | None,
        forced: bool = False,
    ):
        super().__init__(choice, params, tokenizer)
        self.reasoning = reasoning
        self.tools = tools
        self.forced = forced

    @property
    def plain(self) -> bool:
        return self.reasoning is None and self.tools is None

    def fields(self, text: str) -> Iterator[tuple[str, Any]]:
        if self.reasoning is not None:
            thought, text = self.reasoning.push(text)
            if self.finish is not None:
                more = self.reasoning.flush()
                thought = thought + more[0]
                text = text + more[1]
            if thought:
                yield "reasoning_content", thought
        if self.tools is None:
            if text:
                yield "content", text
            return
        yield from _tool_fields(self.tools.push(text))
        if self.finish is not None:
            rest = self.tools.flush(cut=self.finish != FinishReason.STOP)
            yield from _tool_fields(ToolParserOutput("", rest.calls) if self.forced else rest)

    @property
    def finish_reason(self) -> str | None:
        called = self.tools is not None and self.tools.count > 0
        return "tool_calls" if called and self.finish == FinishReason.STOP else self.finish


def _tool_fields(output: ToolParserOutput) -> Iterator[tuple[str, Any]]:
    if output.content:
        yield "content", output.content
    if output.calls:
        yield "tool_calls", output.calls
