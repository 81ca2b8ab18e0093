"""Kernels compiled side by side before they are needed: left to their first launches, an
engine's kernels compile one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}
MOST_THREADS = 16


class Blank(TorchFunctionMode):
    """Fresh storage holds zeros: what a kernel that does not run leaves behind may be used as an
    index."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in EMPTY and made.device.type != "meta":
            made.untyped_storage().fill_(0)
        return made


@contextmanager
def compiling() -> Iterator[None]:
    """Launches by this thread compile, side by side, and run nothing; at the end all are
    compiled. Other threads' launches run. A kernel that does not compile is left for its first
    launch, which says why."""
    run = JITFunction.run
    own = threading.get_ident()

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or threading.get_ident() == own, **kwargs)

    with (
        ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool,
        mock.patch.object(JITFunction, "run", compile_only),
        triton.AsyncCompileMode(pool, ignore_errors=True),
        Blank(),
    ):
        yield
