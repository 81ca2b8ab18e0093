"""From spans of kernels to what a step spends where."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from rorqual import LLM
from rorqual.bench.offline import work as work_limits
from rorqual.bench.offline.profile import Span, busy_share, summarize, timeline, trace_steps
from rorqual.bench.offline.run import experts_hit, greedy
from rorqual.bench.offline.steady_state import enough_tokens, steady_state_steps
from rorqual.bench.offline.work import OfflineWork
from rorqual.engine import step_trace
from rorqual.errors import ConfigError


def steps(count: int, pause: float) -> list[Span]:
    """Two kernels that overlap by 2 us, then a third 1 us later; `pause` between steps."""
    spans = []
    at = 100.0
    for _ in range(count):
        spans += [
            Span("attend", at, at + 10),
            Span("experts", at + 8, at + 28),
            Span("attend", at + 29, at + 39),
        ]
        at += 39 + pause
    return spans


def test_overlapping_kernels_are_busy_once() -> None:
    found = summarize(steps(4, 2.0), 4)
    assert found.busy == 38
    assert found.step == pytest.approx((4 * 39 + 3 * 2) / 4)
    assert found.short == pytest.approx((4 * 1 + 3 * 2) / 4)
    assert found.long == 0
    assert not found.longest
    assert [(kernel.name, kernel.calls, kernel.us) for kernel in found.kernels] == [
        ("attend", 2, 20),
        ("experts", 1, 20),
    ]


def test_who_only_waits_is_not_busy() -> None:
    """Before, between and beside what others do."""
    waits = [Span("wait", 0.0, 100.0), Span("wait", 120.0, 150.0)]
    assert busy_share(steps(1, 0.0) + waits, ["wait"]) == pytest.approx(38 / 39)
    alone = [Span("wait", 200.0, 300.0), Span("attend", 300.0, 300.0 + 39.0)]
    assert busy_share(steps(1, 0.0) + alone, ["wait"]) == pytest.approx(77 / 239)


def test_a_late_host_shows() -> None:
    found = summarize(list(reversed(steps(5, 40.0))), 5)
    assert found.long == pytest.approx(4 * 40 / 5)
    assert found.longest == [(40.0, "attend")] * 3
    lines = list(found.lines())
    assert lines[0] == "step 71 us: busy 38, waits up to 5 us 1, longer ones 32 (for the host 0)"
    assert lines[1] == "  a wait of 40.0 us before attend"
    assert len(lines) == 6


def test_only_a_launch_during_a_wait_blames_the_host() -> None:
    """Waits lie between 139 and 179, 218 and 258. A launch at 120 was there before, one at 240
    came late."""
    assert summarize(steps(3, 40.0), 3, [120.0]).late == 0
    assert summarize(steps(3, 40.0), 3, [240.0, 120.0, 300.0]).late == pytest.approx(40 / 3)


def test_a_profilers_events_are_told_apart() -> None:
    def event(device: DeviceType, name: str, start: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(
            device_type=device, name=name, time_range=SimpleNamespace(start=start, end=end)
        )

    found = [
        event(DeviceType.CPU, "cudaGraphLaunch", 3, 5),
        event(DeviceType.CUDA, "attend", 7, 9),
        event(DeviceType.CPU, "cudaEventSynchronize", 6, 9),
        event(DeviceType.CPU, "cudaMemcpyAsync", 8, 9),
    ]
    assert timeline(found) == ([Span("attend", 7, 9)], [3, 8])


def test_a_trace_of_steps_on_any_device(tmp_path: Path) -> None:
    llm = LLM(max_num_seqs=2, max_model_len=64, num_pages=16, device="cpu")
    prefix = OfflineWork(profile=tmp_path).trace_prefix(2, 0, alone=False)
    assert trace_steps(llm, [[1, 2], [5, 4]], 3, prefix) == [f"{tmp_path}/batch2.json.gz"]
    with gzip.open(tmp_path / "batch2.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name.endswith("decode: 2 decoding, 0 chunks, 2 tokens") for name in names) == 3
    assert not llm.engine.has_work


def test_where_traces_go(tmp_path: Path) -> None:
    work = OfflineWork(profile=Path("out/t.json.gz"))
    assert work.trace_prefix(8, 0, alone=True) == "out/t"
    assert work.trace_prefix(8, 2, alone=False) == "out/t-batch8-drafts2"
    assert OfflineWork(profile=Path("out")).trace_prefix(1, 0, alone=True) == "out/batch1"
    with pytest.raises(ConfigError, match="--profile-steps says how many"):
        OfflineWork(profile=Path("20"))
    with pytest.raises(ConfigError, match="profile_steps=0 is out of range; accepted: 1 to 200"):
        OfflineWork(profile_steps=0)
    assert work_limits.MAX_STEPS == step_trace.MAX_STEPS


def test_the_age_of_a_process_counts_from_its_start() -> None:
    started = time.time()
    code = (
        "import time; time.sleep(0.4); from rorqual.config.process import process_age; "
        "print(process_age())"
    )
    age = float(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )
    assert 0.4 <= age <= time.time() - started + 0.05


def test_requests_that_end_before_the_last_prompt_is_through_are_told_of() -> None:
    """Not waited for: the engine would have nothing to do and never say so."""
    llm = LLM(
        max_num_seqs=4,
        max_model_len=64,
        num_pages=40,
        max_num_batched_tokens=8,
        enable_prefix_caching=False,
        device="cpu",
    )
    prompts = [[i] * 8 for i in range(2, 6)]
    with (
        pytest.raises(ConfigError, match="4 requests never decode together within 2 tokens"),
        steady_state_steps(llm.engine, prompts, greedy(2)),
    ):
        pass
    with steady_state_steps(
        llm.engine, prompts, greedy(enough_tokens(llm.engine, prompts, 3))
    ) as count:
        assert count == len(llm.engine.scheduler.decoding) == 4
    assert not llm.engine.has_work
    assert experts_hit(llm, prompts) is not None
