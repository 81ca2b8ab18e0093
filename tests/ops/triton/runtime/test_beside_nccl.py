"""Multiprocessors that kernels leave to NCCL while micro-batches are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.ops.triton.runtime.launch import NCCL_CHANNELS, beside_nccl, multiprocessors
from rorqual.ops.triton.runtime.launch import nccl_channels as channels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("NCCL_MAX_NCHANNELS", raising=False)
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    channels.cache_clear()
    yield
    channels.cache_clear()


def test_some_are_left_inside_alone() -> None:
    whole = multiprocessors(CPU)
    with beside_nccl():
        assert multiprocessors(CPU) == whole - NCCL_CHANNELS
        with beside_nccl():
            assert multiprocessors(CPU) == whole - NCCL_CHANNELS
    with pytest.raises(KeyError), beside_nccl():
        raise KeyError
    assert multiprocessors(CPU) == whole


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
    assert channels() == left
