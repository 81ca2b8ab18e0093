"""A server started for a measurement, as a user starts it, and stopped after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rorqual.errors import TargetError

POLL_SECONDS = 0.1
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class LaunchedServer:
    """url: http://host:port; ready_seconds: from its start until it took requests; pid: of the
    process that serves."""

    url: str
    ready_seconds: float
    log: Path
    pid: int

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def launched_server(
    options: Sequence[str], seconds: float = 900.0, folder: Path | None = None
) -> Iterator[LaunchedServer]:
    """Start `rorqual serve` with these options on a free port of this machine, from the checkout in
    `folder` if given. Raises TargetError if it exits before it serves, or takes longer than
    `seconds`."""
    command = [sys.executable, "-m", "rorqual", "serve", "--port", "0", *options]
    environment = {**os.environ, "PYTHONPATH": str(folder)} if folder else None
    with tempfile.TemporaryDirectory(prefix="rorqual-bench-") as own:
        log = Path(own) / "server.log"
        began = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=folder, env=environment
            )
        try:
            url = _wait(process, log, began + seconds)
            yield LaunchedServer(url, time.monotonic() - began, log, process.pid)
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], log: Path, deadline: float) -> str:
    while True:
        text = log.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            _, serving, rest = line.partition("serving ")
            _, on, address = rest.partition(" on http://")
            if serving and on:
                return "http://" + address.split()[0]
        if process.poll() is not None:
            raise TargetError(f"the server ended with {process.returncode}:\n{text[-2000:]}")
        if time.monotonic() > deadline:
            raise TargetError(f"the server does not get ready:\n{text[-2000:]}")
        time.sleep(POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
