"""Ctrl-C, or any error, at any point: no request loses, repeats or gets a foreign token."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import rorqual.engine.distributed.executor as ranks
from rorqual import LLM, SamplingParams
from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.channel import Channel, FrameKind
from rorqual.engine.distributed.codec import decode_output, encode_result, number_of, numbered
from rorqual.engine.distributed.worker_handle import ConnectedWorker
from rorqual.engine.execution.cuda_graphs import DecodeGraphs
from rorqual.engine.execution.sampler import PendingStep
from rorqual.engine.executor import LaunchedStep
from rorqual.engine.scheduling.dp_scheduler import DataParallelOutput
from rorqual.engine.scheduling.scheduler_output import (
    PrefillChunk,
    SamplingVariant,
    SchedulerOutput,
    StepMetadata,
    StepResult,
)
from rorqual.errors import EngineError
from rorqual.models.hub import BUNDLED
from rorqual.platforms.cpu import CpuPlatform
from rorqual.request import Request, StructuredOutput
from tests.engine.fake_runner import check_idle

pytestmark = pytest.mark.exhaustive(but_first=True)

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 3,
    "page_size": 4,
    "threads": 1,
    "num_pages": 22,
    "chunked_prefill_size": 5,
    "weights": "random",
    "num_layers": 2,
}
TEXTS = [
    "The captain of the ship",
    "In the beginning",
    "It was a dark night",
    "What do you mean?",
    "Once",
]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True, **changes})


MIXED = [
    params(max_tokens=10, prompt_logprobs=1),
    params(temperature=0.9, seed=3),
    params(presence_penalty=0.7, repetition_penalty=1.2, max_tokens=8),
    params(structured=StructuredOutput("regex", "[a-m]{5,9}"), ignore_eos=False, max_tokens=12),
    params(temperature=1.1, top_k=9, seed=8),
]


def tokens_of(llm: LLM, texts: list[str] = TEXTS) -> list[list[int]]:
    outs = llm.generate(texts, MIXED[: len(texts)])
    return [out.outputs[0].token_ids for out in outs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Of an engine to which nothing ever happened."""
    return tokens_of(LLM(**OPTIONS))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**OPTIONS, num_speculative_tokens=2, steps_in_flight=2, kv_host_memory=0.01)


Spot = tuple[str, str, bool, int]  # path to an object, its method, whether after it, which call


def name_of(spot: Spot) -> str:
    path, name, after, nth = spot
    return f"{'after' if after else 'before'}-{path}.{name}-{nth}"


def find(found: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    return found


@contextmanager
def struck(found: Any, spot: Spot, error: Callable[[str], BaseException]) -> Iterator[None]:
    """The nth call of a method raises `error`, before it has done anything or when it is done."""
    path, name, after, left = spot
    owner = find(found, path)
    real = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left:
            return real(*given, **named)
        if after:
            real(*given, **named)
        raise error("struck")

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)
    assert left <= 0, f"{name_of(spot)} was never reached"


@contextmanager
def ctrl_c(owner: Any, name: str) -> Iterator[None]:
    """A real one, as the method is entered."""
    real = getattr(owner, name)

    def call(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*given)

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)


SPOTS: list[Spot] = [
    ("scheduler.schedulers.0", "schedule", False, 3),
    ("scheduler.schedulers.0", "_grow", True, 5),
    ("scheduler.schedulers.0", "_schedule_chunk", True, 2),
    ("scheduler", "schedule", True, 4),
    ("worker.runner", "launch", False, 2),
    ("worker.runner.rows", "_set_up", True, 2),
    ("worker.runner.build", "prefill", True, 2),
    ("worker.runner.model", "logits", True, 5),
    ("worker.runner.sampler", "_sample_decode", True, 2),
    ("worker.runner.drafter", "draft", False, 3),
    ("worker.runner.drafter", "draft", True, 4),
    ("worker.runner", "launch", True, 1),
    ("worker.runner", "launch", True, 6),
    ("worker.runner", "collect", False, 3),
    ("worker.runner", "collect", True, 4),
    ("scheduler.schedulers.0", "update", False, 4),
    ("scheduler.schedulers.0", "_append", True, 9),
    ("scheduler.schedulers.0", "finish", True, 1),
    ("scheduler", "update", True, 6),
    ("scheduler.schedulers.0", "_release", False, 2),
]
ERRORS = (KeyboardInterrupt, MemoryError, RuntimeError)


def finished(llm: LLM) -> tuple[list[list[int]], int]:
    """(tokens of each request, how many steps raised), by one who goes on whatever is raised."""
    engine = llm.engine
    encode = llm.get_tokenizer().encode
    eos = llm.defaults.eos_token_ids
    raised = 0
    found: dict[str, list[int]] = {str(index): [] for index in range(len(TEXTS))}
    for index, text in enumerate(TEXTS):
        engine.add(Request(str(index), tuple(encode(text)), MIXED[index], eos, time.monotonic()))
    for _ in range(500):
        if not engine.has_work:
            return list(found.values()), raised
        try:
            for out in engine.step():
                sequence = out.sequence
                found[sequence.request.id].append(out.token)
                assert len(sequence.prompt_logprobs) == sequence.score_end
        except ERRORS:
            raised += 1
    raise AssertionError(f"requests never end: {found}")


# ---- one process


@pytest.mark.parametrize("spot", SPOTS, ids=name_of)
def test_an_error_costs_no_request_a_token(llm: LLM, expected: list[list[int]], spot: Spot) -> None:
    """All go on with the call after the one that raised, to the tokens they would have had."""
    for error in ERRORS:
        with struck(llm.engine, spot, error):
            found, raised = finished(llm)
        assert raised == 1
        assert found == expected
        check_idle(llm.engine.scheduler.schedulers[0])


@pytest.mark.parametrize("spot", SPOTS, ids=name_of)
def test_generate_again_after_ctrl_c(llm: LLM, expected: list[list[int]], spot: Spot) -> None:
    """And another Ctrl-C, while the first one's requests are being cancelled, changes nothing."""
    with struck(llm.engine, ("scheduler", "abort", True, 2), KeyboardInterrupt):
        with struck(llm.engine, spot, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            tokens_of(llm)
        assert tokens_of(llm) == expected


def test_ctrl_c_between_any_two_lines(llm: LLM, expected: list[list[int]]) -> None:
    """Python raises KeyboardInterrupt between any two instructions; here, before lines spread
    evenly over all that a run executes of the engine."""
    package = Path(ranks.__file__).parents[2]
    names = (
        "engine",
        "executor",
        "scheduling/scheduler",
        "scheduling/dp_scheduler",
        "execution/model_runner",
        "execution/sampler",
        "execution/logits_processor",
        "execution/request_state",
    )
    files = {str(package / "engine" / f"{name}.py") for name in names}
    files |= {str(package / "cache" / f"{name}.py") for name in ("pages", "prefix")}
    assert all(Path(name).is_file() for name in files)
    count = 0
    stop = -1

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == stop:
                raise KeyboardInterrupt
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename in files else None

    def traced() -> list[list[int]]:
        nonlocal count
        count = 0
        sys.settrace(call)
        try:
            return tokens_of(llm)
        finally:
            sys.settrace(None)

    assert traced() == expected
    lines = count
    assert lines > 1000
    for stop in range(7, lines * 9 // 10, lines // 15):
        with pytest.raises(KeyboardInterrupt):
            traced()
        assert tokens_of(llm) == expected, f"after line {stop}"


class TornGraphs(DecodeGraphs):
    """Ctrl-C, while `struck`, as soon as new slots are on the device."""

    struck = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "shown" and value and self.struck:
            raise KeyboardInterrupt
        super().__setattr__(name, value)


def test_a_recorded_step_takes_the_slots_asked_for() -> None:
    """Slots that the step before left on the device are sent again unless that is sure."""
    platform = CpuPlatform(torch.device("cpu"))
    platform.capture = lambda work, warm=True: work  # type: ignore[method-assign]
    graphs = TornGraphs(
        lambda slots, variant, num_speculative_tokens: slots.clone(), platform, 4, 4
    )
    step = StepMetadata.padded(2, 1, SamplingVariant.GREEDY, 0)
    assert graphs.run([0, 1], step).tolist() == [0, 1]
    graphs.struck = True
    with pytest.raises(KeyboardInterrupt):
        graphs.run([2, 3], step)
    graphs.struck = False
    assert graphs.run([0, 1], step).tolist() == [0, 1]


# ---- several ranks


def test_ctrl_c_waits_for_the_end_of_a_block_and_a_second_does_not() -> None:
    done = []

    def block(times: int) -> None:
        with ranks.uninterrupted():
            for time in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                done.append(time)

    with pytest.raises(KeyboardInterrupt):
        block(1)
    assert done == [0]
    with pytest.raises(KeyboardInterrupt):
        block(3)
    assert done == [0, 0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class OtherRanks:
    """In place of a launcher: ranks 1 to 3 as threads, which answer a plan with its own number, a
    hundred times that of the rank and ten times that of the step added to the slots."""

    interface = "lo"

    def __init__(self) -> None:
        self.ended = [threading.Event() for _ in range(3)]
        self.steps: list[list[int]] = [[] for _ in range(3)]

    def start(self) -> list[ConnectedWorker]:
        return [self._rank(index) for index in range(3)]

    def _rank(self, index: int) -> ConnectedWorker:
        mine, theirs = socket.socketpair()
        channel = Channel(theirs)
        threading.Thread(target=self._serve, args=(index, channel), daemon=True).start()
        return ConnectedWorker(Channel(mine), index, host="here")

    def _serve(self, index: int, channel: Channel) -> None:
        with suppress(OSError):
            self._answer(index, channel)
        self.ended[index].set()
        channel.close()

    def _answer(self, index: int, channel: Channel) -> None:
        while (frame := channel.receive()) is not None and frame[0] is not FrameKind.STOP:
            if frame[0] is FrameKind.STEP:
                number, data = number_of(frame[1])
                self.steps[index].append(number)
                part = decode_output(data).parts[index + 1]
                result = answer(part, index + 1, number)
                channel.send(FrameKind.RESULT, numbered(number, encode_result(result)))

    def close(self) -> None:
        pass


def answer(part: SchedulerOutput, rank: int, step: int) -> StepResult:
    return StepResult([[1000 * rank + 10 * step + slot] for slot in part.sampled_slots])


class OwnRank:
    """Rank 0's runner beside them."""

    def __init__(self) -> None:
        self.steps = 0

    def launch(self, part: SchedulerOutput, metadata: StepMetadata) -> StepResult:
        self.steps += 1
        return answer(part, 0, self.steps)

    def collect(self, pending: StepResult) -> StepResult:
        return pending

    def drop_captured(self) -> None:
        pass


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    others = OtherRanks()
    monkeypatch.setattr(ranks, "make_launcher", lambda config: others)
    monkeypatch.setattr(ranks, "FIND_FAILURE_SECONDS", 0.2)
    monkeypatch.setattr(ranks.DistributedExecutor, "_start", lambda self: None)
    made: Any = ranks.DistributedExecutor(EngineConfig(str(BUNDLED), dp=4))
    made.worker = SimpleNamespace(runner=OwnRank(), close=lambda: None)
    made.leaders = [made._leader(dp) for dp in range(4)]
    made.others = others
    yield made
    made.close()


def step_of(slot: int) -> DataParallelOutput:
    parts = [SchedulerOutput(chunks=[PrefillChunk(slot, 0, [5, 6], True)]) for _ in range(4)]
    return DataParallelOutput(parts, SamplingVariant.GREEDY, host=False)


def first_tokens(results: list[StepResult]) -> list[int]:
    return [result.tokens[0][0] for result in results]


MIDWAY = [
    ("handles.0.channel", "send", False, 1),
    ("handles.0.channel", "send", True, 1),
    ("handles.1.channel", "send", True, 1),
    ("handles.2.channel", "send", True, 1),
    ("worker.runner", "launch", False, 1),
    ("worker.runner", "launch", True, 1),
]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError, OSError])
@pytest.mark.parametrize("spot", MIDWAY, ids=name_of)
def test_an_error_while_others_may_have_the_step_ends_the_group(
    group: Any,
    spot: Spot,
    error: type[BaseException],
) -> None:
    """Some may be in a collective that rank 0 will not enter."""
    assert first_tokens(group.collect(group.launch(step_of(0)))) == [10, 1010, 2010, 3010]
    raised = KeyboardInterrupt if error is KeyboardInterrupt else EngineError
    with struck(group, spot, error), pytest.raises(raised):
        group.launch(step_of(1))
    assert all(ended.wait(60) for ended in group.others.ended)
    for call in (
        lambda: group.launch(step_of(2)),
        lambda: group.collect(LaunchedStep(1, PendingStep())),
    ):
        with pytest.raises(EngineError, match=f"launching step 2: ({error.__name__} )?struck"):
            call()


def test_an_error_in_the_midst_of_ending_the_group_ends_it_with_the_next_call(group: Any) -> None:
    with (
        struck(group, ("", "_abort", False, 1), KeyboardInterrupt),
        struck(group, ("worker.runner", "launch", False, 1), MemoryError),
        pytest.raises(KeyboardInterrupt),
    ):
        group.launch(step_of(0))
    with pytest.raises(EngineError, match="rank 0 failed while launching step 1: interrupted"):
        group.launch(step_of(1))
    assert all(ended.wait(60) for ended in group.others.ended)


def test_a_step_that_cannot_be_sent_has_not_been(group: Any) -> None:
    output = step_of(0)
    output.parts[2].chunks[0] = PrefillChunk(0, 0, [object()], True)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        group.launch(output)
    assert first_tokens(group.collect(group.launch(step_of(3)))) == [13, 1013, 2013, 3013]
    assert group.others.steps == [[1]] * 3


def test_results_of_abandoned_steps_are_thrown_away(group: Any) -> None:
    group.launch(step_of(0))
    group.launch(step_of(1))
    waiting = [("worker.runner", "collect", False, 1), ("handles.1.results", "get", True, 1)]
    for number, spot in enumerate(waiting, 3):
        pending = group.launch(step_of(2))
        with struck(group, spot, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            group.collect(pending)
        assert pending.number == number
    assert first_tokens(group.collect(group.launch(step_of(3)))) == [53, 1053, 2053, 3053]


def test_ctrl_c_while_a_step_is_launched_leaves_all_ranks_in_step(group: Any) -> None:
    with ctrl_c(group.worker.runner, "launch"), pytest.raises(KeyboardInterrupt):
        group.launch(step_of(0))
    assert first_tokens(group.collect(group.launch(step_of(1)))) == [21, 1021, 2021, 3021]


GROUP_SPOTS: list[tuple[Spot, type[BaseException]]] = [
    (("scheduler.schedulers.1", "schedule", True, 3), KeyboardInterrupt),
    (("scheduler.schedulers.1", "_schedule_chunk", True, 2), MemoryError),
    (("executor", "launch", False, 4), RuntimeError),
    (("executor", "launch", True, 3), KeyboardInterrupt),
    (("worker.runner", "collect", True, 3), KeyboardInterrupt),
    (("executor", "_result", False, 3), MemoryError),
    (("executor", "_result", True, 4), KeyboardInterrupt),
    (("scheduler.schedulers.0", "_append", True, 4), MemoryError),
    (("scheduler.schedulers.1", "update", True, 4), KeyboardInterrupt),
]


@pytest.mark.exhaustive
def test_several_ranks_go_on_with_right_tokens_or_not_at_all(expected: list[list[int]]) -> None:
    """One group throughout: at last its drafter fails between two collectives, and it ends."""
    llm = LLM(**OPTIONS, dp=2, ep=2, num_speculative_tokens=2, watchdog_seconds=30)
    group = llm.engine.executor
    engine = llm.engine
    try:
        for spot, error in GROUP_SPOTS:
            with struck(engine, spot, error):
                found, raised = finished(llm)
            assert (raised, found) == (1, expected), name_of(spot)
            for scheduler in engine.scheduler.schedulers:
                check_idle(scheduler)
            assert not engine.scheduler.assigned_rank
        with ctrl_c(group.worker.runner, "launch"), pytest.raises(KeyboardInterrupt):
            tokens_of(llm)
        assert tokens_of(llm) == expected
        drafting = ("worker.runner.drafter", "draft", False, 3)
        with struck(engine, drafting, ValueError), pytest.raises(EngineError, match="ValueError"):
            tokens_of(llm)
        start = time.monotonic()
        with pytest.raises(EngineError, match="rank 0 failed while launching step"):
            tokens_of(llm)
        assert time.monotonic() - start < 30  # the watchdog's
    finally:
        engine.close()
    assert group.handles[0].process is not None
    assert group.handles[0].process.wait(60) is not None
