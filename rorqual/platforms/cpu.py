"""The CPU: steps run as they are launched, so one is in flight at a time."""

from __future__ import annotations

import platform as host
from pathlib import Path

import torch

from rorqual.platforms.base import Platform


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo lacks {key}")


def _cgroup_free() -> float:
    """Bytes left under a container's limit, infinite where there is none."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return float("inf")
    return float("inf") if limit == "max" else float(limit) - float(used)


class CpuPlatform(Platform):
    name = "cpu"

    def describe(self) -> str:
        return f"cpu {host.machine()} {torch.backends.cpu.get_cpu_capability()}"

    def total_memory(self) -> int:
        return _meminfo("MemTotal")

    def available_memory(self) -> int:
        return int(min(_meminfo("MemAvailable"), _cgroup_free()))
