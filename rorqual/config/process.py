"""The age of a process, what it dies with, and its end. No torch."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # prctl(2)
FLUSH_FAILED = 120  # the interpreter's own exit status where its output cannot be written


def process_age() -> float:
    """Seconds since this process was started, by the kernel's clock: imports and loading
    included."""
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the parent ends; where `parent` has ended already, end now.
    Linux; elsewhere the end of the link to the parent has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit(1)


def end_process(status: int) -> NoReturn:
    """End this process as `sys.exit(status)` in its main thread would, exit handlers and all, but
    without taking the interpreter and the libraries apart, and without waiting for threads.

    For processes that had process groups. Where a thread comes back from a collective while the
    interpreter is taken apart, Python ends that thread with C++ frames on its stack, and the
    whole process aborts ("terminate called without an active exception"), whatever its status was
    to be. Groups outlive `destroy_process_group` wherever something holds them. Call it last: what
    only `__del__` or a library's own destructor would release must have been closed.
    """
    # logging, tempfile, multiprocessing and whoever else registered
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # nobody reads any more, or it was closed
            status = status or FLUSH_FAILED
    os._exit(status)
