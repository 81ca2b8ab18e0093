"""Kernels compiled while weights are read: reading leaves most processors idle, and compiling needs
shapes alone. A second model stands in for the first meanwhile, cut after the last layer that is the
first of its kind, with memory for weights that nobody fills."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rorqual.models.transformer import Transformer
from rorqual.platforms.base import Platform

log = logging.getLogger("rorqual.engine")
SPARE = 4 * 2**30  # bytes beside the weights: cache, buffers, what reading takes


def layers_of_all_kinds(model: Transformer) -> int:
    """How many layers from the first on have one of each kind."""
    with model.one_layer_of_each_kind():
        kinds = list(model.layers)
    return 1 + max((model.layers.index(layer) for layer in kinds), default=-1)


def fits_beside(stand_in: int, free: int) -> bool:
    """Whether the weights of a second model do; bytes."""
    return stand_in + SPARE <= free


@contextmanager
def beside(compile_kernels: Callable[[], None], platform: Platform) -> Iterator[None]:
    """Inside, a thread compiles. What it cannot compile is left for the first launch, which says
    why. At the end, also by an error, it has ended and its memory is free."""

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
