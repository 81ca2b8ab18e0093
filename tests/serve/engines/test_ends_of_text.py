"""Requests with stop strings in metrics and traces: the API process finds the end of their text,
and an engine that has sampled more tokens meanwhile counts only those before it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from rorqual.engine.engine import Stats
from rorqual.engine.scheduling.sequence import Sequence, TokenOut, Usage
from rorqual.models.hub import BUNDLED
from rorqual.request import FinishReason, Request, SamplingParams
from rorqual.serve import messages
from rorqual.serve.engines import engine_process
from rorqual.serve.engines.client import ClientUsage, EngineClient
from rorqual.serve.engines.engine_process import EngineProcess
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.http.calls import TextCall
from rorqual.serve.http.choice import ChoiceBuilder, ZeroTokenChoiceBuilder
from rorqual.serve.http.sse import ChunkHead
from rorqual.serve.messages import HistogramState
from rorqual.telemetry.spans import RequestSpan
from rorqual.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(BUNDLED)
EOS = 1
ANSWER = TOKENIZER.encode(" one two three four five six seven eight nine", False)
STOP = " four"
PROMPT = (5, 6, 7)
ONCE = (
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_time_per_output_token_seconds",
)


def stop_place() -> int:
    """How many tokens the text has up to the one that completes the stop string."""
    texts = [TOKENIZER.decode(ANSWER[:count]) for count in range(len(ANSWER) + 1)]
    return next(count for count, text in enumerate(texts) if STOP in text)


PLACE = stop_place()


class SteppedEngine:
    """Samples the next `at_once` tokens of every request's answer in each step."""

    def __init__(self) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.scheduler = SimpleNamespace(
            sequences=self.sequences, usage=lambda: Usage(0, 0, 0, 0, 0, 0, 0, 0)
        )
        self.answers: dict[str, list[int]] = {}
        self.at_once = 1
        self.ended: list[tuple[str, str]] = []
        self.stats = Stats()
        self.in_flight: list[Any] = []
        self.balance = None
        self.worker = SimpleNamespace(experts=None)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def expert_load(self) -> list[list[int]]:
        return []

    def add(self, request: Request, dp_rank: int | None = None) -> None:
        most = len(request.prompt) + (request.params.max_tokens or 0)
        self.sequences[request.id] = Sequence(request, most, 0, 0)

    def stop(self, name: str) -> None:
        del self.sequences[name]
        self.ended.append((name, "stop"))

    def abort(self, name: str) -> None:
        del self.sequences[name]
        self.ended.append((name, "abort"))

    def step(self) -> list[TokenOut]:
        self.stats.steps += 1
        outs: list[TokenOut] = []
        for name, sequence in list(self.sequences.items()):
            sequence.num_cached_prompt = 0
            for _ in range(self.at_once):
                if name not in self.sequences:
                    break
                done = len(sequence.tokens) - sequence.prompt_len
                token = self.answers.get(name, ANSWER)[done]
                sequence.tokens.append(token)
                finish = None
                if token == EOS:
                    finish = FinishReason.STOP
                    sequence.stop_token = token
                elif len(sequence.tokens) == sequence.max_total_len:
                    finish = FinishReason.LENGTH
                if finish is not None:
                    del self.sequences[name]
                outs.append(TokenOut(sequence, token, None, finish))
        return outs


class NotedSpan(RequestSpan):
    recording = True

    def __init__(self, name: str = "", start: float | None = None):
        self.name = name
        self.started = start
        self.ended: float | None = None
        self.attributes: dict[str, Any] = {}
        self.children: list[NotedSpan] = []

    def child(
        self, name: str, attributes: Any = None, kind: Any = None, start: float | None = None
    ) -> NotedSpan:
        made = NotedSpan(name, start)
        made.attributes.update(attributes or {})
        self.children.append(made)
        return made

    def set(self, attributes: Any) -> None:
        self.attributes.update(attributes)

    def end(self, at: float | None = None) -> None:
        self.ended = at


class Pair:
    """An engine process and the API process's side of it; nothing goes between them until it is
    told to. A step ends at each full second."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        self.engine = SteppedEngine()
        self.sent: list[Any] = []
        self.told: list[Any] = []
        encoder = messages.encoder()
        to_client = messages.client_decoder()
        to_engine = messages.engine_decoder()
        link = SimpleNamespace(
            send=lambda one: self.sent.append(to_client.decode(encoder.encode(one)))
        )
        self.process = EngineProcess(self.engine, link, None)  # type: ignore[arg-type]
        self.process.next_snapshot = math.inf
        monkeypatch.setattr(
            engine_process, "time", SimpleNamespace(monotonic=lambda: self.now), raising=True
        )
        self.client = EngineClient(folder, "one", 0, ClientUsage())
        monkeypatch.setattr(
            self.client,
            "_send",
            lambda one: self.told.append(to_engine.decode(encoder.encode(one))),
        )
        self.job = EngineJob(1000)
        self.job.span = self.span = NotedSpan()
        self.call: TextCall

    def ask(self, count: int = 1, zero: bool = False, **params: Any) -> None:
        given = SamplingParams(**{"max_tokens": len(ANSWER), "stop": (STOP,), **params})
        requests = [Request(f"r{place}", PROMPT, given, (EOS,)) for place in range(count)]
        head = ChunkHead("id", "text_completion", 0, "model", "print")
        self.call = TextCall(head, requests, len(PROMPT), TOKENIZER, None)
        builder = ZeroTokenChoiceBuilder if zero else ChoiceBuilder
        self.call.replies.extend(builder(i, given, TOKENIZER) for i in range(count))
        self.job.counting = self.call.counting
        for place, request in enumerate(requests):
            self.job.placed.append((self.client, request.id))
            self.client.add(request, self.call.every_step, self.job, place, 10)
        self.tell()

    def tell(self) -> None:
        """The engine gets what the client has sent."""
        told = self.told
        self.told = []
        for message in told:
            self.process._handle(message)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 1.0
            self.process._step()

    def deliver(self) -> None:
        """The client gets what the engine has sent."""
        sent = self.sent
        self.sent = []
        for message in sent:
            self.client._handle(message)

    def read(self) -> None:
        """The request's task takes what there is."""
        items = self.job.items
        self.job.items = []
        self.call.take(items, self.job)

    def settle(self) -> None:
        """All that is on its way arrives, and the response ends."""
        self.deliver()
        self.read()
        self.job.close()
        self.tell()
        self.process._snapshot(self.now)
        self.deliver()
        assert not self.client.unread
        assert not self.process.unread

    # ---- what was counted

    @property
    def used(self) -> int:
        """Tokens of the answer, as its usage says."""
        return sum(reply.tokens for reply in self.call.replies)

    @property
    def finished(self) -> dict[str, int]:
        return self.client.snapshot.finished

    def histogram(self, name: str) -> HistogramState:
        return self.client.snapshot.histograms[name]

    def observed(self, name: str) -> int:
        return sum(self.histogram(name).counts)

    def decode_spans(self) -> list[NotedSpan]:
        return [one for one in self.span.children if one.name == "decode"]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    found = Pair(tmp_path, monkeypatch)
    yield found
    found.client.close()


def check_stopped(pair: Pair) -> None:
    """One request of PLACE tokens, of which the last came at second PLACE."""
    assert pair.call.replies[0].finish == "stop"
    assert pair.finished == {"stop": 1}
    assert pair.used == PLACE
    assert pair.client.snapshot.output_tokens == PLACE
    for name in ("time_to_first_token_seconds", *ONCE):
        assert pair.observed(name) == 1, name
    assert pair.histogram("request_generation_tokens").total == PLACE
    assert pair.histogram("request_prompt_tokens").total == len(PROMPT)
    assert pair.histogram("e2e_request_latency_seconds").total == PLACE
    assert pair.histogram("request_decode_time_seconds").total == PLACE - 1
    assert pair.histogram("request_time_per_output_token_seconds").total == 1.0
    gaps = pair.histogram("inter_token_latency_seconds")
    assert sum(gaps.counts) == gaps.total == PLACE - 1
    (times,) = pair.client.ended
    assert (times.at, times.ttft, times.e2e, times.tpot) == (PLACE, 1, PLACE, 1)
    (decode,) = pair.decode_spans()
    assert (decode.started, decode.ended) == (1, PLACE)
    assert decode.attributes["gen_ai.usage.output_tokens"] == PLACE
    assert pair.span.attributes["gen_ai.latency.e2e"] == PLACE
    assert pair.span.attributes["gen_ai.latency.time_in_model_decode"] == PLACE - 1
    assert [one.name for one in pair.span.children] == ["queue", "prefill", "decode"]


def test_the_answer_is_long_enough() -> None:
    assert 2 < PLACE < len(ANSWER) - 3


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_tokens_sampled_after_the_stop_string_do_not_count(pair: Pair, ahead: int) -> None:
    pair.ask()
    for _ in range(PLACE):
        pair.step()
        pair.deliver()
        pair.read()
    pair.step(ahead)  # before the engine hears of it
    pair.settle()
    assert pair.engine.ended == [("r0", "stop")]
    check_stopped(pair)


@pytest.mark.parametrize("last", ["length", "end of sequence"])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_an_engine_that_has_ended_the_request_counts_the_stop_string(
    pair: Pair, ahead: int, last: str
) -> None:
    """With the token that completes it, or before it hears of it."""
    if last == "length":
        pair.ask(max_tokens=PLACE + ahead)
    else:
        pair.engine.answers["r0"] = [*ANSWER[: PLACE + ahead], EOS]
        pair.ask()
    for _ in range(PLACE):
        pair.step()
        pair.deliver()
        pair.read()
    while pair.engine.has_work:
        pair.step()
    pair.settle()
    assert not pair.engine.ended
    check_stopped(pair)


def test_a_reader_that_is_late_changes_nothing(pair: Pair) -> None:
    """Its outputs are merged, and the engine has ended."""
    pair.ask()
    pair.step(len(ANSWER))
    pair.settle()
    check_stopped(pair)


@pytest.mark.parametrize("at_once", [2, 3, 4])
def test_several_tokens_of_a_step(pair: Pair, at_once: int) -> None:
    """They come together; those after the stop string are dropped."""
    pair.engine.at_once = at_once
    pair.ask()
    steps = -(-PLACE // at_once)
    pair.step(steps + 1)
    pair.settle()
    assert pair.finished == {"stop": 1}
    assert pair.used == pair.client.snapshot.output_tokens == PLACE
    assert pair.histogram("request_generation_tokens").total == PLACE
    assert pair.histogram("e2e_request_latency_seconds").total == steps
    gaps = pair.histogram("inter_token_latency_seconds")
    assert sum(gaps.counts) == PLACE - at_once, "the first step's tokens have none"
    assert gaps.total == pytest.approx((PLACE - at_once) / at_once)


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_without_the_string_the_engine_says_how_it_ended(pair: Pair, reason: str) -> None:
    if reason == "stop":
        pair.engine.answers["r0"] = [*ANSWER[: PLACE - 1], EOS]
        pair.ask()
    else:
        pair.ask(max_tokens=PLACE, stop=("not there",))
    pair.step(PLACE)
    assert not pair.process.meter.finished, "the text has not been read"
    pair.settle()
    assert pair.finished == {reason: 1}
    assert pair.used == pair.client.snapshot.output_tokens == PLACE
    assert pair.histogram("e2e_request_latency_seconds").total == PLACE
    assert pair.histogram("request_generation_tokens").total == PLACE
    (decode,) = pair.decode_spans()
    assert (decode.started, decode.ended) == (1, PLACE)
    assert decode.attributes["gen_ai.usage.output_tokens"] == PLACE


def test_one_choice_of_two_stops(pair: Pair) -> None:
    pair.engine.answers["r1"] = [token for token in ANSWER if token != ANSWER[PLACE - 1]] + [9]
    pair.ask(count=2)
    for _ in range(len(ANSWER)):
        pair.step()
        pair.deliver()
        pair.read()
        pair.tell()
    pair.settle()
    assert [reply.finish for reply in pair.call.replies] == ["stop", "length"]
    assert pair.engine.ended == [("r0", "stop")]
    assert pair.finished == {"stop": 1, "length": 1}
    assert pair.used == pair.client.snapshot.output_tokens == PLACE + len(ANSWER)
    assert pair.histogram("request_generation_tokens").total == PLACE + len(ANSWER)
    assert pair.histogram("e2e_request_latency_seconds").total == PLACE + len(ANSWER)
    spans = {one.attributes["rorqual.choice"]: one.ended for one in pair.decode_spans()}
    assert spans == {0: PLACE, 1: len(ANSWER)}
    assert pair.span.attributes["gen_ai.latency.e2e"] == PLACE


@pytest.mark.parametrize("stop", [(STOP,), ()])
def test_a_client_that_leaves_is_an_abort(pair: Pair, stop: tuple[str, ...]) -> None:
    pair.ask(stop=stop)
    pair.call.stream = True
    for _ in range(PLACE - 1):
        pair.step()
        pair.deliver()
        pair.read()
    pair.job.close()
    pair.tell()
    pair.settle()
    assert pair.engine.ended == [("r0", "abort")]
    assert pair.finished == {"abort": 1}
    assert not any(pair.observed(name) for name in ONCE)
    assert pair.observed("time_to_first_token_seconds") == 1
    assert not pair.decode_spans()


def test_a_client_that_leaves_before_it_has_read_the_end(pair: Pair) -> None:
    """The engine has computed all of it."""
    pair.ask(max_tokens=2)
    pair.step(2)
    pair.deliver()
    pair.job.close()
    pair.tell()
    pair.process._snapshot(pair.now)
    pair.deliver()
    assert pair.finished == {"length": 1}
    assert not pair.client.unread
    assert not pair.process.unread


@pytest.mark.parametrize("stop", [(STOP,), ()])
def test_a_prompt_that_was_answered_early_is_computed_to_its_end(
    pair: Pair, stop: tuple[str, ...]
) -> None:
    """Another engine fetches its pages: nothing but the response has ended."""
    pair.ask(max_tokens=1, stop=stop)
    pair.process._answer_now("r0", {"remote_num_pages": 1})
    pair.deliver()
    pair.read()
    pair.job.close()
    pair.tell()
    pair.step()
    pair.settle()
    assert not pair.engine.ended
    assert pair.finished == {"length": 1}
    assert pair.observed("request_generation_tokens") == 1
    assert pair.used == pair.client.snapshot.output_tokens == 0


@pytest.mark.parametrize("token", [ANSWER[0], EOS])
@pytest.mark.parametrize("stop", [(STOP,), ()])
def test_a_token_that_is_not_returned_does_not_count(
    pair: Pair, stop: tuple[str, ...], token: int
) -> None:
    """max_tokens 0."""
    pair.engine.answers["r0"] = [token]
    pair.ask(zero=True, max_tokens=1, stop=stop)
    pair.step()
    pair.settle()
    assert pair.call.replies[0].finish == "length"
    assert pair.finished == {"length": 1}
    assert pair.used == pair.client.snapshot.output_tokens == 0
    assert pair.observed("request_generation_tokens") == 1
    assert pair.histogram("request_generation_tokens").total == 0
    assert pair.observed("time_to_first_token_seconds") == 1
    assert pair.observed("inter_token_latency_seconds") == 0
    assert [one.attributes["gen_ai.usage.output_tokens"] for one in pair.decode_spans()] == [0]


def test_tokens_that_were_given_do_not_count(pair: Pair) -> None:
    """A stream that another server began: its tokens were counted there."""
    pair.ask()
    pair.client.cancel(["r0"])
    pair.tell()
    request = Request("r1", PROMPT, pair.call.requests[0].params, (EOS,), outputs=(ANSWER[0],))
    reply = ChoiceBuilder(0, request.params, TOKENIZER)
    reply.push(messages.Output("r1", [ANSWER[0]]))
    pair.call.requests[0] = request
    pair.call.replies[0] = reply
    pair.job.placed[0] = (pair.client, "r1")
    pair.client.add(request, True, pair.job, 0, 10)
    pair.tell()
    pair.step(PLACE + 1)
    pair.settle()
    assert pair.used == PLACE
    assert pair.finished == {"abort": 1, "stop": 1}
    assert pair.client.snapshot.output_tokens == PLACE - 1
    assert pair.histogram("request_generation_tokens").total == PLACE - 1
