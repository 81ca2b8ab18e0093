"""The CPU: steps run as they are launched, so one is in flight at a time."""

from __future__ import annotations

import platform as host

import torch

from rorqual.config.host_memory import available_host_memory, meminfo
from rorqual.platforms.base import Platform


class CpuPlatform(Platform):
    name = "cpu"

    def describe(self) -> str:
        return f"cpu {host.machine()} {torch.backends.cpu.get_cpu_capability()}"

    def total_memory(self) -> int:
        return meminfo("MemTotal")

    def available_memory(self) -> int:
        return available_host_memory()
