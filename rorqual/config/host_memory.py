"""The host: which one this is, and checks of its free memory. No torch."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

from rorqual.errors import ConfigError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo lacks {key}")


def _cgroup_free() -> float:
    """Bytes left under the container's limit, infinite without one."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return float("inf")
    return float("inf") if limit == "max" else float(limit) - float(used)


def available_host_memory() -> int:
    """Bytes."""
    return int(min(meminfo("MemAvailable"), _cgroup_free()))


def check_room(wanted: float, ranks: int, beside: int = 0, free: int | None = None) -> None:
    """Check that `ranks` ranks of a host fit: wanted GiB of kv_host_memory and `beside` other bytes
    each. free: the host's free bytes; None: of this host. Raises ConfigError."""
    if free is None:
        free = available_host_memory()
    if ranks * (int(wanted * 2**30) + beside) <= free:
        return
    several = f" for each of {ranks} ranks" if ranks > 1 else ""
    more = f" beside a cache of {beside / 2**30:.2f}" if beside else ""
    raise ConfigError(
        f"kv_host_memory={wanted} GiB{several}{more}: the host has {free / 2**30:.2f} GiB free"
    )


def host_number() -> int:
    """A number of 56 bits that identifies this host until its next boot."""
    name = BOOT_ID.read_bytes() if BOOT_ID.exists() else uuid.getnode().to_bytes(8, "big")
    return int.from_bytes(hashlib.sha256(name).digest()[:7], "big")
