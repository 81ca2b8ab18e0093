"""The CPU: a launched step runs at once, so one is in flight at a time."""

from __future__ import annotations

import ctypes
import platform as host
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from rorqual.config.host_memory import available_host_memory, meminfo
from rorqual.platforms.base import Platform

LARGE_PAGE = 2 * 2**20
MADV_HUGEPAGE = 14  # Linux' <asm-generic/mman-common.h>


class CpuPlatform(Platform):
    name = "cpu"

    def weights_made(self, tensors: Iterable[Tensor]) -> None:
        """Ask Linux for huge pages (2 MiB), with which weights are read faster. It is only advice:
        nothing depends on it, and no more memory is used."""
        if not sys.platform.startswith("linux"):
            return
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
        for start, size in storages.items():
            first = -(-start // LARGE_PAGE) * LARGE_PAGE
            whole = (start + size - first) // LARGE_PAGE * LARGE_PAGE
            if whole > 0:
                advise(first, whole, MADV_HUGEPAGE)

    def describe(self) -> str:
        return f"cpu {host.machine()} {torch.backends.cpu.get_cpu_capability()}"

    def total_memory(self) -> int:
        return meminfo("MemTotal")

    def available_memory(self) -> int:
        return available_host_memory()
