"""An engine's process has a context on its own GPU alone, whichever threads wait for it."""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)


def has_context(number: int) -> bool:
    """Whether this process has the GPU's primary context."""
    driver = ctypes.CDLL("libcuda.so.1")
    flags, active = ctypes.c_uint(), ctypes.c_int()
    result = driver.cuDevicePrimaryCtxGetState(
        ctypes.c_int(number), ctypes.byref(flags), ctypes.byref(active)
    )
    assert result == 0, result
    return bool(active.value)


def waits_on_threads(found: Any) -> None:
    from rorqual.platforms.cuda import CudaPlatform

    platform = CudaPlatform(torch.device("cuda", 1))
    with platform.stream():
        given = torch.arange(10, device=platform.device)
        fetched = platform.fetch(given)
        with platform.background():
            reached = platform.reached()
        finished = platform.finished()
    numbers: list[Any] = []
    for work in (lambda: numbers.append(fetched().tolist()), reached, finished):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    found.put((numbers, has_context(0), has_context(1)))


def test_a_process_of_the_second_gpu_has_no_context_on_the_first() -> None:
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=waits_on_threads, args=(found,))
    process.start()
    numbers, first, second = found.get(timeout=120)
    process.join()
    assert numbers == [list(range(10))]
    assert second
    assert not first
