"""Multiprocessors that kernels leave to NCCL while micro-batches are computed."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rorqual.config.model import nccl_channels
from rorqual.ops.triton import backend
from rorqual.ops.triton.backend import TritonOps
from rorqual.ops.triton.runtime import cublas, launch
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


class Library:
    """cuBLAS, of one handle."""

    def __init__(self) -> None:
        self.target = 0
        self.status = 0

    def cublasGetSmCountTarget(self, handle: ctypes.c_void_p, found: Any) -> int:
        assert handle.value == 77
        found._obj.value = self.target
        return self.status

    def cublasSetSmCountTarget(self, handle: ctypes.c_void_p, count: ctypes.c_int) -> int:
        assert handle.value == 77
        self.target = count.value
        return self.status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(cublas, "_library", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 77)
    return found


def test_products_of_cublas_leave_them_too(library: Library) -> None:
    with cublas.products_on(124):
        assert library.target == 124
        with cublas.products_on(116):
            assert library.target == 116
        assert library.target == 124
    with pytest.raises(KeyError), cublas.products_on(124):
        raise KeyError
    assert library.target == 0


def test_a_library_that_refuses_is_not_passed_over(library: Library) -> None:
    library.status = 7
    with pytest.raises(RuntimeError, match="status 7"), cublas.products_on(124):
        pass


def test_without_cublas_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    cublas._library.cache_clear()
    with cublas.products_on(124):
        pass
    monkeypatch.setattr(torch.version, "cuda", "12.345")  # is not loaded, and is not looked for
    cublas._library.cache_clear()
    assert cublas._library() is None
    cublas._library.cache_clear()


def test_micro_batches_set_it_on_a_gpu_alone(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = TritonOps()
    with ops.beside_messages():
        assert library.target == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    with ops.beside_messages():
        assert library.target == 132 - NCCL_CHANNELS
    assert library.target == 0
