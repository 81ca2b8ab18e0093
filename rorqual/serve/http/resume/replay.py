"""Continues a stream that another server started: its tokens are replayed as if sampled here,
without sending events for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from rorqual.engine.scheduling.scheduler_output import TokenLogprobs
from rorqual.request import FinishReason, Request
from rorqual.serve.errors import ApiError, bad_request
from rorqual.serve.http.calls import Call, ChatCall, TextCall
from rorqual.serve.http.choice import ChatChoiceBuilder, ChoiceBuilder
from rorqual.serve.http.protocol import Resume, ResumedChoice
from rorqual.serve.http.resume.marked import MarkedCall
from rorqual.serve.messages import Output

LONG_ANSWER = 2_000  # tokens from which replaying them is worth a thread
SENT_LOGPROBS = TokenLogprobs(0.0, 1, (), ())  # in place of log probabilities already sent


async def resume(call: Call, given: Resume, vocab_size: int) -> None:
    """Bring `call` to the state of the other stream. Raises ApiError where that state is
    impossible."""
    _check(call, given, vocab_size)
    if sum(len(choice.token_ids) for choice in given.choices) > LONG_ANSWER:
        await asyncio.to_thread(_restore_all, call, given)
    else:
        _restore_all(call, given)


def _wrong(place: int, what: str) -> ApiError:
    return bad_request(f"rorqual_resume.choices.{place}: {what}", "rorqual_resume")


def _check(call: Call, given: Resume, vocab_size: int) -> None:
    seen: set[int] = set()
    for place, choice in enumerate(given.choices):
        count = len(call.requests)
        if choice.index >= count:
            raise _wrong(place, f"there is no choice {choice.index}; accepted: 0 to {count - 1}")
        if choice.index in seen:
            raise _wrong(place, f"choice {choice.index} is listed twice")
        seen.add(choice.index)
        largest = max(choice.token_ids, default=0)
        if largest >= vocab_size:
            raise _wrong(place, f"{largest} is no token id; accepted: 0 to {vocab_size - 1}")
        most = call.requests[choice.index].params.max_tokens
        if most is not None and len(choice.token_ids) > most:
            raise _wrong(
                place, f"it has {len(choice.token_ids)} tokens, more than max_tokens={most}"
            )


def _restore_all(call: Call, given: Resume) -> None:
    assert isinstance(call, ChatCall | TextCall)
    ended = []
    for place, choice in enumerate(given.choices):
        reply = call.replies[choice.index]
        call.begun[choice.index] = True
        if choice.ended:
            reply.tokens = len(choice.token_ids)
            reply.finish = FinishReason.STOP.value  # nothing more is sent for it
        else:
            _restore(call, place, choice, reply)
        if reply.finish is None:
            continue
        call.open -= 1
        call.over.add(choice.index)
        if not choice.ended:
            ended.append(choice.index)
    call.scores = any(request.params.prompt_logprobs is not None for request in call.wanted)
    call.early = [call.last_event(index) for index in ended]


def _restore(
    call: ChatCall | TextCall, place: int, choice: ResumedChoice, reply: ChoiceBuilder
) -> None:
    request = call.requests[choice.index]
    tokens = choice.token_ids
    entries = None
    text = ""
    if tokens:
        piece = reply.push(_replayed_output(request, tokens, reply))
        text = piece.text
        entries = piece.entries
    if reply.tokens < len(tokens):
        raise _wrong(place, f"it goes on after its end, which is token {reply.tokens}")
    if isinstance(reply, ChatChoiceBuilder):
        for _ in reply.fields(text):
            pass  # to bring its parsers to the same state
    if isinstance(call, TextCall):
        call.swallow(choice.index, entries or [])
    if isinstance(call, MarkedCall):
        call.named[choice.index] = reply.tokens
    changes: dict[str, Any] = {"outputs": tuple(tokens)}
    if request.params.prompt_logprobs is not None:  # already sent
        changes["params"] = replace(request.params, prompt_logprobs=None)
    call.requests[choice.index] = replace(request, **changes)


def _replayed_output(request: Request, tokens: list[int], reply: ChoiceBuilder) -> Output:
    """The engine's output for these tokens. Without a LENGTH finish: only the engine knows how many
    tokens fit."""
    logprobs = None if reply.params.logprobs is None else [SENT_LOGPROBS] * len(tokens)
    output = Output(request.id, tokens, logprobs=logprobs)
    stops = request.stop_ids
    early = request.params.min_tokens
    end = next((i for i, token in enumerate(tokens) if token in stops and i >= early), None)
    if end is not None:
        output.tokens = tokens[: end + 1]
        output.finish = FinishReason.STOP.value
        output.stop_token = tokens[end]
    return output
