"""Multiprocessors that kernels leave to NCCL while micro-batches are computed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.config.model import nccl_channels
from rorqual.ops.triton.runtime import launch
from rorqual.ops.triton.runtime.launch import (
    NCCL_CHANNELS,
    beside_nccl,
    dependent,
    multiprocessors,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MAX_NCHANNELS", raising=False)
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)


def test_some_are_left_inside_alone() -> None:
    whole = multiprocessors(CPU)
    with beside_nccl():
        assert multiprocessors(CPU) == whole - NCCL_CHANNELS
        with beside_nccl():
            assert multiprocessors(CPU) == whole - NCCL_CHANNELS
    with pytest.raises(KeyError), beside_nccl():
        raise KeyError
    assert multiprocessors(CPU) == whole


def test_kernels_do_not_wait_where_nccl_should_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dependent(CPU) == {"DEPENDENT": False}
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    assert dependent(CPU) == {"DEPENDENT": True, "launch_pdl": True}
    assert dependent(CPU, after_long=True) == {"DEPENDENT": True, "launch_pdl": True}
    with beside_nccl():
        assert dependent(CPU) == {"DEPENDENT": True, "launch_pdl": True}
        assert dependent(CPU, after_long=True) == {"DEPENDENT": True, "launch_pdl": False}
    assert dependent(CPU, after_long=True) == {"DEPENDENT": True, "launch_pdl": True}


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"NCCL_MAX_NCHANNELS": "2"}, 2),
        ({"NCCL_MAX_NCHANNELS": "4", "NCCL_MAX_CTAS": "3"}, 3),
        ({"NCCL_MAX_NCHANNELS": "64"}, NCCL_CHANNELS),
        ({"NCCL_MAX_NCHANNELS": ""}, NCCL_CHANNELS),
    ],
)
def test_limits_of_nccl_count(
    limits: dict[str, str], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setenv(name, value)
    assert nccl_channels(NCCL_CHANNELS) == left
