"""Kernels compiled side by side before they are needed: left to their first launches, an
engine's kernels compile one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime import driver
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
    """Launches by this thread compile, side by side, and run nothing; at the end all are compiled
    and loaded. Other threads' launches run. A kernel that does not compile is left for its first
    launch, which says why."""
    run = JITFunction.run
    own = threading.get_ident()
    made: dict[int, Any] = {}

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != own:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        found = run(self, *args, grid=grid, warmup=True, **kwargs)
        made[id(found)] = found
        return found

    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        with (
            mock.patch.object(JITFunction, "run", compile_only),
            triton.AsyncCompileMode(pool, ignore_errors=True),
            Blank(),
        ):
            yield
        _load(list(made.values()), pool)


def _load(made: list[Any], pool: ThreadPoolExecutor) -> None:
    """What a first launch does besides compiling: a C compiler makes the function that launches
    kernels of such arguments (a third of a second each, and kept in Triton's cache folder), and the
    driver takes the kernel. What fails here fails, and says why, at the first launch."""
    # waited for, or in the cache from the start; one that did not compile is None
    every = [one.result(ignore_errors=True) if hasattr(one, "result") else one for one in made]
    fresh = [one for one in every if one is not None and getattr(one, "module", 0) is None]
    active = driver.active
    launcher = getattr(active, "launcher_cls", None)
    if launcher is None:  # a driver that only compiles
        return

    def prepare(kernel: Any) -> None:
        with suppress(Exception):
            launcher(kernel.src, kernel.metadata)

    list(pool.map(prepare, fresh))
    for kernel in fresh:
        with suppress(Exception):
            kernel._init_handles()
