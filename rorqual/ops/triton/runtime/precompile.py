"""Compile kernels in parallel before they are needed; at their first launches they would compile
one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rorqual.ops.triton.runtime.launch import ahead

EMPTY = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)
MOST_THREADS = 16


@contextmanager
def blank() -> Iterator[None]:
    """Inside, new tensors of this thread are zeroed: the output of a kernel that is not run may be
    used as an index. The functions are replaced, as a mode would be asked about every other one
    too."""
    own = threading.get_ident()

    def zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            new = make(*args, **kwargs)
            if threading.get_ident() == own and new.device.type != "meta":
                new.untyped_storage().fill_(0)  # type: ignore[attr-defined]
            return new

        return made

    with ExitStack() as stack:
        for owner, name in EMPTY:
            stack.enter_context(mock.patch.object(owner, name, zeroed(getattr(owner, name))))
        yield


@contextmanager
def compiling() -> Iterator[Callable[[], int]]:
    """Inside, launches by this thread compile in parallel and run nothing; on exit all kernels are
    compiled and loaded. Other threads' launches run. A kernel that fails to compile raises its
    error at its first launch. Yields how many kernels this thread's launches have met so far."""
    run = JITFunction.run
    submit = JITFunction._do_compile
    own = threading.get_ident()
    made: dict[int, Any] = {}
    places: list[tuple[dict[Any, Any], Any]] = []

    def submit_once(self: JITFunction, key: Any, signature: Any, device: Any, *rest: Any) -> Any:
        """Keeps what is being compiled where the next launch looks for it, as Triton 3.8 does:
        deriving the key under which it is compiled takes longer than the rest of a launch."""
        found = submit(self, key, signature, device, *rest)
        if found is not None and threading.get_ident() == own:
            kernels = self.device_caches[device][0]
            kernels[key] = found
            places.append((kernels, key))
        return found

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != own:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        found = run(self, *args, grid=grid, warmup=True, **kwargs)
        made[id(found)] = found
        return found

    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        try:
            with (
                ahead(),
                mock.patch.object(JITFunction, "run", compile_only),
                mock.patch.object(JITFunction, "_do_compile", submit_once),
                triton.AsyncCompileMode(pool, ignore_errors=True),
                blank(),
            ):
                yield lambda: len(made)
        finally:
            _settle(places)
        _load(list(made.values()), pool)


def _settle(places: list[tuple[dict[Any, Any], Any]]) -> None:
    """Put kernels where they are awaited; what failed is compiled again by its first launch."""
    for kernels, key in places:
        found: Any = kernels.get(key)
        if not hasattr(found, "result"):
            continue
        kernel = found.result(ignore_errors=True)
        if kernel is None:
            del kernels[key]
        else:
            kernels[key] = kernel


def _load(made: list[Any], pool: ThreadPoolExecutor) -> None:
    """What a first launch does besides compiling: a C compiler builds the launcher for the argument
    types (a third of a second each, kept in Triton's cache folder), and the driver loads the
    kernel. Errors here are raised at the first launch instead."""
    # finished, or cached from the start; None if it failed to compile
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
