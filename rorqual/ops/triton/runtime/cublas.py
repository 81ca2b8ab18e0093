"""Multiprocessors of cuBLAS's products, which torch launches.

torch has a limit of its own for them (`torch._C._set_sm_carveout_experimental`), which its calls of
cublasGemmEx do not read. cuBLAS has a setting of the handle.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _library() -> ctypes.CDLL | None:
    """cuBLAS as torch has loaded it: a handle is one library's. None where it has not."""
    version = torch.version.cuda
    if version is None:
        return None
    try:
        return ctypes.CDLL(
            f"libcublas.so.{version.partition('.')[0]}", mode=os.RTLD_NOW | os.RTLD_NOLOAD
        )
    except OSError:
        return None


@contextmanager
def products_on(multiprocessors: int) -> Iterator[None]:
    """Inside, cuBLAS chooses this thread's products on the current GPU for so many
    multiprocessors; graphs keep what was chosen at their capture. Where others take the rest, a
    product that was chosen for all has programs that wait for another to end, and takes up to twice
    as long: 4,160 x 4,096 by 2,048 in bf16 169 us instead of 100 on an H200 with 8 of 132
    taken."""
    library = _library()
    if library is None:
        yield
        return
    before = ctypes.c_int()
    _check(library.cublasGetSmCountTarget(_handle(), ctypes.byref(before)))
    _check(library.cublasSetSmCountTarget(_handle(), ctypes.c_int(multiprocessors)))
    try:
        yield
    finally:
        _check(library.cublasSetSmCountTarget(_handle(), before))


def _handle() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_blas_handle())


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS did not set its number of multiprocessors: status {status}")
