"""The age of a process, signals that reach it with its parent, what it dies with, and its end. No
torch."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

# a terminal's Ctrl-C, or a manager of services, sends them to every process of a group
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1  # prctl(2)
FLUSH_FAILED = 120  # the interpreter's own exit status where its output cannot be written


def process_age() -> float:
    """Seconds since this process was started, by the kernel's clock: imports and loading
    included."""
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


@contextmanager
def group_signals_blocked() -> Iterator[None]:
    """Around the start of a child that will call `ignore_group_signals`: until then they are
    blocked in it, so an interrupt while it imports is its parent's to answer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_group_signals() -> None:
    """The parent drains, then says when to leave. In the main thread."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # its own children must not find them blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


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
