"""demo/split_busy.py, as far as it runs without GPUs: what it makes of kernels' spans, and that it
is asked for two; and the order in which both sides end."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rorqual.bench.offline.profile import Span
from rorqual.ops.triton.comm import remote_dispatch
from tests.demo_script import load_demo
from tests.emulation.triton_interpreter import needs_triton

split_busy = load_demo("split_busy")


@needs_triton
def test_waiting_kernels_are_called_so() -> None:
    for name in split_busy.WAITS:
        assert hasattr(remote_dispatch, name)


def test_a_side_is_busy_while_it_does_not_wait() -> None:
    arrival, combine = split_busy.WAITS
    spans = [
        Span(arrival, 0.0, 50.0),
        Span("experts", 50.0, 80.0),
        Span(combine, 70.0, 95.0),
        Span("experts", 95.0, 100.0),
    ]
    found = split_busy.side(spans, 2)
    assert found["busy"] == pytest.approx(35 / 50)
    assert found["kernels_us_a_step"]["experts"] == pytest.approx(17.5)


def test_two_gpus_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["split_busy.py", "deepseek-v2-lite", "--devices", "cpu,cpu"])
    with pytest.raises(SystemExit):
        split_busy.main()
    assert "--devices cpu,cpu: two GPUs, such as cuda:0,cuda:1" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_ends_before_its_expert_server(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """An engine whose server ends first takes that for a failure."""
    ended: list[str] = []

    class FakeServer:
        def __init__(self, script: str, first: Any):
            self.port = 9400

        def receive(self) -> int:
            return self.port

        def close(self) -> None:
            ended.append("expert server")

    config = SimpleNamespace(vocab_size=100)
    engine = SimpleNamespace(model_config=config, close=lambda: ended.append("engine"))

    def fake_llm(model: str, experts: tuple[str], **options: Any) -> Any:
        assert experts == ("127.0.0.1:9400",)
        return SimpleNamespace(engine=engine)

    def spans_of_steps(*given: Any) -> tuple[list[Span], list[float]]:
        if fails:
            raise RuntimeError("a step failed")
        return [Span("attention", 0.0, 1000.0)], []

    monkeypatch.setattr(split_busy, "ChildProcess", FakeServer)
    monkeypatch.setattr(split_busy, "LLM", fake_llm)
    monkeypatch.setattr(split_busy, "spans_of_steps", spans_of_steps)
    trial = split_busy.Trial("m", "random", None, 2, 8, 1, 2, ("cuda:0", "cuda:1"))
    if fails:
        with pytest.raises(RuntimeError, match="a step failed"):
            split_busy.measure(trial)
    else:
        found = split_busy.measure(trial)
        assert found["step_ms"] == 1.0
        assert found["attention"]["busy"] == 1.0
    assert ended == ["engine", "expert server"]
