"""demo/split_busy.py, as far as it runs without GPUs: what it makes of kernels' spans, and that it
is asked for two."""

from __future__ import annotations

import sys

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
