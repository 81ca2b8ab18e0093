"""The clock of a process. No torch."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age() -> float:
    """Seconds since this process was started, by the kernel's clock: imports and loading
    included."""
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
