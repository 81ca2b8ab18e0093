"""Compiles kernels while weights are read: reading leaves most processors idle, and compiling needs
only shapes. It runs on a second model with uninitialized weights and just enough layers to have one
of each kind."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rorqual.models.transformer import Transformer
from rorqual.platforms.base import Platform

log = logging.getLogger("rorqual.engine")
SPARE = 4 * 2**30  # bytes beside the weights: cache, buffers, memory for reading


def layers_of_all_kinds(model: Transformer) -> int:
    """The number of leading layers that include one of each kind."""
    with model.one_layer_of_each_kind():
        kinds = list(model.layers)
    return 1 + max((model.layers.index(layer) for layer in kinds), default=-1)


def fits_beside(stand_in: int, free: int) -> bool:
    """Whether the weights of a second model fit; bytes."""
    return stand_in + SPARE <= free


@contextmanager
def beside(compile_kernels: Callable[[], None], platform: Platform) -> Iterator[None]:
    """Inside the block a thread compiles. What fails to compile is left to the first launch, which
    raises the error. On exit, also by an exception, the thread has ended and its memory is free."""

    def work() -> None:
        try:
            with platform.background():
                compile_kernels()
        except Exception:
            log.warning("kernels could not be compiled while weights were read", exc_info=True)

    thread = threading.Thread(target=work, name="kernels", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        gc.collect()
        platform.release_memory()
