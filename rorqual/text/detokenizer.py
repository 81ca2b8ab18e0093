"""From token ids to output: text without partial characters, stop strings, log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rorqual.engine.scheduling.scheduler_output import TokenLogprobs
from rorqual.engine.scheduling.sequence import TokenOut
from rorqual.request import CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams
from rorqual.text.stop import StopStrings
from rorqual.text.tokenizer import TextStream, Tokenizer


@dataclass(frozen=True)
class Delta:
    """What one step added to one completion. `index`: of the prompt; `output`: of the sample among
    n."""

    index: int
    output: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


def logprob_entry(
    token: int, found: TokenLogprobs, show: Callable[[int], str | None]
) -> dict[int, Logprob]:
    """The most likely tokens, and `token` itself in any case."""
    entry = {
        t: Logprob(p, rank + 1, show(t))
        for rank, (t, p) in enumerate(zip(found.top_ids, found.top, strict=True))
    }
    entry.setdefault(token, Logprob(found.sampled, found.rank, show(token)))
    return entry


def prompt_entries(
    prompt: Sequence[int], found: Sequence[TokenLogprobs], show: Callable[[int], str | None]
) -> list[dict[int, Logprob] | None]:
    """One entry per token; None for the first, which has no context."""
    pairs = zip(prompt[1:], found, strict=True)
    return [None, *(logprob_entry(token, entry, show) for token, entry in pairs)]


class Completion:
    """One sequence's output as it grows. `push` returns the new text and whether a stop string
    ended it."""

    def __init__(
        self, index: int, output: int, params: SamplingParams, tokenizer: Tokenizer | None
    ):
        self.index = index
        self.params = params
        self.tokenizer = tokenizer
        self.result: RequestOutput | None = None
        self.out = CompletionOutput(
            output, "", [], logprobs=[] if params.logprobs is not None else None
        )
        if params.logprobs is not None:
            self.out.cumulative_logprob = 0.0
        wants_text = tokenizer is not None and params.detokenize
        self.stream = (
            TextStream(tokenizer, params.skip_special_tokens) if wants_text and tokenizer else None
        )
        self.stops = StopStrings(params.stop, params.include_stop_str_in_output)

    def push(self, token: TokenOut) -> tuple[Delta, bool]:
        sequence = token.sequence
        delta, stopped = self.take(token.token, token.logprobs, token.finish, sequence.stop_token)
        result = self.result
        if result is not None:
            result.num_cached_tokens = sequence.num_cached_prompt or 0
            if len(self.out.token_ids) == 1 and self.params.prompt_logprobs is not None:
                found = sequence.prompt_logprobs
                result.prompt_logprobs = prompt_entries(result.prompt_token_ids, found, self._show)
        if delta.finish_reason is not None:
            # Steps in flight still increase the counts.
            self.out.drafted = list(sequence.drafted)
            self.out.accepted = list(sequence.accepted)
            if result is not None:
                result.finished = all(out.finished for out in result.outputs)
        return delta, stopped

    def grow(self, tokens: Sequence[int]) -> str:
        """`take` for tokens that cannot finish the completion, where only their text is needed and
        there are no stop strings: a stream's usual step."""
        out = self.out
        stream = self.stream
        out.token_ids += tokens
        if stream is None:
            return ""
        text = stream.push(tokens[0]) if len(tokens) == 1 else "".join(map(stream.push, tokens))
        out.text += text
        return text

    def take(
        self,
        token: int,
        logprobs: TokenLogprobs | None = None,
        finish: FinishReason | None = None,
        stop_token: int | None = None,
    ) -> tuple[Delta, bool]:
        """`push` for a token whose sequence is in another process."""
        self.out.token_ids.append(token)
        if logprobs is not None:
            self._add_logprobs(token, logprobs)
        text = self._text(token, finish)
        stopped = self.stops.found is not None
        reason = FinishReason.STOP if stopped else finish
        self.out.stop_reason = self.stops.found if stopped else self._stop_token(stop_token)
        self.out.finish_reason = reason.value if reason else None
        self.out.text += text
        return Delta(self.index, self.out.index, text, (token,), self.out.finish_reason), stopped

    def _text(self, token: int, finish: FinishReason | None) -> str:
        if self.stream is None:
            return ""
        # The token that stopped the request is not shown, as in vLLM.
        hidden = finish is FinishReason.STOP and not self.params.include_stop_str_in_output
        piece = "" if hidden else self.stream.push(token)
        if finish is not None:
            piece += self.stream.flush()
        early = len(self.out.token_ids) < self.params.min_tokens
        text = piece if early else self.stops.push(piece)
        return (
            text + self.stops.flush() if finish is not None and self.stops.found is None else text
        )

    def _stop_token(self, token: int | None) -> int | None:
        return token if token is not None and token in self.params.stop_token_ids else None

    def _add_logprobs(self, token: int, found: TokenLogprobs) -> None:
        assert self.out.logprobs is not None
        assert self.out.cumulative_logprob is not None
        self.out.cumulative_logprob += found.sampled
        self.out.logprobs.append(logprob_entry(token, found, self._show))

    def _show(self, token: int) -> str | None:
        return self.tokenizer.token(token) if self.tokenizer else None
