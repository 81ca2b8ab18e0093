"""However an engine's tokens are grouped to outputs and wherever the stream is cut: what was told
before and what is told behind it make the whole answer."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from rorqual.engine.scheduling.scheduler_output import TokenLogprobs
from rorqual.models.hub import BUNDLED
from rorqual.request import Request, SamplingParams
from rorqual.serve.engines.job import EngineJob, NullEngine
from rorqual.serve.http.choice import ChatChoiceBuilder, ChoiceBuilder
from rorqual.serve.http.protocol import Resume
from rorqual.serve.http.resume import replay
from rorqual.serve.http.resume.marked import ResumableChatCall, ResumableTextCall
from rorqual.serve.http.resume.replay import LONG_ANSWER, _restore_all, resume
from rorqual.serve.http.sse import ChunkHead
from rorqual.serve.messages import Output
from rorqual.text.reasoning import Reasoning
from rorqual.text.tokenizer import Tokenizer
from rorqual.text.tool_calls import FORMATS
from tests.serve.resuming import Event, joined, parsed, resume_field

TOKENIZER = Tokenizer(BUNDLED)
EOS = 1
VOCAB = 4096


@dataclass(frozen=True)
class Case:
    """finish: how the engine ends it, behind the text's last token. as in a request: the rest."""

    text: str
    finish: str = "stop"
    chat: bool = True
    reasoning: bool = False
    form: str = ""
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    returns_ids: bool = False

    @property
    def tokens(self) -> list[int]:
        ids = TOKENIZER.encode(self.text, False)
        return [*ids, EOS] if self.finish == "stop" else ids

    def call(self) -> Any:
        tokens = self.tokens
        params = SamplingParams(
            max_tokens=len(tokens) if self.finish == "length" else 1000,
            stop=self.stop,
            logprobs=self.logprobs,
            min_tokens=self.min_tokens,
        )
        parts = (
            ChunkHead("id", "kind", 0, "model", "print"),
            [Request("0", (0, 5), params, (EOS,))],
            2,
            TOKENIZER,
            self.logprobs,
        )
        call: Any = ResumableChatCall(*parts) if self.chat else ResumableTextCall(*parts)
        call.replies.append(self.reply(params))
        call.stream = call.include_usage = call.continuous_usage = True
        call.returns_ids = self.returns_ids
        return call

    def reply(self, params: SamplingParams) -> ChoiceBuilder:
        if not self.chat:
            return ChoiceBuilder(0, params, TOKENIZER)
        parser = FORMATS[self.form].parser() if self.form else None
        reasoning = Reasoning(False) if self.reasoning else None
        return ChatChoiceBuilder(0, params, TOKENIZER, reasoning, parser)

    def output(self, tokens: list[int], last: bool) -> Output:
        output = Output("0", list(tokens), cached=1)
        if self.logprobs is not None and tokens:
            output.logprobs = [TokenLogprobs(-0.5, 1, (token, 7), (-0.5, -1.5)) for token in tokens]
        if last:
            output.finish = self.finish
            output.stop_token = EOS if self.finish == "stop" else None
        return output


def said(call: Any, case: Case, begun: int, groups: list[int]) -> bytes:
    """The stream of a call whose engine goes on behind `begun` tokens; groups: tokens of its
    outputs, in turn."""
    job = EngineJob(1)
    job.placed = [(NullEngine(), "0")]
    events = list(call.early)
    tokens = case.tokens
    turn = 0
    while call.open:
        size = groups[turn % len(groups)]
        turn += 1
        some = tokens[begun : begun + size]
        begun += size
        events += call.take([(0, case.output(some, begun >= len(tokens)))], job)
    return b"".join([*events, *call.last_events(), call.end])


def check(case: Case, groups: list[int], later: list[int]) -> None:
    plain = joined(parsed(said(case.call(), case, 0, [1]).decode()))
    whole = parsed(said(case.call(), case, 0, groups).decode())
    assert joined(whole) == plain
    for count in range(1, len(whole) + 1):
        kept = whole[:count]
        rest = behind(case, kept, later)
        assert joined(kept + rest) == plain, f"cut after {count} of {len(whole)} events"
        kept += rest[: len(rest) // 2]
        rest = behind(case, kept, groups)
        assert joined(kept + rest) == plain, f"cut after {count} events, and again"


def behind(case: Case, kept: list[Event], groups: list[int]) -> list[Event]:
    """What another server tells behind these events."""
    call = case.call()
    asyncio.run(resume(call, Resume.model_validate(resume_field(kept)), VOCAB))
    begun = len(call.requests[0].outputs)
    if call.open:
        assert begun == sum(len(tokens) for e in kept for tokens, _ in e.named.values())
    return parsed(said(call, case, begun, groups).decode())


THINKS = "<think>\nSo — a 鯨.\n</think>\n\nYes: 🐋"
HERMES = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n'
B, E, C, SEP, END = FORMATS["deepseek_v3"].marks
CASES: dict[str, Case] = {
    "text": Case("My 鯨 and a 🐋, whales", chat=False),
    "text of a length": Case("My 鯨 and a 🐋"[:-1] + "st", "length", chat=False),
    "stop string": Case("They met at last, in May", chat=False, stop=("met at first", "last, in")),
    "stop string in chat": Case("They met at last", stop=("t last", "met in")),
    "held at the end": Case("They met at last", "length", stop=("last of",)),
    "stop after tokens": Case("a b a b a b a b a b", chat=False, stop=("b",), min_tokens=5),
    "log probabilities": Case("They met 🐋 at", chat=False, logprobs=1, returns_ids=True),
    "log probabilities of a chat": Case("They met 🐋", logprobs=2, stop=("met in",)),
    "ids of a chat": Case("They 🐋 met", returns_ids=True),
    "reasoning": Case(THINKS, reasoning=True),
    "reasoning alone": Case(THINKS[:14], "length", reasoning=True),
    "reasoning, log probabilities": Case(THINKS, reasoning=True, logprobs=0),
    "hermes": Case(HERMES * 2, form="hermes"),
    "half of a call": Case(HERMES[:-25], "length", form="hermes"),
    "half of a mark": Case("Well. <tool_c", form="hermes"),
    "all in one": Case(THINKS + HERMES + "Bye", reasoning=True, form="hermes", logprobs=1),
    "deepseek": Case(
        f'A {B}{C}function{SEP}f\n```json\n{{"a": 1}}\n```{END}{E}', form="deepseek_v3"
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("groups", [[1], [3], [1, 4], [1000]], ids=str)
def test_a_call_goes_on_wherever_it_was_cut(name: str, groups: list[int]) -> None:
    check(CASES[name], groups, [2])


def test_long_answers_are_taken_in_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that other streams go on meanwhile."""
    threads = set()

    def restore(*args: Any) -> None:
        threads.add(threading.current_thread())
        _restore_all(*args)

    monkeypatch.setattr(replay, "_restore_all", restore)
    case = Case("a b 🐋\n" * 700, "length")
    assert len(case.tokens) > LONG_ANSWER
    whole = parsed(said(case.call(), case, 0, [1000]).decode())
    call = case.call()
    asyncio.run(resume(call, Resume.model_validate(resume_field(whole[:-2])), VOCAB))
    assert threads.isdisjoint({threading.current_thread()})
    rest = parsed(said(call, case, len(case.tokens), [1]).decode())
    assert joined(whole[:-2] + rest) == joined(whole)


sizes = st.lists(st.integers(1, 6), min_size=1, max_size=4)
PIECES = ["a", " b", "\n", "鯨", "🐋", "<think>", "</think>", "stop", " st", "op"]
PIECES += ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"a": 1}', "}", "<tool"]


@pytest.mark.exhaustive
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=12),
    st.sampled_from(["stop", "length"]),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.sampled_from([(), ("stop",), ("op\n", " b🐋")]),
    sizes,
    sizes,
)
def test_any_chat_goes_on(
    pieces: list[str],
    finish: str,
    reasoning: bool,
    logprobs: int | None,
    stop: tuple[str, ...],
    groups: list[int],
    later: list[int],
) -> None:
    case = Case("".join(pieces), finish, True, reasoning, "hermes", logprobs, stop)
    check(case, groups, later)
