"""Traces of an engine's steps: whole files with named spans and operations, nothing in the way
before and after, and nothing half done left behind."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from rorqual.engine.engine import Engine
from rorqual.engine.execution.model_runner import ModelRunner
from rorqual.engine.step_trace import MAX_STEPS, TraceFile
from rorqual.errors import ConfigError
from rorqual.request import Request

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "num_pages": 64,
    "page_size": 8,
    "max_num_batched_tokens": 16,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**SMALL)


def add(engine: Engine, name: str, prompt: int, tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    first = 2 + 50 * len(engine.scheduler.sequences)  # no prefix in common
    engine.add(Request(name, tuple(range(first, first + prompt)), params))


def finished(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for out in engine.step():
            found.setdefault(out.sequence.request.id, []).append(out.token)
    return found


def result(engine: Engine) -> list[TraceFile]:
    deadline = time.monotonic() + 60
    while (found := engine.traced()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def spans(path: Path) -> list[str]:
    """Of steps, in order."""
    found = [event for event in events(path) if event.get("name", "").startswith("step ")]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def test_spans_say_what_steps_compute(llm: LLM, tmp_path: Path) -> None:
    """Prefill, both at once, decoding alone; and operations within. The tokens are those of a run
    that nobody looks at."""
    engine = llm.engine
    engine.scheduler.prefix.clear()
    add(engine, "first", 10, 4)
    engine.start_trace(str(tmp_path / "new" / "folder" / "named"), 5)
    engine.step()
    add(engine, "second", 20, 3)
    seen = finished(engine)
    (found,) = result(engine)
    assert found == TraceFile(str(tmp_path / "new" / "folder" / "named.json.gz"))
    assert engine.traced() is None, "told once"
    assert spans(Path(found.path)) == [
        "step 1 prefill: 0 decoding, 1 chunks, 10 tokens",
        "step 2 mixed: 1 decoding, 1 chunks, 16 tokens",
        "step 3 mixed: 1 decoding, 1 chunks, 6 tokens",
        "step 4 decode: 2 decoding, 0 chunks, 2 tokens",
        "step 5 decode: 1 decoding, 0 chunks, 1 tokens",
    ]
    names = {event.get("name") for event in events(Path(found.path))}
    assert {"aten::mm", "wait for a step's tokens"} & names
    assert any(str(name).startswith("aten::") for name in names)
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["named.json.gz"]
    engine.scheduler.prefix.clear()
    add(engine, "first", 10, 4)
    engine.step()
    add(engine, "second", 20, 3)
    assert finished(engine) == seen


def test_nothing_stands_before_the_runner_but_during_a_trace(llm: LLM, tmp_path: Path) -> None:
    engine = llm.engine
    runner = engine.worker.runner
    assert not {"launch", "collect"} & vars(runner).keys()
    engine.start_trace(str(tmp_path / "t"), 2)
    assert {"launch", "collect"} <= vars(runner).keys()
    add(engine, "r", 3, 6)
    finished(engine)
    assert not {"launch", "collect"} & vars(runner).keys()
    assert runner.launch.__func__ is ModelRunner.launch
    assert [one.error for one in result(engine)] == [""]


def test_a_trace_may_be_ended_early_and_another_begin(llm: LLM, tmp_path: Path) -> None:
    engine = llm.engine
    for name in ("a", "b"):
        engine.start_trace(str(tmp_path / name), 50)
        add(engine, "r", 3, 4)
        engine.step()
        engine.stop_trace()
        finished(engine)
        assert result(engine) == [TraceFile(str(tmp_path / f"{name}.json.gz"))]
        assert len(spans(tmp_path / f"{name}.json.gz")) == 1
    engine.stop_trace()
    assert engine.traced() is None


def test_a_trace_without_steps_is_no_file(llm: LLM, tmp_path: Path) -> None:
    llm.engine.start_trace(str(tmp_path / "t"), 3)
    llm.engine.stop_trace()
    assert [one.error for one in result(llm.engine)] == ["no step was computed"]
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_is_told(llm: LLM, tmp_path: Path) -> None:
    """And the steps go on."""
    (tmp_path / "file").write_text("")
    llm.engine.start_trace(str(tmp_path / "file" / "t"), 3)
    add(llm.engine, "r", 3, 4)
    assert len(finished(llm.engine)["r"]) == 4
    (found,) = result(llm.engine)
    assert "Error" in found.error


def test_an_engine_that_ends_leaves_no_half_of_a_file(llm: LLM, tmp_path: Path) -> None:
    engine = llm.engine
    engine.start_trace(str(tmp_path / "t"), 9)
    add(engine, "r", 3, 4)
    engine.step()
    engine.close()
    assert not [*tmp_path.iterdir()]
    assert [one.error for one in result(engine)] == ["the engine ended"]
    assert len(finished(engine)["r"]) == 3  # a local one can go on all the same


@pytest.mark.parametrize("steps", [0, -1, MAX_STEPS + 1])
def test_the_number_of_steps_has_bounds(llm: LLM, tmp_path: Path, steps: int) -> None:
    with pytest.raises(ConfigError, match=f"accepted: 1 to {MAX_STEPS}"):
        llm.engine.start_trace(str(tmp_path / "t"), steps)


@pytest.mark.exhaustive
def test_every_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    llm = LLM(**SMALL, tp=2, threads=1)
    try:
        llm.engine.start_trace(str(tmp_path / "t"), 3)
        add(llm.engine, "r", 3, 6)
        finished(llm.engine)
        paths = [tmp_path / f"t-rank{rank}.json.gz" for rank in range(2)]
        assert result(llm.engine) == [TraceFile(str(path)) for path in paths]
        first, second = map(spans, paths)
        assert len(first) == 3
        assert first == second
        llm.engine.start_trace(str(tmp_path / "u"), 100)  # under way when the ranks end
        add(llm.engine, "s", 3, 2)
        finished(llm.engine)
    finally:
        llm.engine.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in paths]
