"""Step times that an earlier start measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM
from rorqual.engine.config import EngineConfig
from rorqual.engine.execution.worker import read_model
from rorqual.engine.micro_batches import measure
from rorqual.engine.micro_batches.kept import AGREES, KeptTimes, parsed, read
from rorqual.engine.micro_batches.measure import Limits, PartsTimer, deviation
from rorqual.engine.micro_batches.step_times import (
    MeasuredSize,
    PhaseTimes,
    StageSeconds,
    StepTimes,
)
from rorqual.models.hub import BUNDLED
from rorqual.parallel.mesh import Mesh
from rorqual.platforms import make_platform
from tests.engine.micro_batches.test_auto import OPTIONS, PROMPTS, engine, measured
from tests.engine.mixed_batch import COMMON, params

CONFIG = EngineConfig(str(BUNDLED))
STAGES = (StageSeconds(1e-3, 1e-3), StageSeconds(1e-3))


def table(seconds: float) -> StepTimes:
    size = MeasuredSize(4, 4, "alltoall", 1e-3, STAGES, (seconds, seconds), (0.1, 0.0))
    return StepTimes(3, PhaseTimes((size,)), PhaseTimes(reason="nothing travels"), 2.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RORQUAL_CACHE", str(tmp_path))
    return tmp_path / "step-times"


def kept(config: EngineConfig = CONFIG) -> KeptTimes:
    return KeptTimes(config, read_model(config), Mesh.single(), make_platform("cpu"))


class Start:
    """What an engine would measure, and how far it would find kept times off."""

    def __init__(self, seconds: float, wrong: float = 0.0):
        self.seconds = seconds
        self.wrong = wrong
        self.measured = 0

    def times(self, found: KeptTimes) -> StepTimes:
        return found.times(self.measure, lambda _: self.wrong)

    def measure(self) -> StepTimes:
        self.measured += 1
        return table(self.seconds)


def test_a_second_start_measures_nothing_while_the_machine_is_the_same(folder: Path) -> None:
    first, second = Start(1.0), Start(2.0, wrong=AGREES)
    assert first.times(kept()) == table(1.0)
    assert second.times(kept()) == table(1.0)
    assert (first.measured, second.measured) == (1, 0)
    assert [path.suffix for path in folder.iterdir()] == [".json"], "nothing half written"


def test_times_that_do_not_agree_any_more_are_replaced() -> None:
    Start(1.0).times(kept())
    assert Start(2.0, wrong=AGREES + 0.01).times(kept()) == table(2.0)
    assert Start(3.0).times(kept()) == table(2.0)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"layers": 1}', json.dumps({"decode": 3}), "\udcff", "x" * 2**21],
)
def test_what_is_no_table_is_measured_anew(folder: Path, text: str) -> None:
    Start(1.0).times(kept())
    (path,) = folder.iterdir()
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert parsed(read(path)) is None
    assert Start(2.0).times(kept()) == table(2.0)
    assert parsed(read(path)) == table(2.0)


def test_a_folder_that_cannot_be_written_costs_the_times_alone(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    assert Start(1.0).times(kept()) == table(1.0)
    assert Start(2.0).times(kept()) == table(2.0)


def test_other_options_have_times_of_their_own() -> None:
    Start(1.0).times(kept())
    other = replace(CONFIG, max_num_seqs=257)
    assert Start(2.0).times(kept(other)) == table(2.0)
    assert Start(3.0).times(kept()) == table(1.0)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert Start(4.0).times(kept()) == table(4.0)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.exhaustive
def test_reasons_are_compared_with_the_engine_that_is_there() -> None:
    runner = LLM(**{**COMMON, "num_pages": 20}).engine.worker.runner
    reason = PhaseTimes(reason="every rank holds every token: nothing travels to experts")
    layers = sum(runner.model.config.moe_layers)
    same = StepTimes(layers, reason, reason)
    limits = Limits(4, 1, 64, 64)
    assert deviation(runner, limits, same) == 0
    assert deviation(runner, limits, replace(same, layers=layers + 1)) == float("inf")
    assert deviation(runner, limits, replace(same, decode=table(1.0).decode)) == float("inf")


def test_a_size_is_timed_again_with_the_parts_that_were_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer than are allowed, where the others were far behind."""
    runner = LLM(**{**COMMON, "num_pages": 20}).engine.worker.runner
    monkeypatch.setattr(measure, "why_whole", lambda runner, decode: "")
    monkeypatch.setattr(PartsTimer, "_layer", lambda self, step: (1e-3, STAGES))
    monkeypatch.setattr(PartsTimer, "_pass", lambda self, output, metadata, captured: None)
    asked: list[int] = []

    def times(self: PartsTimer, passes: list[None]) -> Any:
        asked.append(len(passes))
        return (1.1,) * len(passes), (0.0,) * len(passes)

    monkeypatch.setattr(PartsTimer, "_times", times)
    layers = sum(runner.model.config.moe_layers)
    exchange = runner.model.layout([4], False).exchange

    def size(*passes: float) -> PhaseTimes:
        noise = (0.0,) * len(passes)
        return PhaseTimes((MeasuredSize(4, 4, exchange, 1e-3, STAGES, passes, noise),))

    kept_times = StepTimes(layers, size(1.0, 1.0, 1.0), size(1.0, 1.0))
    limits = Limits(4, 1, 64, 64)
    assert deviation(runner, limits, kept_times) == pytest.approx(0.1)
    assert asked == [3, 2]


@pytest.mark.exhaustive
@pytest.mark.longest
def test_engines_of_two_ranks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Both ranks go the same way, or the start would hang: with times that agree, as they do
    unless the machine is busy with other things, and with others'."""
    options: dict[str, Any] = {"keep_step_times": True}
    single = LLM(**{**COMMON, "enable_prefix_caching": False})
    expected = [out.outputs[0].token_ids for out in single.generate(PROMPTS, params(max_tokens=6))]

    def start() -> StepTimes:
        with engine(monkeypatch, **options) as llm:
            found = llm.generate(PROMPTS, params(max_tokens=6))
            assert [out.outputs[0].token_ids for out in found] == expected
            return measured(llm)

    newest = start()
    for _ in range(5):
        found = start()
        if found == newest:
            break
        newest = found
    else:
        pytest.fail("times of the start before were never used")
    (path,) = folder.iterdir()
    assert parsed(path.read_text()) == newest
    phases = [
        replace(
            phase,
            sizes=tuple(
                replace(size, passes=tuple(9 * one for one in size.passes)) for size in phase.sizes
            ),
        )
        for phase in (newest.decode, newest.prompts)
    ]
    wrong = replace(newest, decode=phases[0], prompts=phases[1])
    path.write_text(wrong.as_json())
    assert start() not in (wrong, newest)
    assert OPTIONS["keep_step_times"] is False, "of the other tests"
