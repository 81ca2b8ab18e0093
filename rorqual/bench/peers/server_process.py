"""Any engine's server, started for a measurement and gone after it, with all its processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rorqual.config.process import die_with_parent
from rorqual.errors import TargetError

POLL_SECONDS = 0.2
STOP_SECONDS = 20.0  # from the polite signal to the other one
GONE_SECONDS = 30.0  # from that one until the kernel must have ended them
LAST_LINES = 25
MARK = "RORQUAL_BENCH_SERVER"  # a variable that its processes inherit
READY_PAGES = ("/health", "/v1/models")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class RunningServer:
    """pid: of the process that was started, which serves HTTP."""

    url: str
    pid: int
    log: Path
    ready_seconds: float

    def processor_seconds(self) -> float | None:
        """That the process has used; None where it has ended."""
        fields = _stat(self.pid)
        return None if fields is None else (int(fields[11]) + int(fields[12])) / TICKS

    def lost(self) -> bool:
        return not _alive(self.pid)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class StartedServer:
    """A process that may not accept requests yet. began: in seconds of time.monotonic."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    began: float

    def wait_ready(self, seconds: float) -> RunningServer:
        """Raises TargetError, with the end of the log, if the process exits before it accepts
        requests, or takes longer than `seconds` from its start."""
        _wait(self.process, self.url, self.log, self.began + seconds)
        ready = time.monotonic() - self.began
        return RunningServer(self.url, self.process.pid, self.log, ready)


@contextmanager
def started_server(
    command: Callable[[int], Sequence[str]],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[StartedServer]:
    """Run `command` of a port, without waiting for it: several can start at the same time. Raises
    TargetError if there is no such program. None of its processes is left running afterwards, even
    after an error."""
    port = free_port()
    mark = uuid.uuid4().hex
    began = time.monotonic()
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                list(command(port)),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **(environment or {}), MARK: mark},
                process_group=0,  # Ctrl-C is for the benchmark, which then ends it
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:
            raise TargetError(f"the server cannot be started: {error}") from None
    try:
        yield StartedServer(process, f"http://127.0.0.1:{port}", log, began)
    finally:
        _end(process, mark)


@contextmanager
def running_server(
    command: Callable[[int], Sequence[str]],
    log: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """A server that accepts requests; see `started_server` and `StartedServer.wait_ready`."""
    with started_server(command, log, environment) as server:
        yield server.wait_ready(seconds)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, deadline: float) -> None:
    while not all(_answers(url + page) for page in READY_PAGES):
        if process.poll() is not None:
            raise TargetError(f"the server ended with {process.returncode}:\n{last_lines(log)}")
        if time.monotonic() > deadline:
            raise TargetError(f"the server does not get ready:\n{last_lines(log)}")
        time.sleep(POLL_SECONDS)


def _answers(page: str) -> bool:
    try:
        with urllib.request.urlopen(page, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LAST_LINES:])


# ---- no process is left


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Searches for its children both before (while their parents identify them) and after."""
    found = _family(process.pid, mark)
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    found |= _family(process.pid, mark)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + GONE_SECONDS
    while any(_alive(pid) for pid in found) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _family(pid: int, mark: str) -> set[int]:
    """A server's processes: those of its group, its descendants, and those with its mark in their
    environment; some engines' processes leave the group, and some overwrite their environment."""
    parents: dict[int, int] = {}
    found = {pid}
    for path in Path("/proc").glob("[0-9]*"):
        other = int(path.name)
        fields = _stat(other)
        if fields is None:
            continue
        parents[other] = int(fields[1])
        if int(fields[2]) == pid or _marked(path, mark):
            found.add(other)
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found - {os.getpid()}


def _marked(path: Path, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in (path / "environ").read_bytes()
    except OSError:
        return False


def _alive(pid: int) -> bool:
    """Zombie processes do not count."""
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def _stat(pid: int) -> list[str] | None:
    """Of /proc/PID/stat, from the state on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
