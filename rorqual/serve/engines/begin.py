"""Starts engine processes. A process imports what an engine needs, torch above all, before it reads
its configuration, so it can be started before that is known and import in parallel with this
process."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

from rorqual.config.process import group_signals_blocked, process_age

Process = subprocess.Popen[bytes]


def begin_engine() -> Process:
    """A process that waits for a line on its standard input."""
    with group_signals_blocked():
        return subprocess.Popen(
            [sys.executable, "-m", "rorqual.serve.engines.engine_main"], stdin=subprocess.PIPE
        )


class EarlyEngines:
    """Engine processes started before the server has read its options. Unused ones end with the
    `with` block."""

    def __init__(self) -> None:
        self.waiting: list[Process] = []
        self.began: float | None = None  # age of this process at the first start; seconds

    def begin(self, count: int) -> None:
        """Have `count` processes wait; none where a package of the server is missing, which the
        server reports itself."""
        if find_spec("msgspec") is None or find_spec("zmq") is None:
            return
        if self.began is None:
            self.began = process_age()
        while len(self.waiting) < count:
            with group_signals_blocked():  # until somebody knows of it
                self.waiting.append(begin_engine())

    def take(self) -> Process:
        """A waiting process, else a new one."""
        if self.began is None:
            self.began = process_age()
        return self.waiting.pop(0) if self.waiting else begin_engine()

    def __enter__(self) -> EarlyEngines:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.waiting:
            process.kill()
        for process in self.waiting:
            process.communicate()
        self.waiting.clear()


_of_this_process = EarlyEngines()


def early_engines() -> EarlyEngines:
    """Those of the command line: one is started before its commands are imported."""
    return _of_this_process
