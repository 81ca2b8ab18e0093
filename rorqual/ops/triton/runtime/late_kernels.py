"""Kernels that are compiled, or loaded from the cache folder, by a step that waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import triton

_began = threading.local()  # of each thread: when it began to compile
_noted: Callable[[str, float], None] | None = None


def watch(noted: Callable[[str, float], None] | None) -> None:
    """From now on call `noted` with the name of each kernel that this process compiles or loads at
    a launch, and the seconds until it was there, in the launching thread; None: no longer. Hooks
    of other tools stay as they are, and then nothing is noted."""
    global _noted
    _noted = noted
    runtime: Any = triton.knobs.runtime
    if noted is None:
        if runtime.jit_cache_hook is _begin:
            runtime.jit_cache_hook = None
        if runtime.jit_post_compile_hook is _end:
            runtime.jit_post_compile_hook = None
        return
    if runtime.jit_cache_hook is None and runtime.jit_post_compile_hook is None:
        runtime.jit_cache_hook = _begin
        runtime.jit_post_compile_hook = _end


def _begin(**_: Any) -> bool:
    """Triton's hook before it compiles; False: it goes on."""
    _began.at = time.perf_counter()
    return False


def _end(*, fn: Any, **_: Any) -> None:
    """Triton's hook once the kernel is there."""
    now = time.perf_counter()
    if _noted is not None:
        _noted(fn.name.rpartition(".")[2], now - getattr(_began, "at", now))
