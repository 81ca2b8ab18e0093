"""Begins engine processes. A process imports what an engine needs, torch above all, before it reads
what it is to be, so one may be begun before that is known, and import while this process does."""

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
            [sys.executable, "-m", "rorqual.serve.engines.engine_process"], stdin=subprocess.PIPE
        )


class EarlyEngines:
    """Engine processes begun before their server has read its options. Those that nobody took end
    with the `with` block."""

    def __init__(self) -> None:
        self.waiting: list[Process] = []
        self.began: float | None = None  # the age of this process at the first; seconds

    def begin(self, count: int) -> None:
        """So many; none where a package of the server's is missing, which the server then says."""
        if find_spec("msgspec") is None or find_spec("zmq") is None:
            return
        self.began = process_age()
        self.waiting = [begin_engine() for _ in range(count)]

    def take(self) -> Process:
        """One that waits, else a new one."""
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
