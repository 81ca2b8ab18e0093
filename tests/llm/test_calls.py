"""Several calls open at once on one LLM, in one thread and in several: whose tokens are whose."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from rorqual.engine.scheduling.sequence import TokenOut
from rorqual.errors import EngineError, RequestError

LIMIT = 60  # seconds after which a thread that should long be done counts as hung
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]


@pytest.fixture(scope="module")
def model() -> LLM:
    return LLM(skip_tokenizer_init=True, dtype="float32", max_num_seqs=16, max_model_len=128)


@pytest.fixture
def llm(model: LLM) -> Iterator[LLM]:
    """The model with nothing under way, before and after."""
    assert not model.engine.has_work
    yield model
    engine = model.engine
    (scheduler,) = model.engine.scheduler.schedulers
    left = list(scheduler.sequences)
    for name in left:
        engine.abort(name)
    while engine.in_flight:
        engine.collect()
    assert not left
    assert scheduler.prefix.available == scheduler.allocator.capacity


def greedy(tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def alone(llm: LLM, prompts: list[list[int]], tokens: int = 8) -> list[list[int]]:
    outs = [llm.generate(prompt, greedy(tokens))[0] for prompt in prompts]
    return [out.outputs[0].token_ids for out in outs]


def read(deltas: Any) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


class Thread:
    """Work in a thread of its own. `result` fails where it hangs, and raises what it raised."""

    def __init__(self, work: Callable[[], Any]):
        self.found: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.found = work()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self.thread.join(LIMIT)
        assert not self.thread.is_alive(), "the thread hangs"
        if self.error is not None:
            raise self.error
        return self.found


class Steps:
    """The engine's step, and before the steps named in `before` what is said there."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch):
        self.step = llm.engine.step
        self.count = 0
        self.before: dict[int, Callable[[], Any]] = {}
        monkeypatch.setattr(llm.engine, "step", self)

    def __call__(self) -> list[TokenOut]:
        self.count += 1
        self.before.get(self.count, lambda: None)()
        return self.step()


@pytest.fixture
def steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(llm, monkeypatch)


def wait(event: threading.Event) -> None:
    assert event.wait(LIMIT), "what should have happened did not"


def raise_(error: BaseException) -> None:
    raise error


# ---- whose tokens are whose


def test_two_streams_read_in_turn(llm: LLM):
    expected = alone(llm, PROMPTS[:2])
    first, second = (llm.stream(prompt, greedy()) for prompt in PROMPTS[:2])

    def both() -> list[list[int]]:
        pairs = list(zip(first, second, strict=True))
        return [read(deltas) for deltas in zip(*pairs, strict=True)]

    assert Thread(both).result() == expected


def test_generate_while_a_stream_is_open(llm: LLM):
    """The stream's tokens of those steps are kept for it, to its last."""
    expected = alone(llm, PROMPTS, 12)
    stream = llm.stream(PROMPTS[0], greedy(12))
    start = read([next(stream)])
    outs = Thread(lambda: llm.generate(PROMPTS[1:], greedy(12))).result()
    assert [out.outputs[0].token_ids for out in outs] == expected[1:]
    assert all(out.finished for out in outs)
    assert start + Thread(lambda: read(stream)).result() == expected[0]


def test_threads_that_generate_and_one_that_streams_and_cancels(llm: LLM):
    chance = random.Random(3)
    lengths = [chance.randint(1, 12) for _ in range(24)]
    prompts = [[chance.randrange(3, 4096) for _ in range(n)] for n in lengths]
    expected = alone(llm, prompts, 6)

    def generate(numbers: list[int]) -> None:
        for start in range(0, len(numbers), 4):
            some = numbers[start : start + 4]
            outs = llm.generate([prompts[n] for n in some], greedy(6))
            assert [out.outputs[0].token_ids for out in outs] == [expected[n] for n in some]

    def stream() -> None:
        for number in chance.sample(range(24), 16):
            stream = llm.stream(prompts[number], greedy(6))
            length = chance.randint(0, 7)
            found = read(delta for delta, _ in zip(stream, range(length), strict=False))
            assert found == expected[number][:length]
            if chance.random() < 0.5:
                stream.close()

    numbers = list(range(24))
    threads = [Thread(lambda: generate(numbers)), Thread(lambda: generate(numbers[::-1]))]
    for thread in [*threads, Thread(stream)]:
        thread.result()


def test_tokens_can_be_read_while_another_thread_is_in_the_next_step(llm: LLM, steps: Steps):
    expected = alone(llm, PROMPTS[:2])
    base = steps.count
    reading = threading.Event()
    has_read = threading.Event()
    steps.before = {base + 1: lambda: wait(reading), base + 2: lambda: wait(has_read)}
    stream = llm.stream(PROMPTS[0], greedy())
    other = Thread(lambda: llm.generate(PROMPTS[1], greedy()))

    def reader() -> list[int]:
        while steps.count == base:
            threading.Event().wait(0.001)
        reading.set()
        start = [next(stream)]
        has_read.set()
        return read([*start, *stream])

    assert Thread(reader).result() == expected[0]
    assert other.result()[0].outputs[0].token_ids == expected[1]


def test_a_busy_thread_lets_others_add(llm: LLM, steps: Steps):
    added = threading.Event()
    seen = []

    def until_claimed() -> None:
        wait(added)
        while not llm._shared.claims:
            threading.Event().wait(0.001)

    scheduler = llm.engine.scheduler
    steps.before = {1: until_claimed, 2: lambda: seen.append(len(scheduler.sequences))}
    busy = Thread(lambda: llm.generate(PROMPTS[0], greedy()))
    while not steps.count:
        threading.Event().wait(0.001)
    added.set()
    Thread(lambda: llm.generate(PROMPTS[1], greedy())).result()
    busy.result()
    assert seen == [2]


# ---- failures


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), EngineError("rank 1 died")])
def test_a_failed_step_reaches_every_open_call(llm: LLM, steps: Steps, error: Exception):
    """Those that did not compute it get what came before, then an EngineError, once."""
    expected = alone(llm, PROMPTS[:1])
    idle = llm.stream(PROMPTS[0], greedy())
    stepping = llm.stream(PROMPTS[1], greedy())
    next(stepping)
    next(stepping)
    steps.before = {steps.count + 1: lambda: raise_(error)}
    with pytest.raises(type(error), match=str(error)) as raised:
        next(stepping)
    assert raised.value is error
    assert not llm.engine.has_work
    assert read([next(idle), next(idle)]) == expected[0][:2]
    with pytest.raises(EngineError, match=str(error)) as caught:
        next(idle)
    assert caught.value.__cause__ is error
    assert list(idle) == list(stepping) == []
    assert alone(llm, PROMPTS[:1]) == expected


def test_a_failed_step_reaches_a_thread_that_waits_for_it(llm: LLM, steps: Steps):
    stream = llm.stream(PROMPTS[0], greedy())
    waiting = threading.Event()

    def fail() -> None:
        wait(waiting)
        raise RuntimeError("out of luck")

    steps.before = {1: fail}
    stepping = Thread(lambda: llm.generate(PROMPTS[1], greedy()))
    while not steps.count:
        threading.Event().wait(0.001)

    def reader() -> list[int]:
        waiting.set()
        return read(stream)

    reading = Thread(reader)
    with pytest.raises(RuntimeError, match="out of luck"):
        stepping.result()
    with pytest.raises(EngineError, match="out of luck"):
        reading.result()


def test_an_interrupted_step_leaves_nobody_waiting(llm: LLM, steps: Steps):
    """Whether its tokens were lost is not known: the other call may not go on without them."""
    expected = alone(llm, PROMPTS[:1])
    stream = llm.stream(PROMPTS[0], greedy())
    steps.before = {steps.count + 2: lambda: raise_(KeyboardInterrupt())}
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[1], greedy())
    assert read([next(stream)]) == expected[0][:1]
    with pytest.raises(EngineError, match="KeyboardInterrupt"):
        next(stream)
    assert not llm.engine.has_work
    assert alone(llm, PROMPTS[:1]) == expected


def test_requests_that_vanish_end_in_an_error_not_in_a_spin(llm: LLM):
    streams = [llm.stream(prompt, greedy()) for prompt in PROMPTS[:2]]
    for name in list(llm.engine.scheduler.sequences):
        llm.engine.abort(name)
    for stream in streams:
        with pytest.raises(EngineError, match="nothing to compute"):
            Thread(lambda stream=stream: next(stream)).result()


def test_tokens_taken_by_someone_else_end_in_an_error(llm: LLM):
    stream = llm.stream(PROMPTS[0], greedy())
    while llm.engine.has_work:
        llm.engine.step()
    with pytest.raises(EngineError, match="nothing to compute"):
        Thread(lambda: read(stream)).result()


# ---- closing, and letting go


@pytest.mark.parametrize("way", ["close", "drop", "cycle"])
def test_a_stream_that_was_never_read_leaves_nothing(llm: LLM, way: str):
    stream: Any = llm.stream(PROMPTS, greedy())
    assert llm.engine.has_work
    if way == "close":
        stream.close()
    elif way == "drop":
        del stream
    else:
        ring = [stream]
        ring.append(ring)
        del stream, ring
        gc.collect()
    assert not llm.engine.has_work


def test_close_while_another_thread_steps(llm: LLM, steps: Steps):
    """The stream ends, for its reader too, and the other call goes on as if it had been alone."""
    expected = alone(llm, PROMPTS[:2])
    stream = llm.stream(PROMPTS[0], greedy())
    closing = threading.Event()
    base = steps.count

    def until_claimed() -> None:
        wait(closing)
        while not llm._shared.claims:
            threading.Event().wait(0.001)

    steps.before = {base + 3: until_claimed}
    other = Thread(lambda: llm.generate(PROMPTS[1], greedy()))
    while steps.count < base + 3:
        threading.Event().wait(0.001)
    closing.set()
    Thread(stream.close).result()
    assert list(stream) == []
    assert other.result()[0].outputs[0].token_ids == expected[1]
    assert len(llm.engine.scheduler.sequences) == 0


def test_a_stream_collected_in_the_midst_of_a_step(llm: LLM, steps: Steps):
    """The collector may run anywhere, so in the step itself: what it drops is cancelled after."""
    expected = alone(llm, PROMPTS[:2])
    ring: list[Any] = [llm.stream(PROMPTS[0], greedy(100))]

    def drop() -> None:
        ring.clear()
        assert len(llm.engine.scheduler.sequences) == 2

    steps.before = {steps.count + 8: drop}
    out = Thread(lambda: llm.generate(PROMPTS[1], greedy())).result()[0]
    assert out.outputs[0].token_ids == expected[1]
    assert not llm.engine.has_work


def test_what_is_wrong_with_a_stream_s_prompt_is_said_by_the_call_itself(llm: LLM):
    with pytest.raises(RequestError, match="128 tokens"):
        llm.stream([[5], [5] * 128], greedy())
    assert not llm.engine.has_work


def test_any_exception_takes_back_what_is_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    add = llm.engine.add
    added = []

    def fail(request: Any) -> None:
        add(request)
        added.append(request)
        if len(added) == 2:
            raise RuntimeError("out of luck")

    monkeypatch.setattr(llm.engine, "add", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        llm.generate(PROMPTS, greedy())
    assert len(added) == 2
    assert not llm.engine.has_work
