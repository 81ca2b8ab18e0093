"""The first module of an engine process (`python -m`). What takes long and is not Python begins
here, while torch is imported."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from importlib.util import find_spec

from rorqual.config.process import die_with_parent, end_process

HEAD_START_SECONDS = 2.0  # after torch is imported


def head_start() -> None:
    """Where there is an NVIDIA GPU, load its driver (0.4 s) and have Triton hash its own files (0.4
    to 0.9 s), which name compiled kernels. Triton keeps the digest, the driver its state; errors
    are for those who use them."""
    # as torch does before it initializes the driver: kernels are loaded when they are used
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    if driver.cuInit(0) or find_spec("triton") is None:
        return
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def main() -> int:
    die_with_parent()  # imports take seconds
    beside = threading.Thread(target=head_start, name="head start", daemon=True)
    beside.start()
    gc.disable()
    from rorqual.serve.engines import engine_process

    beside.join(HEAD_START_SECONDS)  # a driver that hangs need not stop an engine on the CPU
    # what was imported stays: a collection during the start need not look at it
    gc.freeze()
    gc.enable()
    return engine_process.main()


if __name__ == "__main__":
    end_process(main())  # ends the other ranks too, by the executor's exit handler
