"""Process helpers: age, garbage collection, signals to the process group, death of the parent,
exit. No torch."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

# a terminal's Ctrl-C, or a service manager, sends these to every process of a group
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1  # prctl(2)
FLUSH_FAILED = 120  # Python's exit status if stdout or stderr cannot be flushed


def process_age() -> float:
    """Seconds since this process was started, by the kernel's clock, including imports."""
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def freeze_loaded() -> None:
    """Call once a process that serves has started. Otherwise a garbage collection during its work
    scans all that was loaded (0.1 s where torch is imported), and every stream waits for it."""
    gc.collect()
    gc.freeze()


@contextmanager
def loaded_unscanned() -> Iterator[None]:
    """In this context garbage collections do not scan what exists before it, and free none of it.
    Takes some microseconds. For work in a process that is not ours, which may wish to free it
    later."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def loaded_frozen() -> Iterator[None]:
    """The same while something is measured. Objects that were frozen before stay frozen."""
    if gc.get_freeze_count():
        gc.collect()
        yield
        return
    freeze_loaded()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def group_signals_blocked() -> Iterator[None]:
    """Use around the start of a child that will call `ignore_group_signals`: until then the signals
    are blocked in it, so that only the parent handles an interrupt while the child imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_group_signals() -> None:
    """The parent handles the signals and tells this process when to exit. In the main thread."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # children of this process must not inherit the block
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the parent exits; if `parent` has exited already, exit now.
    Linux only; elsewhere rely on the closed connection to the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit(1)


def end_process(status: int) -> NoReturn:
    """End this process like `sys.exit(status)` in the main thread, with exit handlers, but without
    finalizing the interpreter and libraries, and without waiting for threads.

    For processes that had process groups. If a thread returns from a collective during interpreter
    finalization, Python ends that thread with C++ frames on its stack, and the whole process aborts
    ("terminate called without an active exception") instead of returning its status. Groups outlive
    `destroy_process_group` while anything references them. Call it last: resources that only
    `__del__` or a library's destructor would release must have been closed.
    """
    # logging, tempfile, multiprocessing and others
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the stream is closed
            status = status or FLUSH_FAILED
    os._exit(status)
