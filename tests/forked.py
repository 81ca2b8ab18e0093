"""Processes that have imported torch before they start: forks of one that did so once.

For tests of what a process does, of which the imports would take most of the time. The memory, the
pid, signals and the end are its own. What only a start by the interpreter itself can show (its
flags, hash seeds, the time to start) needs a real one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing import reduction
from typing import Any

import torch

from tests.child_process import ROOT

# Of the one forkserver that a process can have.
PRELOADED = ["tests.parallel.jobs", "rorqual.llm.llm", "rorqual.cli.app", "rorqual.cli.experts"]


class Descriptor:
    """Of a file, which the new process gets a copy of."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(copy: Any) -> int:
    number: int = copy.detach()
    return number


def context() -> Any:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def _end_with_parent() -> None:
    """The tests' process may be killed; the forkserver, whose child this is, lives on then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _run(
    module: str, arguments: list[str], env: dict[str, str], folder: str, files: list[int]
) -> None:
    """In the new process, as `python -m module arguments` would."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for number, own in enumerate(files):
        os.dup2(own, number)
        os.close(own)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class ForkedProcess:
    """Of subprocess.Popen what tests use; its standard input and output are pipes of text.

    env: all of its environment; folder: where it runs. stderr: a file's descriptor, or this
    process's own.
    """

    def __init__(
        self, module: str, arguments: list[str], env: dict[str, str], stderr: int | None = None
    ):
        ours, theirs = os.pipe()
        asked, commands = os.pipe()
        files = [asked, theirs, 2 if stderr is None else stderr]
        self.process = context().Process(
            target=_run,
            args=(module, arguments, env, str(ROOT), [Descriptor(number) for number in files]),
            daemon=True,
        )
        try:
            self.process.start()
        finally:
            os.close(asked)
            os.close(theirs)
        self.stdin = os.fdopen(commands, "w")
        self.stdout = os.fdopen(ours)
        self.pid: int = self.process.pid

    @property
    def returncode(self) -> int | None:
        found: int | None = self.process.exitcode
        return found

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        found = self.returncode
        if found is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout or 0.0)
        return found

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


Started = ForkedProcess | subprocess.Popen[str]


def start(
    module: str,
    arguments: list[str],
    env: dict[str, str],
    stderr: int | None = None,
    fork: bool = True,
) -> Started:
    """`python -m module arguments` in this tree. Forked where that may be and `fork` says so: a
    GPU's libraries must be loaded by the process that uses them."""
    if fork and not torch.cuda.is_available():
        return ForkedProcess(module, arguments, env, stderr)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=ROOT,
        env=env,
        text=True,
    )


def completed(
    module: str, arguments: list[str], text: str = ""
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run with the text as standard input, and what it said."""
    with tempfile.TemporaryFile() as errors:
        process = ForkedProcess(module, arguments, dict(os.environ), errors.fileno())
        process.stdin.write(text)
        process.stdin.close()
        with process.stdout:
            out = process.stdout.read()
        status = process.wait(300)
        errors.seek(0)
        return subprocess.CompletedProcess(
            [module, *arguments], status, out, errors.read().decode()
        )
