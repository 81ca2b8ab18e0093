"""Engines that measure, and decide for each step, into how many parts it is cut."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from demo.throttled_wire import MODEL
from rorqual import LLM
from rorqual.engine.execution import worker
from rorqual.engine.micro_batches import policy
from rorqual.engine.micro_batches.measure import (
    LAUNCHING,
    MOST_LAUNCHING,
    REPEATS,
    SIZE_SECONDS,
    Limits,
    PartsTimer,
    measure,
)
from rorqual.engine.micro_batches.policy import MeasuredParts
from rorqual.engine.micro_batches.report import parts_of
from rorqual.engine.micro_batches.step_times import StepTimes
from rorqual.engine.scheduling.scheduler_output import SchedulerOutput
from tests.engine.micro_batches.paced_wire import pace
from tests.engine.mixed_batch import COMMON, TEXTS, everything, params

SHORT = 6.0  # seconds of measuring; rank 0's limit ends it for all
EVERY_SIZE = 60.0  # up to the largest step, on a machine that does other things too
OPTIONS: dict[str, Any] = {
    **COMMON,
    "dp": 2,
    "ep": 2,
    "micro_batches": "auto",
    "keep_step_times": False,
    "max_num_batched_tokens": 192,
    "enable_prefix_caching": False,
}
PROMPTS = [[7 * i + 3 * j for j in range(30)] for i in range(1, 13)]


@contextmanager
def engine(
    monkeypatch: pytest.MonkeyPatch, seconds: float = SHORT, **options: Any
) -> Iterator[LLM]:
    monkeypatch.setattr(worker, "measure", partial(measure, seconds=seconds))
    llm = LLM(**{**OPTIONS, **options})
    try:
        yield llm
    finally:
        llm.engine.close()


def measured(llm: LLM) -> StepTimes:
    times = llm.engine.worker.step_times
    assert times is not None
    return times


@pytest.mark.exhaustive
@pytest.mark.longest
@pytest.mark.parametrize("more", [{}, {"exchange": "alltoall", "num_speculative_tokens": 1}])
def test_steps_are_cut_where_the_wire_is_slow(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """As long as computing, or longer, for prompts. Tokens are those of one process."""
    single = LLM(**{**COMMON, "enable_prefix_caching": False})
    expected = [out.outputs[0].token_ids for out in single.generate(PROMPTS, params(max_tokens=6))]
    mixed = everything(single, TEXTS)
    pace(monkeypatch, 40e-9)
    monkeypatch.setattr(policy, "noise_at", lambda *_: 0.0)  # of whatever else runs here
    with engine(monkeypatch, EVERY_SIZE, **more) as llm:
        times = measured(llm)
        assert times.prompts.sizes[-1].tokens == OPTIONS["max_num_batched_tokens"]
        found = llm.generate(PROMPTS, params(max_tokens=6))
        assert [out.outputs[0].token_ids for out in found] == expected
        assert max(llm.engine.stats.steps_by_parts) > 1, times
        assert everything(llm, TEXTS) == mixed


@pytest.mark.exhaustive
@pytest.mark.longest
def test_what_is_decided_follows_from_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback as it is, which is fast only while the other rank gets a processor at once."""
    with engine(monkeypatch) as llm:
        times = measured(llm)
        assert times.layers == sum(llm.engine.model_config.moe_layers)
        assert isinstance(llm.engine.scheduler.micro_batches, MeasuredParts)
        for decodes, phase in ((True, times.decode), (False, times.prompts)):
            for size in phase.sizes:
                parts = parts_of(times, size, decodes)
                assert parts == 1 or size.passes[parts - 1] < size.passes[0]
        llm.generate([[5, 6, 7]], params(max_tokens=9))  # alone: nothing to cut
        assert set(llm.engine.stats.steps_by_parts) == {1}


@pytest.mark.exhaustive
@pytest.mark.longest
def test_steps_stay_whole_on_a_fast_wire(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loopback, and layers that compute ten times as long as it carries their rows. A machine that
    does other things too may make parts look faster once, not in every start."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    wide = {"model": str(tmp_path), "weights": "random", "skip_tokenizer_init": True}
    found = []
    for _ in range(4):
        with engine(monkeypatch, EVERY_SIZE, **wide, num_layers=3, exchange="low_latency") as llm:
            llm.generate(PROMPTS, params(max_tokens=6))
            found.append(max(llm.engine.stats.steps_by_parts))
            times = measured(llm)
            assert times.decode.sizes, "it was measured, not left out"
            assert times.prompts.sizes[-1].tokens == OPTIONS["max_num_batched_tokens"]
        if found[-1] == 1:
            return
    pytest.fail(f"parts of the most divided step in each start: {found}; the last: {times}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dp": 1, "ep": 1, "tp": 2}, "nothing travels"),
        pytest.param({"pp": 2}, "pipeline", marks=pytest.mark.longest),
    ],
)
def test_where_nothing_can_overlap_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], reason: str
) -> None:
    with engine(monkeypatch, **sizes) as llm:
        times = measured(llm)
        assert reason in times.decode.reason
        assert reason in times.prompts.reason
        llm.generate([[5, 6, 7]] * 8, params(max_tokens=3))
        assert set(llm.engine.stats.steps_by_parts) == {1}


def sizes_in_time(device: str, passes: dict[int, float], budget: float = 1e9) -> list[int]:
    """Which sizes of up to 192 are timed where a pass takes so long."""
    runner = LLM(**{**COMMON, "num_pages": 20}).engine.worker.runner
    timer = PartsTimer(runner, Limits(4, 1, 64, 64), budget)
    timer.platform = SimpleNamespace(device=torch.device(device))  # type: ignore[assignment]
    found = []
    for size in timer._in_time((4, 12), 192, 1.0):
        timer.whole = passes[size]
        timer.least = 0.0 if budget > 1 else 10.0
        found.append(size)
    return found


def test_a_cpu_times_small_sizes_first_and_others_large_ones_down_to_where_launches_bind() -> None:
    passes = {192: 16.0, 96: 8.0, 48: 4.0, 24: 3.7, 12: 3.6, 4: 3.6}
    assert sizes_in_time("cpu", passes) == [4, 12, 24, 48, 96, 192]
    assert sizes_in_time("meta", passes) == [192, 96, 48, 24]
    assert sizes_in_time("cpu", passes, 1.0) == [4]
    assert sizes_in_time("meta", passes, 1.0) == [192]


@pytest.mark.exhaustive
def test_a_captured_pass_computes_what_a_launched_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a platform that keeps the work it is to capture."""
    runner = LLM(**{**COMMON, "num_pages": 20}).engine.worker.runner
    monkeypatch.setattr(runner.platform, "capture", lambda work: work, raising=False)
    timer = PartsTimer(runner, Limits(4, 1, 64, 64), 1.0)
    with torch.inference_mode(), timer._rows():
        runner.rows.length[:3] = 8
        output = SchedulerOutput([0, 1, 2], [9, 9, 9])
        metadata = timer._metadata(output, 1)
        captured = timer._pass(output, metadata, True)()
        runner.rows.length[:3] = 8
        launched = timer._pass(output, metadata, False)()
    assert torch.equal(captured, launched)
    assert captured.shape == (3, runner.model.config.hidden_size)
    assert not runner.rows.length.any()
    assert not runner.rows.last_token.any()


def test_the_slots_that_a_captured_pass_reads_live_as_long_as_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's replay has only their address, and no reference to the work."""
    runner = LLM(**{**COMMON, "num_pages": 20}).engine.worker.runner
    given: list[weakref.ref[torch.Tensor]] = []

    def decode_pass(slots: torch.Tensor, metadata: Any) -> tuple[None, torch.Tensor]:
        given.append(weakref.ref(slots))
        return None, slots.clone()

    def capture(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        found = work()
        return lambda: found

    monkeypatch.setattr(runner, "decode_pass", decode_pass)
    monkeypatch.setattr(runner.platform, "capture", capture, raising=False)
    timer = PartsTimer(runner, Limits(4, 1, 64, 64), 1.0)
    output = SchedulerOutput([0, 1, 2], [9, 9, 9])
    once = timer._pass(output, timer._metadata(output, 1), True)
    gc.collect()
    held = given[0]()
    assert held is not None
    assert once().tolist() == held.tolist() == [0, 1, 2]


def test_a_stage_is_timed_by_the_device_where_that_computes_while_the_host_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device begins when all is launched; a host that needs longer gets more time the next
    time, within a limit."""
    runner = LLM(**{**COMMON, "num_pages": 20}).engine.worker.runner
    marks: list[float] = []
    delays: list[float] = []

    class DeviceClock:
        def mark(self) -> None:
            marks.append(sum(delays) + 0.5 * len(marks) ** 2)

        def seconds(self) -> list[float]:
            return [end - begin for begin, end in pairwise(marks[-3:])]

    monkeypatch.setattr(runner.platform, "clock", DeviceClock)
    monkeypatch.setattr(runner.model.ops, "delay", delays.append)
    timer = PartsTimer(runner, Limits(4, 1, 64, 64), 1.0)
    assert timer._timed_stage(lambda: "rows") == ("rows", [0.5, 2.0])
    assert delays == [LAUNCHING]
    timer._timed_stage(lambda: time.sleep(0.012))
    timer._timed_stage(lambda: time.sleep(0.1))
    timer._timed_stage(lambda: None)
    assert delays[1] == LAUNCHING
    assert 0.024 <= delays[2] < MOST_LAUNCHING == delays[3]


def test_kernels_of_every_size_and_number_of_parts_are_met_before_any_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one layer of each kind, where the backend compiles ahead."""
    runner = LLM(**{**COMMON, "num_pages": 20}).engine.worker.runner
    met: list[tuple[int, int, int]] = []

    def forward_pass(output: SchedulerOutput, metadata: Any) -> None:
        met.append((output.num_tokens, len(metadata.micro_batches) or 1, len(runner.model.layers)))

    whole = len(runner.model.layers)
    monkeypatch.setattr(runner, "forward_pass", forward_pass)
    with torch.inference_mode():
        PartsTimer(runner, Limits(4, 1, 48, 64), 1.0)._compile_ahead(["", ""])
        assert not met
        timer = PartsTimer(runner, Limits(4, 1, 48, 64, compiles=True), 1.0)
        timer._compile_ahead(["whole", ""])
    assert {tokens for tokens, _, _ in met} == {4, 12, 24, 48}
    assert {parts for _, parts, _ in met} == {1, 2, 3, 4}
    assert {layers for _, _, layers in met} == {2}
    assert len(runner.model.layers) == whole > 2


class Scripted(PartsTimer):
    """Its passes are numbers: 1, 2, ... parts. Nothing runs; times are said."""

    def __init__(self, seconds: Callable[[int, int], float]):
        self.said = seconds
        self.runs = [0] * 4

    def _timed(self, once: Any) -> float:
        self.runs[once - 1] += 1
        return self.said(once, self.runs[once - 1])

    def _slowest(self, seconds: Any) -> Any:
        return seconds


def test_passes_that_cannot_win_leave_the_time_to_the_others() -> None:
    """Two parts win by a tenth, but most of their passes are disturbed; three and four are launched
    one by one."""
    own = {1: 0.036, 2: 0.033, 3: 0.3, 4: 0.4}

    disturbed = {2: 1.3, 3: 1.25, 4: 1.21}

    def seconds(parts: int, run: int) -> float:
        return own[parts] * disturbed.get(run, 1.0)

    timer = Scripted(seconds)
    shortest, noise = timer._times([1, 2, 3, 4])  # type: ignore[list-item]
    assert shortest[0] == own[1]
    assert shortest[1] == own[2]
    assert max(noise[:2]) == 0
    assert timer.runs[2:] == [3, 3], "the first one warms up"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parts_that_are_far_behind_are_not_timed_with_smaller_steps(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sizes are timed from the largest down, as on a GPU; each phase begins with all."""
    runner = LLM(**{**COMMON, "num_pages": 20}).engine.worker.runner
    timer = PartsTimer(runner, Limits(4, 1, 64, 64), 1e9)
    timer.platform = SimpleNamespace(device=torch.device(device))  # type: ignore[assignment]
    monkeypatch.setattr(timer, "_layer", lambda step: (1e-3, ()))
    monkeypatch.setattr(timer, "_pass", lambda output, metadata, captured: None)
    said = {64: (4.0, 3.0, 8.0, 9.1), 32: (2.0, 1.5, 4.6), 16: (1.0, 4.0), 8: (0.5, 2.0)}

    def times(passes: list[None]) -> Any:
        found = said[timed[-1]] if device == "meta" else (1.0, 5.0, 5.0, 5.0)
        assert len(passes) == len(found)
        return found, (0.0,) * len(found)

    monkeypatch.setattr(timer, "_times", times)
    for _ in range(2):
        timed: list[int] = []
        for size in timer._in_time((8, 16), 64, 1.0):
            timed.append(size)
            found = timer._prompt_size(size)
            assert found.passes == (said[size] if device == "meta" else (1.0, 5.0, 5.0, 5.0))
        assert timed == ([64, 32, 16, 8] if device == "meta" else [8, 16, 32, 64])


def test_a_pass_that_was_held_up_twice_is_not_given_up() -> None:
    timer = Scripted(lambda parts, run: (0.02, 0.018)[parts - 1] * (1 if run > 3 else 2.5))
    shortest, _ = timer._times([1, 2])  # type: ignore[list-item]
    assert shortest == (0.02, 0.018)
    timer = Scripted(lambda parts, run: 0.02 if parts == 1 else 0.018 * (1 if run > 3 else 2.5))
    assert timer._times([1, 2])[0] == (0.02, 0.018)  # type: ignore[list-item]


def test_long_passes_are_repeated_least_often() -> None:
    timer = Scripted(lambda parts, run: 0.4 + 0.1 * parts + 0.05 * (run % 3))
    timer._times([1, 2, 3])  # type: ignore[list-item]
    assert timer.runs[:3] == [1 + REPEATS[0]] * 3
    assert REPEATS[0] * 0.5 * 3 > SIZE_SECONDS
