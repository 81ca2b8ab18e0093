"""Steps with prompts in two micro-batches that are captured in pieces: the tokens of one process.
Replays run recorded operations, and messages go between them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual import LLM
from rorqual.bench.micro_batches.run import BenchSizes, run
from rorqual.engine.distributed.executor import DistributedExecutor
from rorqual.engine.execution import worker
from rorqual.engine.execution.model_runner import ModelRunner
from rorqual.engine.execution.piecewise.attention import DecodeRows
from rorqual.engine.execution.piecewise.parts import (
    AttentionGap,
    MessageGap,
    PartRecorder,
    Sending,
)
from rorqual.engine.micro_batches.measure import measure
from rorqual.errors import EngineError
from rorqual.layers.moe import DenseMLP
from rorqual.ops.interface import AttentionMetadata, Ops
from rorqual.parallel.group_axis import GroupAxis
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import SINGLE_LAYOUT
from rorqual.platforms.base import Start
from tests.engine.distributed import in_pieces
from tests.engine.distributed.starting import ROOT
from tests.engine.distributed.test_cut_prompts import LONG, PROMPTS, alike, answers, cuts
from tests.engine.execution import bounded
from tests.engine.execution.recording import LOOKING, RecordingPlatform, as_one_call
from tests.engine.mixed_batch import params
from tests.models.checkpoints import save

SITE = Path(__file__).parent / "recording_site"
OPTIONS: dict[str, Any] = {
    **LONG,
    "enable_prefix_caching": False,
    "watchdog_seconds": 120,
}
CAPTURED: dict[str, Any] = {"micro_batches": 2, "exe_mode": "graph", "piecewise_tokens": 512}
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "sequence_parallel": True},
    {"dp": 2, "ep": 2, "num_speculative_tokens": 2, "embed_tp": 2, "head_tp": 2},
    {"dp": 2},
    {"dp": 2, "ep": 2, "redundant_experts": 4},
    {"tp": 2, "dp": 2, "ep": 4, "exchange": "allgather_ep"},
]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> RecordingPlatform:
    """Of rank 0; the others have their own."""
    platform = RecordingPlatform(torch.device("cpu"))
    monkeypatch.setattr(
        "rorqual.engine.distributed.executor.make_platform", lambda device: platform
    )
    for name in LOOKING:
        monkeypatch.setattr(Ops, name, as_one_call(getattr(Ops, name)))
    bounded.put_in_place(monkeypatch.setattr)
    monkeypatch.setattr(bounded, "calls", [])
    monkeypatch.setenv("PYTHONPATH", f"{SITE}{os.pathsep}{ROOT}")
    return platform


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_tokens_are_those_of_one_process(
    layout: dict[str, Any], recording: RecordingPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(LLM(**OPTIONS), PROMPTS)
    launched = cuts(monkeypatch)  # of steps in parts that are not replayed
    llm = LLM(**OPTIONS, **CAPTURED, **layout)
    started = len(bounded.calls)
    found = answers(llm, PROMPTS)
    assert len(bounded.calls) > started, "all attention of prompts was launched"
    # the two long prompts, each alone, and all three together
    assert recording.replayed >= 3
    assert not launched
    kinds = [type(gap) for gap in recording.gaps]
    assert kinds.count(MessageGap) >= kinds.count(AttentionGap) > 0
    assert alike(found, expected)


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda layout: "-".join(map(str, layout)))
def test_results_are_sent_in_pieces_of_columns(
    layout: dict[str, Any], recording: RecordingPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is sent before the next is computed; tokens are those of one process."""
    expected = answers(LLM(**OPTIONS), PROMPTS)
    monkeypatch.setenv(in_pieces.VARIABLE, "1")
    in_pieces.put_in_place(monkeypatch.setattr)
    monkeypatch.setattr(in_pieces, "calls", [])
    unsent: list[list[int]] = []  # messages of a recorder, before and after
    launch = GroupAxis.launch_recorded

    def noted(axis: GroupAxis) -> None:
        recorder = axis.recorder
        before = len(recorder.unsent) if isinstance(recorder, PartRecorder) else 0
        launch(axis)
        if isinstance(recorder, PartRecorder):
            unsent.append([before, len(recorder.unsent)])

    monkeypatch.setattr(GroupAxis, "launch_recorded", noted)
    launched = cuts(monkeypatch)
    llm = LLM(**OPTIONS, **CAPTURED, **layout)
    assert in_pieces.calls
    assert unsent
    assert unsent.count([1, 0]) == len(unsent)
    assert alike(answers(llm, PROMPTS), expected)
    assert recording.replayed >= 3
    assert not launched


def test_larger_steps_are_launched_ahead_on_all_ranks(
    recording: RecordingPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels are compiled; here they run, and every collective has its match."""
    ahead: list[int] = []
    run_ahead = ModelRunner._run_ahead

    def noted(runner: ModelRunner, tokens: int, *given: Any) -> None:
        ahead.append(tokens)
        run_ahead(runner, tokens, *given)

    monkeypatch.setattr(ModelRunner, "_run_ahead", noted)
    monkeypatch.setattr(RecordingPlatform, "compiles", True)
    monkeypatch.setenv("COMPILES_IN_TESTS", "1")
    llm = LLM(**OPTIONS, **CAPTURED, dp=2, ep=2)
    try:
        assert CAPTURED["piecewise_tokens"] < min(ahead)
        assert max(ahead) == OPTIONS["max_num_batched_tokens"]
        given = [prompt for prompt in PROMPTS for _ in range(2)]
        assert len(llm.generate(given, params(max_tokens=3))) == len(given)
    finally:
        llm.engine.close()


@pytest.mark.exhaustive
def test_dense_layers_as_experts_have_messages_too(
    recording: RecordingPlatform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save("v3", tmp_path)  # a dense layer is one shared and two fixed experts
    prompts = [[token % 50 + 3 for token in prompt[:200]] for prompt in PROMPTS]
    options = {**OPTIONS, "skip_tokenizer_init": True, "max_model_len": 256}
    expected = answers(LLM(tmp_path, **options), prompts)
    launched = cuts(monkeypatch)
    started = []
    for fixed in (False, True):
        llm = LLM(tmp_path, **options, **CAPTURED, dp=2, ep=2, fixed_experts=fixed)
        assert alike(answers(llm, prompts), expected)
        started.append(sum(type(gap) is MessageGap for gap in recording.gaps))
    assert started[1] > started[0] > 0
    assert not launched


def test_results_are_sent_before_shared_experts_compute(
    recording: RecordingPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[PartRecorder] = []
    unsent: list[int] = []
    enter = PartRecorder._recording
    forward = DenseMLP.forward

    @contextmanager
    def entered(part: PartRecorder, axes: Sequence[GroupAxis]) -> Iterator[None]:
        with enter(part, axes):
            parts.append(part)
            try:
                yield
            finally:
                parts.pop()

    def noted(mlp: DenseMLP, x: Tensor, layout: Layout = SINGLE_LAYOUT) -> Tensor:
        if parts:
            unsent.append(len(parts[-1].unsent))
        return forward(mlp, x, layout)

    monkeypatch.setattr(PartRecorder, "_recording", entered)
    monkeypatch.setattr(DenseMLP, "forward", noted)
    llm = LLM(**OPTIONS, **CAPTURED, dp=2, ep=2)
    llm.engine.close()
    assert len(unsent) > 2 * len(llm.engine.worker.model.layers)
    assert not any(unsent)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda layout: "-".join(map(str, layout)))
def test_requests_decode_beside_chunks(
    layout: dict[str, Any], recording: RecordingPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first part or in both, at the same time."""
    options = {**OPTIONS, "chunked_prefill_size": 160}
    expected = answers(LLM(**options), PROMPTS)
    launched = cuts(monkeypatch)
    held: list[tuple[DecodeRows, int]] = []
    hold = DecodeRows.hold

    def noted(rows: DecodeRows, segment: AttentionMetadata) -> None:
        held.append((rows, len(segment)))
        hold(rows, segment)

    monkeypatch.setattr(DecodeRows, "hold", noted)
    llm = LLM(**options, **CAPTURED, **layout)
    parts = llm.engine.worker.runner.parts
    captured = [rows for attention in parts.attention for rows in attention.decodes.values()]
    found = answers(llm, PROMPTS)
    assert any(rows in captured for rows, _ in held), "all were attended to one by one"
    assert recording.replayed >= 3
    assert not launched
    assert alike(found, expected)


@pytest.mark.exhaustive
@pytest.mark.longest
def test_what_is_captured_is_timed_and_chosen_from(
    recording: RecordingPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that measure: steps in two parts are captured before, so that their replays are
    timed, and the benchmark's too."""
    monkeypatch.setattr(worker, "measure", partial(measure, seconds=6.0))
    launched = cuts(monkeypatch)
    options = {**CAPTURED, "micro_batches": "auto", "keep_step_times": False}
    llm = LLM(**OPTIONS, **options, dp=2, ep=2)
    try:
        times = llm.engine.worker.step_times
        assert times is not None
        assert times.prompts.sizes[-1].passes[1] > 0
        timed = recording.replayed
        assert timed
        assert all(len(parts) > 2 for parts in launched)
        said: list[str] = []
        sizes = BenchSizes(prompts=(400,), batches=(3,), requests=4, repeats=1)
        cells = run(llm.engine, sizes, said.append)
        assert [(cell.phase, cell.tokens) for cell in cells] == [("prompts", 400)]
        assert any("captured decode steps" in line for line in said)
        assert recording.replayed > timed
    finally:
        llm.engine.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("blow", "named"), [(signal.SIGKILL, "status -9"), (signal.SIGSTOP, "no sign of life")]
)
def test_a_rank_that_dies_or_hangs_between_pieces_ends_the_engine_with_its_name(
    blow: signal.Signals, named: str, recording: RecordingPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rank 0's messages of a replay are on their way."""
    llm = LLM(**{**OPTIONS, **CAPTURED, "watchdog_seconds": 6}, dp=2, ep=2)
    executor = llm.engine.executor
    assert isinstance(executor, DistributedExecutor)
    process = executor.handles[0].process
    assert process is not None
    started = Sending.start
    sent = 0

    def start(self: Sending, how: Start) -> None:
        nonlocal sent
        sent += 1
        if sent == 20:
            os.kill(process.pid, blow)
        started(self, how)

    monkeypatch.setattr(Sending, "start", start)
    given = [prompt for prompt in PROMPTS for _ in range(2)]
    try:
        with pytest.raises(EngineError, match=r"rank 1 \(pp 0, dp 1, tp 0\)") as error:
            llm.generate(given, params(max_tokens=20))
        assert named in str(error.value)
        assert sent >= 20
        with pytest.raises(EngineError):
            llm.generate(given, params(max_tokens=2))
    finally:
        llm.engine.close()
